"""Decode: rows of one or a few queries, bound by how fast their keys and values stream in."""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt
from jaxtyping import Array, Float, Int

from pallas_kernels.early_launch import can_launch_early, program_id
from pallas_kernels.paged_attention.config import MIN_DOT, DecodeConfig, Geometry, decode_queries, next_power_of_2
from pallas_kernels.paged_attention.triton_common import (
    NUM_INPUTS,
    Ref,
    Refs,
    Softmax,
    Tile,
    Work,
    attend_tiles,
    cdiv,
    empty_softmax,
    load_queries,
    normalise,
    store_pairs,
)
from pallas_kernels.paged_attention.triton_merge import merge_decode

Queries = Float[Array, "num_tokens num_heads head_dim"]


class Plan(NamedTuple):
    """What is known when the kernel is traced."""

    geometry: Geometry
    config: DecodeConfig
    scale: float
    has_starts: bool  # rows may have other than one query, and starts says which are theirs
    is_early: bool  # see early_launch.program_id


def decode(
    arrays: Refs, out: Queries | None, geometry: Geometry, config: DecodeConfig, scale: float, interpret: bool
) -> Queries:
    """Attention of the rows that have at most config.decode_queries(geometry) queries.

    Grid (num_rows * num_kv_heads, num_splits): a program takes one row's queries for one key head, against one piece
    of that row's keys. The heads of a row are neighbours in the grid. With one split it writes the output itself;
    otherwise each piece's unfinished softmax goes out, and another kernel joins them.

    out: where to write, updated in place, other rows' tokens untouched; None when every row has exactly one query
    (a padding row's is zero).
    """
    num_rows, num_tokens = arrays.seq_lens.shape[0], arrays.q.shape[0]
    plan = Plan(geometry, config, scale, has_starts=out is not None, is_early=can_launch_early(interpret=interpret))
    call = functools.partial(
        pl.pallas_call,
        functools.partial(_decode_program, plan=plan),
        grid=(num_rows * geometry.num_kv_heads, config.num_splits),
        compiler_params=plt.CompilerParams(num_warps=config.num_warps, num_stages=config.num_stages),
        interpret=interpret,
        name="paged_attention_decode",
    )
    if config.num_splits > 1:
        pairs = (config.num_splits, num_rows, geometry.num_kv_heads, tile_rows_of(geometry))
        shapes = (pairs, pairs, (*pairs, geometry.padded_dim))
        parts = call(out_shape=tuple(jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes))(*arrays)
        if out is None:
            return merge_decode(Softmax(*parts), geometry, interpret)
        return merge(Softmax(*parts), arrays, out, geometry)
    shape = jax.ShapeDtypeStruct((num_tokens, geometry.num_heads, geometry.head_dim), arrays.q.dtype)
    if out is None:
        return call(out_shape=shape)(*arrays)
    return call(out_shape=shape, input_output_aliases={len(arrays): 0})(*arrays, out)


def tile_rows_of(geometry: Geometry) -> int:
    """(query, head of the group) pairs of a program, padded."""
    return max(MIN_DOT, next_power_of_2(geometry.group))


def _decode_program(*refs: Ref, plan: Plan) -> None:
    geometry, config = plan.geometry, plan.config
    inputs = Refs(*refs[:NUM_INPUTS])
    outputs = refs[-3:] if config.num_splits > 1 else refs[-1:]  # between them, if anything, the aliased output
    index = program_id(0, is_early=plan.is_early)
    row, head = index // geometry.num_kv_heads, index % geometry.num_kv_heads
    first, num_queries = _queries_of(inputs, row, geometry) if plan.has_starts else (row, jnp.int32(1))
    tile = _decode_tile(inputs, row, head, (first, num_queries), geometry)
    num_tiles = cdiv(tile.num_keys, config.tile_keys)
    per_split = cdiv(num_tiles, config.num_splits)
    first = pl.program_id(1) * per_split
    end = jnp.minimum(first + per_split, num_tiles)
    work = Work(inputs, tile, geometry, plan.scale, config.tile_keys, load_queries(inputs, tile, geometry))
    state = empty_softmax(tile_rows_of(geometry), geometry.padded_dim)
    state = attend_tiles(work, first, end, state, is_masked=True)
    if config.num_splits == 1:
        _store_output(outputs[0], tile, num_queries, geometry, state)
    else:
        _store_partial(outputs, tile, geometry, state)


