"""The contract of kv_cache_write: every backend against a loop in numpy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import kv_cache_write
from pallas_kernels.kv_cache_write import api

BACKENDS = api.BACKENDS

NUM_LAYERS, NUM_BLOCKS, NUM_KV_HEADS, BLOCK_SIZE, HEAD_DIM = 3, 9, 3, 16, 40
SHAPE = (NUM_LAYERS, NUM_BLOCKS, NUM_KV_HEADS, BLOCK_SIZE, HEAD_DIM)
NUM_TOKENS = 24


def _caches(dtype: str = "float32") -> tuple[np.ndarray, np.ndarray]:
    """Every element another value, so that whatever moved is seen."""
    k = np.arange(np.prod(SHAPE), dtype=np.float32).reshape(SHAPE) % 251
    return k.astype(jnp.dtype(dtype)), (k + 300).astype(jnp.dtype(dtype))


def _new_tokens(dtype: str = "float32") -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(1)
    k, v = rng.normal(size=(2, NUM_TOKENS, NUM_KV_HEADS, HEAD_DIM))
    return k.astype(jnp.dtype(dtype)), v.astype(jnp.dtype(dtype))


def _slots(num_padding: int = 0) -> np.ndarray:
    """Distinct slots outside the null block, in no order; padding tokens name slot 0."""
    slots = np.random.default_rng(2).permutation(np.arange(BLOCK_SIZE, NUM_BLOCKS * BLOCK_SIZE))[:NUM_TOKENS]
    slots[NUM_TOKENS - num_padding :] = 0
    return slots.astype(np.int32)


def _expected(cache: np.ndarray, new: np.ndarray, slots: np.ndarray, layer: int) -> np.ndarray:
    out = cache.copy()
    for token, slot in enumerate(slots.tolist()):
        for head in range(NUM_KV_HEADS):
            out[layer, slot // BLOCK_SIZE, head, slot % BLOCK_SIZE] = new[token, head].astype(cache.dtype)
    return out


def _write(caches: tuple, new: tuple, slots: np.ndarray, layer: int, backend: str) -> list[np.ndarray]:
    arrays = [jnp.asarray(array) for array in (*caches, *new, slots)]
    return [np.asarray(cache) for cache in kv_cache_write(*arrays, layer=layer, backend=backend)]


@pytest.mark.parametrize("layer", range(NUM_LAYERS))
@pytest.mark.parametrize("dtypes", [("float32", "float32"), ("bfloat16", "bfloat16"), ("bfloat16", "float32")])
def test_writes_its_slots_and_nothing_else(layer: int, dtypes: tuple[str, str], backend: str) -> None:
    """The cache's own dtype is kept; other layers, blocks, heads and offsets keep every bit."""
    caches, new, slots = _caches(dtypes[0]), _new_tokens(dtypes[1]), _slots()
    written = _write(caches, new, slots, layer, backend)
    for cache, tokens, out in zip(caches, new, written, strict=True):
        assert out.dtype == cache.dtype
        np.testing.assert_array_equal(out, _expected(cache, tokens, slots, layer))


@pytest.mark.parametrize("slot", [BLOCK_SIZE, 5 * BLOCK_SIZE + 7, NUM_BLOCKS * BLOCK_SIZE - 1])
def test_one_token(slot: int, backend: str) -> None:
    """The null block is nobody's, and may change too."""
    caches, new, slots = _caches(), _new_tokens(), np.array([slot], np.int32)
    written = _write(caches, tuple(tokens[:1] for tokens in new), slots, 1, backend)
    for cache, tokens, out in zip(caches, new, written, strict=True):
        np.testing.assert_array_equal(out[:, 1:], _expected(cache, tokens, slots, 1)[:, 1:])
        np.testing.assert_array_equal(out[[0, 2]], cache[[0, 2]])


