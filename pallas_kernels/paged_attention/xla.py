"""paged_attention in jax.numpy: the CPU's path. Loops over chunks of keys up to the longest row, never the whole table.

Queries are cut into tiles of at most TILE_QUERIES queries of one row, so a prefill chunk reads its keys once per tile
and a decode row (a tile of one query) wastes nothing. Tiles are worked off GROUP_TILES at a time, so that a long row
delays only its own group. Softmax is accumulated online over the chunks (Milakov and Gimelshein, 2018).
"""

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

Cache = Float[Array, "num_layers num_blocks num_kv_heads block_size head_dim"]
Queries = Float[Array, "num_tokens num_heads head_dim"]
TokenIndex = Int[Array, "num_tiles queries_per_tile"]
Attend = Callable[["Tiles"], Array]

TILE_QUERIES = 16
GROUP_TILES = 8
CHUNK_KEYS = 128


class Tiles(NamedTuple):
    """Queries cut into tiles, in float32. A padding query has position -1."""

    q: Float[Array, "num_tiles num_kv_heads queries_per_tile*group head_dim"]
    positions: Int[Array, "num_tiles queries_per_tile*group"]
    block_tables: Int[Array, "num_tiles blocks_per_row"]


class Softmax(NamedTuple):
    """Online softmax of a group of tiles: running maximum, sum of weights, weighted sum of values."""

    maximum: Float[Array, "num_tiles num_kv_heads queries_per_tile*group"]
    total: Float[Array, "num_tiles num_kv_heads queries_per_tile*group"]
    values: Float[Array, "num_tiles num_kv_heads queries_per_tile*group head_dim"]


