"""Ragged batches over a paged cache, and dense attention in float64 to hold backends against."""

from typing import NamedTuple

import jax.numpy as jnp
import numpy as np

from pallas_kernels.paged_attention.shapes import AttentionShape, Row

NUM_LAYERS = 3
LAYER = 1
NUM_SPARE_BLOCKS = 5  # blocks of the pool that no row of the batch owns, the null block aside


class Padding(NamedTuple):
    """Sizes that batches of a kind are padded to, so that they share one compilation."""

    num_tokens: int
    num_rows: int
    blocks_per_row: int
    num_blocks: int


class Garbage(NamedTuple):
    """What stands where nobody may look: in slots that no row owns, and in table entries past a row's blocks."""

    slots: float = np.nan
    entries: str = "last"  # "last": the pool's last block; "far": a block of nobody; "other": another row's block


class AttentionCase(NamedTuple):
    """Arguments of paged_attention, and the output it must give, padding included."""

    q: np.ndarray
    k_cache: np.ndarray
    v_cache: np.ndarray
    block_tables: np.ndarray
    seq_lens: np.ndarray
    query_start_loc: np.ndarray
    expected: np.ndarray  # float64 [num_tokens, num_heads, head_dim], zeros for padding tokens

    @property
    def arguments(self) -> list[jnp.ndarray]:
        """The positional arguments, on the device."""
        return [jnp.asarray(array) for array in self[:6]]


def padding_for(shape: AttentionShape) -> Padding:
    """Room for every kind of step of shapes.CONTRACT at this block size."""
    blocks_per_row = -(-160 // shape.block_size) + 2
    num_blocks = 1 + 60 * 8 // shape.block_size + 12 + NUM_SPARE_BLOCKS
    return Padding(8 if shape.is_decode else 160, 8, blocks_per_row, num_blocks)


def make_case(
    shape: AttentionShape,
    padding: Padding,
    *,
    dtype: str = "float32",
    cache_dtype: str | None = None,
    garbage: Garbage | None = None,
    layer: int = LAYER,
    scale: float | None = None,
    query_factor: float = 1.0,
) -> AttentionCase:
    """A batch of shape.rows with random contents (queries times query_factor), its blocks shuffled over the pool."""
    rng = np.random.default_rng(0)
    garbage = garbage or Garbage()
    owned = _deal_blocks(rng, shape, padding.num_blocks)
    cache_type = jnp.dtype(cache_dtype or dtype)
    cache_shape = (NUM_LAYERS, padding.num_blocks, shape.num_kv_heads, shape.block_size, shape.head_dim)
    k_cache, v_cache = (np.full(cache_shape, garbage.slots, cache_type) for _ in "kv")
    q = np.full((padding.num_tokens, shape.num_heads, shape.head_dim), garbage.slots, jnp.dtype(dtype))
    expected = np.zeros(q.shape)
    start = 0
    for row, block_ids in zip(shape.rows, owned, strict=True):
        keys, values = (
            rng.normal(size=(row.seq_len, shape.num_kv_heads, shape.head_dim)).astype(cache_type) for _ in "kv"
        )
        for position in range(row.seq_len):
            slot = (layer, block_ids[position // shape.block_size], slice(None), position % shape.block_size)
            k_cache[slot], v_cache[slot] = keys[position], values[position]
        queries = slice(start, start + row.num_new)
        q[queries] = (query_factor * rng.normal(size=(row.num_new, *q.shape[1:]))).astype(q.dtype)
        expected[queries] = dense_attention(q[queries], keys, values, row.context, scale)
        start += row.num_new
    tables = _block_tables(rng, owned, padding, garbage.entries)
    return AttentionCase(q, k_cache, v_cache, tables, *_row_arrays(shape.rows, padding.num_rows), expected)


def dense_attention(q: np.ndarray, k: np.ndarray, v: np.ndarray, context: int, scale: float | None) -> np.ndarray:
    """Causal attention of one row in float64: query i stands at position context + i and reads keys up to it."""
    q, k, v = (array.astype(np.float64) for array in (q, k, v))
    group = q.shape[1] // k.shape[1]
    scale = 1 / np.sqrt(q.shape[2]) if scale is None else scale
    out = np.zeros(q.shape)
    for index in range(q.shape[0]):
        num_keys = context + index + 1
        for head in range(q.shape[1]):
            scores = k[:num_keys, head // group] @ q[index, head] * scale
            weights = np.exp(scores - scores.max())
            out[index, head] = weights @ v[:num_keys, head // group] / weights.sum()
    return out


def _deal_blocks(rng: np.random.Generator, shape: AttentionShape, num_blocks: int) -> list[list[int]]:
    """Blocks of each row, in no order; the pool's last block and some others stay nobody's."""
    ids = iter(rng.permutation(np.arange(1, num_blocks - 1)).tolist())
    counts = [-(-row.seq_len // shape.block_size) for row in shape.rows]
    assert sum(counts) + NUM_SPARE_BLOCKS <= num_blocks - 1, (sum(counts), num_blocks)
    return [[next(ids) for _ in range(count)] for count in counts]


def _block_tables(rng: np.random.Generator, owned: list[list[int]], padding: Padding, entries: str) -> np.ndarray:
    used = {block_id for block_ids in owned for block_id in block_ids}
    spare = [block_id for block_id in range(1, padding.num_blocks - 1) if block_id not in used]
    choices = {"last": [padding.num_blocks - 1], "far": spare, "other": sorted(used)}[entries]
    tables = rng.choice(choices, size=(padding.num_rows, padding.blocks_per_row)).astype(np.int32)
    for index, block_ids in enumerate(owned):
        tables[index, : len(block_ids)] = block_ids
    return tables


def _row_arrays(rows: tuple[Row, ...], num_rows: int) -> tuple[np.ndarray, np.ndarray]:
    """seq_lens and query_start_loc, padded as the engine's batches are."""
    num_padding = num_rows - len(rows)
    seq_lens = np.array([row.seq_len for row in rows] + [0] * num_padding, np.int32)
    counts = [0] + [row.num_new for row in rows] + [0] * num_padding
    return seq_lens, np.cumsum(counts, dtype=np.int32)
