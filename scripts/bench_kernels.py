"""Times the attention kernels on this machine's GPU, next to their floors, and checks them against the reference.

    python scripts/bench_kernels.py [--json FILE]

Llama-3-8B heads (32 query heads, 8 key heads, head_dim 128), bfloat16, blocks of 16 in shuffled order. A figure is the
mean of many calls inside one jitted loop, each fed the last one's output, so that no launch from Python is timed.
"""

import argparse
import json
import time
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import paged_attention

NUM_HEADS, NUM_KV_HEADS, HEAD_DIM, BLOCK_SIZE = 32, 8, 128, 16
READ_BYTES_PER_S = 4.4e12  # measured on an H200
FLOPS_PER_S = 800e12


class Problem(NamedTuple):
    """One batch: each row's sequence length and number of queries."""

    name: str
    seq_lens: np.ndarray
    num_queries: np.ndarray


def decode_problems() -> list[Problem]:
    """Every row one query."""
    equal = [(32, 4096), (128, 1024), (64, 4096), (1, 4096), (256, 512)]
    problems = [(f"decode {rows} x {keys}", np.full(rows, keys)) for rows, keys in equal]
    problems.append(("decode 64 uneven", np.sort(np.random.default_rng(5).integers(256, 4097, 64))[::-1]))
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
    cache_shape = (1, num_blocks, NUM_KV_HEADS, BLOCK_SIZE, HEAD_DIM)
    q = jax.random.normal(keys[0], (int(starts[-1]), NUM_HEADS, HEAD_DIM), dtype)
    k, v = (jax.random.normal(key, cache_shape, dtype) for key in keys[1:])
    return q, k, v, jnp.asarray(tables), jnp.asarray(problem.seq_lens, jnp.int32), jnp.asarray(starts)


def seconds_per_call(arrays: tuple[jax.Array, ...], num_calls: int) -> float:
    """Best of five timings of num_calls calls in one loop."""

    @jax.jit
    def loop(q: jax.Array, *rest: jax.Array) -> jax.Array:
        return jax.lax.fori_loop(0, num_calls, lambda _, q: paged_attention(q, *rest, layer=0), q)

    loop(*arrays).block_until_ready()
    times = []
    for _ in range(5):
        start_s = time.perf_counter()
        loop(*arrays).block_until_ready()
        times.append(time.perf_counter() - start_s)
    return min(times) / num_calls


def error_against_reference(arrays: tuple[jax.Array, ...], num_rows: int = 2) -> float:
    """Relative error of the first rows, against the reference in float32 on the same values."""
    q, k, v, tables, seq_lens, starts = arrays
    out = paged_attention(*arrays, layer=0)
    num_tokens = int(starts[num_rows]) if num_rows < len(seq_lens) else len(q)
    rows = slice(0, min(num_rows, len(seq_lens)))
    wanted = slice(max(0, num_tokens - 64), num_tokens)
    part = (q[:num_tokens], k, v, tables[rows], seq_lens[rows], starts[: rows.stop + 1])
    if num_tokens > 4096:
        return float("nan")
    reference = paged_attention(*part, layer=0, backend="xla").astype(jnp.float32)[wanted]
    return float(jnp.linalg.norm(out[wanted].astype(jnp.float32) - reference) / jnp.linalg.norm(reference))


def measure(problem: Problem) -> dict[str, Any]:
    """One line of the table."""
    arrays = make_arrays(problem, jnp.bfloat16)
    num_bytes = 2 * int(problem.seq_lens.sum()) * NUM_KV_HEADS * HEAD_DIM * 2
    context = problem.seq_lens - problem.num_queries
    num_pairs = float((problem.num_queries * (context + (problem.num_queries + 1) / 2)).sum())
    num_flops = 4 * NUM_HEADS * HEAD_DIM * num_pairs
    num_calls = 200 if problem.num_queries.max() == 1 else 10
    time_s = seconds_per_call(arrays, num_calls)
    floor_s = max(num_bytes / READ_BYTES_PER_S, num_flops / FLOPS_PER_S)
    return {
        "kernel": problem.name,
        "us": round(time_s * 1e6, 1),
        "floor_us": round(floor_s * 1e6, 1),
        "tflops": round(num_flops / time_s / 1e12, 1),
        "error": error_against_reference(arrays),
    }


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", help="also write the lines to this file")
    args = parser.parse_args()
    lines = []
    for problem in decode_problems() + prefill_problems():
        lines.append(json.dumps({"device": jax.devices()[0].device_kind} | measure(problem)))
        print(lines[-1], flush=True)
    if args.json:
        with open(args.json, "w") as file:
            file.write("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
