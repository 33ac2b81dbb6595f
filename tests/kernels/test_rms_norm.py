"""The contract of add_rms_norm: every backend against numpy in float64."""

import inspect

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import add_rms_norm
from pallas_kernels.rms_norm import api

BACKENDS = api.BACKENDS

SIZES = [64, 96, 576, 2048, 4096]
TOLERANCES = {"float32": 1e-6, "bfloat16": 2e-2}
EPS = 1e-5


def _inputs(num_tokens: int, size: int, dtype: str, has_delta: bool = True) -> tuple:
    """x, delta and weight; rows of very different lengths."""
    rng = np.random.default_rng(num_tokens * size)
    x, delta = rng.normal(size=(2, num_tokens, size)) * 10.0 ** np.arange(-2, num_tokens - 2)[:, None]
    weight = rng.uniform(0.5, 2, size=size)
    x, delta, weight = (array.astype(jnp.dtype(dtype)) for array in (x, delta, weight))
    return x, delta if has_delta else None, weight


def _expected(x: np.ndarray, delta: np.ndarray | None, weight: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The rounded sum, and its norm in float64."""
    summed = x if delta is None else (x.astype(np.float64) + delta.astype(np.float64)).astype(x.dtype)
    row = summed.astype(np.float64)
    return summed, row / np.sqrt(np.mean(row**2, axis=-1, keepdims=True) + EPS) * weight.astype(np.float64)


def _run(inputs: tuple, backend: str | None) -> list[np.ndarray]:
    arrays = [None if array is None else jnp.asarray(array) for array in inputs]
    return [np.asarray(array) for array in add_rms_norm(*arrays, eps=EPS, backend=backend)]


@pytest.mark.parametrize("has_delta", [True, False])
@pytest.mark.parametrize("dtype", list(TOLERANCES))
@pytest.mark.parametrize("num_tokens", [1, 5])
@pytest.mark.parametrize("size", SIZES)
def test_sum_and_norm(size: int, num_tokens: int, dtype: str, has_delta: bool, backend: str) -> None:
    inputs = _inputs(num_tokens, size, dtype, has_delta)
    summed, normed = _run(inputs, backend)
    expected_sum, expected_norm = _expected(*inputs)
    assert summed.dtype == normed.dtype == jnp.dtype(dtype)
    np.testing.assert_array_equal(summed, expected_sum)
    np.testing.assert_allclose(normed.astype(np.float64), expected_norm, rtol=TOLERANCES[dtype], atol=0)


@pytest.mark.parametrize("has_delta", [True, False])
@pytest.mark.parametrize("size", SIZES)
def test_bfloat16_is_a_rounding_step_from_xla(size: int, has_delta: bool, backend: str) -> None:
    inputs = _inputs(5, size, "bfloat16", has_delta)
    (summed, normed), (xla_sum, xla_norm) = _run(inputs, backend), _run(inputs, "xla")
    np.testing.assert_array_equal(summed, xla_sum)
    step = float(jnp.finfo(jnp.bfloat16).eps)
    np.testing.assert_allclose(normed.astype(np.float64), xla_norm.astype(np.float64), rtol=step, atol=0)


def test_weight_of_a_wider_dtype_is_not_rounded(backend: str) -> None:
    """The rows are: the norm is rounded to their dtype, then multiplied in the weight's."""
    x, delta, _ = _inputs(5, 96, "bfloat16")
    weight = _inputs(5, 96, "float32")[2]
    _, ones_normed = _run((x, delta, np.ones_like(weight)), backend)
    summed, normed = _run((x, delta, weight), backend)
    assert (summed.dtype, normed.dtype) == (x.dtype, weight.dtype)
    np.testing.assert_array_equal(ones_normed, ones_normed.astype(x.dtype).astype(np.float32))
    np.testing.assert_allclose(normed, ones_normed * weight, rtol=1e-6)


@pytest.mark.parametrize("dtype", list(TOLERANCES))
def test_a_zero_row_comes_out_as_zeros(dtype: str, backend: str) -> None:
    """Of x alone, and where delta takes away all of x; its neighbours are what they are without it."""
    x, delta, weight = _inputs(5, 96, dtype)
    delta[2] = -x[2]
    summed, normed = _run((x, delta, weight), backend)
    assert not summed[2].any() and not normed[2].any()
    np.testing.assert_array_equal(summed[[1, 3]], _run((x[[1, 3]], delta[[1, 3]], weight), backend)[0])
    assert not _run((np.zeros_like(x), None, weight), backend)[1].any()


def test_nan_stays_in_its_row(backend: str) -> None:
    """A padding token may hold anything."""
    x, delta, weight = _inputs(5, 96, "float32")
    x[1, 7], delta[4] = np.nan, np.inf
    for out in _run((x, delta, weight), backend):
        assert np.isfinite(out[[0, 2, 3]]).all() and not np.isfinite(out[[1, 4]]).all()


def test_without_delta_x_comes_back(backend: str) -> None:
    x, _, weight = _inputs(5, 96, "float32")
    np.testing.assert_array_equal(_run((x, None, weight), backend)[0], x)


def test_unknown_backend_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match=r"backend is 'cudnn'; allowed: .*reference.*xla"):
        _run(_inputs(1, 64, "float32"), "cudnn")


@pytest.mark.parametrize(
    ("shapes", "message"),
    [
        (((64,), None, (64,)), r"x's shape is \(64,\); allowed: \[num_tokens, size\]"),
        (((5, 0), None, (0,)), r"x's shape is \(5, 0\); allowed: \[num_tokens, size\]"),
        (((5, 64), (1, 64), (64,)), r"delta's shape is \(1, 64\); allowed: x's, \(5, 64\)"),
        (((5, 64), None, (96,)), r"weight's shape is \(96,\); allowed: \(64,\)"),
    ],
)
def test_wrong_shapes_are_refused_by_name(shapes: tuple, message: str) -> None:
    """Without the run-time type checks of test runs, which would be the first to see them."""
    arrays = [None if shape is None else jnp.zeros(shape) for shape in shapes]
    with pytest.raises(ValueError, match=message):
        inspect.unwrap(add_rms_norm)(*arrays, eps=EPS)


@pytest.mark.parametrize("name", ["x", "delta", "weight"])
def test_integers_are_refused_by_name(name: str) -> None:
    arrays = {"x": jnp.ones((5, 64)), "delta": jnp.ones((5, 64)), "weight": jnp.ones(64)}
    arrays[name] = arrays[name].astype(jnp.int32)
    with pytest.raises(ValueError, match=f"{name}'s dtype is int32; allowed: float32, bfloat16, float16"):
        inspect.unwrap(add_rms_norm)(*arrays.values(), eps=EPS)
