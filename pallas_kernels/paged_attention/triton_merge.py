"""Joins what the decode kernel's splits of a row have found, in one small kernel."""

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt
from jaxtyping import Array, Float

from pallas_kernels.early_launch import can_launch_early, program_id
from pallas_kernels.paged_attention.config import Geometry, next_power_of_2
from pallas_kernels.paged_attention.triton_common import MASKED, Ref, Softmax, dims_of

NUM_WARPS = 4


def merge_decode(parts: Softmax, geometry: Geometry, interpret: bool) -> Float[Array, "num_rows num_heads head_dim"]:
    """The output of rows that have one query each.

    parts: arrays [num_splits, num_rows, num_kv_heads, tile_rows] (values: and padded_dim), float32. Grid (num_rows,
    num_heads): a program joins one query head's splits by their maxima (log-sum-exp).
    """
    num_splits, num_rows = parts.total.shape[:2]
    is_early = can_launch_early(interpret=interpret)
    return pl.pallas_call(
        functools.partial(_merge_program, geometry=geometry, num_splits=num_splits, is_early=is_early),
        grid=(num_rows, geometry.num_heads),
        out_shape=jax.ShapeDtypeStruct((num_rows, geometry.num_heads, geometry.head_dim), geometry.dtype),
        compiler_params=plt.CompilerParams(num_warps=NUM_WARPS, num_stages=1),
        interpret=interpret,
        name="paged_attention_merge",
    )(*parts)


def _merge_program(
    maximum_ref: Ref,
    total_ref: Ref,
    values_ref: Ref,
    out_ref: Ref,
    *,
    geometry: Geometry,
    num_splits: int,
    is_early: bool,
) -> None:
    row, head = program_id(0, is_early=is_early), pl.program_id(1)
    pair = (row, head // geometry.group, head % geometry.group)
    splits = jnp.arange(next_power_of_2(num_splits), dtype=jnp.int32)
    is_split = splits < num_splits
    maximum = plt.load(maximum_ref.at[(splits, *pair)], mask=is_split, other=MASKED)
    total = plt.load(total_ref.at[(splits, *pair)], mask=is_split, other=0)
    dims, is_real = dims_of(geometry)
    mask = is_split[:, None] if is_real is None else is_split[:, None] & is_real
    values = plt.load(values_ref.at[(splits[:, None], *pair, dims)], mask=mask, other=0)
    weights = jnp.exp2(maximum - jnp.max(maximum))  # 0 where no key was seen, or 1 where none was anywhere
    whole = jnp.sum(total * weights)
    merged = jnp.sum(values * weights[:, None], axis=0) / jnp.where(whole == 0, 1, whole)
    is_dim = None if is_real is None else is_real[0]
    plt.store(out_ref.at[row, head, dims[0]], merged.astype(out_ref.dtype), mask=is_dim)
