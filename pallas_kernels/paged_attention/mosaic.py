"""paged_attention on Pallas's Mosaic GPU backend: NVIDIA Hopper GPUs.

As on Triton, rows with few queries (decoding) and rows with many (prefill chunks) go to kernels of their own, which
write into one output. Where rows may share beginnings, a third kernel goes over those first.
"""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.paged_attention import tuned
from pallas_kernels.paged_attention.cascade import SharedPrefixes
from pallas_kernels.paged_attention.config import Geometry
from pallas_kernels.paged_attention.mosaic_cascade import attend_prefixes
from pallas_kernels.paged_attention.mosaic_decode import MosaicDecodeConfig, decode, decode_config
from pallas_kernels.paged_attention.mosaic_limits import unsupported
from pallas_kernels.paged_attention.mosaic_prefill import prefill, prefill_config
from pallas_kernels.paged_attention.triton_common import Refs

Cache = Float[Array, "num_layers num_blocks num_kv_heads block_size head_dim"]
Queries = Float[Array, "num_tokens num_heads head_dim"]


def paged_attention(
    q: Queries,
    k_cache: Cache,
    v_cache: Cache,
    block_tables: Int[Array, "num_rows blocks_per_row"],
    seq_lens: Int[Array, " num_rows"],
    query_start_loc: Int[Array, " num_rows_plus_1"],
    *,
    layer: Int[Array, ""],
    scale: float,
    row_order: Int[Array, " num_rows"] | None = None,
    shared: SharedPrefixes | None = None,
) -> Queries:
    """See api.paged_attention. ValueError names what these kernels do not take."""
    num_rows, blocks_per_row = block_tables.shape
    geometry = Geometry.of(q, k_cache)
    reason = unsupported(geometry)
    if reason is not None:
        raise ValueError(f"backend is 'mosaic': {reason}")
    max_keys = blocks_per_row * geometry.block_size
    found = tuned.find("mosaic_decode", geometry, num_rows, max_keys)
    config = MosaicDecodeConfig(**found) if found else decode_config(geometry, num_rows, max_keys)
    block_tables, seq_lens, query_start_loc = map(_materialised, (block_tables, seq_lens, query_start_loc))
    row_order = None if row_order is None else _materialised(row_order)
    arrays = Refs(jnp.reshape(layer, (1,)), block_tables, seq_lens, query_start_loc, q, k_cache, v_cache)
    tiles, prefix = prefill_config(geometry), None
    if shared is not None and scale > 0:
        shared = SharedPrefixes(*map(_materialised, shared))
        prefix = attend_prefixes(arrays, shared, geometry, tiles, scale, None)
    out = decode(arrays, None, geometry, config, scale, None, row_order, prefix)
    if q.shape[0] == num_rows:
        return out
    return prefill(arrays, out, geometry, tiles, scale, None, prefix=prefix)  # writes all other tokens


def _materialised(indices: Int[Array, "..."]) -> Int[Array, "..."]:
    """The same non-negative numbers, in a buffer of their own.

    XLA gives a kernel a slice as a pointer into the whole. Mosaic's kernels refuse one that is not a multiple of 256
    bytes, and such a call would not be part of a CUDA graph. XLA cannot know that this maximum changes nothing.
    """
    return jnp.maximum(indices, 0)
