"""kv_cache_write: new keys and values to their slots, in place when the caches are donated."""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.backends import default_backend
from pallas_kernels.checks import check_caches, check_shape
from pallas_kernels.kv_cache_write import triton, xla

Cache = Float[Array, "num_layers num_blocks num_kv_heads block_size head_dim"]
NewTokens = Float[Array, "num_tokens num_kv_heads head_dim"]

BACKENDS: dict[str, Callable[..., tuple[Cache, Cache]]] = {
    "reference": xla.kv_cache_write,
    "xla": xla.kv_cache_write,
    "triton": triton.kv_cache_write,
    "triton_interpret": functools.partial(triton.kv_cache_write, interpret=True),
}


def kv_cache_write(
    k_cache: Cache,
    v_cache: Cache,
    k: NewTokens,
    v: NewTokens,
    slot_mapping: Int[Array, " num_tokens"],
    *,
    layer: int | Int[Array, ""],
    backend: str | None = None,
) -> tuple[Cache, Cache]:
    """Writes token i of k and v to slot slot_mapping[i] = block_id * block_size + offset of one layer.

    k and v are cast to the caches' dtype. Slots must be distinct, but for padding tokens, which all name slot 0: block
    0 is the null block and nobody reads it. The whole caches go in and come out (a slice would copy the layer); under
    jit with the caches donated they are written in place.

    backend: one of BACKENDS; None for the default, "triton" on an NVIDIA GPU and "xla" elsewhere. ValueError names an
    unknown one, a shape that does not fit the others, or a layer that the caches do not have (unless it is traced).
    """
    name = default_backend() if backend is None else backend
    if name not in BACKENDS:
        raise ValueError(f"backend is {backend!r}; allowed: {', '.join(BACKENDS)}")
    check_caches(k_cache, v_cache, layer)
    _, _, num_kv_heads, _, head_dim = k_cache.shape
    for what, array in (("k", k), ("v", v)):
        check_shape(what, array, (*slot_mapping.shape, num_kv_heads, head_dim))
    return _dispatch(k_cache, v_cache, k, v, slot_mapping, jnp.int32(layer), backend=name)


@functools.partial(jax.jit, static_argnames="backend")
def _dispatch(
    k_cache: Cache,
    v_cache: Cache,
    k: NewTokens,
    v: NewTokens,
    slot_mapping: Int[Array, " num_tokens"],
    layer: Int[Array, ""],
    *,
    backend: str,
) -> tuple[Cache, Cache]:
    # Jitted with a traced layer, so that a model of many layers traces and lowers the write once.
    return BACKENDS[backend](k_cache, v_cache, k, v, slot_mapping, layer)
