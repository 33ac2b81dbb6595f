"""One forward pass: params, cache and a packed batch in; logits, greedy tokens and the updated cache out. Pure."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.extend.core import get_opaque_trace_state
from jaxtyping import Array, Float, Int

from pallas_kernels import kv_cache_write, paged_attention, rope_kv_cache_write
from pallas_kernels.paged_attention.cascade import SharedPrefixes
from paxpage.config import require
from paxpage.engine.batch import StepInputs, StepShape, unpack, unpack_shared
from paxpage.engine.kv_cache import KVCache
from paxpage.engine.sampler import describe, greedy
from paxpage.models.protocol import Angles
from paxpage.models.registry import Params, merge

# XLA counts the donated cache once for each kernel that updates it, thinks that memory is short, and would compute
# cheap things again in every layer to save it (395 kernels become 429 in a decode step of 32 layers).
COMPILER_OPTIONS: dict[str, Any] = {"xla_disable_hlo_passes": "rematerialization"}
# From some tens of tokens on XLA's own ways with a matrix product, Triton kernels and products split along the inner
# axis whose sum is a kernel of its own, are at best as fast as cuBLAS to 1%, from 128 tokens on slower (BUILD_NOTES.md,
# 2026-11-30: 2 to 6% of a step), and take longer to compile.
CUBLAS_FROM = 64
# XLA times cuBLAS's algorithms as before, but does not compare what they give with each other (that is level 4), which
# took half of a cold start of 1B (BUILD_NOTES.md, 2026-11-30). Triton's, which it compiles itself, it still compares.
CUBLAS_OPTIONS = {"xla_gpu_enable_triton_gemm": False, "xla_gpu_autotune_level": 3}
# Of samplers and other small programs XLA takes its first choice of kernels. Timing them may hold up the requests that
# are served meanwhile, takes device memory while free memory is counted, and lets a sampler round now like this and
# now like that.
UNTIMED_OPTIONS = {"xla_gpu_enable_triton_gemm": False, "xla_gpu_autotune_level": 0}
# Of mixed steps XLA is to make no CUDA graph. Their arrays lie elsewhere each time, and patching a graph takes the host
# longer than launching its kernels one by one, which goes on while the first ones run (BUILD_NOTES.md, 2026-11-30).
WITHOUT_GRAPH = {"xla_gpu_graph_min_graph_size": 2**31 - 1}


SCORED_PER_CALL = 32  # prompt tokens scored at a time: their logits are 16 MiB with a vocabulary of 128,000
COPIES_PER_CALL = 16  # block copies of one call; a step with more makes several
MAX_KEPT_ROWS = 64  # steps of more rows keep the device busy for longer than the host needs to begin the next one


class StepOutput(NamedTuple):
    """What one forward pass gives."""

    token_ids: Int[Array, " max_rows"]  # the most likely token of each row, padded to one length for every shape
    logits: Float[Array, "num_rows vocab_size"]  # float32
    hidden: Float[Array, "num_tokens hidden_size"] | None  # of a mixed step's tokens, for score()
    advanced: Int[Array, " num_ints"] | None  # of a small decode step: packed, for the same rows' next tokens


class PagedAttend:
    """models.protocol.Attend over a KVCache, for the time of one trace: holds the cache as it is updated."""

    def __init__(
        self, cache: KVCache, inputs: StepInputs, backend: str | None, shared: SharedPrefixes | None = None
    ) -> None:
        self.cache = cache
        self._trace = get_opaque_trace_state(convention="nnx")
        self._inputs = inputs
        self._backend = backend
        self._shared = shared

    def __call__(
        self,
        layer: int,
        q: Float[Array, "num_tokens num_heads head_dim"],
        k: Float[Array, "num_tokens num_kv_heads head_dim"],
        v: Float[Array, "num_tokens num_kv_heads head_dim"],
        scale: float | None = None,
    ) -> Float[Array, "num_tokens num_heads head_dim"]:
        """Writes k and v to this step's slots, then attends over each row's blocks.

        Raises ValueError for what the model's kv_spec does not say.
        """
        self._check_layer(layer)
        self._check_token("k", k.shape[1:])
        self._check_token("v", v.shape[1:])
        inputs, backend = self._inputs, self._backend
        cache = kv_cache_write(*self.cache, k, v, inputs.slot_mapping, layer=layer, backend=backend)
        self.cache = KVCache(*cache)
        return self._attend(layer, q, scale)

    def rotary(
        self,
        layer: int,
        qkv: Float[Array, "num_tokens num_heads_and_2_num_kv_heads head_dim"],
        angles: Angles,
        scale: float | None = None,
    ) -> Float[Array, "num_tokens num_heads head_dim"]:
        """Rotates and writes in one pass, then attends. Raises ValueError for what the model's kv_spec does not say."""
        self._check_layer(layer)
        inputs, backend = self._inputs, self._backend
        q, k_cache, v_cache = rope_kv_cache_write(
            *self.cache, qkv, *angles, inputs.slot_mapping, layer=layer, backend=backend
        )
        self.cache = KVCache(k_cache, v_cache)
        return self._attend(layer, q, scale)

    def _attend(
        self, layer: int, q: Float[Array, "num_tokens num_heads head_dim"], scale: float | None
    ) -> Float[Array, "num_tokens num_heads head_dim"]:
        inputs = self._inputs
        rows = (inputs.block_tables, inputs.seq_lens, inputs.query_start_loc)
        attention = functools.partial(paged_attention, layer=layer, scale=scale, backend=self._backend)
        return attention(q, *self.cache, *rows, row_order=inputs.row_order, shared=self._shared)

    def _check_layer(self, layer: int) -> None:
        # The cache that an inner trace writes would be lost, and be missed when the step is first run.
        is_own_trace = get_opaque_trace_state(convention="nnx") == self._trace
        allowed = "the model's own __call__, not a function that jit, checkpoint, scan, vmap or another traces anew"
        require(is_own_trace, "place where attend is called", "another trace", allowed)
        # JAX would drop writes past the last layer, and read the last one, without a word.
        num_layers = self.cache.k.shape[0]
        require(0 <= layer < num_layers, "layer", layer, f"0 to {num_layers - 1}, as kv_spec says")

    def _check_token(self, name: str, shape: tuple[int, ...]) -> None:
        # JAX would write one head to all of them, without a word.
        _, _, num_kv_heads, _, head_dim = self.cache.k.shape
        is_valid = shape == (num_kv_heads, head_dim)
        require(is_valid, f"shape of a token's {name}", shape, f"{(num_kv_heads, head_dim)}, as kv_spec says")