def paged_attention(
    q: Queries,
    k_cache: Cache,
    v_cache: Cache,
    block_tables: Int[Array, "num_rows blocks_per_row"],
    seq_lens: Int[Array, " num_rows"],
    query_start_loc: Int[Array, " num_rows_plus_1"],
    *,
    layer: Int[Array, ""],
    scale: float,
) -> Queries:
    """See api.paged_attention."""
    num_kv_heads, block_size = k_cache.shape[2:4]
    chunk_blocks = max(1, CHUNK_KEYS // block_size)
    is_decode = q.shape[0] == seq_lens.shape[0]
    cut = _cut_decode(seq_lens) if is_decode else _cut_ragged(q.shape[0], seq_lens, query_start_loc)
    tiles = _gather_tiles(q * scale, cut, _pad_columns(block_tables, chunk_blocks), num_kv_heads)
    attend = functools.partial(_attend_group, k_cache=k_cache, v_cache=v_cache, layer=layer, chunk_blocks=chunk_blocks)
    return _scatter_tiles(_for_each_group(attend, tiles, cut.num_tiles), cut.token_index, q)


class Cut(NamedTuple):
    """Which tokens a tile holds, where they stand, and whose they are."""

    token_index: TokenIndex  # num_tokens where a tile has no further query
    positions: TokenIndex
    rows: Int[Array, " num_tiles"]
    num_tiles: Int[Array, ""]  # how many tiles hold a query


def _cut_decode(seq_lens: Int[Array, " num_rows"]) -> Cut:
    rows = jnp.arange(seq_lens.shape[0])
    num_tiles = jnp.max(jnp.where(seq_lens > 0, rows + 1, 0))
    return Cut(rows[:, None], seq_lens[:, None] - 1, rows, num_tiles)


def _cut_ragged(
    num_tokens: int, seq_lens: Int[Array, " num_rows"], query_start_loc: Int[Array, " num_rows_plus_1"]
) -> Cut:
    num_rows = seq_lens.shape[0]
    tiles = jnp.arange(min(num_tokens, num_tokens // TILE_QUERIES + num_rows))
    tiles_of_row = (jnp.diff(query_start_loc) + TILE_QUERIES - 1) // TILE_QUERIES
    first_tile = jnp.concatenate([jnp.zeros(1, jnp.int32), jnp.cumsum(tiles_of_row)])
    rows = jnp.clip(jnp.searchsorted(first_tile, tiles, side="right", method="compare_all") - 1, 0, num_rows - 1)
    tile_in_row = tiles - first_tile[rows]
    tokens = (query_start_loc[rows] + tile_in_row * TILE_QUERIES)[:, None] + jnp.arange(TILE_QUERIES)
    ends = query_start_loc[rows + 1][:, None]
    is_query = tokens < ends
    positions = jnp.where(is_query, tokens - ends + seq_lens[rows][:, None], -1)
    return Cut(jnp.where(is_query, tokens, num_tokens), positions, rows, first_tile[-1])


def _pad_columns(block_tables: Int[Array, "num_rows blocks_per_row"], multiple: int) -> Int[Array, "num_rows padded"]:
    return jnp.pad(block_tables, ((0, 0), (0, -block_tables.shape[1] % multiple)))


def _gather_tiles(q: Queries, cut: Cut, block_tables: Int[Array, "num_rows blocks"], num_kv_heads: int) -> Tiles:
    num_tiles, tile = cut.token_index.shape
    group = q.shape[1] // num_kv_heads
    q = q.astype(jnp.float32).at[cut.token_index].get(mode="fill", fill_value=0)
    q = q.reshape(num_tiles, tile, num_kv_heads, group, -1).transpose(0, 2, 1, 3, 4)
    q = q.reshape(num_tiles, num_kv_heads, tile * group, -1)
    return Tiles(q, jnp.repeat(cut.positions, group, axis=1), block_tables[cut.rows])


def _scatter_tiles(out: Float[Array, "num_tiles num_kv_heads q d"], token_index: TokenIndex, q: Queries) -> Queries:
    num_tiles, tile = token_index.shape
    num_kv_heads = out.shape[1]
    out = out.reshape(num_tiles, num_kv_heads, tile, -1, q.shape[2]).transpose(0, 2, 1, 3, 4)
    return (
        jnp.zeros_like(q).at[token_index].set(out.reshape(num_tiles, tile, *q.shape[1:]).astype(q.dtype), mode="drop")
    )


def _for_each_group(
    attend: Attend, tiles: Tiles, num_tiles: Int[Array, ""]
) -> Float[Array, "num_tiles num_kv_heads q d"]:
    group = min(GROUP_TILES, tiles.q.shape[0])
    padding = -tiles.q.shape[0] % group
    padded = jax.tree.map(lambda x: jnp.pad(x, ((0, padding),) + ((0, 0),) * (x.ndim - 1)), tiles)

    def body(index: Int[Array, ""], out: Array) -> Array:
        part = jax.tree.map(lambda x: jax.lax.dynamic_slice_in_dim(x, index * group, group), padded)
        return jax.lax.dynamic_update_slice_in_dim(out, attend(part), index * group, 0)

    out = jax.lax.fori_loop(0, (num_tiles + group - 1) // group, body, jnp.zeros_like(padded.q))
    return out[: tiles.q.shape[0]]


def _attend_group(
    tiles: Tiles, *, k_cache: Cache, v_cache: Cache, layer: Int[Array, ""], chunk_blocks: int
) -> Float[Array, "num_tiles num_kv_heads q d"]:
    chunk_keys = chunk_blocks * k_cache.shape[3]
    num_chunks = (jnp.max(tiles.positions) + chunk_keys) // chunk_keys

    def body(chunk: Int[Array, ""], state: Softmax) -> Softmax:
        blocks = jax.lax.dynamic_slice_in_dim(tiles.block_tables, chunk * chunk_blocks, chunk_blocks, axis=1)
        key_positions = chunk * chunk_keys + jnp.arange(chunk_keys)
        is_visible = key_positions <= tiles.positions[:, :, None]
        k, v = (_keys_of(cache, layer, blocks) for cache in (k_cache, v_cache))
        return _update(state, tiles.q, k, v, is_visible)

    return _finish(jax.lax.fori_loop(0, num_chunks, body, _empty(tiles.q)))


def _keys_of(
    cache: Cache, layer: Int[Array, ""], blocks: Int[Array, "num_tiles n"]
) -> Float[Array, "num_tiles heads keys d"]:
    gathered = cache[layer, blocks].astype(jnp.float32)
    num_tiles, _, num_kv_heads, _, head_dim = gathered.shape
    return gathered.swapaxes(1, 2).reshape(num_tiles, num_kv_heads, -1, head_dim)


def _empty(q: Float[Array, "num_tiles num_kv_heads q d"]) -> Softmax:
    row = jnp.zeros(q.shape[:-1])
    return Softmax(row - jnp.inf, row, jnp.zeros_like(q))


def _update(
    state: Softmax,
    q: Float[Array, "num_tiles heads q d"],
    k: Float[Array, "num_tiles heads keys d"],
    v: Float[Array, "num_tiles heads keys d"],
    is_visible: Bool[Array, "num_tiles q keys"],
) -> Softmax:
    scores = jnp.where(is_visible[:, None], jnp.einsum("thqd,thkd->thqk", q, k, precision="highest"), -jnp.inf)
    maximum = jnp.maximum(state.maximum, jnp.max(scores, axis=-1))
    # A query that has seen no key yet has maximum -inf: subtract 0 there, so that its weights are exp(-inf) = 0.
    base = jnp.where(jnp.isneginf(maximum), 0, maximum)
    weights = jnp.exp(scores - base[..., None])
    decay = jnp.exp(state.maximum - base)
    # A slot no query of the tile may see can hold anything, NaN too: select it away, since 0 * NaN is NaN.
    v = jnp.where(jnp.any(is_visible, axis=1)[:, None, :, None], v, 0)
    values = state.values * decay[..., None] + jnp.einsum("thqk,thkd->thqd", weights, v, precision="highest")
    return Softmax(maximum, state.total * decay + jnp.sum(weights, axis=-1), values)


def _finish(state: Softmax) -> Float[Array, "num_tiles heads q d"]:
    return state.values / jnp.where(state.total == 0, 1, state.total)[..., None]