def _queries_of(refs: Refs, row: Array, geometry: Geometry) -> tuple[Array, Array]:
    """The row's first token and number of queries; 0 queries if they are not for this kernel."""
    first, end = plt.load(refs.starts.at[row]), plt.load(refs.starts.at[row + 1])
    return first, jnp.where(end - first <= decode_queries(geometry), end - first, 0)


def _decode_tile(refs: Refs, row: Array, head: Array, queries: tuple[Array, Array], geometry: Geometry) -> Tile:
    first, num_queries = queries
    seq_len = plt.load(refs.seq_lens.at[row])
    pairs = jnp.arange(tile_rows_of(geometry), dtype=jnp.int32)
    query = jnp.minimum(pairs // geometry.group, jnp.maximum(num_queries - 1, 0))
    tokens = jnp.minimum(first + query, refs.q.shape[0] - 1)
    heads = head * geometry.group + pairs % geometry.group
    num_keys = jnp.where(num_queries > 0, seq_len, 0)
    return Tile(row, head, num_keys, tokens, heads, seq_len - num_queries + query)


def _store_output(out_ref: Ref, tile: Tile, num_queries: Array, geometry: Geometry, state: Softmax) -> None:
    is_pair = jnp.arange(tile_rows_of(geometry), dtype=jnp.int32) < num_queries * geometry.group
    store_pairs(out_ref, tile, geometry, is_pair, normalise(state))


def _store_partial(out_refs: tuple[Ref, ...], tile: Tile, geometry: Geometry, state: Softmax) -> None:
    maximum_ref, total_ref, values_ref = out_refs
    pairs = jnp.arange(tile_rows_of(geometry), dtype=jnp.int32)
    dims = jnp.arange(geometry.padded_dim, dtype=jnp.int32)
    split = pl.program_id(1)
    plt.store(maximum_ref.at[split, tile.row, tile.head, pairs], state.maximum)
    plt.store(total_ref.at[split, tile.row, tile.head, pairs], state.total)
    plt.store(values_ref.at[split, tile.row, tile.head, pairs[:, None], dims[None, :]], state.values)


def merge(parts: Softmax, arrays: Refs, out: Queries, geometry: Geometry) -> Queries:
    """Joins the splits by their maxima (log-sum-exp), in XLA, and puts each row's queries where they belong in out."""
    maximum = jnp.max(parts.maximum, axis=0)
    weights = jnp.exp2(parts.maximum - maximum)
    total = jnp.sum(parts.total * weights, axis=0)
    values = jnp.sum(parts.values * weights[..., None], axis=0) / jnp.where(total == 0, 1, total)[..., None]
    num_queries, group = decode_queries(geometry), geometry.group
    values = values[:, :, : num_queries * group, : geometry.head_dim]
    num_rows = values.shape[0]
    values = values.reshape(num_rows, geometry.num_kv_heads, num_queries, group, -1).transpose(0, 2, 1, 3, 4)
    values = values.reshape(num_rows, num_queries, geometry.num_heads, -1).astype(arrays.q.dtype)
    return _scatter(values, arrays.starts, out)


def _scatter(values: Array, starts: Int[Array, " num_rows_plus_1"], out: Queries) -> Queries:
    query = jnp.arange(values.shape[1])[None, :]
    first, counts = starts[:-1, None], jnp.diff(starts)[:, None]
    is_mine = (query < counts) & (counts <= values.shape[1])
    return out.at[jnp.where(is_mine, first + query, out.shape[0])].set(values, mode="drop")
