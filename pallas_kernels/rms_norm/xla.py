"""add_rms_norm in jax.numpy: the definition, and the CPU's path."""

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

Rows = Float[Array, "num_tokens size"]


def add_rms_norm(x: Rows, delta: Rows | None, weight: Float[Array, " size"], *, eps: float) -> tuple[Rows, Rows]:
    """See api.add_rms_norm."""
    summed = x if delta is None else (x + delta).astype(x.dtype)
    return summed, rms_norm(summed, weight, eps)


@functools.partial(jax.jit, static_argnames="eps")
def rms_norm(x: Float[Array, "*batch size"], weight: Float[Array, " size"], eps: float) -> Float[Array, "*batch size"]:
    """x / sqrt(mean(x ** 2) + eps), in float32 and rounded to x's dtype, times weight."""
    x32 = x.astype(jnp.float32)
    variance = jnp.mean(x32 * x32, axis=-1, keepdims=True)
    normed = x32 * jax.lax.rsqrt(variance + eps)
    if weight.dtype != x.dtype:
        # Said outright: XLA on a GPU drops a rounding to bfloat16 and back (xla_allow_excess_precision). Where the
        # product is rounded as well, one rounding less is within what backends may differ by.
        info = jnp.finfo(x.dtype)
        normed = jax.lax.reduce_precision(normed, info.nexp, info.nmant)
    return normed.astype(x.dtype) * weight
