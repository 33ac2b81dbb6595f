"""paged_attention on Pallas's Triton backend: NVIDIA GPUs from Ampere on.

Rows with few queries (decoding) and rows with many (prefill chunks) go to kernels of their own, which share one output:
each writes its own rows' tokens. Both hold a tile of (query, head of a group) pairs against tiles of one key head's
keys, gathered through the block table, with the online softmax of FlashAttention (Dao et al., 2022) in base 2.
"""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.paged_attention import tuned
from pallas_kernels.paged_attention.config import DecodeConfig, Geometry, decode_config, prefill_config
from pallas_kernels.paged_attention.triton_common import Refs
from pallas_kernels.paged_attention.triton_decode import decode
from pallas_kernels.paged_attention.triton_prefill import prefill

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
    interpret: bool = False,
) -> Queries:
    """See api.paged_attention. interpret: run on the CPU, for tests."""
    num_rows, blocks_per_row = block_tables.shape
    geometry = Geometry.of(q, k_cache)
    max_keys = blocks_per_row * geometry.block_size
    found = tuned.find("triton_decode", geometry, num_rows, max_keys)
    config = DecodeConfig(**found) if found else decode_config(geometry, num_rows, max_keys)
    is_decode = q.shape[0] == num_rows
    arrays = Refs(jnp.reshape(layer, (1,)), block_tables, seq_lens, query_start_loc, q, k_cache, v_cache)
    if is_decode:
        return decode(arrays, None, geometry, config, scale, interpret)
    out = decode(arrays, jnp.zeros_like(q), geometry, config, scale, interpret)
    return prefill(arrays, out, geometry, prefill_config(geometry), scale, interpret)
