"""add_rms_norm on Pallas's Triton backend: every row is read once, and its sum never leaves the registers."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt
from jaxtyping import Array, Float

from pallas_kernels.early_launch import can_launch_early, program_id

Rows = Float[Array, "num_tokens size"]
Ref = Any  # a Pallas reference


def add_rms_norm(
    x: Rows, delta: Rows | None, weight: Float[Array, " size"], *, eps: float, interpret: bool = False
) -> tuple[Rows, Rows]:
    """See api.add_rms_norm. Grid (num_tokens,): a program sums and norms one row.

    summed = x + delta;  normed = summed / sqrt(sum(summed ** 2) / size + eps) * weight
    """
    num_tokens, size = x.shape
    rows = (x,) if delta is None else (x, delta)
    is_early = can_launch_early(interpret=interpret)
    outputs = (jax.ShapeDtypeStruct(x.shape, jnp.result_type(x, weight)), jax.ShapeDtypeStruct(x.shape, x.dtype))
    normed, *summed = pl.pallas_call(
        functools.partial(_norm_program, size=size, eps=eps, has_delta=delta is not None, is_early=is_early),
        grid=(num_tokens,),
        out_shape=outputs[: len(rows)],
        compiler_params=plt.CompilerParams(num_warps=num_warps(size), num_stages=1),
        interpret=interpret,
        name="rms_norm" if delta is None else "add_rms_norm",
    )(weight, *rows)
    return (summed[0] if summed else x), normed


def num_warps(size: int) -> int:
    """Warps of a program: at most 32 elements a thread up to 8,192, so that a row fits in registers beside its loads.

    Fewer than 4 would leave a single row (one request decoding) to one scheduler of an SM's four.
    """
    return 4 if size <= 4096 else 8


def _norm_program(*refs: Ref, size: int, eps: float, has_delta: bool, is_early: bool) -> None:
    weight_ref, x_ref, *rest = refs  # [size], [num_tokens, size]; the rest as x: delta if any, normed, summed if any
    columns = jnp.arange(1 << (size - 1).bit_length(), dtype=jnp.int32)
    is_real, row = columns < size, (program_id(0, is_early=is_early), columns)
    # The weight first: the compiler moves no load across a store, so after one it would wait for x and delta.
    weight = plt.load(weight_ref.at[columns], mask=is_real, other=0)
    x = plt.load(x_ref.at[row], mask=is_real, other=0)
    if has_delta:
        delta_ref, normed_ref, summed_ref = rest
        x = (x + plt.load(delta_ref.at[row], mask=is_real, other=0)).astype(x.dtype)
        plt.store(summed_ref.at[row], x, mask=is_real)
    else:
        (normed_ref,) = rest
    plt.store(normed_ref.at[row], _norm(x, size, eps) * weight, mask=is_real)


def _norm(x: Float[Array, " padded_size"], size: int, eps: float) -> Float[Array, " padded_size"]:
    """x / rms(x) in x's dtype. Padding is zero, and so adds nothing to the sum of squares."""
    x32 = x.astype(jnp.float32)
    variance = jnp.sum(x32 * x32) / size
    return (x32 * jax.lax.rsqrt(variance + eps)).astype(x.dtype)