def forward(
    params: Params,
    cache: KVCache,
    packed: Int[Array, " num_ints"],
    previous: Int[Array, " max_rows"],
    logits_buffer: Float[Array, "num_rows vocab_size"] | None,
    *,
    graphdef: nnx.GraphDef,
    shape: StepShape,
    backend: str | None,
) -> tuple[StepOutput, KVCache]:
    """One step over batch.pack's array.

    previous: the tokens that the step before sampled, for rows whose token the host did not know when it packed them.
    logits_buffer: old logits of the same shape, whose memory the new ones take when it is donated; not read. Jit it
    with the keyword arguments static and cache donated, packed too where keeps_packed(shape).
    """
    inputs = unpack(packed, shape)
    shared = SharedPrefixes(*unpack_shared(packed, shape)) if shape.max_pieces else None
    attend = PagedAttend(cache, inputs, backend, shared)
    model = merge(graphdef, params)
    hidden = model(resolve(inputs.token_ids, previous), inputs.positions, attend)
    _require_rows("hidden", hidden, shape.num_tokens)
    last = hidden if shape.is_decode else hidden[inputs.logits_indices]
    logits = model.compute_logits(last)
    _require_rows("logits", logits, shape.num_rows)
    logits = logits.astype(jnp.float32)
    tokens = pad_rows(greedy(logits), len(previous))
    advanced = advance(packed, shape) if keeps_packed(shape) else None
    return StepOutput(tokens, logits, None if shape.is_decode else hidden, advanced), attend.cache


