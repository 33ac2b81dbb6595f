"""One forward pass: params, cache and a packed batch in; logits, greedy tokens and the updated cache out. Pure."""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from pallas_kernels import kv_cache_write, paged_attention
from pallas_kernels.paged_attention.api import default_backend
from paxpage.engine.batch import StepInputs, StepShape, unpack
from paxpage.engine.kv_cache import KVCache
from paxpage.engine.sampler import greedy
from paxpage.models.registry import Params, merge


class StepOutput(NamedTuple):
    """What one forward pass gives."""

    token_ids: Int[Array, " num_rows"]  # the most likely token of each row
    logits: Float[Array, "num_rows vocab_size"]  # float32


class PagedAttend:
    """models.protocol.Attend over a KVCache, for the time of one trace: holds the cache as it is updated."""

    def __init__(self, cache: KVCache, inputs: StepInputs) -> None:
        self.cache = cache
        self._inputs = inputs

    def __call__(
        self,
        layer: int,
        q: Float[Array, "num_tokens num_heads head_dim"],
        k: Float[Array, "num_tokens num_kv_heads head_dim"],
        v: Float[Array, "num_tokens num_kv_heads head_dim"],
        scale: float | None = None,
    ) -> Float[Array, "num_tokens num_heads head_dim"]:
        """Writes k and v to this step's slots, then attends over each row's blocks."""
        inputs = self._inputs
        self.cache = KVCache(*kv_cache_write(*self.cache, k, v, inputs.slot_mapping, layer=layer))
        return paged_attention(
            q, *self.cache, inputs.block_tables, inputs.seq_lens, inputs.query_start_loc, layer=layer, scale=scale
        )


def forward(
    params: Params, cache: KVCache, packed: Int[Array, " num_ints"], *, graphdef: nnx.GraphDef, shape: StepShape
) -> tuple[StepOutput, KVCache]:
    """One step over batch.pack's array. Jit it with graphdef and shape static and cache donated."""
    inputs = unpack(packed, shape)
    attend = PagedAttend(cache, inputs)
    model = merge(graphdef, params)
    hidden = model(inputs.token_ids, inputs.positions, attend)
    if not shape.is_decode:
        hidden = hidden[inputs.logits_indices]
    logits = model.compute_logits(hidden).astype(jnp.float32)
    return StepOutput(greedy(logits), logits), attend.cache


def abstract_inputs(shape: StepShape) -> jax.ShapeDtypeStruct:
    """The packed array's shape, for compiling ahead."""
    return jax.ShapeDtypeStruct((shape.num_ints,), jnp.int32)


def abstract(params: Params) -> Params:
    """Shapes and dtypes of params, for compiling ahead."""
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), params)


def compile_forward(graphdef: nnx.GraphDef, params: Params, cache: KVCache, shape: StepShape) -> jax.stages.Compiled:
    """Compiles forward for one shape; params and cache are abstract. The cache argument is donated."""
    run = functools.partial(forward, graphdef=graphdef, shape=shape)
    return jax.jit(run, donate_argnums=1).lower(params, cache, abstract_inputs(shape)).compile()


def temporary_bytes(compiled: jax.stages.Compiled) -> int:
    """Device memory that a compiled step takes beside params and cache: temporaries and other outputs."""
    stats = compiled.memory_analysis()
    assert stats is not None, "this platform's compiler gives no memory analysis"
    return stats.temp_size_in_bytes + stats.output_size_in_bytes - stats.alias_size_in_bytes


def attention_backend() -> str:
    """Which backend of pallas_kernels serves attention here."""
    return default_backend()
