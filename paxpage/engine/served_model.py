"""A model to be served, described before it is loaded: a folder, a config with params, or a researcher's own module."""

import dataclasses
import functools
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from paxpage.config import ModelConfig, require
from paxpage.engine import step
from paxpage.models import registry
from paxpage.models.checkpoint import check_params
from paxpage.models.generation import GenerationDefaults
from paxpage.models.loading import LoadOptions, load_params, load_tokenizer, open_model
from paxpage.models.protocol import CausalLM, KVSpec
from paxpage.models.registry import Params

DEFAULT_MODULE_LEN = 2048  # max_model_len of a module that names no max_position_embeddings

Model = str | ModelConfig | nnx.Module


class Loader(NamedTuple):
    """Functions that bring what takes time, to run side by side."""

    load_tokenizer: Callable[[], Any]  # a transformers tokenizer, or None: seconds of imports and parsing
    load_params: Callable[[Callable[[], None]], Params]  # given what it calls now and then; that may end it by raising
    generation: GenerationDefaults  # as the model's files have them; see with_tokenizer


class ServedModel(NamedTuple):
    """All that compiling takes, and functions that bring the rest."""

    name: str
    graphdef: nnx.GraphDef
    abstract_params: Params  # jax.ShapeDtypeStruct
    spec: KVSpec
    dtype: str  # of the keys and values, unless the user chooses another
    max_position_embeddings: int
    vocab_size: int | None  # None: to be found by tracing the model
    num_heads: int | None  # of queries; None: not known
    loader: Loader
    config: ModelConfig | None = None  # None: a module of the user's own


def describe(model: Model, params: Params | None, tokenizer: Any, options: LoadOptions) -> ServedModel:
    """Finds and checks a model without reading its weights. Arguments as for build.build_engine; ValueError by name."""
    if isinstance(model, nnx.Module):
        require(params is None, "params", "a pytree", "nothing beside an NNX module, which holds its own")
        return _from_module(model, tokenizer)
    if isinstance(model, ModelConfig):
        require(params is not None, "params", None, "a pytree, when model is a ModelConfig")
        assert params is not None
        return _from_config("model", model, _dtype_of(params), params, _loader_of(params, tokenizer))
    return _from_files(model, params, tokenizer, options)


def _from_files(model: str, params: Params | None, tokenizer: Any, options: LoadOptions) -> ServedModel:
    if isinstance(tokenizer, str):
        options, tokenizer = dataclasses.replace(options, tokenizer=tokenizer), None
    source = open_model(model, options)
    dtype = source.dtype if params is None else _dtype_of(params)
    loader = Loader(
        lambda: load_tokenizer(source) if tokenizer is None else tokenizer,
        functools.partial(load_params, source) if params is None else lambda go_on: params,
        source.generation,
    )
    return _from_config(source.name, source.config, dtype, params, loader)


def raise_if_failed(work: Future[Any]) -> None:
    """Raises what work, which may still be at it, has raised."""
    if work.done():
        work.result()


def _loader_of(params: Params, tokenizer: Any) -> Loader:
    """What is there already."""
    return Loader(lambda: tokenizer, lambda go_on: params, GenerationDefaults())


def _from_config(name: str, config: ModelConfig, dtype: str, params: Params | None, loader: Loader) -> ServedModel:
    if params is not None:
        check_params(config, params)
    module = registry.abstract_model(config, dtype)
    graphdef, abstract_params = registry.split(module)
    sizes = (config.max_position_embeddings, config.vocab_size, config.num_heads)
    return ServedModel(name, graphdef, abstract_params, module.kv_spec, dtype, *sizes, loader, config)


def _from_module(module: nnx.Module, tokenizer: Any) -> ServedModel:
    is_model = isinstance(module, CausalLM)
    allowed = "modules with kv_spec, __call__ and compute_logits (models.protocol)"
    require(is_model, "model", type(module).__name__, allowed)
    spec: KVSpec = getattr(module, "kv_spec")  # noqa: B009 (the type checker knows nnx.Module alone)
    graphdef, params = registry.split(module)
    length = getattr(module, "max_position_embeddings", DEFAULT_MODULE_LEN)
    name, loader = type(module).__name__, _loader_of(params, tokenizer)
    return ServedModel(name, graphdef, step.abstract(params), spec, _dtype_of(params), length, None, None, loader)


def _dtype_of(params: Params) -> str:
    leaves = jax.tree.leaves(params)
    return next(leaf.dtype.name for leaf in leaves if jnp.issubdtype(leaf.dtype, jnp.floating))
