"""kv_cache_write as XLA's scatter: the definition, and the CPU's path."""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

Cache = Float[Array, "num_layers num_blocks num_kv_heads block_size head_dim"]
NewTokens = Float[Array, "num_tokens num_kv_heads head_dim"]


def kv_cache_write(
    k_cache: Cache,
    v_cache: Cache,
    k: NewTokens,
    v: NewTokens,
    slot_mapping: Int[Array, " num_tokens"],
    layer: Int[Array, ""],
) -> tuple[Cache, Cache]:
    """See api.kv_cache_write."""
    if slot_mapping.shape[0] == 1:
        # XLA would turn a scatter of one index into a dynamic-update-slice, fuse that with what reads the cache, and
        # copy the whole cache for it. So the token goes to the null block as well.
        k, v = jnp.concatenate([k, k]), jnp.concatenate([v, v])
        slot_mapping = jnp.pad(slot_mapping, (0, 1))
    block_size = k_cache.shape[3]
    block_ids, offsets = slot_mapping // block_size, slot_mapping % block_size
    k_cache = k_cache.at[layer, block_ids, :, offsets].set(k.astype(k_cache.dtype))
    v_cache = v_cache.at[layer, block_ids, :, offsets].set(v.astype(v_cache.dtype))
    return k_cache, v_cache
