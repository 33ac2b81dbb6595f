"""Times the attention kernels for python -m paxpage.bench kernels. Imports JAX."""

import functools
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from tqdm import tqdm

from pallas_kernels import paged_attention
from pallas_kernels.paged_attention.api import BACKENDS, choose_backend
from pallas_kernels.paged_attention.config import Geometry
from paxpage.bench import attention_problems
from paxpage.bench.attention_problems import BLOCK_SIZE, Problem, error_against_reference, make_arrays
from paxpage.bench.kernels import KernelOptions
from paxpage.bench.plots import Roof, RooflinePoint, plot_roofline
from paxpage.bench.results import ResultWriter, origin
from paxpage.bench.timing import CALLS_PER_TURN, lower_loop, roof_of, seconds_of
from paxpage.config import require

NUM_CALLS = {"decode": 200, "prefill": 32}  # multiples of NUM_PER_TURN
NUM_PER_TURN = {"decode": CALLS_PER_TURN, "prefill": 32}  # as many layers as Llama-3-8B's
REPETITIONS = 5


class Bench(NamedTuple):
    """On what is measured, and beside what."""

    dtype: str
    roof: Roof
    scale: str


class Timing(NamedTuple):
    """One problem on one backend."""

    problem: Problem
    backend: str
    num_bytes: int
    num_flops: float
    time_s: float


def run(options: KernelOptions, flags: dict[str, Any]) -> int:
    """All problems on all backends: a line of JSON each on stdout; returns the exit code."""
    dtype, scale = prepare(options)
    known = attention_problems.decode_problems(scale) + attention_problems.prefill_problems(scale)
    jobs = [(problem, backend) for problem in chosen(known, options.only) for backend in options.backends]
    roof = roof_of(jax.devices()[0].device_kind, dtype)
    bench = Bench(dtype, roof, scale)
    rates = {"roof_gb_s": round(roof.bytes_per_s / 1e9, 1), "roof_tflops": round(roof.flops_per_s / 1e12, 2)}
    writer = ResultWriter(origin(flags) | {"test": "kernels", "dtype": dtype} | rates, options.json, is_printed=True)
    timings = []
    for problem, backend in tqdm(jobs, unit="kernel"):
        timing, error = measure(problem, backend, bench)
        timings.append(timing)
        writer.write(fields_of(timing, bench.roof) | {"error": error})
    if options.plot_dir is not None:
        plot(timings, bench, Path(options.plot_dir))
    return 0


def prepare(options: KernelOptions) -> tuple[str, str]:
    """Checks the backends; dtype and scale by device."""
    for backend in options.backends:
        require(backend in (None, *BACKENDS), "backends", backend, ", ".join(BACKENDS))
    is_cpu = jax.default_backend() == "cpu"
    if is_cpu:
        print("# no GPU: on the CPU, in float32, the xla backend is timed unless another is named", file=sys.stderr)
    scale = ("small" if is_cpu else "full") if options.scale == "auto" else options.scale
    return "float32" if is_cpu else "bfloat16", scale


def chosen(known: Sequence[Problem], only: str) -> list[Problem]:
    """Those whose names contain only; ValueError if there are none."""
    found = [problem for problem in known if only in problem.name]
    require(bool(found), "only", only, f"a part of: {', '.join(problem.name for problem in known)}")
    return found


def measure(problem: Problem, backend: str | None, bench: Bench) -> tuple[Timing, float | None]:
    """The time of a call, and the error."""
    arrays = make_arrays(problem, bench.dtype)
    num_calls = num_calls_of(problem, bench.scale)
    loop = lower_loop(attend_with(problem, backend), arrays, num_calls, num_per_turn(problem, bench.scale)).compile()
    time_s = seconds_of(loop, arrays, REPETITIONS) / num_calls
    num_bytes = attention_problems.num_bytes(problem, jnp.dtype(bench.dtype).itemsize)
    name = backend or chosen_backend(problem, bench.dtype)
    timing = Timing(problem, name, num_bytes, attention_problems.num_flops(problem), time_s)
    return timing, error_against_reference(arrays, backend)


def num_calls_of(problem: Problem, scale: str) -> int:
    """Calls in the loop that is timed."""
    return NUM_CALLS["decode" if problem.is_decode else "prefill"] if scale == "full" else CALLS_PER_TURN


def num_per_turn(problem: Problem, scale: str) -> int:
    """Calls in one turn of that loop."""
    return NUM_PER_TURN["decode" if problem.is_decode else "prefill"] if scale == "full" else CALLS_PER_TURN


def attend_with(problem: Problem, backend: str | None) -> Callable[..., jax.Array]:
    """A function of make_arrays' arrays; the order of rows is made once, as in a step."""
    order = jnp.asarray(np.argsort(-problem.seq_lens, kind="stable"), jnp.int32)
    return functools.partial(paged_attention, layer=0, row_order=order, backend=backend)


def chosen_backend(problem: Problem, dtype: str) -> str:
    """What paged_attention takes when it is not told."""
    geometry = Geometry(*problem.heads, BLOCK_SIZE, dtype, dtype)
    return choose_backend(geometry, len(problem.seq_lens), problem.is_decode)


def floor_s(timing: Timing, roof: Roof) -> float:
    """Seconds that no kernel can be below."""
    return max(timing.num_bytes / roof.bytes_per_s, timing.num_flops / roof.flops_per_s)


def fields_of(timing: Timing, roof: Roof) -> dict[str, Any]:
    """What is written."""
    return {
        "kernel": timing.problem.name,
        "backend": timing.backend,
        "us": round(timing.time_s * 1e6, 1),
        "floor_us": round(floor_s(timing, roof) * 1e6, 1),
        "tflops": round(timing.num_flops / timing.time_s / 1e12, 3),
        "gb_s": round(timing.num_bytes / timing.time_s / 1e9, 1),
    }


def plot(timings: list[Timing], bench: Bench, folder: Path) -> None:
    """A PNG for the decode kernels and one for the prefill kernels."""
    folder.mkdir(parents=True, exist_ok=True)
    for kernel, is_decode in (("decode", True), ("prefill", False)):
        points = [
            RooflinePoint(f"{t.problem.name} ({t.backend})", t.num_flops / t.num_bytes, t.num_flops / t.time_s)
            for t in timings
            if t.problem.is_decode == is_decode
        ]
        if points:
            path = folder / f"roofline-paged-attention-{kernel}.png"
            device = jax.devices()[0].device_kind
            plot_roofline(points, bench.roof, f"paged_attention, {kernel}, {bench.dtype}, {device}", path)
            print(f"plot: {path}", file=sys.stderr)
