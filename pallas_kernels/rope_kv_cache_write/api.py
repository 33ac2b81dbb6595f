"""rope_kv_cache_write: what stands between a projection and attention, in one launch."""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.backends import default_backend
from pallas_kernels.checks import check_caches, check_shape
from pallas_kernels.rope_kv_cache_write import triton, xla

Cache = Float[Array, "num_layers num_blocks num_kv_heads block_size head_dim"]
Projected = Float[Array, "num_tokens num_heads_and_2_num_kv_heads head_dim"]
Angles = Float[Array, "num_tokens half"]
Result = tuple[Float[Array, "num_tokens num_heads head_dim"], Cache, Cache]

BACKENDS: dict[str, Callable[..., Result]] = {
    "reference": xla.rope_kv_cache_write,
    "xla": xla.rope_kv_cache_write,
    "triton": triton.rope_kv_cache_write,
    "triton_interpret": functools.partial(triton.rope_kv_cache_write, interpret=True),
}


def rope_kv_cache_write(
    k_cache: Cache,
    v_cache: Cache,
    qkv: Projected,
    cos: Angles,
    sin: Angles,
    slot_mapping: Int[Array, " num_tokens"],
    *,
    layer: int | Int[Array, ""],
    backend: str | None = None,
) -> Result:
    """Rotates queries and keys, writes keys and values to their slots; returns the queries and both caches.

    qkv: each token's query heads, then its key heads, then its value heads; num_kv_heads is the caches'. cos and sin:
    float32, of position * frequency for the head_dim / 2 pairs (dimension i turns with i + head_dim / 2). The rotation
    is computed in float32 and rounded to qkv's dtype, which the queries keep; keys and values are cast to the caches'.
    slot_mapping, layer, donation and padding: as for kv_cache_write.

    backend: one of BACKENDS; None for the default, "triton" on an NVIDIA GPU and "xla" elsewhere. ValueError names an
    unknown one, a shape that does not fit the others, or a layer that the caches do not have (unless it is traced).
    """
    name = default_backend() if backend is None else backend
    if name not in BACKENDS:
        raise ValueError(f"backend is {backend!r}; allowed: {', '.join(BACKENDS)}")
    check_caches(k_cache, v_cache, layer)
    _, _, num_kv_heads, _, head_dim = k_cache.shape
    if qkv.ndim != 3 or qkv.shape[2] != head_dim or qkv.shape[1] <= 2 * num_kv_heads:
        raise ValueError(
            f"qkv's shape is {qkv.shape}; allowed: more than 2 * {num_kv_heads} heads of the cache's {head_dim}"
        )
    if head_dim % 2 or cos.shape[-1] != head_dim // 2:
        raise ValueError(f"cos has {cos.shape[-1]} pairs; allowed: half of an even head_dim ({head_dim})")
    for what, array in (("cos", cos), ("sin", sin)):
        check_shape(what, array, (qkv.shape[0], head_dim // 2))
    check_shape("slot_mapping", slot_mapping, qkv.shape[:1])
    return _dispatch(k_cache, v_cache, qkv, cos, sin, slot_mapping, jnp.int32(layer), backend=name)


@functools.partial(jax.jit, static_argnames="backend")
def _dispatch(
    k_cache: Cache,
    v_cache: Cache,
    qkv: Projected,
    cos: Angles,
    sin: Angles,
    slot_mapping: Int[Array, " num_tokens"],
    layer: Int[Array, ""],
    *,
    backend: str,
) -> Result:
    # Jitted with a traced layer, so that a model of many layers traces and lowers this once.
    return BACKENDS[backend](k_cache, v_cache, qkv, cos, sin, slot_mapping, layer)
