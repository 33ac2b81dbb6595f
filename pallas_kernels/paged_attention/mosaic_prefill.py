"""Prefill on Pallas's Mosaic GPU backend (Hopper): rows of many queries, bound by arithmetic.

The plan of FlashAttention-3 (Shah et al., 2024, sec. 3.1) over a paged cache: a program has a warpgroup that only
copies, and two that compute and take turns, one at the tensor cores while the other is at its softmax.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int

from pallas_kernels.paged_attention.config import Geometry, decode_queries
from pallas_kernels.paged_attention.mosaic_common import Prefix, swizzled
from pallas_kernels.paged_attention.mosaic_limits import unsupported
from pallas_kernels.paged_attention.triton_common import LOG2_E, MASKED, Ref, Refs, cdiv

Queries = Float[Array, "num_tokens num_heads head_dim"]

NUM_CONSUMERS, PRODUCER = 2, 2  # warpgroups 0 and 1 compute, 2 copies
UNIT = 64  # queries of one head that a consumer holds: the rows of its matrix products
CHUNK = 8  # copies into swizzled memory begin at a multiple of 8 tokens
CORNER = 64  # values are cleared in squares that take few registers
LAYOUT = plgpu.Layout.WGMMA
PER_QUERY = LAYOUT.reduce(1)


@dataclasses.dataclass(frozen=True)
class MosaicPrefillConfig:
    """Tiles of the prefill kernel."""

    tile_keys: int  # a multiple of 64
    num_stages: int  # tiles of keys, and of values, in flight
    consumer_registers: int  # of each thread
    producer_registers: int
    num_programs: int = 132  # each stays and takes tile after tile: one for each multiprocessor of an H100 or H200

    def __post_init__(self) -> None:
        assert self.tile_keys % CORNER == 0 and self.tile_keys > 0, self.tile_keys
        assert self.num_stages >= 2, self.num_stages
        assert self.num_programs >= 1, self.num_programs


def prefill_config(geometry: Geometry) -> MosaicPrefillConfig:
    """As measured on an H200 (BUILD_NOTES.md, 2026-11-30); registers so that next to nothing spills, which
    tests/gpu_code counts."""
    if geometry.head_dim > 64:
        return MosaicPrefillConfig(128, num_stages=2, consumer_registers=232, producer_registers=40)
    return MosaicPrefillConfig(128, num_stages=2, consumer_registers=216, producer_registers=72)


class QueryTiles(NamedTuple):
    """Consecutive queries of one row that a program takes at a time, those with the most keys first."""

    table: Int[Array, "num_tiles 2"]  # the row; where in q the tile begins, in chunks of 8 tokens
    num_tiles: Int[Array, " 1"]  # that exist; the rest is padding


class Plan(NamedTuple):
    """What is known when the kernel is traced."""

    geometry: Geometry
    config: MosaicPrefillConfig
    scale: float
    is_interpreted: bool
    is_causal: bool = True  # or the queries of a tile all see the same keys

    @property
    def heads_per_tile(self) -> int:
        """One for each consumer or, where a group is odd, one that the consumers share."""
        return NUM_CONSUMERS if self.geometry.group % NUM_CONSUMERS == 0 else 1

    @property
    def queries_per_tile(self) -> int:
        """Consecutive queries of a tile."""
        return UNIT * NUM_CONSUMERS // self.heads_per_tile

    @property
    def head_tiles(self) -> int:
        """Tiles that the same queries make over all heads."""
        return self.geometry.num_heads // self.heads_per_tile

    @property
    def box_keys(self) -> int:
        """Consecutive keys that one copy loads."""
        return min(self.geometry.block_size, self.config.tile_keys)

    @property
    def num_boxes(self) -> int:
        """Copies that fill a tile of keys."""
        return self.config.tile_keys // self.box_keys


class Inputs(NamedTuple):
    """The kernel's arrays, whole, in device memory."""

    layer: Ref  # int32 [1]
    block_tables: Ref  # int32 [num_rows, blocks_per_row]
    seq_lens: Ref  # int32 [num_rows]; not read if not causal, nor are the next
    starts: Ref  # int32 [num_rows + 1]
    q: Ref  # [num_tokens, num_heads, head_dim]
    k: Ref  # [num_layers, num_blocks, num_kv_heads, block_size, head_dim]
    v: Ref
    tiles: Ref  # int32 [num_tiles, ...], what Role.tile_at reads
    num_tiles: Ref  # int32 [1]
    prefix: Prefix | None = None  # with values and log_sums flat: [num_places, ...]


