"""Times the attention kernels on this machine's GPU, next to their floors, and checks them against the reference.

    python scripts/bench_kernels.py [--backends triton,mosaic] [--only decode] [--json FILE]

Llama-3-8B heads (32 query heads, 8 key heads, head_dim 128), bfloat16, blocks of 16 in shuffled order. A figure is the
mean of many calls inside one jitted loop, each fed the last one's output, so that no launch from Python is timed.
"""

import argparse
import functools
import json
import pathlib
import sys
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))

from pallas_kernels import paged_attention
from pallas_kernels.paged_attention.shapes import HeadLayout

BLOCK_SIZE = 16
CALLS_PER_TURN = 8
READ_BYTES_PER_S = 4.4e12  # measured on an H200
FLOPS_PER_S = 800e12


class Problem(NamedTuple):
    """One batch: each row's sequence length and number of queries."""

    name: str
    seq_lens: np.ndarray
    num_queries: np.ndarray
    heads: HeadLayout = HeadLayout(32, 8, 128)


def decode_problems() -> list[Problem]:
    """Every row one query."""
    equal = [(32, 4096), (128, 1024), (64, 4096), (1, 4096), (256, 512)]
    problems = [(f"decode {rows} x {keys}", np.full(rows, keys)) for rows, keys in equal]
    problems.append(("decode 64 uneven", np.random.default_rng(5).integers(256, 4097, 64)))
    return [Problem(name, lens, np.ones_like(lens)) for name, lens in problems]


def prefill_problems() -> list[Problem]:
    """Every row all queries."""
    sizes = [(1, 4096), (4, 4096), (1, 16384)]
    return [Problem(f"prefill {rows} x {keys}", np.full(rows, keys), np.full(rows, keys)) for rows, keys in sizes]


def make_arrays(problem: Problem, dtype: Any) -> tuple[jax.Array, ...]:
    """Random q, k_cache, v_cache, shuffled block tables, seq_lens, query_start_loc."""
    rng = np.random.default_rng(0)
    blocks_of_row = -(-problem.seq_lens // BLOCK_SIZE)
    num_blocks = int(blocks_of_row.sum()) + 1
    order = rng.permutation(np.arange(1, num_blocks))
    tables = np.zeros((len(problem.seq_lens), int(blocks_of_row.max())), np.int32)
    ends = np.cumsum(blocks_of_row)
    for row, (end, count) in enumerate(zip(ends, blocks_of_row, strict=True)):
        tables[row, :count] = order[end - count : end]
    starts = np.concatenate([[0], np.cumsum(problem.num_queries)]).astype(np.int32)
    keys = jax.random.split(jax.random.key(0), 3)
    num_heads, num_kv_heads, head_dim = problem.heads
    cache_shape = (1, num_blocks, num_kv_heads, BLOCK_SIZE, head_dim)
    q = jax.random.normal(keys[0], (int(starts[-1]), num_heads, head_dim), dtype)
    k, v = (jax.random.normal(key, cache_shape, dtype) for key in keys[1:])
    return q, k, v, jnp.asarray(tables), jnp.asarray(problem.seq_lens, jnp.int32), jnp.asarray(starts)


def lower_loop(attend: Callable[..., jax.Array], arrays: tuple[jax.Array, ...], num_calls: int) -> jax.stages.Lowered:
    """num_calls calls in one loop, each fed the last one's output, ready to be compiled.

    Several to a turn of the loop: XLA makes no CUDA graph of fewer than five, and the host would launch each.
    """

    def turn(_: jax.Array, q: jax.Array, *rest: jax.Array) -> jax.Array:
        return functools.reduce(lambda q, _: attend(q, *rest), range(CALLS_PER_TURN), q)

    def loop(q: jax.Array, *rest: jax.Array) -> jax.Array:
        return jax.lax.fori_loop(0, num_calls // CALLS_PER_TURN, lambda index, q: turn(index, q, *rest), q)

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


def error_against_reference(arrays: tuple[jax.Array, ...], backend: str | None, num_rows: int = 2) -> float:
    """Relative error of the first rows, against the reference in float32 on the same values."""
    q, k, v, tables, seq_lens, starts = arrays
    out = paged_attention(*arrays, layer=0, backend=backend)
    num_tokens = int(starts[num_rows]) if num_rows < len(seq_lens) else len(q)
    rows = slice(0, min(num_rows, len(seq_lens)))
    wanted = slice(max(0, num_tokens - 64), num_tokens)
    part = (q[:num_tokens], k, v, tables[rows], seq_lens[rows], starts[: rows.stop + 1])
    if num_tokens > 4096:
        return float("nan")
    reference = paged_attention(*part, layer=0, backend="xla").astype(jnp.float32)[wanted]
    return float(jnp.linalg.norm(out[wanted].astype(jnp.float32) - reference) / jnp.linalg.norm(reference))


def measure(problem: Problem, backend: str | None) -> dict[str, Any]:
    """One line of the table."""
    arrays = make_arrays(problem, jnp.bfloat16)
    num_heads, num_kv_heads, head_dim = problem.heads
    num_bytes = 2 * int(problem.seq_lens.sum()) * num_kv_heads * head_dim * 2
    context = problem.seq_lens - problem.num_queries
    num_pairs = float((problem.num_queries * (context + (problem.num_queries + 1) / 2)).sum())
    num_flops = 4 * num_heads * head_dim * num_pairs
    num_calls = 200 if problem.num_queries.max() == 1 else 16
    order = jnp.argsort(-arrays[4], stable=True).astype(jnp.int32)  # made once, as in a step
    attend = functools.partial(paged_attention, layer=0, row_order=order, backend=backend)
    time_s = seconds_of(lower_loop(attend, arrays, num_calls).compile(), arrays, repetitions=5) / num_calls
    floor_s = max(num_bytes / READ_BYTES_PER_S, num_flops / FLOPS_PER_S)
    return {
        "kernel": problem.name,
        "backend": backend or "default",
        "us": round(time_s * 1e6, 1),
        "floor_us": round(floor_s * 1e6, 1),
        "tflops": round(num_flops / time_s / 1e12, 1),
        "error": error_against_reference(arrays, backend),
    }


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backends", default="", help="comma-separated; the device's default if none is named")
    parser.add_argument("--only", default="", help="kernels whose name contains this")
    parser.add_argument("--json", help="also write the lines to this file")
    args = parser.parse_args()
    lines = []
    problems = [problem for problem in decode_problems() + prefill_problems() if args.only in problem.name]
    for problem in problems:
        for backend in args.backends.split(","):
            result = measure(problem, backend or None)
            lines.append(json.dumps({"device": jax.devices()[0].device_kind} | result))
            print(lines[-1], flush=True)
    if args.json:
        with open(args.json, "w") as file:
            file.write("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