def keeps_packed(shape: StepShape) -> bool:
    """Whether the step leaves its packed array, which is donated to it, ready for the same rows' next tokens."""
    return shape.is_decode and shape.max_pieces == 0 and shape.num_rows <= MAX_KEPT_ROWS


def advance(packed: Int[Array, " num_ints"], shape: StepShape) -> Int[Array, " num_ints"]:
    """A decode step's array for its rows' next tokens, which the step samples; the block tables stay as they are."""
    inputs = unpack(packed, shape)
    is_real = inputs.seq_lens > 0
    token_ids = jnp.where(is_real, -1 - jnp.arange(shape.num_rows), 0)
    counted = (inputs.positions + is_real, inputs.slot_mapping + is_real, inputs.query_start_loc)
    begins = jnp.concatenate([token_ids, *counted, inputs.seq_lens + is_real]).astype(packed.dtype)
    return packed.at[: begins.shape[0]].set(begins)


def _require_rows(name: str, array: object, num_rows: int) -> None:
    # JAX would take the last row for one that is not there, without a word.
    shape: tuple[int, ...] = getattr(array, "shape", ())
    is_valid = len(shape) == 2 and shape[0] == num_rows
    require(is_valid, f"shape of {name}", shape, f"({num_rows}, size), as models.protocol says")


def states_to_score(
    hidden: Float[Array, "num_tokens hidden_size"], packed: Int[Array, " num_ints"]
) -> Float[Array, "num_scored hidden_size"]:
    """SCORED_PER_CALL hidden states of a step, from packed[0] on: what score() takes is then of one shape."""
    return hidden.at[packed[0] + jnp.arange(packed.shape[0] - 1)].get(mode="clip")


def score(
    params: Params,
    states: Float[Array, "num_scored hidden_size"],
    packed: Int[Array, " num_ints"],
    *,
    graphdef: nnx.GraphDef,
    num_top: int,
) -> tuple[Array, ...]:
    """Log-probabilities of given tokens after each of SCORED_PER_CALL hidden states.

    packed: where the first of them was, then the tokens. Returns what sampler.describe does, a row for each token.
    """
    logits = merge(graphdef, params).compute_logits(states).astype(jnp.float32)
    return describe(logits, packed[1:], num_top)


def resolve(token_ids: Int[Array, " num_tokens"], previous: Int[Array, " max_rows"]) -> Int[Array, " num_tokens"]:
    """Puts the token of row i of the step before in the place of -1 - i."""
    return jnp.where(token_ids < 0, previous.at[-1 - token_ids].get(mode="clip"), token_ids)


def pad_rows(token_ids: Int[Array, " num_rows"], max_rows: int) -> Int[Array, " max_rows"]:
    """Zeros up to max_rows."""
    return jnp.pad(token_ids, (0, max_rows - token_ids.shape[0]))


def abstract_inputs(shape: StepShape) -> jax.ShapeDtypeStruct:
    """The packed array's shape, for compiling ahead."""
    return jax.ShapeDtypeStruct((shape.num_ints,), jnp.int32)


def abstract(params: Params) -> Params:
    """Shapes and dtypes of params, for compiling ahead."""
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), params)


class StepModel(NamedTuple):
    """What every step function of an engine is made from; params and cache are jax.ShapeDtypeStructs."""

    graphdef: nnx.GraphDef
    params: Params
    cache: KVCache
    max_rows: int
    vocab_size: int
    backend: str | None = None  # of all kernels; None: each one's default


def trace_forward(model: StepModel, shape: StepShape) -> jax.stages.Traced:
    """Traces forward for one shape."""
    return jit_forward(flat_forward(model, shape), shape).trace(*abstract_arguments(model, shape))


