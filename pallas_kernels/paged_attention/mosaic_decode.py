"""Decode on Pallas's Mosaic GPU backend (Hopper): rows of one or a few queries, bound by how fast keys stream in.

In this file a program is what CUDA calls a thread block, here of one warpgroup; a block is one of the cache.
"""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Bool, Float, Int

from pallas_kernels.paged_attention.config import Geometry, decode_queries, most_splits
from pallas_kernels.paged_attention.mosaic_common import Prefix, swizzled
from pallas_kernels.paged_attention.mosaic_limits import unsupported
from pallas_kernels.paged_attention.triton_common import LOG2_E, MASKED, Ref, Refs

Queries = Float[Array, "num_tokens num_heads head_dim"]

ALIGNED_HEADS = 8  # query heads are loaded in aligned groups of 8: rows of a swizzled tile, columns of a matrix product
NUM_WARPS = 4  # of a program
LOG_SUM_ROWS = 64  # copies of a vector, for want of a layout of vectors that goes from program to program
MAX_SPLITS = 16  # the largest cluster of a Hopper GPU
PORTABLE_SPLITS = 8  # larger clusters do not all run at once
MAX_COLUMNS = 32  # more of them would spill registers
NUM_MULTIPROCESSORS = 132
KIB = 1024
TILE_BYTES = 16 * KIB  # of keys: of heads of 64, tiles of 128 keys instead of 64 take up to a third less time
SHARED_BYTES = 227 * KIB  # of a multiprocessor, and the most that one program may have
FLOAT32_BYTES = 4
RESERVED_BYTES = 5 * KIB  # of a program: barriers, alignment, room to reduce over warps
KEYS, COLUMNS = 0, 1  # axes of the scores
PIECES_AT_ONCE = 4  # of a row's prefix: so many are on their way together, in as many registers as a tile's scores
LAYOUT = plgpu.Layout.WGMMA
PER_COLUMN = LAYOUT.reduce(KEYS)


@dataclasses.dataclass(frozen=True)
class MosaicDecodeConfig:
    """Tiles of the decode kernel. Where shared memory has no room for as many stages or splits, there are fewer."""

    tile_keys: int  # keys of a stage, a multiple of 64
    num_stages: int  # tiles of keys, and of values, in flight
    num_splits: int  # programs of a cluster, which share a row's tiles of keys

    def __post_init__(self) -> None:
        assert self.tile_keys % 64 == 0 and self.tile_keys > 0, self.tile_keys
        assert self.num_stages >= 2, self.num_stages
        assert 1 <= self.num_splits <= MAX_SPLITS, self.num_splits


