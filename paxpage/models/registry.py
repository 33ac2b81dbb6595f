"""Which architectures there are, and a model as (graphdef, params)."""

import functools
from typing import Any

import jax
from flax import nnx

from paxpage.config import ModelConfig, require
from paxpage.models.llama import LlamaForCausalLM
from paxpage.models.protocol import CausalLM
from paxpage.models.qwen2 import Qwen2ForCausalLM
from paxpage.models.qwen3 import Qwen3ForCausalLM

Params = dict[str, Any]  # nested dicts of arrays; layer indices are strings

ARCHITECTURES: dict[str, type[LlamaForCausalLM]] = {
    "LlamaForCausalLM": LlamaForCausalLM,
    "MistralForCausalLM": LlamaForCausalLM,
    "Qwen2ForCausalLM": Qwen2ForCausalLM,
    "Qwen3ForCausalLM": Qwen3ForCausalLM,
}


@functools.lru_cache(maxsize=4)  # finding, checking and loading a model each ask for it, at 0.15 s
def abstract_model(config: ModelConfig, dtype: str) -> LlamaForCausalLM:
    """The module with jax.ShapeDtypeStruct in place of every array; not to be changed.

    ValueError for an unknown architecture.
    """
    is_known = config.architecture in ARCHITECTURES
    require(is_known, "architecture", config.architecture, ", ".join(ARCHITECTURES))
    return nnx.eval_shape(lambda: ARCHITECTURES[config.architecture](config, dtype))


def abstract_params(config: ModelConfig, dtype: str) -> Params:
    """Names, shapes and dtypes of the parameters: nested dicts of jax.ShapeDtypeStruct."""
    return split(abstract_model(config, dtype))[1]


def split(model: nnx.Module) -> tuple[nnx.GraphDef, Params]:
    """A module as its structure and a plain dict of its arrays (not copied)."""
    graphdef, state = nnx.split(model)
    return graphdef, _with_str_keys(nnx.to_pure_dict(state))


def merge(graphdef: nnx.GraphDef, params: Params) -> CausalLM:
    """The reverse of split; cheap enough to run inside a trace, not at every call."""
    return nnx.merge(graphdef, nnx.State(nnx.restore_int_paths(params)))


def _with_str_keys(tree: Any) -> Any:
    return {str(key): _with_str_keys(value) for key, value in tree.items()} if isinstance(tree, dict) else tree


def num_bytes(params: Params) -> int:
    """Bytes of all arrays (or of what ShapeDtypeStructs stand for)."""
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(params))