def flat_forward(model: StepModel, shape: StepShape) -> Callable[..., tuple[StepOutput, KVCache]]:
    """forward for one shape, of abstract_arguments.

    Params go in as the list of their leaves (a nested dict would be walked at every call, 60 us for 115 of them).
    """
    tree = jax.tree.structure(model.params)
    forward_with = functools.partial(forward, graphdef=model.graphdef, shape=shape, backend=model.backend)

    def forward_flat(leaves: list[Array], *rest: Any) -> tuple[StepOutput, KVCache]:
        return forward_with(jax.tree.unflatten(tree, leaves), *rest)

    return forward_flat


def jit_forward(forward_flat: Callable[..., tuple[StepOutput, KVCache]], shape: StepShape) -> jax.stages.Wrapped:
    """cache, logits_buffer and, of a small step, packed are donated.

    The logits of a small step come out where the last ones of this shape were: on a GPU a decode step is one CUDA
    graph, and every address that differs from the last run's is patched into each kernel that uses it, by the host.
    """
    return jax.jit(forward_flat, donate_argnums=(1, 2, 4) if keeps_packed(shape) else (1, 4), keep_unused=True)


def abstract_arguments(model: StepModel, shape: StepShape) -> tuple[Any, ...]:
    """Shapes and dtypes of what a compiled step is called with."""
    previous = jax.ShapeDtypeStruct((model.max_rows,), jnp.int32)
    logits = logits_buffer_of(shape.num_rows, model.vocab_size)
    return jax.tree.leaves(model.params), model.cache, abstract_inputs(shape), previous, logits


def logits_buffer_of(num_rows: int, vocab_size: int) -> jax.ShapeDtypeStruct | None:
    """The buffer that a step of num_rows rows takes as logits_buffer; None where it is not worth its memory."""
    return jax.ShapeDtypeStruct((num_rows, vocab_size), jnp.float32) if num_rows <= MAX_KEPT_ROWS else None


def vocab_size_of(graphdef: nnx.GraphDef, params: Params, cache: KVCache, shape: StepShape) -> int:
    """Width of a model's logits."""
    run = functools.partial(forward, logits_buffer=None, graphdef=graphdef, shape=shape, backend=None)
    previous = jax.ShapeDtypeStruct((shape.num_rows,), jnp.int32)
    output, _ = jax.eval_shape(run, params, cache, abstract_inputs(shape), previous)
    return output.logits.shape[1]


def compiler_options(shape: StepShape) -> dict[str, Any]:
    """What XLA is told about a step."""
    by_size = CUBLAS_OPTIONS if shape.num_tokens >= CUBLAS_FROM else {}
    return COMPILER_OPTIONS | by_size | ({} if shape.is_decode else WITHOUT_GRAPH)


def copy_blocks(cache: KVCache, pairs: Int[Array, "2 num_copies"]) -> KVCache:
    """Copies blocks pairs[0] onto blocks pairs[1] in all layers; every source is read before any target is written.

    Targets are distinct, but for the null block's.
    """
    sources, targets = pairs
    return KVCache(*(array.at[:, targets].set(array[:, sources]) for array in cache))


def abstract_pairs() -> jax.ShapeDtypeStruct:
    """The shape of copy_blocks' pairs, COPIES_PER_CALL of them, for compiling ahead."""
    return jax.ShapeDtypeStruct((2, COPIES_PER_CALL), jnp.int32)


def lower_copy(cache: KVCache) -> jax.stages.Lowered:
    """Lowers copy_blocks for COPIES_PER_CALL copies; cache is abstract, and donated."""
    return jax.jit(copy_blocks, donate_argnums=0).lower(cache, abstract_pairs())


def temporary_bytes(compiled: jax.stages.Compiled) -> int:
    """Device memory that a compiled step takes beside params and cache: temporaries and other outputs."""
    return analysed_bytes(compiled.memory_analysis())


def analysed_bytes(stats: Any) -> int:
    """The same of what Compiled.memory_analysis() gives."""
    assert stats is not None, "this platform's compiler gives no memory analysis"
    return stats.temp_size_in_bytes + stats.output_size_in_bytes - stats.alias_size_in_bytes
