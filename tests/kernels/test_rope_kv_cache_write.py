"""The contract of rope_kv_cache_write: every backend against complex numbers in numpy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import rope_kv_cache_write
from pallas_kernels.rope_kv_cache_write import api

BACKENDS = api.BACKENDS

NUM_LAYERS, NUM_BLOCKS, BLOCK_SIZE, NUM_TOKENS = 2, 6, 16, 13
HEADS = [(9, 3, 64), (4, 4, 16), (5, 1, 80), (6, 2, 96), (7, 7, 40), (32, 8, 128), (8, 1, 256)]
TOLERANCE = {"float32": 1e-6, "bfloat16": 2**-7, "float16": 2**-10}


def _inputs(num_heads: int, num_kv_heads: int, head_dim: int, dtype: str) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    cache = (NUM_LAYERS, NUM_BLOCKS, num_kv_heads, BLOCK_SIZE, head_dim)
    angles = rng.uniform(0, 500, (NUM_TOKENS, head_dim // 2)).astype(np.float32)
    slots = rng.permutation(np.arange(BLOCK_SIZE, NUM_BLOCKS * BLOCK_SIZE))[:NUM_TOKENS]
    return {
        "k_cache": rng.normal(size=cache).astype(jnp.dtype(dtype)),
        "v_cache": rng.normal(size=cache).astype(jnp.dtype(dtype)),
        "qkv": rng.normal(size=(NUM_TOKENS, num_heads + 2 * num_kv_heads, head_dim)).astype(jnp.dtype(dtype)),
        "cos": np.cos(angles),
        "sin": np.sin(angles),
        "slot_mapping": slots.astype(np.int32),
    }


def _expected(inputs: dict[str, np.ndarray], layer: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    k_cache, v_cache = inputs["k_cache"].copy(), inputs["v_cache"].copy()
    num_kv_heads = k_cache.shape[2]
    qkv = inputs["qkv"].astype(np.float64)
    half = qkv.shape[2] // 2
    turn = (inputs["cos"] + 1j * inputs["sin"])[:, None, :]
    turned = (qkv[..., :half] + 1j * qkv[..., half:]) * turn
    rotated = np.concatenate([turned.real, turned.imag], axis=-1)
    k, v = rotated[:, -2 * num_kv_heads : -num_kv_heads], inputs["qkv"][:, -num_kv_heads:]
    for token, slot in enumerate(inputs["slot_mapping"].tolist()):
        k_cache[layer, slot // BLOCK_SIZE, :, slot % BLOCK_SIZE] = k[token].astype(k_cache.dtype)
        v_cache[layer, slot // BLOCK_SIZE, :, slot % BLOCK_SIZE] = v[token]
    return rotated[:, : -2 * num_kv_heads], k_cache, v_cache


def _run(inputs: dict[str, np.ndarray], layer: int, backend: str) -> list[np.ndarray]:
    arrays = [jnp.asarray(array) for array in inputs.values()]
    return [np.asarray(out) for out in rope_kv_cache_write(*arrays, layer=layer, backend=backend)]


@pytest.mark.parametrize(
    ("heads", "dtype"),
    [(heads, "float32") for heads in HEADS]
    + [(heads, dtype) for heads in HEADS[:3:2] for dtype in ("bfloat16", "float16")],
)
def test_rotates_and_writes(heads: tuple[int, int, int], dtype: str, backend: str) -> None:
    """Queries and written keys to rounding; values, and all that is not written, to the bit."""
    inputs = _inputs(*heads, dtype)
    q, k_cache, v_cache = _run(inputs, 1, backend)
    expected_q, expected_k, expected_v = _expected(inputs, 1)
    assert q.dtype == jnp.dtype(dtype)
    tolerance = TOLERANCE[dtype] * 8
    np.testing.assert_allclose(q.astype(np.float64), expected_q, rtol=0, atol=tolerance)
    np.testing.assert_allclose(k_cache.astype(np.float32), expected_k.astype(np.float32), rtol=0, atol=tolerance)
    np.testing.assert_array_equal(v_cache, expected_v)
    is_written = np.zeros(k_cache.shape, bool)
    for slot in inputs["slot_mapping"].tolist():
        is_written[1, slot // BLOCK_SIZE, :, slot % BLOCK_SIZE] = True
    np.testing.assert_array_equal(k_cache[~is_written], inputs["k_cache"][~is_written])


def test_padding_goes_to_the_null_block(backend: str) -> None:
    """Tokens that name slot 0, NaN and all, leave the other blocks and other tokens' queries alone."""
    inputs = _inputs(9, 3, 64, "float32")
    inputs["slot_mapping"][-4:] = 0
    inputs["qkv"][-4:] = np.nan
    q, k_cache, v_cache = _run(inputs, 0, backend)
    assert np.isfinite(q[:-4]).all() and np.isfinite(k_cache[:, 1:]).all() and np.isfinite(v_cache[:, 1:]).all()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_backends_agree_with_xla(dtype: str, backend: str) -> None:
    """To a rounding: the same float32 formula, with or without a fused multiply-add."""
    inputs = _inputs(9, 3, 64, dtype)
    for ours, xlas in zip(_run(inputs, 0, backend), _run(inputs, 0, "xla"), strict=True):
        ours, xlas = ours.astype(np.float32), xlas.astype(np.float32)
        np.testing.assert_allclose(ours, xlas, rtol=TOLERANCE[dtype], atol=1e-6)


@pytest.mark.parametrize("num_tokens", [1, NUM_TOKENS])
def test_donated_caches_are_updated_in_place(num_tokens: int, serving_backend: str) -> None:
    cache = jax.ShapeDtypeStruct((4, 1024, 8, BLOCK_SIZE, 128), jnp.bfloat16)
    qkv = jax.ShapeDtypeStruct((num_tokens, 48, 128), jnp.bfloat16)
    angles = jax.ShapeDtypeStruct((num_tokens, 64), jnp.float32)
    slots = jax.ShapeDtypeStruct((num_tokens,), jnp.int32)
    run = jax.jit(lambda *arrays: rope_kv_cache_write(*arrays, layer=1, backend=serving_backend), donate_argnums=(0, 1))
    stats = run.lower(cache, cache, qkv, angles, angles, slots).compile().memory_analysis()
    cache_bytes = 2 * (4 * 1024 * 8 * BLOCK_SIZE * 128) * 2
    assert stats.alias_size_in_bytes == cache_bytes
    assert stats.temp_size_in_bytes < cache_bytes / 2 / 4 / 10  # a tenth of one layer's keys


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"backend": "cudnn"}, r"backend is 'cudnn'; allowed: .*reference.*xla"),
        ({"num_heads": 0}, r"qkv's shape is .*; allowed: more than 2 \* 3 heads of the cache's 64"),
        ({"half": 16}, r"cos has 16 pairs; allowed: half of an even head_dim \(64\)"),
    ],
)
def test_what_does_not_fit_is_refused_by_name(changes: dict, message: str) -> None:
    inputs = _inputs(9, 3, 64, "float32")
    if "num_heads" in changes:
        inputs["qkv"] = inputs["qkv"][:, :6]
    if "half" in changes:
        inputs["cos"], inputs["sin"] = inputs["cos"][:, :16], inputs["sin"][:, :16]
    with pytest.raises(ValueError, match=message):
        _run(inputs, 0, changes.get("backend", "xla"))