def decode_config(geometry: Geometry, num_rows: int, max_keys: int) -> MosaicDecodeConfig:
    """As measured on an H200 with 8 key heads of 128, tiles with heads of 64 too (BUILD_NOTES.md, 2026-11-30).

    Few programs are split until there is one for each multiprocessor (8 rows of 4096 keys: 39 us in two splits; one
    row: 14 us in 8 splits, 19 in 16). Where all multiprocessors hold two programs at once, two stages are best (32
    rows: 130 us, 136 with three). Alone, or in several waves, programs want three (64 rows: 259 us, 281 with two).
    """
    num_programs = num_rows * geometry.num_kv_heads
    key_bytes = geometry.head_dim * geometry.item_bytes
    tile_keys = TILE_BYTES // key_bytes
    most = min(PORTABLE_SPLITS, NUM_MULTIPROCESSORS // num_programs, most_splits(tile_keys, max_keys))
    num_splits = 1 << max(0, most.bit_length() - 1)
    is_in_pairs = 3 * NUM_MULTIPROCESSORS <= 2 * num_programs <= 4 * NUM_MULTIPROCESSORS
    ring_bytes = (64 if is_in_pairs else 96) * KIB
    return MosaicDecodeConfig(tile_keys, max(2, ring_bytes // (2 * TILE_BYTES)), num_splits)


class Plan(NamedTuple):
    """What is known when the kernel is traced."""

    geometry: Geometry
    config: MosaicDecodeConfig
    scale: float
    has_starts: bool  # rows may have other than one query, and starts says which are theirs

    @property
    def num_windows(self) -> int:
        """Aligned groups of 8 query heads that one key head's queries may touch."""
        first_heads = [head * self.geometry.group for head in range(self.geometry.num_kv_heads)]
        last_heads = [first + self.geometry.group - 1 for first in first_heads]
        pairs = zip(first_heads, last_heads, strict=True)
        return max(last // ALIGNED_HEADS - first // ALIGNED_HEADS + 1 for first, last in pairs)

    @property
    def columns_per_query(self) -> int:
        """Columns of the scores that one query takes."""
        return self.num_windows * ALIGNED_HEADS

    @property
    def row_queries(self) -> int:
        """Most queries of a row that this kernel takes."""
        return decode_queries(self.geometry) if self.has_starts else 1

    @property
    def num_queries(self) -> int:
        """Most queries of a program."""
        return min(self.row_queries, max(1, MAX_COLUMNS // self.columns_per_query))

    @property
    def num_chunks(self) -> int:
        """Programs, or clusters of them, that a row's queries are dealt to."""
        return pl.cdiv(self.row_queries, self.num_queries)

    @property
    def num_columns(self) -> int:
        """Columns of the scores: (query, aligned head) pairs."""
        return self.num_queries * self.columns_per_query

    @property
    def box_keys(self) -> int:
        """Consecutive keys that one TMA copy loads."""
        return min(self.geometry.block_size, self.config.tile_keys)

    @property
    def num_boxes(self) -> int:
        """Copies that fill a tile."""
        return self.config.tile_keys // self.box_keys


class Inputs(NamedTuple):
    """Whole arrays in device memory."""

    layer: Ref  # int32 [1]
    block_tables: Ref  # int32 [num_rows, blocks_per_row]
    seq_lens: Ref  # int32 [num_rows]
    starts: Ref  # int32 [num_rows + 1]
    q: Ref  # [num_tokens, num_windows, 8, head_dim]
    k: Ref  # [num_layers, num_blocks, num_kv_heads, block_size, head_dim]
    v: Ref
    row_order: Ref | None  # int32 [num_rows]
    prefix: Prefix | None


class Scratch(NamedTuple):
    """Shared memory of a program, and the barriers that say when it is filled."""

    q: Ref  # [num_columns, head_dim]
    k: Ref  # [num_stages, tile_keys, head_dim]
    v: Ref
    weights: Ref  # [num_columns, tile_keys]
    out: Ref  # [num_columns, head_dim]
    q_ready: Ref
    k_ready: Ref  # [num_stages]
    v_ready: Ref
    parts: tuple[Ref, ...]  # of the cluster: outputs [num_splits, head_dim, num_columns] and log-sums [.., 64, ..]
    parts_ready: Ref  # None if there are no parts


class Work(NamedTuple):
    """One program's work: a row, one of its key heads, and every num_splits-th of its tiles of keys."""

    layer: Int[Array, ""]
    row: Int[Array, ""]
    head: Int[Array, ""]  # key head
    token: Int[Array, ""]  # the first query
    num_queries: Int[Array, ""]  # 0: nothing to do
    num_keys: Int[Array, ""]  # that the last query sees
    first_key: Int[Array, ""]  # of tile 0: those before are done
    first_tile: Int[Array, ""]
    num_tiles: Int[Array, ""]


class Stream(NamedTuple):
    """Keys, or values, on their way from the cache to the ring of stages."""

    cache: Ref  # [num_layers, num_blocks, num_kv_heads, block_size, head_dim]
    tiles: Ref  # [num_stages, tile_keys, head_dim]
    ready: Ref  # [num_stages]


class Softmax(NamedTuple):
    """Online softmax in base 2 of each column; values is not yet divided by the totals, the sums of weights."""

    maximum: Float[Array, " num_columns"]
    weights: Float[Array, "tile_keys num_columns"]  # key by key of a tile: summed over once, at the end
    values: Float[Array, "head_dim num_columns"]


def decode(
    arrays: Refs,
    out: Queries | None,
    geometry: Geometry,
    config: MosaicDecodeConfig,
    scale: float,
    interpret: Any,
    row_order: Int[Array, " num_rows"] | None = None,
    prefix: Prefix | None = None,
) -> Queries:
    """softmax(scale q K^T) V for the rows that have at most decode_queries(geometry) queries.

    Grid (num_rows * num_kv_heads * num_chunks), in clusters of num_splits: a cluster takes one row's queries, or a
    chunk of them, for one key head, and its programs every num_splits-th tile of that row's keys. A program keeps
    num_stages tiles on their way by TMA and multiplies with its operands swapped, K Q^T and V^T P^T: keys, then
    dimensions, fill the 64 rows that Hopper's tensor cores want, and the few queries their columns. The softmax is
    online (FlashAttention, Dao et al., 2022), in base 2. A cluster's parts meet in the shared memory of its first
    program, which writes the output.

    When num_tokens == num_rows every row has exactly one query (a padding row's output is zero), and starts is not
    read. out: where to write, other rows' tokens untouched; None for a new array, which holds anything there.
    row_order: all rows in the order in which they are begun; longest first is best. prefix: of rows of one query;
    the programs begin with it, in the place of the keys it stands for. interpret: None, or InterpretGPUParams to run on
    the CPU. ValueError says what is not supported.
    """
    _check(geometry, config, interpret)
    num_rows = arrays.seq_lens.shape[0]
    plan = fit(Plan(geometry, config, scale, has_starts=arrays.q.shape[0] != num_rows))
    inputs = Inputs(*arrays[:4], _windows(arrays.q), arrays.k, arrays.v, row_order, prefix)
    shape = jax.ShapeDtypeStruct(arrays.q.shape, arrays.q.dtype)
    run = functools.partial(
        plgpu.kernel,
        scratch_types=(_scratch(plan),),
        grid=(num_rows * geometry.num_kv_heads * plan.num_chunks,),
        grid_names=("cluster",),
        cluster=(plan.config.num_splits,),
        cluster_names=("split",),
        compiler_params=plgpu.CompilerParams(approx_math=True),
        interpret=interpret or None,
        kernel_name="paged_attention_decode",
    )
    body = functools.partial(_program, plan)
    if out is None:
        return run(body, out_type=shape)(inputs)
    out_ref = jax.new_ref(out)
    run(body)(inputs, out_ref)
    return out_ref[...]


def _check(geometry: Geometry, config: MosaicDecodeConfig, interpret: Any) -> None:
    reason = unsupported(geometry)
    if reason is not None:
        raise ValueError(reason)
    if interpret and config.num_splits > 1:
        allowed = "1 in the interpreter, which has no stores from one program to another"
        raise ValueError(f"num_splits is {config.num_splits}; allowed: {allowed}")


def fit(plan: Plan) -> Plan:
    """The plan with as many stages as let a multiprocessor hold two programs, or as many splits as one has room for."""
    geometry, config = plan.geometry, plan.config
    stage_bytes = 2 * config.tile_keys * geometry.head_dim * geometry.item_bytes
    own_bytes = plan.num_columns * (2 * geometry.head_dim + config.tile_keys) * geometry.item_bytes + RESERVED_BYTES
    part_bytes = plan.num_columns * (geometry.head_dim + LOG_SUM_ROWS) * FLOAT32_BYTES
    num_stages, num_splits = config.num_stages, config.num_splits
    if num_splits == 1:
        num_stages = min(num_stages, (SHARED_BYTES // 2 - own_bytes) // stage_bytes)
    num_stages = max(2, num_stages)
    num_splits = min(num_splits, max(1, (SHARED_BYTES - own_bytes - num_stages * stage_bytes) // part_bytes))
    return plan._replace(config=MosaicDecodeConfig(config.tile_keys, num_stages, num_splits))


def _windows(q: Queries) -> Float[Array, "num_tokens num_windows 8 head_dim"]:
    """Query heads in aligned groups, the last one filled up: a view wherever num_heads is a multiple of 8."""
    num_tokens, num_heads, head_dim = q.shape
    padding = -num_heads % ALIGNED_HEADS
    if padding:
        q = jnp.pad(q, ((0, 0), (0, padding), (0, 0)))
    return q.reshape(num_tokens, -1, ALIGNED_HEADS, head_dim)


def _scratch(plan: Plan) -> Scratch:
    geometry, config = plan.geometry, plan.config
    tiles = (config.num_stages, config.tile_keys, geometry.head_dim)
    per_stage = plgpu.Barrier(num_arrivals=plan.num_boxes, num_barriers=config.num_stages)
    part_rows = (geometry.head_dim, LOG_SUM_ROWS) if config.num_splits > 1 else ()
    return Scratch(
        q=swizzled((plan.num_columns, geometry.head_dim), geometry.dtype),
        k=swizzled(tiles, geometry.dtype),
        v=swizzled(tiles, geometry.dtype),
        weights=swizzled((plan.num_columns, config.tile_keys), geometry.dtype),
        out=plgpu.SMEM((plan.num_columns, geometry.head_dim), jnp.dtype(geometry.dtype)),
        q_ready=plgpu.Barrier(num_arrivals=plan.num_queries * plan.num_windows),
        k_ready=per_stage,
        v_ready=per_stage,
        parts=tuple(swizzled((config.num_splits, rows, plan.num_columns), jnp.float32, 32) for rows in part_rows),
        parts_ready=plgpu.Barrier(num_arrivals=2 * config.num_splits) if part_rows else None,
    )


def _program(plan: Plan, inputs: Inputs, out_ref: Ref, scratch: Scratch) -> None:
    """Keeps num_stages tiles in flight, attends to each as it arrives, and writes the row's output or its part."""
    num_stages = plan.config.num_stages
    work = _work(plan, inputs)
    last_column = inputs.block_tables.shape[1] - 1
    blocks = [_blocks_of(plan, inputs, work, index, last_column) for index in range(num_stages + 1)]
    streams = Stream(inputs.k, scratch.k, scratch.k_ready), Stream(inputs.v, scratch.v, scratch.v_ready)
    _load_queries(plan, inputs, work, scratch)
    for index in range(num_stages):
        for stream in streams:
            _load(plan, work, stream, jnp.int32(index), blocks[index])
    plgpu.barrier_wait(scratch.q_ready)
    last_block = jnp.maximum(lax.div(work.num_keys - 1, plan.geometry.block_size), 0)

    def attend(index: Array, carry: tuple[Softmax, tuple[Array, ...]]) -> tuple[Softmax, tuple[Array, ...]]:
        state, next_blocks = carry
        # A step ahead: they take long to come.
        later_blocks = _blocks_of(plan, inputs, work, index + num_stages + 1, last_block)
        return _attend_tile(plan, work, streams, scratch, index, state, next_blocks), later_blocks

    state, _ = lax.fori_loop(0, work.num_tiles, attend, (_begin(plan, inputs, work), blocks[num_stages]))
    _finish(plan, work, scratch, state, out_ref)


def _work(plan: Plan, inputs: Inputs) -> Work:
    geometry, config = plan.geometry, plan.config
    cluster, split = lax.axis_index("cluster"), lax.axis_index("split")
    pair, chunk = lax.div(cluster, plan.num_chunks), lax.rem(cluster, plan.num_chunks)
    row, head = lax.div(pair, geometry.num_kv_heads), lax.rem(pair, geometry.num_kv_heads)
    if inputs.row_order is not None:
        row = inputs.row_order[row]
    token, num_queries, num_keys = _queries_of(plan, inputs, row, chunk)
    first_key = jnp.int32(0) if inputs.prefix is None else inputs.prefix.num_tokens[row]
    num_tiles = pl.cdiv(pl.cdiv(num_keys - first_key, config.tile_keys) - split, config.num_splits)
    return Work(inputs.layer[0], row, head, token, num_queries, num_keys, first_key, split, num_tiles)


def _queries_of(plan: Plan, inputs: Inputs, row: Array, chunk: Array) -> tuple[Array, Array, Array]:
    """A chunk's first token, number of queries, and keys that the last of them sees; 0 and 0 if there is no work."""
    seq_len = inputs.seq_lens[row]
    if not plan.has_starts:
        return row, jnp.int32(1), seq_len
    first, count = inputs.starts[row], inputs.starts[row + 1] - inputs.starts[row]
    first_query = chunk * plan.num_queries
    num_left = jnp.where(count <= plan.row_queries, count - first_query, 0)
    num_queries = jnp.clip(num_left, 0, plan.num_queries)
    return first + first_query, num_queries, jnp.where(num_queries > 0, seq_len - (num_left - num_queries), 0)


def _first_key(plan: Plan, work: Work, index: Array | int) -> Array:
    """Position of the first key of the program's tile number index."""
    return work.first_key + (work.first_tile + index * plan.config.num_splits) * plan.config.tile_keys


def _blocks_of(plan: Plan, inputs: Inputs, work: Work, index: Array | int, last: Array | int) -> tuple[Array, ...]:
    """The blocks of a tile's boxes, from columns of the table up to last.

    Past the row's end any block will do, as what it holds is masked; the row's own last one is in the L2 cache.
    """
    first_key = _first_key(plan, work, index)
    places = [lax.div(first_key + box * plan.box_keys, plan.geometry.block_size) for box in range(plan.num_boxes)]
    return tuple(inputs.block_tables[work.row, jnp.minimum(place, last)] for place in places)


def _load_queries(plan: Plan, inputs: Inputs, work: Work, scratch: Scratch) -> None:
    """Each query's aligned windows of heads; places past the row's last query get that one again."""
    first_window = lax.div(work.head * plan.geometry.group, ALIGNED_HEADS)
    for query in range(plan.num_queries):
        token = work.token + jnp.minimum(query, jnp.maximum(work.num_queries - 1, 0))
        token = jnp.minimum(token, inputs.q.shape[0] - 1)
        for window in range(plan.num_windows):
            column = query * plan.columns_per_query + window * ALIGNED_HEADS
            source = inputs.q.at[token, jnp.minimum(first_window + window, inputs.q.shape[1] - 1)]
            plgpu.copy_gmem_to_smem(source, scratch.q.at[pl.ds(column, ALIGNED_HEADS)], scratch.q_ready)


def _load(plan: Plan, work: Work, stream: Stream, index: Array, blocks: tuple[Array, ...]) -> None:
    """Starts to load a tile into its stage, if there is such a tile. The warps share the copies."""
    stage = lax.rem(index, plan.config.num_stages)
    offset = pl.multiple_of(lax.rem(_first_key(plan, work, index), plan.geometry.block_size), plan.box_keys)

    def load(warp: Array) -> None:
        for box, block in enumerate(blocks):
            source = stream.cache.at[work.layer, block, work.head]
            if plan.box_keys < plan.geometry.block_size:
                source = source.at[pl.ds(offset, plan.box_keys)]
            target = stream.tiles.at[stage, pl.ds(box * plan.box_keys, plan.box_keys)]
            copy = functools.partial(plgpu.copy_gmem_to_smem, source, target, stream.ready.at[stage])
            pl.when(warp == box % NUM_WARPS)(copy)

    pl.when(index < work.num_tiles)(lambda: plgpu.warp_map(load))


def _empty(plan: Plan) -> Softmax:
    """No key seen yet."""
    return Softmax(
        plgpu.layout_cast(jnp.full((plan.num_columns,), MASKED, jnp.float32), PER_COLUMN),
        plgpu.layout_cast(jnp.zeros((plan.config.tile_keys, plan.num_columns), jnp.float32), LAYOUT),
        plgpu.layout_cast(jnp.zeros((plan.geometry.head_dim, plan.num_columns), jnp.float32), LAYOUT),
    )


def _begin(plan: Plan, inputs: Inputs, work: Work) -> Softmax:
    """The row's prefix, if it has one, as if it were the first key of the tile, with the sum of its keys' weights."""
    empty, prefix = _empty(plan), inputs.prefix
    if prefix is None:
        return empty
    is_first = (lax.axis_index("split") == 0) & (work.num_queries > 0)  # longer rows' prefixes are the prefill kernel's
    num_pieces = jnp.where(is_first, prefix.num_pieces[work.row], 0)

    def join(turn: Array, merged: Merged) -> Merged:
        first = turn * PIECES_AT_ONCE
        pieces = [_load_piece(plan, prefix, work, first + index, num_pieces) for index in range(PIECES_AT_ONCE)]
        return functools.reduce(lambda merged, piece: _join(merged, *piece), pieces, merged)

    merged = lax.fori_loop(0, pl.cdiv(num_pieces, PIECES_AT_ONCE), join, _nothing(plan))
    keys = plgpu.broadcasted_iota(jnp.int32, empty.weights.shape, KEYS, layout=LAYOUT)
    weights = jnp.where(keys == 0, _over_rows(merged.total, empty.weights), 0.0)
    return Softmax(merged.maximum, weights, merged.values)


def _load_piece(
    plan: Plan, prefix: Prefix, work: Work, index: Array, num_pieces: Array
) -> tuple[Float[Array, " num_columns"], Float[Array, "head_dim num_columns"]]:
    """A piece's log-sum and output; where there is no such piece, one that weighs nothing.

    A row with a prefix has one query: what the columns of others get does not matter.
    """
    piece = prefix.first_piece[work.row] + jnp.minimum(index, num_pieces - 1)
    first_head = lax.div(work.head * plan.geometry.group, ALIGNED_HEADS) * ALIGNED_HEADS
    heads = pl.ds(pl.multiple_of(first_head, ALIGNED_HEADS), plan.num_columns)
    place = prefix.place[work.row]
    log_sum = plgpu.load(prefix.log_sums.at[piece, place, heads], layout=PER_COLUMN, optimized=False)
    # Two neighbours in memory, which a thread loads at once, stand in one column.
    source = prefix.values.at[piece, place, heads].transpose((1, 0))
    values = plgpu.load(source, layout=plgpu.Layout.WGMMA_TRANSPOSED, optimized=False)
    return log_sum + jnp.where(index < num_pieces, 0.0, MASKED), plgpu.layout_cast(values, LAYOUT)


def _attend_tile(
    plan: Plan,
    work: Work,
    streams: tuple[Stream, Stream],
    scratch: Scratch,
    index: Array,
    state: Softmax,
    next_blocks: tuple[Array, ...],
) -> Softmax:
    """One tile: scores, softmax update, values. As soon as a stage has been read, its next tile is sent for."""
    stage, next_index = lax.rem(index, plan.config.num_stages), index + plan.config.num_stages
    first_key = _first_key(plan, work, index)
    plgpu.barrier_wait(scratch.k_ready.at[stage])
    scores = _scores(plan, scratch.q, scratch.k.at[stage])
    _load(plan, work, streams[0], next_index, next_blocks)
    is_visible = _is_visible(plan, work, first_key)
    scores = jnp.where(is_visible, scores * (plan.scale * LOG2_E), MASKED)
    maximum = jnp.maximum(state.maximum, jnp.max(scores, axis=KEYS))
    weights = jnp.where(is_visible, jnp.exp2(scores - _over_rows(maximum, scores)), 0.0)
    decay = jnp.exp2(state.maximum - maximum)
    scratch.weights.transpose((1, 0))[...] = weights.astype(scratch.weights.dtype)
    plgpu.barrier_wait(scratch.v_ready.at[stage])
    pl.when(first_key + plan.config.tile_keys > work.num_keys)(
        functools.partial(_clear_tail, scratch.v.at[stage], work.num_keys - first_key)
    )
    plgpu.commit_smem()
    values = _weighted_values(plan, scratch.v.at[stage], scratch.weights)
    _load(plan, work, streams[1], next_index, next_blocks)
    total_weights = state.weights * _over_rows(decay, weights) + weights
    return Softmax(maximum, total_weights, state.values * _over_rows(decay, values) + values)


def _over_rows(per_column: Array, like: Array) -> Array:
    """The same in every row."""
    return lax.broadcast_in_dim(per_column, like.shape, [COLUMNS])


def _scores(plan: Plan, q: Ref, k: Ref) -> Float[Array, "tile_keys num_columns"]:
    """K Q^T: keys fill the 64 rows that the tensor core wants, and the few queries its columns."""

    def multiply(accumulator: Ref) -> Array:
        plgpu.wgmma(accumulator, k, q.transpose((1, 0)))
        return accumulator[...]

    return pl.run_scoped(multiply, plgpu.ACC((plan.config.tile_keys, plan.num_columns), jnp.float32))


def _weighted_values(plan: Plan, v: Ref, weights: Ref) -> Float[Array, "head_dim num_columns"]:
    """V^T P^T: a tile's part of the output, not yet divided."""

    def multiply(accumulator: Ref) -> Array:
        plgpu.wgmma(accumulator, v.transpose((1, 0)), weights.transpose((1, 0)))
        return accumulator[...]

    return pl.run_scoped(multiply, plgpu.ACC((plan.geometry.head_dim, plan.num_columns), jnp.float32))


def _is_visible(plan: Plan, work: Work, first_key: Array) -> Bool[Array, "tile_keys num_columns"]:
    """Which keys each column's query may see: those up to its own position."""
    shape = (plan.config.tile_keys, plan.num_columns)
    positions = first_key + plgpu.broadcasted_iota(jnp.int32, shape, KEYS, layout=LAYOUT)
    if plan.num_queries == 1:
        return positions < work.num_keys
    queries = plgpu.broadcasted_iota(jnp.int32, shape, COLUMNS, layout=LAYOUT) // plan.columns_per_query
    return positions <= work.num_keys - work.num_queries + queries


def _clear_tail(v: Ref, num_keys: Array) -> None:
    """Zeroes the values of slots past the row's end: whatever they hold, a weight of zero does not remove NaN."""
    values = plgpu.load(v, layout=LAYOUT)
    keys = plgpu.broadcasted_iota(jnp.int32, values.shape, KEYS, layout=LAYOUT)
    v[...] = jnp.where(keys < num_keys, values, jnp.zeros_like(values))


def _finish(plan: Plan, work: Work, scratch: Scratch, state: Softmax, out_ref: Ref) -> None:
    """Writes the row's output, if this program has seen all of its keys; if not, the cluster's first program does."""
    total = jnp.sum(state.weights, axis=KEYS)
    values = state.values / _over_rows(jnp.where(total == 0.0, 1.0, total), state.values)  # zeros if no key was seen
    if plan.config.num_splits == 1:
        _store(plan, work, scratch, values, out_ref)
        return
    log_sum = jnp.where(total == 0.0, MASKED, state.maximum + jnp.log2(jnp.where(total == 0.0, 1.0, total)))
    _send_part(scratch, values, log_sum)

    @pl.when(lax.axis_index("split") == 0)
    def _merge() -> None:
        _store(plan, work, scratch, _merged(plan, scratch), out_ref)


def _store(
    plan: Plan, work: Work, scratch: Scratch, values: Float[Array, "head_dim num_columns"], out_ref: Ref
) -> None:
    """Writes the columns of the queries that exist, and of their heads those that read this key head."""
    scratch.out.transpose((1, 0))[...] = values.astype(scratch.out.dtype)
    plgpu.commit_smem()
    group = plan.geometry.group
    first_head = work.head * group
    for query in range(plan.num_queries):
        column = query * plan.columns_per_query + lax.rem(first_head, ALIGNED_HEADS)
        source = scratch.out.at[pl.ds(column, group)]
        target = out_ref.at[work.token + query, pl.ds(first_head, group)]
        copy = functools.partial(plgpu.copy_smem_to_gmem, source, target)
        if plan.has_starts:
            pl.when(query < work.num_queries)(copy)
        else:
            copy()
    plgpu.wait_smem_to_gmem(0)


def _send_part(
    scratch: Scratch, values: Float[Array, "head_dim num_columns"], log_sum: Float[Array, " num_columns"]
) -> None:
    """Writes this program's output, and the logarithm of its sum of weights, into the first program's shared memory."""
    log_sums = lax.broadcast_in_dim(log_sum, (LOG_SUM_ROWS, *log_sum.shape), [COLUMNS])
    for part, array in zip(scratch.parts, (values, log_sums), strict=True):
        plgpu.async_store_smem(
            plgpu.layout_cast(array, LAYOUT),
            part.at[lax.axis_index("split")],
            scratch.parts_ready,
            cluster_idx=jnp.int32(0),
            cluster_dim="split",
            optimized=False,
        )


class Merged(NamedTuple):
    """Outputs over different keys, weighed by their sums of weights; values is not yet divided by total."""

    maximum: Float[Array, " num_columns"]
    total: Float[Array, " num_columns"]
    values: Float[Array, "head_dim num_columns"]


def _nothing(plan: Plan) -> Merged:
    empty = _empty(plan)
    zeros = plgpu.layout_cast(jnp.zeros((plan.num_columns,), jnp.float32), PER_COLUMN)
    return Merged(empty.maximum, zeros, empty.values)


def _join(
    merged: Merged, log_sum: Float[Array, " num_columns"], output: Float[Array, "head_dim num_columns"]
) -> Merged:
    maximum = jnp.maximum(merged.maximum, log_sum)
    decay, weight = jnp.exp2(merged.maximum - maximum), jnp.exp2(log_sum - maximum)
    values = merged.values * _over_rows(decay, output) + output * _over_rows(weight, output)
    return Merged(maximum, merged.total * decay + weight, values)


def _merged(plan: Plan, scratch: Scratch) -> Float[Array, "head_dim num_columns"]:
    """The cluster's output: its programs' outputs, weighted by their sums of weights."""
    outputs, log_sums = scratch.parts
    plgpu.barrier_wait(scratch.parts_ready)

    def join(split: Array, merged: Merged) -> Merged:
        log_sum = jnp.max(plgpu.load(log_sums.at[split], layout=LAYOUT, optimized=False), axis=KEYS)
        return _join(merged, log_sum, plgpu.load(outputs.at[split], layout=LAYOUT, optimized=False))

    merged = lax.fori_loop(0, plan.config.num_splits, join, _nothing(plan))
    return merged.values / _over_rows(merged.total, merged.values)


def padded_heads(geometry: Geometry, *, has_starts: bool) -> int:
    """Heads of Prefix's arrays: as many as let a program load its columns wherever its own heads stand."""
    plan = Plan(geometry, decode_config(geometry, 1, 1), 1.0, has_starts)
    last_window = (geometry.num_heads - geometry.group) // ALIGNED_HEADS
    return last_window * ALIGNED_HEADS + plan.num_columns
