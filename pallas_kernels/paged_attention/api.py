"""paged_attention: the one entry point; backends stand beside it and agree with reference.py."""

import functools
import logging
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.backends import default_backend, device_kind, is_hopper
from pallas_kernels.checks import check_caches, check_shape
from pallas_kernels.paged_attention import reference, triton, xla
from pallas_kernels.paged_attention.cascade import SharedPrefixes
from pallas_kernels.paged_attention.config import BLOCK_SIZES, Geometry
from pallas_kernels.paged_attention.mosaic_limits import unsupported

logger = logging.getLogger(__name__)

Cache = Float[Array, "num_layers num_blocks num_kv_heads block_size head_dim"]
Queries = Float[Array, "num_tokens num_heads head_dim"]


def _mosaic(
    *arrays: Array, layer: Array, scale: float, row_order: Array | None = None, shared: SharedPrefixes | None = None
) -> Queries:
    """mosaic.paged_attention, where there is a device for it."""
    if not is_hopper():
        raise ValueError(f"backend is 'mosaic' and the device {device_kind()}; allowed: it runs on Hopper GPUs only")
    # Imported here: it takes half a second, and most devices have no use for it.
    from pallas_kernels.paged_attention import mosaic

    return mosaic.paged_attention(*arrays, layer=layer, scale=scale, row_order=row_order, shared=shared)


BACKENDS: dict[str, Callable[..., Queries]] = {
    "reference": reference.paged_attention,
    "xla": xla.paged_attention,
    "triton": triton.paged_attention,
    "mosaic": _mosaic,
    "triton_interpret": functools.partial(triton.paged_attention, interpret=True),
}
MOSAIC_FROM = 64  # pairs of a row and a key head: with fewer, keys are cut into pieces, which Triton does at less cost


def paged_attention(
    q: Queries,
    k_cache: Cache,
    v_cache: Cache,
    block_tables: Int[Array, "num_rows blocks_per_row"],
    seq_lens: Int[Array, " num_rows"],
    query_start_loc: Int[Array, " num_rows_plus_1"],
    *,
    layer: int | Int[Array, ""],
    scale: float | None = None,
    row_order: Int[Array, " num_rows"] | None = None,
    shared: SharedPrefixes | None = None,
    backend: str | None = None,
) -> Queries:
    """softmax(scale q K^T + causal mask) V for every new token of a ragged batch (PagedAttention, SOSP 2023, sec. 4.1).

    Row r's queries are q[query_start_loc[r]:query_start_loc[r + 1]]: the last tokens of a sequence of seq_lens[r]
    tokens, all of whose keys and values are in the caches already, token t in block block_tables[r, t // block_size].
    A row with one query is decoding, one with several is a prefill chunk over whatever context lies before it. When
    num_tokens == num_rows the batch must be decode only (one query a row), and query_start_loc is not read.

    Padding: rows beyond the batch have seq_lens 0 and no queries (in a decode batch, one whose output is zero).
    Entries of block_tables past a row's blocks may name any valid block: they are never used, whatever it holds. Tokens
    past query_start_loc[-1] come out as zeros.

    num_heads is a multiple of num_kv_heads; query head h reads key head h // (num_heads // num_kv_heads). scale
    defaults to head_dim ** -0.5. Softmax and accumulation are in float32; the output has q's dtype.

    row_order: all rows in the order in which they are best begun: longest first, where the lengths differ much. It
    changes nothing in the output, and not every backend makes use of it. shared: what cascade.shared_prefixes found,
    padded to num_rows with zeros; it changes the output by no more than rounding, and only "mosaic" makes use of it.

    backend: one of BACKENDS; None for choose_backend's. ValueError names an unknown backend, a shape that is not
    supported or does not fit the others, or a layer that the caches do not have (unless it is traced).
    """
    rows = (block_tables, seq_lens, query_start_loc)
    check_caches(k_cache, v_cache, layer)
    _check_shapes(q, k_cache)
    _check_rows(q.shape[0], *rows)
    is_decode = q.shape[0] == seq_lens.shape[0]
    name = choose_backend(Geometry.of(q, k_cache), seq_lens.shape[0], is_decode) if backend is None else backend
    if name not in BACKENDS:
        raise ValueError(f"backend is {backend!r}; allowed: {', '.join(BACKENDS)}")
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    return _dispatch(q, k_cache, v_cache, *rows, jnp.int32(layer), row_order, shared, scale=scale, backend=name)


