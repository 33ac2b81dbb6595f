"""Batches on which the attention kernels are timed, and their cost.

Llama-3-8B heads (32 query heads, 8 key heads, head_dim 128); blocks of 16 in shuffled order, if nothing else is said.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import paged_attention
from pallas_kernels.paged_attention.config import BLOCK_SIZES
from pallas_kernels.paged_attention.shapes import HeadLayout

BLOCK_SIZE = 16
MAX_CHECKED_TOKENS = 4096
CHECKED_QUERIES = 64


class Problem(NamedTuple):
    """One batch: each row's sequence length and number of queries."""

    name: str
    seq_lens: np.ndarray
    num_queries: np.ndarray
    heads: HeadLayout = HeadLayout(32, 8, 128)

    @property
    def is_decode(self) -> bool:
        """Whether each row has one query."""
        return bool(self.num_queries.max() == 1)


DECODE_SIZES = {  # rows x keys
    "full": ((32, 4096), (128, 1024), (64, 4096), (1, 4096), (256, 512)),
    "small": ((4, 256), (1, 512)),
    "smoke": ((2, 32),),
}
PREFILL_SIZES = {"full": ((1, 4096), (4, 4096), (1, 16384)), "small": ((1, 128),), "smoke": ((1, 16),)}
# The same of the problems on which the price of paging is measured.
PAGED_DECODE_SIZES = {
    "full": ((1, 4096), (8, 4096), (64, 1024), (256, 512)),
    "small": ((1, 1024), (4, 256)),
    "smoke": ((2, 256),),
}
PAGED_PREFILL_SIZES = {"full": ((1, 4096), (4, 1024)), "small": ((1, 256),), "smoke": ((1, 32),)}


def decode_problems(scale: str = "full") -> list[Problem]:
    """Every row one query. scale: a key of DECODE_SIZES."""
    problems = [_decode_problem(*size) for size in DECODE_SIZES[scale]]
    if scale == "full":
        lens = np.random.default_rng(5).integers(256, 4097, 64)
        problems.append(Problem("decode 64 uneven", lens, np.ones_like(lens)))
    return problems


def prefill_problems(scale: str = "full") -> list[Problem]:
    """Every row all queries. scale: a key of PREFILL_SIZES."""
    return [_prefill_problem(*size) for size in PREFILL_SIZES[scale]]


def paging_problems(scale: str = "full") -> list[Problem]:
    """Those on which the price of paging is measured, small batches and large ones. scale: as of the others."""
    decode = [_decode_problem(*size) for size in PAGED_DECODE_SIZES[scale]]
    return decode + [_prefill_problem(*size) for size in PAGED_PREFILL_SIZES[scale]]


def _decode_problem(rows: int, keys: int) -> Problem:
    lens = np.full(rows, keys)
    return Problem(f"decode {rows} x {keys}", lens, np.ones_like(lens))


def _prefill_problem(rows: int, keys: int) -> Problem:
    lens = np.full(rows, keys)
    return Problem(f"prefill {rows} x {keys}", lens, lens)


def make_tables(seq_lens: np.ndarray, block_size: int, *, is_shuffled: bool) -> np.ndarray:
    """Block tables, int32 [num_rows, blocks_per_row], over blocks 1, 2, ...; padded with the null block, 0.

    Shuffled: in an order that has nothing to do with the rows, as in a cache long in use. Otherwise row by row, each
    block behind the one before, as in a contiguous array.
    """
    blocks_of_row = -(-seq_lens // block_size)
    order = np.arange(1, int(blocks_of_row.sum()) + 1)
    if is_shuffled:
        order = np.random.default_rng(0).permutation(order)
    tables = np.zeros((len(seq_lens), int(blocks_of_row.max())), np.int32)
    ends = np.cumsum(blocks_of_row)
    for row, (end, count) in enumerate(zip(ends, blocks_of_row, strict=True)):
        tables[row, :count] = order[end - count : end]
    return tables


def make_arrays(problem: Problem, dtype: Any, block_size: int = BLOCK_SIZE) -> tuple[jax.Array, ...]:
    """Random q, k_cache, v_cache, shuffled block tables, seq_lens, query_start_loc."""
    tables = make_tables(problem.seq_lens, block_size, is_shuffled=True)
    starts = np.concatenate([[0], np.cumsum(problem.num_queries)]).astype(np.int32)
    keys = jax.random.split(jax.random.key(0), 3)
    num_heads, num_kv_heads, head_dim = problem.heads
    # As many slots whatever the block size, as far as that can be: drawing is compiled once for each shape.
    num_slots = -(-(int(tables.max()) + 1) * block_size // max(BLOCK_SIZES)) * max(BLOCK_SIZES)
    q = jax.random.normal(keys[0], (int(starts[-1]), num_heads, head_dim), dtype)
    flat = [jax.random.normal(key, (num_slots, num_kv_heads * head_dim), dtype) for key in keys[1:]]
    k, v = (slots.reshape(1, num_slots // block_size, num_kv_heads, block_size, head_dim) for slots in flat)
    return q, k, v, jnp.asarray(tables), jnp.asarray(problem.seq_lens, jnp.int32), jnp.asarray(starts)


def num_bytes(problem: Problem, itemsize: int) -> int:
    """Of keys and values, each read once."""
    return 2 * int(problem.seq_lens.sum()) * problem.heads.num_kv_heads * problem.heads.head_dim * itemsize


def num_flops(problem: Problem) -> float:
    """Of both products, over the pairs of a query and a key that the causal mask leaves."""
    context = problem.seq_lens - problem.num_queries
    num_pairs = float((problem.num_queries * (context + (problem.num_queries + 1) / 2)).sum())
    return 4 * problem.heads.num_heads * problem.heads.head_dim * num_pairs


def error_against_reference(arrays: tuple[jax.Array, ...], backend: str | None, num_rows: int = 2) -> float | None:
    """Relative error of the first rows' last queries, against the jax.numpy path; None where that takes too long."""
    q, k, v, tables, seq_lens, starts = arrays
    num_tokens = int(starts[num_rows]) if num_rows < len(seq_lens) else len(q)
    if num_tokens > MAX_CHECKED_TOKENS:
        return None
    out = paged_attention(*arrays, layer=0, backend=backend)
    rows = slice(0, min(num_rows, len(seq_lens)))
    wanted = slice(max(0, num_tokens - CHECKED_QUERIES), num_tokens)
    part = (q[:num_tokens], k, v, tables[rows], seq_lens[rows], starts[: rows.stop + 1])
    reference = paged_attention(*part, layer=0, backend="xla").astype(jnp.float32)[wanted]
    return float(jnp.linalg.norm(out[wanted].astype(jnp.float32) - reference) / jnp.linalg.norm(reference))
