"""What the Mosaic GPU kernels share: the layout of what the tensor cores read from shared memory, and of prefixes."""

from typing import Any, NamedTuple

import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.paged_attention.triton_common import Ref

SWIZZLE_BYTES = 128


class Prefix(NamedTuple):
    """Attention over the rows' first keys, computed already, in pieces that are yet to be merged."""

    num_tokens: Ref  # int32 [num_rows], the keys that are done: whole blocks, but not a row's last key; 0 for none
    first_piece: Ref  # int32 [num_rows]
    num_pieces: Ref  # int32 [num_rows]
    place: Ref  # int32 [num_rows], of the row's first query in each of its pieces; those after it follow
    stride: Ref  # int32 [num_rows], from one of the row's pieces to the next; 1 for rows of one query
    values: Ref  # float32 [max_pieces, num_places, padded_heads, head_dim], the output if there were no other keys
    log_sums: Ref  # float32 [max_pieces, num_places, padded_heads], log2 of the sum of weights


def swizzled(shape: tuple[int, ...], dtype: Any, swizzle_bytes: int = SWIZZLE_BYTES) -> Any:
    """Shared memory in tiles of 8 rows of swizzle_bytes each, interleaved: with 128, what tensor cores read."""
    tile = (8, swizzle_bytes // jnp.dtype(dtype).itemsize)
    # mypy takes a method that a protocol leaves empty for an abstract one.
    transforms = (plgpu.TilingTransform(tile), plgpu.SwizzleTransform(swizzle_bytes))  # type: ignore[abstract]
    return plgpu.SMEM(shape, jnp.dtype(dtype), transforms=transforms)
