"""Mosaic's kernels, compiled before the steps that they are in.

XLA compiles a kernel in the middle of a step. It takes options of LLVM that are not XLA's own, which hold for the whole
process: such a kernel waits until no other thread compiles anything else, and everything else waits for it. Kernels
that are compiled by themselves, several at a time, wait for little, and steps then find them by their hash.
"""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp

CALL = "mosaic_gpu_v2"
# What a call of a kernel has beside its hash and its module, on one device.
SINGLE_DEVICE = {"use_custom_barrier": False, "uses_xla_collective_metadata": False}


def compile_kernels(lowered: jax.stages.Lowered, sharding: jax.sharding.Sharding | None = None) -> None:
    """All of a program's, each in a thread. sharding: names a device that is not the default one."""
    programs = [kernel_program(*kernel, sharding) for kernel in kernels_of(lowered).items()]
    if programs:
        with ThreadPoolExecutor(len(programs), "compile kernels") as threads:
            list(threads.map(jax.stages.Lowered.compile, programs))


def kernels_of(lowered: jax.stages.Lowered) -> dict[bytes, bytes]:
    """Modules of a program's kernels by their hash."""
    module = lowered.compiler_ir("stablehlo")
    assert module is not None
    return dict(_kernels_in(module.operation))


def kernel_program(
    kernel_hash: bytes, module: bytes, sharding: jax.sharding.Sharding | None = None
) -> jax.stages.Lowered:
    """A program that is never run: once it is compiled, this process has the kernel."""

    def call() -> jax.Array:  # without arguments: compiling the kernel looks at none
        result = jax.ShapeDtypeStruct((1,), jnp.float32)
        attributes = SINGLE_DEVICE | {"kernel_hash": kernel_hash, "module": module}
        return jax.ffi.ffi_call(CALL, result, has_side_effect=True)(**attributes)

    return jax.jit(call, out_shardings=sharding).lower()


def _kernels_in(operation: Any) -> Iterator[tuple[bytes, bytes]]:
    for inner in (each.operation for region in operation.regions for block in region for each in block):
        if inner.name == "stablehlo.custom_call" and inner.attributes["call_target_name"].value == CALL:
            config = inner.attributes["mhlo.backend_config"]
            yield config["kernel_hash"].value_bytes, config["module"].value_bytes
        yield from _kernels_in(inner)
