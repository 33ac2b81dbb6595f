"""The paged cache of keys and values as a pytree, and the arithmetic of its size."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from paxpage.models.protocol import KVSpec


class CacheLayout(NamedTuple):
    """What decides the shape of a cache."""

    spec: KVSpec
    num_blocks: int  # the null block included
    block_size: int  # tokens
    dtype: str


class KVCache(NamedTuple):
    """All layers' keys and values: each [num_layers, num_blocks, num_kv_heads, block_size, head_dim].

    One stacked array for each, donated to every step and scattered into with a static layer index: slicing a layer out
    would copy it.
    """

    k: jax.Array
    v: jax.Array


def cache_shape(spec: KVSpec, num_blocks: int, block_size: int) -> tuple[int, int, int, int, int]:
    """The shape of KVCache.k and of KVCache.v."""
    return (spec.num_layers, num_blocks, spec.num_kv_heads, block_size, spec.head_dim)


def allocate(spec: KVSpec, num_blocks: int, block_size: int, dtype: str) -> KVCache:
    """A cache of zeros on the default device."""
    shape = cache_shape(spec, num_blocks, block_size)
    return KVCache(jnp.zeros(shape, dtype), jnp.zeros(shape, dtype))


def abstract_cache(spec: KVSpec, num_blocks: int, block_size: int, dtype: str) -> KVCache:
    """The cache with jax.ShapeDtypeStruct in place of arrays, for compiling ahead."""
    shape = cache_shape(spec, num_blocks, block_size)
    return KVCache._make(jax.ShapeDtypeStruct(shape, jnp.dtype(dtype)) for _ in range(2))


def bytes_per_block(spec: KVSpec, block_size: int, dtype: str) -> int:
    """Bytes that one block takes in all layers, keys and values."""
    return 2 * spec.num_layers * spec.num_kv_heads * block_size * spec.head_dim * jnp.dtype(dtype).itemsize