def test_padding_goes_to_the_null_block(backend: str) -> None:
    """Many padding tokens name the same slot: what lands there is anybody's guess, but only there."""
    caches, new, slots = _caches(), _new_tokens(), _slots(num_padding=10)
    for cache, tokens, out in zip(caches, new, _write(caches, new, slots, 1, backend), strict=True):
        expected = _expected(cache, tokens, slots, 1)
        np.testing.assert_array_equal(out[:, 1:], expected[:, 1:])
        np.testing.assert_array_equal(out[:, 0, :, 1:], cache[:, 0, :, 1:])


def test_nan_of_padding_stays_in_the_null_block(backend: str) -> None:
    caches, (k, v), slots = _caches(), _new_tokens(), _slots(num_padding=10)
    k[-10:], v[-10:] = np.nan, np.nan
    for out in _write(caches, (k, v), slots, 0, backend):
        assert np.isfinite(out[:, 1:]).all() and np.isfinite(out[:, 0, :, 1:]).all()


def test_a_token_that_is_overwritten_leaves_nothing(backend: str) -> None:
    """A block that another request had is used again: the second write wins whole."""
    caches, (k, v), slots = _caches(), _new_tokens(), _slots()
    first = _write(caches, (k, v), slots, 2, backend)
    second = _write(tuple(first), (v, k), slots, 2, backend)
    for cache, tokens, out in zip(caches, (v, k), second, strict=True):
        np.testing.assert_array_equal(out, _expected(cache, tokens, slots, 2))


def test_unknown_backend_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match=r"backend is 'cudnn'; allowed: .*reference.*xla"):
        _write(_caches(), _new_tokens(), _slots(), 0, "cudnn")


def _compile(backend: str, num_tokens: int, *, is_donated: bool) -> jax.stages.Compiled:
    """A write into a bfloat16 cache of 8 heads of 128, then a read, compiled for shapes alone."""
    cache = jax.ShapeDtypeStruct((4, 1024, 8, BLOCK_SIZE, 128), jnp.bfloat16)
    new = jax.ShapeDtypeStruct((num_tokens, 8, 128), jnp.bfloat16)
    slots = jax.ShapeDtypeStruct((num_tokens,), jnp.int32)

    def write_and_read(*arrays: jax.Array) -> tuple[jax.Array, ...]:
        k_cache, v_cache = kv_cache_write(*arrays, layer=1, backend=backend)
        return k_cache, v_cache, k_cache[1, arrays[-1] // BLOCK_SIZE]

    jitted = jax.jit(write_and_read, donate_argnums=(0, 1) if is_donated else ())
    return jitted.lower(cache, cache, new, new, slots).compile()


@pytest.mark.parametrize("num_tokens", [1, 4, 24])
def test_donated_caches_are_updated_in_place(num_tokens: int, serving_backend: str) -> None:
    """The compiler's own figures; without donation the same check finds the copy."""
    cache_bytes = 2 * (4 * 1024 * 8 * BLOCK_SIZE * 128) * 2
    in_place = _compile(serving_backend, num_tokens, is_donated=True).memory_analysis()
    assert in_place.alias_size_in_bytes == cache_bytes
    assert in_place.temp_size_in_bytes < cache_bytes / 2 / 4 / 10  # a tenth of one layer's keys
    copied = _compile(serving_backend, num_tokens, is_donated=False).memory_analysis()
    assert copied.alias_size_in_bytes == 0 and copied.output_size_in_bytes >= cache_bytes


def test_donated_buffers_are_the_ones_that_come_back(serving_backend: str) -> None:
    caches = [jnp.asarray(cache) for cache in _caches()]
    new = [jnp.asarray(tokens) for tokens in _new_tokens()]
    write = jax.jit(lambda *arrays: kv_cache_write(*arrays, layer=0, backend=serving_backend), donate_argnums=(0, 1))
    caches = list(write(*caches, *new, jnp.asarray(_slots())))  # XLA's own buffers: numpy's may not be donated
    before = [cache.unsafe_buffer_pointer() for cache in caches]
    after = [cache.unsafe_buffer_pointer() for cache in write(*caches, *new, jnp.asarray(_slots()))]
    assert after == before
    assert all(cache.is_deleted() for cache in caches)
