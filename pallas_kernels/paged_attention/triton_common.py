"""Phases that the Triton decode and prefill kernels share: gather keys, score, accumulate."""

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental.pallas import triton as plt
from jaxtyping import Array, Bool, Float, Int

from pallas_kernels.paged_attention.config import Geometry

MASKED = -1e30  # a score no query may see; finite, so that a tile without any visible key makes no NaN
LOG2_E = math.log2(math.e)

Ref = Any  # a Pallas reference


class Refs(NamedTuple):
    """The kernels' inputs, whole arrays in device memory."""

    layer: Ref  # int32 [1]
    block_tables: Ref  # int32 [num_rows, blocks_per_row]
    seq_lens: Ref  # int32 [num_rows]
    starts: Ref  # int32 [num_rows + 1], query_start_loc
    q: Ref  # [num_tokens, num_heads, head_dim]
    k: Ref  # [num_layers, num_blocks, num_kv_heads, block_size, head_dim]
    v: Ref


NUM_INPUTS = len(Refs._fields)


class Tile(NamedTuple):
    """Where one program works: a row, one of its key heads, and which (query, head of the group) pairs."""

    row: Int[Array, ""]
    head: Int[Array, ""]  # key head
    num_keys: Int[Array, ""]  # keys that the program may read; 0 for nothing to do
    tokens: Int[Array, " tile_rows"]  # index in q, clamped to the row's own
    heads: Int[Array, " tile_rows"]  # query heads
    positions: Int[Array, " tile_rows"]  # of the queries in their sequence


class Softmax(NamedTuple):
    """Online softmax in base 2: values is not yet divided by total."""

    maximum: Float[Array, " tile_rows"]
    total: Float[Array, " tile_rows"]
    values: Float[Array, "tile_rows padded_dim"]


def empty_softmax(tile_rows: int, padded_dim: int) -> Softmax:
    """No key seen yet."""
    zeros = jnp.zeros((tile_rows,), jnp.float32)
    return Softmax(zeros + MASKED, zeros, jnp.zeros((tile_rows, padded_dim), jnp.float32))


def dims_of(geometry: Geometry) -> tuple[Int[Array, "1 padded_dim"], Bool[Array, "1 padded_dim"] | None]:
    """Indices along head_dim, and which are real (None when all are)."""
    dims = jnp.arange(geometry.padded_dim, dtype=jnp.int32)[None, :]
    return dims, None if geometry.padded_dim == geometry.head_dim else dims < geometry.head_dim


def load_rows(ref: Ref, index: tuple, is_real: Array | None) -> Float[Array, "rows padded_dim"]:
    """A tile whose last index runs along head_dim, zero past it."""
    if is_real is None:
        return plt.load(ref.at[index])
    mask = jnp.broadcast_to(is_real, jnp.broadcast_shapes(*(jnp.shape(i) for i in index)))
    return plt.load(ref.at[index], mask=mask, other=0)


def load_queries(refs: Refs, tile: Tile, geometry: Geometry) -> Float[Array, "tile_rows padded_dim"]:
    """The tile's queries."""
    dims, is_real = dims_of(geometry)
    return load_rows(refs.q, (tile.tokens[:, None], tile.heads[:, None], dims), is_real)


def key_slots(
    refs: Refs, tile: Tile, geometry: Geometry, positions: Int[Array, " tile_keys"]
) -> tuple[Int[Array, " tile_keys"], Int[Array, " tile_keys"]]:
    """Block and offset of each key. A position past the row's keys is clamped to its last: always a slot it owns."""
    clamped = jnp.minimum(positions, tile.num_keys - 1)
    blocks = plt.load(refs.block_tables.at[tile.row, clamped // geometry.block_size])
    return blocks, clamped % geometry.block_size


def dot(a: Array, b: Array, *, is_b_transposed: bool = False) -> Float[Array, "m n"]:
    """a @ b (or a @ b.T), accumulated in float32; float32 operands in full precision."""
    precision = jax.lax.Precision.HIGHEST if a.dtype == jnp.float32 else None
    return plt.dot(a, b, trans_b=is_b_transposed, precision=precision)


class Work(NamedTuple):
    """A program's tile with all that scoring it takes."""

    refs: Refs
    tile: Tile
    geometry: Geometry
    scale: float
    tile_keys: int
    q: Float[Array, "tile_rows padded_dim"]


def attend_tiles(work: Work, first: Array, end: Array, state: Softmax, *, is_masked: bool) -> Softmax:
    """Tiles of keys number first .. end - 1. is_masked: some query may not see some key of theirs."""
    body = functools.partial(_attend_tile, work, is_masked)
    return jax.lax.fori_loop(first, end, body, state)


def _attend_tile(work: Work, is_masked: bool, index: Int[Array, ""], state: Softmax) -> Softmax:
    """One tile: load, score, update the softmax, add the values."""
    refs, tile, geometry, q = work.refs, work.tile, work.geometry, work.q
    positions = index * work.tile_keys + jnp.arange(work.tile_keys, dtype=jnp.int32)
    blocks, offsets = key_slots(refs, tile, geometry, positions)
    dims, is_real = dims_of(geometry)
    slots = (refs_layer(refs), blocks[:, None], tile.head, offsets[:, None], dims)
    k = load_rows(refs.k, slots, is_real).astype(q.dtype)
    scores = dot(q, k, is_b_transposed=True) * (work.scale * LOG2_E)
    if is_masked:
        scores = jnp.where(positions[None, :] <= tile.positions[:, None], scores, MASKED)
    maximum = jnp.maximum(state.maximum, jnp.max(scores, axis=1))
    weights = jnp.exp2(scores - maximum[:, None])
    decay = jnp.exp2(state.maximum - maximum)
    v = load_rows(refs.v, slots, is_real).astype(q.dtype)
    values = state.values * decay[:, None] + dot(weights.astype(q.dtype), v)
    return Softmax(maximum, state.total * decay + jnp.sum(weights, axis=1), values)


def refs_layer(refs: Refs) -> Int[Array, ""]:
    """The layer index."""
    return refs.layer[0]


def store_pairs(
    out_ref: Ref,
    tile: Tile,
    geometry: Geometry,
    is_pair: Bool[Array, " tile_rows"],
    values: Float[Array, "tile_rows d"],
) -> None:
    """Writes the output rows of the (query, head) pairs that exist."""
    dims, is_real = dims_of(geometry)
    mask = is_pair[:, None] & (dims >= 0 if is_real is None else is_real)
    # Pairs that do not exist name a token past the end, so that the interpreter does not see two writes to one place.
    tokens = jnp.where(is_pair, tile.tokens, out_ref.shape[0])
    plt.store(out_ref.at[tokens[:, None], tile.heads[:, None], dims], values.astype(out_ref.dtype), mask=mask)


def cdiv(a: Array, b: int) -> Array:
    """a / b rounded up."""
    return (a + b - 1) // b


def normalise(state: Softmax) -> Float[Array, "tile_rows padded_dim"]:
    """The attention output; zero where no key was seen."""
    return state.values / jnp.where(state.total == 0, 1, state.total)[:, None]
