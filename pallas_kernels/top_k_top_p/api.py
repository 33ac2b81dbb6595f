"""top_k_top_p_draw: the best of what top_k and top_p keep; backends stand beside it and agree with xla.py."""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.backends import default_backend
from pallas_kernels.checks import check_shape
from pallas_kernels.top_k_top_p import triton, xla

Rows = Float[Array, "num_rows vocab_size"]
Tokens = Int[Array, " num_rows"]

BACKENDS: dict[str, Callable[..., Tokens]] = {
    "reference": xla.top_k_top_p_draw,
    "xla": xla.top_k_top_p_draw,
    "triton": triton.top_k_top_p_draw,
    "triton_interpret": functools.partial(triton.top_k_top_p_draw, interpret=True),
}


def top_k_top_p_draw(
    scores: Rows, noisy: Rows, top_k: Tokens, top_p: Float[Array, " num_rows"], *, backend: str | None = None
) -> Tokens:
    """For each row the token of the largest `noisy` among those that top_k, then top_p, keep of `scores`; int32.

    scores: float32 log-probabilities but for a constant: each row's largest is 0, the others are less. noisy: float32,
    the same with Gumbel noise for a draw from the softmax of what is kept; -inf where a token must not be drawn, but
    not where a row's scores are 0. top_k: int32, at least 1; vocab_size or more keeps all. top_p: float32, above 0; 1
    keeps all.

    top_k keeps the top_k largest scores, top_p the fewest largest whose probabilities among those that top_k kept reach
    top_p; a token that ties with the last one kept stays. Probabilities are summed in float32, in each backend's own
    order: where they reach top_p but for a rounding, backends may keep one token more or less.

    backend: one of BACKENDS; None for the default, "triton" on an NVIDIA GPU and "xla" elsewhere. ValueError names an
    unknown backend, or a shape or dtype that is not supported.
    """
    name = default_backend() if backend is None else backend
    if name not in BACKENDS:
        raise ValueError(f"backend is {backend!r}; allowed: {', '.join(BACKENDS)}")
    _check(scores, noisy, top_k, top_p)
    return _dispatch(scores, noisy, top_k, top_p, backend=name)


@functools.partial(jax.jit, static_argnames="backend")
def _dispatch(scores: Rows, noisy: Rows, top_k: Tokens, top_p: Float[Array, " num_rows"], *, backend: str) -> Tokens:
    return BACKENDS[backend](scores, noisy, top_k, top_p)


def _check(scores: Array, noisy: Array, top_k: Array, top_p: Array) -> None:
    if scores.ndim != 2 or not scores.size:
        raise ValueError(f"scores's shape is {scores.shape}; allowed: [num_rows, vocab_size], neither of them 0")
    row = scores.shape[:1]
    wanted = {"noisy": (noisy, scores.shape), "top_k": (top_k, row), "top_p": (top_p, row)}
    for name, (array, shape) in wanted.items():
        check_shape(name, array, shape)
    for name, array in (("scores", scores), ("noisy", noisy), ("top_p", top_p)):
        if array.dtype != jnp.float32:
            raise ValueError(f"{name}'s dtype is {array.dtype}; allowed: float32")
    if top_k.dtype != jnp.int32:
        raise ValueError(f"top_k's dtype is {top_k.dtype}; allowed: int32")
