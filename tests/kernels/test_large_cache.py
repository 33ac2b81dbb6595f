"""Offsets past 2**31 elements and 2**32 bytes, on a GPU's whole memory. Last passed on an H200: see BUILD_NOTES.md."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import kv_cache_write, paged_attention

NUM_LAYERS, NUM_KV_HEADS, BLOCK_SIZE, HEAD_DIM = 4, 8, 16, 128
BLOCKS_PER_ROW = 4


def block_ids(num_blocks: int) -> np.ndarray:
    """A row's blocks: the pool's last, some in the middle, and the first usable one."""
    return np.array([[num_blocks - 1, num_blocks // 2, num_blocks - 2, 1]], np.int32)


def attend(num_blocks: int, num_new: int) -> np.ndarray:
    """Writes a sequence of 64 tokens into the last layer of a cache of zeros and attends with its last num_new."""
    rng = np.random.default_rng(0)
    num_tokens = BLOCKS_PER_ROW * BLOCK_SIZE
    k, v = (jnp.asarray(rng.normal(size=(num_tokens, NUM_KV_HEADS, HEAD_DIM)), jnp.bfloat16) for _ in "kv")
    q = jnp.asarray(rng.normal(size=(num_new, 4 * NUM_KV_HEADS, HEAD_DIM)), jnp.bfloat16)
    tables = block_ids(num_blocks)
    slots = (tables.reshape(-1, 1).astype(np.int64) * BLOCK_SIZE + np.arange(BLOCK_SIZE)).reshape(-1)
    assert slots.max() < 2**31, "slots are int32"
    write = jax.jit(
        lambda *cache: kv_cache_write(*cache, k, v, jnp.asarray(slots, jnp.int32), layer=3), donate_argnums=(0, 1)
    )
    shape = (NUM_LAYERS, num_blocks, NUM_KV_HEADS, BLOCK_SIZE, HEAD_DIM)
    cache = write(jnp.zeros(shape, jnp.bfloat16), jnp.zeros(shape, jnp.bfloat16))
    rows = (jnp.asarray(tables), jnp.asarray([num_tokens]), jnp.asarray([0, num_new]))
    out = np.asarray(paged_attention(q, *cache, *rows, layer=3), np.float32)
    del cache
    return out


@pytest.mark.gpu
@pytest.mark.parametrize("num_new", [1, 64])
def test_a_cache_of_most_of_the_devices_memory(num_new: int) -> None:
    stats = jax.local_devices()[0].memory_stats()
    bytes_per_block = 2 * 2 * NUM_LAYERS * NUM_KV_HEADS * BLOCK_SIZE * HEAD_DIM
    num_blocks = int(0.93 * (stats["bytes_limit"] - stats["bytes_in_use"])) // bytes_per_block
    assert num_blocks * bytes_per_block > 60e9, "this device has too little memory for the test"
    np.testing.assert_array_equal(attend(num_blocks, num_new), attend(64, num_new))
