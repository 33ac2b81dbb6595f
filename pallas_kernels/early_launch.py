"""When a GPU may launch the kernel that comes after one of Pallas's Triton kernels (Hopper).

XLA launches its kernels and these so that each may be on its multiprocessors before the one before it has ended, and
lets each wait for that end by its first instruction (programmatic dependent launch; griddepcontrol in PTX). But only
its own matrix products say when the next kernel may come; after others it comes when all their programs have ended.
"""

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt
from jaxtyping import Array, Int

from pallas_kernels.backends import is_hopper

ASSEMBLY = "griddepcontrol.launch_dependents; mov.b32 $0, $1;"


def can_launch_early(*, interpret: bool) -> bool:
    """Whether the device has the instruction, for program_id."""
    return not interpret and is_hopper()


def program_id(axis: int, *, is_early: bool) -> Int[Array, ""]:
    """pl.program_id; is_early: the next kernel may be launched once every program of this one has come here.

    Nothing is read too early: that kernel waits for this one's end, and for all that it has written, before it begins.
    """
    index = pl.program_id(axis)
    if not is_early:
        return index
    # The assembly has no effect that the compiler knows of: it stays because its result is used.
    like = jax.ShapeDtypeStruct((1,), jnp.int32)
    [same] = plt.elementwise_inline_asm(
        ASSEMBLY, args=[jnp.full(like.shape, index)], constraints="=r,r", pack=1, result_shape_dtypes=[like]
    )
    return jnp.max(same)