class Scratch(NamedTuple):
    """Shared memory of a program, and its barriers."""

    q: Ref  # [NUM_CONSUMERS, UNIT, head_dim]
    k: Ref  # [num_stages, tile_keys, head_dim]
    v: Ref
    out: Ref  # if causal: a union of [NUM_CONSUMERS, UNIT, head_dim] swizzled, and the same as plain rows
    zeros: Ref  # if causal: [UNIT, head_dim] plain rows
    weights: Ref  # [NUM_CONSUMERS, UNIT, tile_keys] when interpreted
    q_full: Ref
    q_empty: Ref
    k_full: Ref  # [num_stages]
    k_empty: Ref
    v_full: Ref
    v_empty: Ref
    v_loaded: Ref  # values with a tail that the producer has yet to clear
    turns: Ref  # [NUM_CONSUMERS]


class Done(NamedTuple):
    """Where the outputs over a tile's first keys are."""

    place: Int[Array, ""]  # in Prefix.values, of the tile's token 0 in the row's first piece
    num_pieces: Int[Array, ""]  # 0: there are none
    stride: Int[Array, ""]  # from one piece's place to the next one's


class Tile(NamedTuple):
    """Queries of one row, and the heads, that a program attends to at a time."""

    row: Int[Array, ""]
    head: Int[Array, ""]  # the first query head
    chunk: Int[Array, ""]  # where in q the tile begins, in chunks of 8 tokens
    first: Int[Array, ""]  # the tile's tokens first .. end - 1 are the row's; others are computed and thrown away
    end: Int[Array, ""]
    position: Int[Array, ""]  # in the row's sequence, of the tile's token 0; if not causal, of the last key to see
    seq_len: Int[Array, ""]
    num_key_tiles: Int[Array, ""]
    first_key: Int[Array, ""]  # those before are done
    entry: Int[Array, ""]  # in Inputs.tiles
    done: Done | None = None  # what came of the keys before first_key, if that is to be merged


class Visit(NamedTuple):
    """A tile in the course of a program."""

    tile: Tile
    number: Int[Array, ""]  # among the program's tiles
    first: Int[Array, ""]  # tiles of keys that the program saw before this tile's


class Role(NamedTuple):
    """What distinguishes the kernels that go this course."""

    tile_at: Callable[[Array], Tile]  # by its place in the order of work
    store: Callable[..., None]  # (unit, output in float32, maximum of the scores, total of the weights)
    end: Callable[[], None]  # what the producer does after all tiles


class Softmax(NamedTuple):
    """Online softmax in base 2. The values of the last tile of keys are yet to be added, by its weights."""

    maximum: Float[Array, "64"]
    total: Float[Array, "64"]
    weights: Float[Array, "64 tile_keys"]
    values: Float[Array, "64 head_dim"] | None  # when interpreted; otherwise the tensor cores' accumulator has them


def prefill(
    arrays: Refs,
    out: Queries,
    geometry: Geometry,
    config: MosaicPrefillConfig,
    scale: float,
    interpret: Any,
    tiles: QueryTiles | None = None,
    prefix: Prefix | None = None,
) -> Queries:
    """Attention of the rows that have more queries than the decode kernel takes, written into out in place.

    Tokens behind the last row's become zeros; those of other rows stay as they are.

    Grid (num_programs,). A tile is 64 queries of two heads that read the same key head or, where a group is odd, 128
    queries of one head; a program takes every num_programs-th tile, the heaviest first. Its consumers hold half a
    tile each, and its producer loads the keys and values that both need, block by block through the block table, from
    the last that any query sees to the first.

    interpret: None, or plgpu.InterpretGPUParams to run on the CPU. tiles: cut_tiles' answer if the caller has it: it
    is the same for all layers. prefix: what the rows' first keys gave, which are then left out, and it is merged.
    ValueError: unsupported(geometry), or a scale that is not positive.
    """
    reason = unsupported(geometry)
    if reason is not None:
        raise ValueError(reason)
    if scale <= 0:
        raise ValueError(f"scale is {scale}; allowed: more than 0")
    num_tokens = arrays.q.shape[0]
    if num_tokens % CHUNK:
        arrays, out = arrays._replace(q=padded(arrays.q)), padded(out)
    plan = Plan(geometry, config, scale, bool(interpret))
    if tiles is None:
        num_done = None if prefix is None else prefix.num_tokens
        tiles = cut_tiles(arrays.starts, arrays.seq_lens, arrays.q.shape[0], geometry, config, num_done)
    if prefix is not None:
        flat = (array.reshape(-1, *array.shape[2:]) for array in prefix[-2:])
        prefix = Prefix(*prefix[:-2], *flat)
    out_ref = jax.new_ref(out)
    kernel = plgpu.kernel(
        functools.partial(_program, plan),
        scratch_types=(scratch_of(plan),),
        grid=(min(config.num_programs, tiles.table.shape[0] * plan.head_tiles),),
        grid_names=("program",),
        num_threads=NUM_CONSUMERS + 1,
        thread_name="warpgroup",
        compiler_params=plgpu.CompilerParams(approx_math=True),
        interpret=interpret or None,
        kernel_name="paged_attention_prefill",
    )
    kernel(Inputs(*arrays, *tiles, prefix), out_ref)
    return out_ref[:num_tokens]


