"""How large a cache may grow before an index overflows (case 35)."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import kv_cache_write, paged_attention

BLOCK_SIZE = 16
INT32_MAX = 2**31 - 1
LAYOUTS = {"llama-8b": (32, 32, 8, 128), "smollm2-135m": (30, 9, 3, 64)}  # layers, query heads, KV heads, head_dim


def pool_shape(layout: str, pool_bytes: int) -> tuple[int, int, int, int, int]:
    """The shape of each of the two bfloat16 caches that together fill pool_bytes."""
    num_layers, _, num_kv_heads, head_dim = LAYOUTS[layout]
    bytes_per_block = 2 * 2 * num_layers * num_kv_heads * BLOCK_SIZE * head_dim
    return (num_layers, pool_bytes // bytes_per_block, num_kv_heads, BLOCK_SIZE, head_dim)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("pool_gb", [80, 120])
def test_offsets_pass_int32_but_no_index_does(layout: str, pool_gb: int) -> None:
    """So a flat int32 offset would wrap round on such a device, while a slot or an index of one axis is far from it."""
    shape = pool_shape(layout, pool_gb * 10**9)
    largest_offset = int(np.prod(shape, dtype=np.int64)) - 1
    assert largest_offset > INT32_MAX
    assert shape[1] * BLOCK_SIZE - 1 < INT32_MAX  # slots, the largest integers of a step
    assert max(shape) < INT32_MAX


def _abstract_attention(backend: str, layout: str, shape: tuple[int, ...]) -> str:
    num_heads, head_dim = LAYOUTS[layout][1], shape[-1]
    cache = jax.ShapeDtypeStruct(shape, jnp.bfloat16)
    q = jax.ShapeDtypeStruct((32, num_heads, head_dim), jnp.bfloat16)
    ints = [jax.ShapeDtypeStruct(size, jnp.int32) for size in ((8, 64), (8,), (9,))]
    attend = jax.jit(lambda *arrays: paged_attention(*arrays, layer=1, backend=backend))
    return attend.lower(q, cache, cache, *ints).as_text()


def _abstract_write(layout: str, shape: tuple[int, ...]) -> jax.stages.Lowered:
    cache = jax.ShapeDtypeStruct(shape, jnp.bfloat16)
    new = jax.ShapeDtypeStruct((32, shape[2], shape[4]), jnp.bfloat16)
    slots = jax.ShapeDtypeStruct((32,), jnp.int32)
    write = jax.jit(lambda *arrays: kv_cache_write(*arrays, layer=1), donate_argnums=(0, 1))
    return write.lower(cache, cache, new, new, slots)


def _is_indexed_by_axis(program: str, shape: tuple[int, ...]) -> bool:
    """Whether the cache is only ever addressed with one index an axis: XLA then widens the offset by itself.

    Every type of as many elements as the cache must still have its axes: a cache flattened to one or two would need
    offsets past int32 from the program.
    """
    num_elements = int(np.prod(shape, dtype=np.int64))
    types = {tuple(map(int, dims.split("x"))) for dims in re.findall(r"tensor<([0-9x]+)xbf16>", program)}
    whole = {dims for dims in types if int(np.prod(dims, dtype=np.int64)) >= num_elements // shape[0]}
    return whole == {tuple(shape)}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_jnp_paths_address_a_large_pool_by_axis(layout: str) -> None:
    """For a pool of 120 GB, lowered without allocating it."""
    shape = pool_shape(layout, 120 * 10**9)
    for backend in ("reference", "xla"):
        assert _is_indexed_by_axis(_abstract_attention(backend, layout, shape), shape), backend
    assert _is_indexed_by_axis(_abstract_write(layout, shape).as_text(), shape)


def test_a_flat_offset_would_be_caught() -> None:
    shape = pool_shape("llama-8b", 120 * 10**9)
    cache = jax.ShapeDtypeStruct(shape, jnp.bfloat16)
    flat = jax.jit(lambda array, slot: array.reshape(-1, shape[-1])[slot])
    program = flat.lower(cache, jax.ShapeDtypeStruct((4,), jnp.int32)).as_text()
    assert not _is_indexed_by_axis(program, shape)


def test_a_large_pool_is_written_in_place() -> None:
    """Compiled for 120 GB: aliased whole, with next to no temporaries."""
    shape = pool_shape("llama-8b", 120 * 10**9)
    stats = _abstract_write("llama-8b", shape).compile().memory_analysis()
    assert stats.alias_size_in_bytes == 2 * 2 * int(np.prod(shape, dtype=np.int64))
    assert stats.temp_size_in_bytes < 2**20
