"""rope_kv_cache_write in jax.numpy: the definition, and the CPU's path."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.kv_cache_write import xla as kv_cache_write

Cache = Float[Array, "num_layers num_blocks num_kv_heads block_size head_dim"]
Angles = Float[Array, "num_tokens half"]


@jax.jit
def rotate(x: Float[Array, "num_tokens heads head_dim"], cos: Angles, sin: Angles) -> Array:
    """Rotates dimension i with dimension i + head_dim / 2, in float32 (Su et al., 2021, halves instead of pairs)."""
    cos, sin = cos[:, None, :], sin[:, None, :]
    x1, x2 = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([x1 * cos - x2 * sin, x2 * cos + x1 * sin], axis=-1).astype(x.dtype)


def rope_kv_cache_write(
    k_cache: Cache,
    v_cache: Cache,
    qkv: Float[Array, "num_tokens num_heads_and_2_num_kv_heads head_dim"],
    cos: Angles,
    sin: Angles,
    slot_mapping: Int[Array, " num_tokens"],
    layer: Int[Array, ""],
) -> tuple[Float[Array, "num_tokens num_heads head_dim"], Cache, Cache]:
    """See api.rope_kv_cache_write."""
    num_kv_heads = k_cache.shape[2]
    num_heads = qkv.shape[1] - 2 * num_kv_heads
    q, k, v = jnp.split(qkv, (num_heads, num_heads + num_kv_heads), axis=1)
    k_cache, v_cache = kv_cache_write.kv_cache_write(k_cache, v_cache, rotate(k, cos, sin), v, slot_mapping, layer)
    return rotate(q, cos, sin), k_cache, v_cache