def padded(array: Queries) -> Float[Array, "padded_tokens num_heads head_dim"]:
    """To a multiple of 8 tokens, which the tiling of shared memory asks of what is copied there."""
    return jnp.pad(array, ((0, -array.shape[0] % CHUNK), (0, 0), (0, 0)))


def cut_tiles(
    starts: Int[Array, " num_rows_plus_1"],
    seq_lens: Int[Array, " num_rows"],
    num_tokens: int,
    geometry: Geometry,
    config: MosaicPrefillConfig,
    num_done: Int[Array, " num_rows"] | None = None,
) -> QueryTiles:
    """Cuts the rows of more than decode_queries(geometry) queries, at multiples of 8 tokens from the start of q.

    num_done: how many of each row's first keys are left out.
    """
    queries = Plan(geometry, config, 1.0, False).queries_per_tile
    num_rows, fewest = seq_lens.shape[0], decode_queries(geometry) + 1
    bases = starts[:-1] // CHUNK * CHUNK
    tiles_of_row = jnp.where(jnp.diff(starts) >= fewest, cdiv(starts[1:] - bases, queries), 0)
    ends = jnp.cumsum(tiles_of_row, dtype=jnp.int32)
    # A row adds at most 7 tokens in front, and one tile that is not full.
    most_rows = min(num_rows, num_tokens // fewest)
    most_tiles = (num_tokens + most_rows * (CHUNK - 1)) // queries + most_rows
    tiles = jnp.arange(max(most_tiles, 1), dtype=jnp.int32)
    found = jnp.searchsorted(ends, tiles, side="right", method="compare_all").astype(jnp.int32)
    rows = jnp.minimum(found, num_rows - 1)
    tokens = bases[rows] + (tiles - ends[rows] + tiles_of_row[rows]) * queries
    own_lens = seq_lens if num_done is None else seq_lens - num_done
    num_keys = jnp.where(found < num_rows, own_lens[rows] - starts[rows + 1] + tokens, -num_tokens)
    order = jnp.argsort(-num_keys)
    # Summed anew, since a slice of ends would reach the kernel as a pointer that is not aligned.
    table = jnp.stack((rows, tokens // CHUNK), axis=1)[order]
    return QueryTiles(table, jnp.sum(tiles_of_row, keepdims=True, dtype=jnp.int32))


def scratch_of(plan: Plan) -> Scratch:
    """What a program takes."""
    geometry, config = plan.geometry, plan.config
    dtype = jnp.dtype(geometry.dtype)
    queries = (NUM_CONSUMERS, UNIT, geometry.head_dim)
    keys = (config.num_stages, config.tile_keys, geometry.head_dim)
    views = swizzled(queries, dtype), plgpu.SMEM(queries, dtype)
    per_stage = functools.partial(plgpu.Barrier, num_barriers=config.num_stages)
    return Scratch(
        q=swizzled(queries, dtype),
        k=swizzled(keys, dtype),
        v=swizzled(keys, dtype),
        # Race detection takes parts of a union for overlapping as a whole, but each consumer keeps to its half of both.
        out=() if not plan.is_causal else views if plan.is_interpreted else plgpu.RefUnion(*views),
        zeros=plgpu.SMEM((UNIT, geometry.head_dim), dtype) if plan.is_causal else (),
        weights=swizzled((NUM_CONSUMERS, UNIT, config.tile_keys), dtype) if plan.is_interpreted else (),
        q_full=plgpu.Barrier(num_arrivals=NUM_CONSUMERS),
        q_empty=plgpu.Barrier(num_arrivals=NUM_CONSUMERS),
        k_full=per_stage(num_arrivals=plan.num_boxes),
        k_empty=per_stage(num_arrivals=NUM_CONSUMERS),
        v_full=per_stage(num_arrivals=plan.num_boxes),
        v_empty=per_stage(num_arrivals=NUM_CONSUMERS),
        v_loaded=plgpu.Barrier(num_arrivals=plan.num_boxes),
        turns=plgpu.Barrier(num_barriers=NUM_CONSUMERS),
    )


def _program(plan: Plan, inputs: Inputs, out: Ref, scratch: Scratch) -> None:
    tile_at, store = functools.partial(_tile, plan, inputs), functools.partial(_store, inputs, out)
    clear_padding = functools.partial(_clear_padding, plan, inputs, out, scratch)
    run_program(plan, inputs, scratch, Role(tile_at, store, clear_padding))


def run_program(plan: Plan, inputs: Inputs, scratch: Scratch, role: Role) -> None:
    """One block of threads: its consumers and its producer."""
    warpgroup = lax.axis_index("warpgroup")

    @pl.when(warpgroup < PRODUCER)
    def _consume() -> None:
        plgpu.set_max_registers(plan.config.consumer_registers, action="increase")
        pl.when(warpgroup == 1)(functools.partial(plgpu.barrier_arrive, scratch.turns.at[0]))
        _visit_tiles(plan, inputs, role, functools.partial(_attend, plan, scratch, role, warpgroup))
        plgpu.wait_smem_to_gmem(0)
        if plan.is_interpreted:  # which insists that each arrival is seen: a last turn is left that nobody takes
            pl.when(warpgroup == 0)(functools.partial(plgpu.barrier_wait, scratch.turns.at[0]))

    @pl.when(warpgroup == PRODUCER)
    def _produce() -> None:
        plgpu.set_max_registers(plan.config.producer_registers, action="decrease")
        _drain(plan, scratch, *_visit_tiles(plan, inputs, role, functools.partial(_load, plan, inputs, scratch)))
        role.end()
        plgpu.wait_smem_to_gmem(0)


def _visit_tiles(plan: Plan, inputs: Inputs, role: Role, use: Callable[[Visit], None]) -> tuple[Array, Array]:
    """Calls use for each of the program's tiles. The answer: how many tiles, and how many tiles of keys they had.

    From round to round the programs' order is reversed, so that no program has the heavier tile each time.
    """
    num_programs, program = lax.axis_size("program"), lax.axis_index("program")
    total = inputs.num_tiles[0] * plan.head_tiles

    def place_in(turn: Array) -> Array:
        return turn * num_programs + jnp.where(turn % 2 == 0, program, num_programs - 1 - program)

    def visit(turn: Array, first: Array) -> Array:
        tile = role.tile_at(place_in(turn))
        use(Visit(tile, turn, first))
        return first + tile.num_key_tiles

    full_turns = lax.div(total, num_programs)
    num_turns = full_turns + jnp.where(place_in(full_turns) < total, 1, 0)
    return num_turns, lax.fori_loop(0, num_turns, visit, jnp.int32(0))


def _tile(plan: Plan, inputs: Inputs, place: Array) -> Tile:
    """Neighbouring places are heads over the same queries."""
    index, head_tile = lax.div(place, plan.head_tiles), lax.rem(place, plan.head_tiles)
    row, chunk = inputs.tiles[index, 0], inputs.tiles[index, 1]
    token, seq_len = chunk * CHUNK, inputs.seq_lens[row]
    first = jnp.maximum(inputs.starts[row] - token, 0)
    end = jnp.minimum(inputs.starts[row + 1] - token, plan.queries_per_tile)
    position = seq_len - (inputs.starts[row + 1] - token)
    first_key = jnp.int32(0) if inputs.prefix is None else inputs.prefix.num_tokens[row]
    num_key_tiles = cdiv(position + end - first_key, plan.config.tile_keys)
    head, done = head_tile * plan.heads_per_tile, _done(plan, inputs, row, token)
    return Tile(row, head, chunk, first, end, position, seq_len, num_key_tiles, first_key, index, done)


def _done(plan: Plan, inputs: Inputs, row: Array, token: Array) -> Done | None:
    """Asked for when a tile begins: at its end it would be waited for."""
    prefix, places = inputs.prefix, plan.queries_per_tile
    if prefix is None:
        return None
    place = prefix.first_piece[row] * places + prefix.place[row] + token - inputs.starts[row]
    return Done(place, prefix.num_pieces[row], prefix.stride[row] * places)


def head_and_offset(plan: Plan, tile: Tile, consumer: Array | int) -> tuple[Array, Array | int]:
    """A consumer's head, and its first token within the tile."""
    if plan.heads_per_tile == NUM_CONSUMERS:
        return tile.head + consumer, 0
    return tile.head, consumer * UNIT


def _part_of(plan: Plan, array: Ref, tile: Tile, consumer: Array | int) -> Ref:
    """A consumer's part of q or of the output."""
    head, offset = head_and_offset(plan, tile, consumer)
    return array.at[pl.ds((tile.chunk + offset // CHUNK) * CHUNK, UNIT), head]


# The producer.


def _load(plan: Plan, inputs: Inputs, scratch: Scratch, visit: Visit) -> None:
    """The queries, then keys and values tile by tile, each as soon as its place is empty."""
    pl.when(visit.number > 0)(functools.partial(plgpu.barrier_wait, scratch.q_empty))
    for consumer in range(NUM_CONSUMERS):
        queries = _part_of(plan, inputs.q, visit.tile, consumer)
        plgpu.copy_gmem_to_smem(queries, scratch.q.at[consumer], scratch.q_full)

    def load(step: Array, _: None) -> None:
        first_key = _first_key(plan, visit.tile, step)
        boxes = [_box(plan, inputs, visit.tile, first_key + box * plan.box_keys) for box in range(plan.num_boxes)]
        count = visit.first + step
        stage, is_reused = lax.rem(count, plan.config.num_stages), count >= plan.config.num_stages
        pl.when(is_reused)(functools.partial(plgpu.barrier_wait, scratch.k_empty.at[stage]))
        _copy_boxes(plan, inputs.k, boxes, scratch.k.at[stage], scratch.k_full.at[stage])
        pl.when(is_reused)(functools.partial(plgpu.barrier_wait, scratch.v_empty.at[stage]))
        _load_values(plan, inputs, scratch, boxes, stage, visit.tile.seq_len - first_key)

    lax.fori_loop(0, visit.tile.num_key_tiles, load, None)


def _load_values(
    plan: Plan, inputs: Inputs, scratch: Scratch, boxes: list[tuple], stage: Array, num_valid: Array
) -> None:
    """The consumers see a tile with slots past the row's end only once those are cleared."""
    v, v_full = scratch.v.at[stage], scratch.v_full.at[stage]

    @pl.when(num_valid >= plan.config.tile_keys)
    def _whole() -> None:
        _copy_boxes(plan, inputs.v, boxes, v, v_full)

    @pl.when(num_valid < plan.config.tile_keys)
    def _tail() -> None:
        _copy_boxes(plan, inputs.v, boxes, v, scratch.v_loaded)
        plgpu.barrier_wait(scratch.v_loaded)
        _clear_tail(plan, v, num_valid)
        for _ in range(plan.num_boxes):
            plgpu.barrier_arrive(v_full)


def _first_key(plan: Plan, tile: Tile, step: Array | int) -> Array:
    """Of tile number `step`; number 0 is the last of the sequence."""
    return tile.first_key + (tile.num_key_tiles - 1 - step) * plan.config.tile_keys


def _box(plan: Plan, inputs: Inputs, tile: Tile, first_key: Array) -> tuple[Array, Array, Array, Array]:
    """Where some keys are. Past the row's last block, that one again: nobody else's is read."""
    block_size = plan.geometry.block_size
    entry = jnp.minimum(lax.div(first_key, block_size), lax.div(tile.seq_len - 1, block_size))
    block, kv_head = inputs.block_tables[tile.row, entry], lax.div(tile.head, plan.geometry.group)
    return inputs.layer[0], block, kv_head, lax.rem(first_key, block_size)


def _copy_boxes(plan: Plan, source: Ref, boxes: list[tuple], target: Ref, barrier: Ref) -> None:
    for number, (layer, block, head, offset) in enumerate(boxes):
        keys = source.at[layer, block, head]
        if plan.box_keys < plan.geometry.block_size:
            keys = keys.at[pl.ds(pl.multiple_of(offset, plan.box_keys), plan.box_keys)]
        plgpu.copy_gmem_to_smem(keys, target.at[pl.ds(number * plan.box_keys, plan.box_keys)], barrier)


def _clear_tail(plan: Plan, v: Ref, num_valid: Array) -> None:
    """Zeroes the values of slots past the row's end: whatever they hold, a weight of zero does not remove NaN."""
    corners_across = plan.geometry.head_dim // CORNER

    def clear(index: Array, _: None) -> None:
        row, column = lax.div(index, corners_across) * CORNER, lax.rem(index, corners_across) * CORNER
        corner = v.at[pl.ds(row, CORNER), pl.ds(column, CORNER)]
        values = plgpu.load(corner, layout=LAYOUT)
        is_valid = row + plgpu.broadcasted_iota(jnp.int32, values.shape, 0, layout=LAYOUT) < num_valid
        corner[...] = jnp.where(is_valid, values, jnp.zeros_like(values))

    lax.fori_loop(0, plan.config.tile_keys // CORNER * corners_across, clear, None)
    plgpu.commit_smem()


def _drain(plan: Plan, scratch: Scratch, num_tiles: Array, num_key_tiles: Array) -> None:
    """Sees everything emptied that no later load waits for: a barrier must not outlive those who wait on it."""

    def wait_keys(count: Array, _: None) -> None:
        stage = lax.rem(count, plan.config.num_stages)
        plgpu.barrier_wait(scratch.k_empty.at[stage])
        plgpu.barrier_wait(scratch.v_empty.at[stage])

    lax.fori_loop(jnp.maximum(num_key_tiles - plan.config.num_stages, 0), num_key_tiles, wait_keys, None)
    pl.when(num_tiles > 0)(functools.partial(plgpu.barrier_wait, scratch.q_empty))


def _clear_padding(plan: Plan, inputs: Inputs, out: Ref, scratch: Scratch) -> None:
    """Zeroes the output of the tokens behind the last row's, each program its share of them."""
    num_heads, num_tokens, zeros = plan.geometry.num_heads, out.shape[0], scratch.zeros
    heads = max(count for count in range(1, UNIT + 1) if num_heads % count == 0)
    first = inputs.starts[inputs.starts.shape[0] - 1] + lax.axis_index("program")

    @pl.when(first < num_tokens)
    def _clear() -> None:
        zeros[...] = plgpu.layout_cast(jnp.zeros(zeros.shape, zeros.dtype), LAYOUT)
        plgpu.commit_smem()

        @pl.loop(first, num_tokens, step=lax.axis_size("program"))
        def _token(token: Array) -> None:
            for head in range(0, num_heads, heads):
                plgpu.copy_smem_to_gmem(zeros.at[pl.ds(0, heads)], out.at[token, pl.ds(head, heads)])


# The consumers.


class Unit(NamedTuple):
    """What one consumer computes at a time: 64 queries of one head, over all keys that the tile's queries see."""

    plan: Plan
    scratch: Scratch
    consumer: Int[Array, ""]
    visit: Visit
    position: Int[Array, ""]  # of the first query

    @property
    def tile(self) -> Tile:
        """The tile that the queries are half of."""
        return self.visit.tile

    def stage(self, step: Array | int) -> Array:
        """Where the keys and values of tile number `step` are; number 0 is the last of the sequence."""
        return lax.rem(self.visit.first + step, self.plan.config.num_stages)


def _attend(plan: Plan, scratch: Scratch, role: Role, consumer: Array, visit: Visit) -> None:
    offset = head_and_offset(plan, visit.tile, consumer)[1] if plan.is_causal else 0
    unit = Unit(plan, scratch, consumer, visit, visit.tile.position + offset)
    plgpu.barrier_wait(scratch.q_full)
    accumulator = plgpu.ACC((UNIT, plan.geometry.head_dim), jnp.float32)
    values, maximum, total = pl.run_scoped(functools.partial(_attend_keys, unit), accumulator)
    role.store(unit, values * lax.broadcast_in_dim(1.0 / total, values.shape, [0]), maximum, total)


def _attend_keys(unit: Unit, sums: Ref) -> tuple[Array, Array, Array]:
    """The weighted sum of the values, the maximum and the total. Keys that all queries see need no mask."""
    num_tiles = unit.tile.num_key_tiles
    num_masked = num_tiles - lax.div(unit.position + 1 - unit.tile.first_key, unit.plan.config.tile_keys)
    num_masked = jnp.clip(num_masked, 1, num_tiles)
    state = _first_step(unit)
    state = lax.fori_loop(1, num_masked, functools.partial(_step, unit, sums, True), state)
    state = lax.fori_loop(num_masked, num_tiles, functools.partial(_step, unit, sums, False), state)
    plgpu.barrier_arrive(unit.scratch.q_empty)
    _begin_turn(unit)
    values = _add_values(unit, sums, state, num_tiles - 1)
    _end_turn(unit)
    values = sums[...] if values is None else values
    plgpu.barrier_arrive(unit.scratch.v_empty.at[unit.stage(num_tiles - 1)])
    return values, state.maximum, state.total


def _first_step(unit: Unit) -> Softmax:
    """The scores of the last tile of keys, with nothing to overlap them with."""

    def multiply(accumulator: Ref) -> Array:
        _start_scores(unit, accumulator, 0)
        _end_turn(unit)
        return accumulator[...]

    scores = _mask(unit, 0, _with_scores(unit, 0, multiply))
    plgpu.barrier_arrive(unit.scratch.k_empty.at[unit.stage(0)])
    zeros = plgpu.layout_cast(jnp.zeros((UNIT,), jnp.float32), PER_QUERY)
    values = jnp.zeros((UNIT, unit.plan.geometry.head_dim), jnp.float32) if unit.plan.is_interpreted else None
    state, _ = _update(unit, Softmax(zeros + MASKED, zeros, scores, values), scores)
    return state._replace(weights=state.weights.astype(unit.plan.geometry.dtype))


def _step(unit: Unit, sums: Ref, is_masked: bool, step: Array, state: Softmax) -> Softmax:
    """Starts tile number `step`'s scores and, behind them, the values of the one before; then its softmax."""

    def multiply(accumulator: Ref) -> tuple[Array, Array | None]:
        _start_scores(unit, accumulator, step)
        values = _add_values(unit, sums, state, step - 1)
        _end_turn(unit)
        return plgpu.wgmma_accumulator_load(accumulator, wait_n=1), values

    scores, values = _with_scores(unit, step, multiply)
    plgpu.barrier_arrive(unit.scratch.k_empty.at[unit.stage(step)])
    if is_masked:
        scores = _mask(unit, step, scores)
    state, decay = _update(unit, state, scores)
    # sums[...] waits for all matrix products; the barrier ties to that wait what reads the sums and what takes the old
    # weights' registers. ptxas moves the wait up to before the softmax, which is no less right, and good: held back by
    # a loop in between, it costs a sixth of the speed on an H200, since the values' place is emptied and loaded later.
    weights, values = lax.optimization_barrier((state.weights, sums[...] if values is None else values))
    plgpu.barrier_arrive(unit.scratch.v_empty.at[unit.stage(step - 1)])
    values = values * lax.broadcast_in_dim(decay, values.shape, [0])
    weights = weights.astype(unit.plan.geometry.dtype)
    return state._replace(weights=weights, values=_keep_values(unit, sums, values))


def _with_scores(unit: Unit, step: Array | int, multiply: Callable[[Ref], Any]) -> Any:
    """multiply(an accumulator for the scores of tile `step`), when its keys are there and it is our turn."""
    plgpu.barrier_wait(unit.scratch.k_full.at[unit.stage(step)])
    _begin_turn(unit)
    return pl.run_scoped(multiply, plgpu.ACC((UNIT, unit.plan.config.tile_keys), jnp.float32))


def _begin_turn(unit: Unit) -> None:
    """Waits until the other consumer's matrix products are under way: then comes its softmax, beside ours."""
    plgpu.barrier_wait(unit.scratch.turns.at[unit.consumer])


def _end_turn(unit: Unit) -> None:
    plgpu.barrier_arrive(unit.scratch.turns.at[1 - unit.consumer])


def _start_scores(unit: Unit, accumulator: Ref, step: Array | int) -> None:
    """Q K^T."""
    q = unit.scratch.q.at[unit.consumer]
    plgpu.wgmma(accumulator, q, unit.scratch.k.at[unit.stage(step)].transpose((1, 0)))


def _add_values(unit: Unit, sums: Ref, state: Softmax, step: Array | int) -> Array | None:
    """Starts to add P V to the sums. The interpreter cannot store sums, nor multiply registers: the new sums."""
    stage, scratch = unit.stage(step), unit.scratch
    plgpu.barrier_wait(scratch.v_full.at[stage])
    if state.values is None:
        plgpu.wgmma(sums, state.weights, scratch.v.at[stage])
        return None
    weights = scratch.weights.at[unit.consumer]
    weights[...] = state.weights
    plgpu.commit_smem()

    def multiply(accumulator: Ref) -> Array:
        plgpu.wgmma(accumulator, weights, scratch.v.at[stage])
        return accumulator[...]

    return state.values + pl.run_scoped(multiply, plgpu.ACC((UNIT, unit.plan.geometry.head_dim), jnp.float32))


def _keep_values(unit: Unit, sums: Ref, values: Array) -> Array | None:
    if unit.plan.is_interpreted:
        return values
    sums[...] = values
    return None


def _mask(unit: Unit, step: Array | int, scores: Array) -> Array:
    """Removes, by selection, the keys that stand after a query."""
    query, key = (plgpu.broadcasted_iota(jnp.int32, scores.shape, axis, layout=LAYOUT) for axis in (0, 1))
    first_key = _first_key(unit.plan, unit.tile, step)
    # A thread's keys are 8 apart: so written, what is compared differs by constants, which take no registers.
    limit = unit.position - first_key + (query if unit.plan.is_causal else 0) - (key & 7)
    return jnp.where((key & ~7) <= limit, scores, -jnp.inf)


def _update(unit: Unit, state: Softmax, scores: Array) -> tuple[Softmax, Array]:
    """Takes in a tile's scores. The answer's weights are still float32; decay is what sums so far shrink by."""
    factor = unit.plan.scale * LOG2_E
    maximum = jnp.maximum(state.maximum, jnp.max(scores, axis=1) * factor)
    weights = jnp.exp2(scores * factor - lax.broadcast_in_dim(maximum, scores.shape, [0]))
    decay = jnp.exp2(state.maximum - maximum)
    return state._replace(maximum=maximum, total=state.total * decay + jnp.sum(weights, axis=1), weights=weights), decay


def _merge(prefix: Prefix, done: Done, unit: Unit, values: Array, log_sum: Array) -> Array:
    """The output over all keys: each piece of the prefix is weighed by its sum of weights, in base 2."""
    head, offset = head_and_offset(unit.plan, unit.tile, unit.consumer)

    def over_dims(per_query: Array) -> Array:
        return lax.broadcast_in_dim(per_query, values.shape, [0])

    def join(number: Array, merged: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        values, maximum, total = merged
        places = pl.ds(done.place + number * done.stride + offset, UNIT)
        log_sum = plgpu.load(prefix.log_sums.at[places, head], layout=PER_QUERY, optimized=False)
        piece = plgpu.load(prefix.values.at[places, head], layout=LAYOUT, optimized=False)
        new_maximum = jnp.maximum(maximum, log_sum)
        decay, weight = jnp.exp2(maximum - new_maximum), jnp.exp2(log_sum - new_maximum)
        return values * over_dims(decay) + piece * over_dims(weight), new_maximum, total * decay + weight

    ones = plgpu.layout_cast(jnp.ones((UNIT,), jnp.float32), PER_QUERY)
    values, _, total = lax.fori_loop(0, done.num_pieces, join, (values, log_sum, ones))
    return values * over_dims(1.0 / total)


def _store(inputs: Inputs, out: Ref, unit: Unit, values: Array, maximum: Array, total: Array) -> None:
    """All 64 queries in one copy; where some are other rows' tokens, the row's own one by one."""
    plan, tile = unit.plan, unit.tile
    if inputs.prefix is not None and tile.done is not None:
        values = _merge(inputs.prefix, tile.done, unit, values, maximum + jnp.log2(total))
    values = values.astype(plan.geometry.dtype)
    tiled, plain = (part.at[unit.consumer] for part in unit.scratch.out)
    head, offset = head_and_offset(plan, tile, unit.consumer)
    first, end = jnp.maximum(tile.first - offset, 0), jnp.minimum(tile.end - offset, UNIT)
    is_whole = (first == 0) & (end == UNIT)
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # of the tile before

    @pl.when(is_whole)
    def _whole() -> None:
        tiled[...] = values
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(tiled, _part_of(plan, out, tile, unit.consumer))

    @pl.when(jnp.logical_not(is_whole))
    def _rows() -> None:
        plain[...] = values
        plgpu.commit_smem()
        token = tile.chunk * CHUNK + offset

        @pl.loop(first, end)
        def _row(query: Array) -> None:
            plgpu.copy_smem_to_gmem(plain.at[pl.ds(query, 1)], out.at[pl.ds(token + query, 1), head])
