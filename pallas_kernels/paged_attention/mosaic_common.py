"""What the Mosaic GPU kernels share: the layout of what the tensor cores read from shared memory."""

from typing import Any

import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

SWIZZLE_BYTES = 128


def swizzled(shape: tuple[int, ...], dtype: Any, swizzle_bytes: int = SWIZZLE_BYTES) -> Any:
    """Shared memory in tiles of 8 rows of swizzle_bytes each, interleaved: with 128, what tensor cores read."""
    tile = (8, swizzle_bytes // jnp.dtype(dtype).itemsize)
    # mypy takes a method that a protocol leaves empty for an abstract one.
    transforms = (plgpu.TilingTransform(tile), plgpu.SwizzleTransform(swizzle_bytes))  # type: ignore[abstract]
    return plgpu.SMEM(shape, jnp.dtype(dtype), transforms=transforms)
