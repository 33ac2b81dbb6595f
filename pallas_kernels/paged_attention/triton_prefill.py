"""Prefill: rows of many queries over their own and earlier keys, bound by arithmetic."""

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt
from jaxtyping import Array, Bool, Float, Int

from pallas_kernels.paged_attention.config import Geometry, PrefillConfig, decode_queries
from pallas_kernels.paged_attention.triton_common import (
    NUM_INPUTS,
    Ref,
    Refs,
    Tile,
    Work,
    attend_tiles,
    cdiv,
    empty_softmax,
    load_queries,
    normalise,
    store_pairs,
)

Queries = Float[Array, "num_tokens num_heads head_dim"]


def prefill(
    arrays: Refs, out: Queries, geometry: Geometry, config: PrefillConfig, scale: float, interpret: bool
) -> Queries:
    """Attention of the rows that have more queries than the decode kernel takes, written into out in place.

    Grid (num_kv_heads, num_tiles): a program takes tile_rows // group consecutive queries of one row with all the
    heads that read one key head, so that each loaded key serves them all. Later tiles have more keys and come first.
    """
    queries = config.tile_rows // geometry.group
    tile_rows, tile_tokens = cut_tiles(arrays.starts, arrays.q.shape[0], queries, decode_queries(geometry))
    body = functools.partial(_prefill_program, geometry=geometry, config=config, scale=scale)
    call = pl.pallas_call(
        body,
        grid=(geometry.num_kv_heads, tile_rows.shape[0]),
        out_shape=jax.ShapeDtypeStruct(out.shape, out.dtype),
        input_output_aliases={NUM_INPUTS + 2: 0},
        compiler_params=plt.CompilerParams(num_warps=config.num_warps, num_stages=config.num_stages),
        interpret=interpret,
        name="paged_attention_prefill",
    )
    return call(*arrays, tile_rows, tile_tokens, out)


def cut_tiles(
    starts: Int[Array, " num_rows_plus_1"], num_tokens: int, queries: int, most_decode: int
) -> tuple[Int[Array, " num_tiles"], Int[Array, " num_tiles"]]:
    """Each tile's row and first token, the last tile of the batch first; row -1 for tiles left over.

    Rows with at most most_decode queries get none.
    """
    num_rows = starts.shape[0] - 1
    counts = jnp.diff(starts)
    tiles_of_row = jnp.where(counts > most_decode, cdiv(counts, queries), 0)
    first_tile = jnp.concatenate([jnp.zeros(1, jnp.int32), jnp.cumsum(tiles_of_row, dtype=jnp.int32)])
    # A row of more than most_decode queries has at most one tile that is not full.
    most_tiles = min(num_tokens // queries + num_rows, num_tokens // (most_decode + 1) + 1)
    tiles = jnp.arange(most_tiles, dtype=jnp.int32)[::-1]
    rows = jnp.searchsorted(first_tile, tiles, side="right", method="compare_all").astype(jnp.int32) - 1
    clipped = jnp.clip(rows, 0, num_rows - 1)
    tokens = starts[clipped] + (tiles - first_tile[clipped]) * queries
    return jnp.where(tiles < first_tile[-1], rows, -1), tokens


def _prefill_program(*refs: Ref, geometry: Geometry, config: PrefillConfig, scale: float) -> None:
    inputs = Refs(*refs[:NUM_INPUTS])
    rows_ref, tokens_ref, _aliased_ref, out_ref = refs[NUM_INPUTS:]
    head, index = pl.program_id(0), pl.program_id(1)
    row = plt.load(rows_ref.at[index])

    @pl.when(row >= 0)
    def _attend() -> None:
        first = plt.load(tokens_ref.at[index])
        end = plt.load(inputs.starts.at[row + 1])
        tile = _prefill_tile(inputs, row, head, (first, end), geometry, config)
        work = Work(inputs, tile, geometry, scale, config.tile_keys, load_queries(inputs, tile, geometry))
        # Keys up to the first query's own position are visible to all queries of the tile: no mask.
        num_unmasked = (plt.load(inputs.seq_lens.at[row]) - (end - first) + 1) // config.tile_keys
        num_tiles = cdiv(tile.num_keys, config.tile_keys)
        state = empty_softmax(config.tile_rows, geometry.padded_dim)
        state = attend_tiles(work, jnp.int32(0), num_unmasked, state, is_masked=False)
        state = attend_tiles(work, num_unmasked, num_tiles, state, is_masked=True)
        store_pairs(out_ref, tile, geometry, _is_pair(first, end, geometry, config), normalise(state))


def _prefill_tile(
    refs: Refs, row: Array, head: Array, tokens_of: tuple[Array, Array], geometry: Geometry, config: PrefillConfig
) -> Tile:
    first, end = tokens_of
    queries = config.tile_rows // geometry.group
    pairs = jnp.arange(config.tile_rows, dtype=jnp.int32)
    query = jnp.minimum(pairs // geometry.group, queries - 1)
    tokens = jnp.minimum(first + query, end - 1)
    heads = head * geometry.group + pairs % geometry.group
    positions = plt.load(refs.seq_lens.at[row]) - (end - tokens)
    last = jnp.minimum(first + queries, end) - 1
    num_keys = plt.load(refs.seq_lens.at[row]) - (end - last) + 1
    return Tile(row, head, num_keys, tokens, heads, positions)


def _is_pair(first: Array, end: Array, geometry: Geometry, config: PrefillConfig) -> Bool[Array, " tile_rows"]:
    pairs = jnp.arange(config.tile_rows, dtype=jnp.int32)
    num_pairs = config.tile_rows // geometry.group * geometry.group
    return (first + pairs // geometry.group < end) & (pairs < num_pairs)
