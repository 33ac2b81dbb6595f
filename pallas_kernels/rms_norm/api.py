"""add_rms_norm: a residual sum and its RMS norm; backends stand beside it and agree with xla.py."""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from pallas_kernels.backends import default_backend
from pallas_kernels.rms_norm import triton, xla

Rows = Float[Array, "num_tokens size"]

BACKENDS: dict[str, Callable[..., tuple[Rows, Rows]]] = {
    "reference": xla.add_rms_norm,
    "xla": xla.add_rms_norm,
    "triton": triton.add_rms_norm,
    "triton_interpret": functools.partial(triton.add_rms_norm, interpret=True),
}


def add_rms_norm(
    x: Rows, delta: Rows | None, weight: Float[Array, " size"], *, eps: float, backend: str | None = None
) -> tuple[Rows, Rows]:
    """(summed, normed): summed = x + delta, normed = summed / sqrt(mean(summed ** 2) + eps) * weight, row by row.

    delta None: summed is x, and only normed is computed. Source: Zhang and Sennrich, 2019, sec. 4.

    summed has x's dtype, and it is the rounded sum that is normed (but XLA on a CPU may norm it unrounded, within one
    fusion: xla_allow_excess_precision). The statistics are in float32; summed / rms is cast back to x's dtype before it
    is multiplied with weight, so normed has the dtype of that product: x's own, where x and weight have the same. Any
    size; nothing is donated.

    backend: one of BACKENDS; None for the default, "triton" on an NVIDIA GPU and "xla" elsewhere. ValueError names an
    unknown backend, or a shape or dtype that is not supported.
    """
    name = default_backend() if backend is None else backend
    if name not in BACKENDS:
        raise ValueError(f"backend is {backend!r}; allowed: {', '.join(BACKENDS)}")
    _check_shapes(x, delta, weight)
    return _dispatch(x, delta, weight, eps=eps, backend=name)


@functools.partial(jax.jit, static_argnames=("eps", "backend"))
def _dispatch(
    x: Rows, delta: Rows | None, weight: Float[Array, " size"], *, eps: float, backend: str
) -> tuple[Rows, Rows]:
    # Jitted, so that a model of many layers traces and lowers the kernel once.
    return BACKENDS[backend](x, delta, weight, eps=eps)


def _check_shapes(x: Array, delta: Array | None, weight: Array) -> None:
    if x.ndim != 2 or not x.size:
        raise ValueError(f"x's shape is {x.shape}; allowed: [num_tokens, size], neither of them 0")
    if delta is not None and delta.shape != x.shape:
        raise ValueError(f"delta's shape is {delta.shape}; allowed: x's, {x.shape}")
    if weight.shape != x.shape[1:]:
        raise ValueError(f"weight's shape is {weight.shape}; allowed: {x.shape[1:]}, the size of x's rows")
    for name, array in (("x", x), ("delta", delta), ("weight", weight)):
        if array is not None and not jnp.issubdtype(array.dtype, jnp.floating):
            raise ValueError(f"{name}'s dtype is {array.dtype}; allowed: float32, bfloat16, float16")
