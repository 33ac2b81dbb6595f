"""kv_cache_write: new keys and values to their slots, in place when the caches are donated."""

import jax
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
    *,
    layer: int | Int[Array, ""],
) -> tuple[Cache, Cache]:
    """Writes token i of k and v to slot slot_mapping[i] = block_id * block_size + offset of one layer.

    k and v are cast to the caches' dtype. Slots must be distinct, but for padding tokens, which all name slot 0: block
    0 is the null block and nobody reads it. The whole caches go in and come out (a slice would copy the layer); under
    jit with the caches donated, XLA's scatter writes in place.
    """
    return _write(k_cache, v_cache, k, v, slot_mapping, jnp.int32(layer))


@jax.jit
def _write(
    k_cache: Cache,
    v_cache: Cache,
    k: NewTokens,
    v: NewTokens,
    slot_mapping: Int[Array, " num_tokens"],
    layer: Int[Array, ""],
) -> tuple[Cache, Cache]:
    # Jitted with a traced layer, so that a model of many layers traces and lowers the write once.
    block_size = k_cache.shape[3]
    block_ids, offsets = slot_mapping // block_size, slot_mapping % block_size
    k_cache = k_cache.at[layer, block_ids, :, offsets].set(k.astype(k_cache.dtype))
    v_cache = v_cache.at[layer, block_ids, :, offsets].set(v.astype(v_cache.dtype))
    return k_cache, v_cache