def choose_backend(geometry: Geometry, num_rows: int, is_decode: bool) -> str:
    """The fastest backend on the device at hand, as measured (BUILD_NOTES.md, 2026-11-30).

    On a Hopper GPU "mosaic", but for what it does not take and for decode steps of few rows; on any other NVIDIA GPU
    "triton"; "xla" elsewhere.
    """
    name = default_backend()
    is_small = is_decode and num_rows * geometry.num_kv_heads < MOSAIC_FROM
    if name != "triton" or not is_hopper() or is_small:
        return name
    reason = unsupported(geometry)
    if reason is None:
        return "mosaic"
    _log_refusal(reason)
    return name


@functools.cache
def _log_refusal(reason: str) -> None:
    """Once: a model asks for every layer of every shape."""
    logger.info("paged_attention takes backend triton and not mosaic: %s", reason)


@functools.partial(jax.jit, static_argnames=("scale", "backend"))
def _dispatch(
    q: Queries,
    k_cache: Cache,
    v_cache: Cache,
    block_tables: Int[Array, "num_rows blocks_per_row"],
    seq_lens: Int[Array, " num_rows"],
    query_start_loc: Int[Array, " num_rows_plus_1"],
    layer: Int[Array, ""],
    row_order: Int[Array, " num_rows"] | None,
    shared: SharedPrefixes | None,
    *,
    scale: float,
    backend: str,
) -> Queries:
    # Jitted with a traced layer, so that a model of many layers traces and lowers the kernel once.
    rows = (block_tables, seq_lens, query_start_loc)
    if backend == "mosaic":
        return _mosaic(q, k_cache, v_cache, *rows, layer=layer, scale=scale, row_order=row_order, shared=shared)
    return BACKENDS[backend](q, k_cache, v_cache, *rows, layer=layer, scale=scale)


def _check_shapes(q: Array, k_cache: Cache) -> None:
    if q.ndim != 3 or not q.shape[0]:
        raise ValueError(f"q's shape is {q.shape}; allowed: [num_tokens, num_heads, head_dim], with one token at least")
    _, _, num_kv_heads, block_size, head_dim = k_cache.shape
    if q.shape[1] % num_kv_heads:
        raise ValueError(f"num_heads is {q.shape[1]}; allowed: multiples of num_kv_heads ({num_kv_heads})")
    if q.shape[2] != head_dim:
        raise ValueError(f"q's head_dim is {q.shape[2]}; allowed: the cache's, {head_dim}")
    if block_size not in BLOCK_SIZES:
        raise ValueError(f"block_size is {block_size}; allowed: {', '.join(map(str, BLOCK_SIZES))}")
    if not jnp.issubdtype(q.dtype, jnp.floating):
        raise ValueError(f"q's dtype is {q.dtype}; allowed: float32, bfloat16, float16")


def _check_rows(num_tokens: int, block_tables: Array, seq_lens: Array, query_start_loc: Array) -> None:
    if seq_lens.ndim != 1 or not 0 < seq_lens.shape[0] <= num_tokens:
        raise ValueError(f"seq_lens's shape is {seq_lens.shape}; allowed: [num_rows], with 1 to {num_tokens} rows")
    num_rows = seq_lens.shape[0]
    if block_tables.ndim != 2 or block_tables.shape[0] != num_rows or not block_tables.size:
        raise ValueError(f"block_tables's shape is {block_tables.shape}; allowed: [{num_rows}, blocks_per_row]")
    check_shape("query_start_loc", query_start_loc, (num_rows + 1,))
