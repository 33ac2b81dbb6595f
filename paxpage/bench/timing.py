"""Times functions on the device: many calls in one jitted loop, so that no launch from Python counts."""

import functools
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from paxpage.bench.plots import Roof

CALLS_PER_TURN = 8
ROOFS = {"NVIDIA H200": Roof(4.4e12, 800e12)}  # measured; bfloat16 with float32 accumulation
# Bytes of an array and rows of a matrix: more than a CPU keeps in its caches; on a GPU enough to hide a launch.
ROOF_SIZES = {"cpu": (1 << 27, 1024), "gpu": (1 << 32, 8192)}
ROOF_REPETITIONS = 3


def lower_loop(
    attend: Callable[..., jax.Array], arrays: Sequence[Any], num_calls: int, calls_per_turn: int = CALLS_PER_TURN
) -> jax.stages.Lowered:
    """num_calls calls in one loop, each fed the last one's output, ready to be compiled.

    arrays: attend's arguments, or jax.ShapeDtypeStructs in their place.

    Several to a turn of the loop: XLA makes no CUDA graph of fewer than five, and the host would launch each. What
    depends on the rows alone is computed once a turn, as it is once for all layers of a model.
    """

    def turn(_: jax.Array, q: jax.Array, *rest: jax.Array) -> jax.Array:
        return functools.reduce(lambda q, _: attend(q, *rest), range(calls_per_turn), q)

    def loop(q: jax.Array, *rest: jax.Array) -> jax.Array:
        return jax.lax.fori_loop(0, num_calls // calls_per_turn, lambda index, q: turn(index, q, *rest), q)

    return jax.jit(loop).lower(*arrays)


def seconds_of(loop: jax.stages.Compiled, arrays: tuple[jax.Array, ...], repetitions: int) -> float:
    """Seconds of one run of a loop: the best of several."""
    loop(*arrays).block_until_ready()
    times = []
    for _ in range(repetitions):
        start_s = time.perf_counter()
        loop(*arrays).block_until_ready()
        times.append(time.perf_counter() - start_s)
    return min(times)


def roof_of(device_kind: str, dtype: str) -> Roof:
    """What the device can do: known from BUILD_NOTES.md's measurements, or measured now (half a second on a CPU)."""
    return ROOFS.get(device_kind) or measure_roof(dtype)


def measure_roof(dtype: str) -> Roof:
    """Bytes a second of a sum over a large array, and operations a second of a large matrix product."""
    num_bytes, width = ROOF_SIZES["cpu" if jax.default_backend() == "cpu" else "gpu"]
    values = (jnp.ones(num_bytes // jnp.dtype(dtype).itemsize, dtype),)
    matrix = (jnp.ones((width, width), dtype),)
    read_s = seconds_of(jax.jit(jnp.sum).lower(*values).compile(), values, ROOF_REPETITIONS)
    product_s = seconds_of(jax.jit(lambda x: x @ x).lower(*matrix).compile(), matrix, ROOF_REPETITIONS)
    return Roof(num_bytes / read_s, 2 * width**3 / product_s)
