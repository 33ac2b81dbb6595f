"""Attention over shared prefixes on Pallas's Mosaic GPU backend (Hopper).

The kernel goes the course of the prefill kernel: stacked queries of rows that share a prefix, against a piece of its
keys. The decode kernel, or for rows of more queries the prefill kernel, then goes over each row's own keys and merges
with them the pieces of its prefix.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array

from pallas_kernels.paged_attention.cascade import TILE_KEYS, Piece, SharedPrefixes
from pallas_kernels.paged_attention.config import Geometry
from pallas_kernels.paged_attention.mosaic_common import Prefix
from pallas_kernels.paged_attention.mosaic_decode import padded_heads
from pallas_kernels.paged_attention.mosaic_prefill import (
    NUM_CONSUMERS,
    UNIT,
    Inputs,
    MosaicPrefillConfig,
    Plan,
    Role,
    Scratch,
    Tile,
    Unit,
    head_and_offset,
    padded,
    run_program,
    scratch_of,
)
from pallas_kernels.paged_attention.triton_common import Ref, Refs


def attend_prefixes(
    arrays: Refs,
    shared: SharedPrefixes,
    geometry: Geometry,
    config: MosaicPrefillConfig,
    scale: float,
    interpret: Any,
) -> Prefix:
    """Attention of each window of tokens over each piece of their rows' prefix, for decode and prefill to go on from.

    shared: its fields as arrays on the device.

    Grid (num_programs,), as mosaic_prefill.prefill: a tile is a window of 64 tokens for two heads that read the same
    key head or, where a group is odd, of 128 tokens for one head; a program takes every num_programs-th tile. All
    tokens of the window see all keys of the piece. Where there is no piece, and for padding heads, the answer holds
    anything.
    """
    plan = plan_for(geometry, config, scale, interpret)
    has_starts = arrays.q.shape[0] != arrays.seq_lens.shape[0]
    # A piece more than there are: what the prefill kernel loads of a window may reach past its end.
    num_pieces = shared.pieces.shape[0] + (1 if has_starts else 0)
    shape = (num_pieces, plan.queries_per_tile, padded_heads(geometry, has_starts=has_starts))
    kernel = plgpu.kernel(
        functools.partial(_program, plan),
        out_type=[jax.ShapeDtypeStruct(size, jnp.float32) for size in ((*shape, geometry.head_dim), shape)],
        scratch_types=(scratch_of(plan),),
        grid=(min(config.num_programs, shared.pieces.shape[0] * plan.head_tiles),),
        grid_names=("program",),
        num_threads=NUM_CONSUMERS + 1,
        thread_name="warpgroup",
        compiler_params=plgpu.CompilerParams(approx_math=True),
        interpret=interpret or None,
        kernel_name="paged_attention_prefixes",
    )
    arrays = arrays._replace(seq_lens=None, starts=None, q=padded(arrays.q))
    inputs = Inputs(*arrays, shared.pieces, shared.total)
    return Prefix(*shared[2:], *kernel(inputs))


def plan_for(geometry: Geometry, config: MosaicPrefillConfig, scale: float, interpret: Any) -> Plan:
    """The prefill kernel's, without its mask."""
    assert config.tile_keys == TILE_KEYS, config
    return Plan(geometry, config, scale, bool(interpret), is_causal=False)


def _program(plan: Plan, inputs: Inputs, values: Ref, log_sums: Ref, scratch: Scratch) -> None:
    tile_at, store = functools.partial(_tile, plan, inputs), functools.partial(_store, values, log_sums)
    run_program(plan, inputs, scratch, Role(tile_at, store, lambda: None))


def _tile(plan: Plan, inputs: Inputs, place: Array) -> Tile:
    """Neighbouring places are heads over the same piece."""
    index, head_tile = lax.div(place, plan.head_tiles), lax.rem(place, plan.head_tiles)
    piece = Piece(*(inputs.tiles[index, field] for field in range(len(Piece._fields))))
    return Tile(
        row=piece.row,
        head=head_tile * plan.heads_per_tile,
        chunk=piece.chunk,
        first=jnp.int32(0),
        end=jnp.int32(plan.queries_per_tile),
        position=piece.num_tokens - 1,
        seq_len=piece.num_tokens,
        num_key_tiles=piece.num_tiles,
        first_key=piece.first_tile * plan.config.tile_keys,
        entry=index,
    )


def _store(values: Ref, log_sums: Ref, unit: Unit, output: Array, maximum: Array, total: Array) -> None:
    """The output as if there were no other keys, and what it weighs, straight from registers."""
    head, offset = head_and_offset(unit.plan, unit.tile, unit.consumer)
    places = pl.ds(offset, UNIT)
    values[unit.tile.entry, places, head] = output
    log_sums[unit.tile.entry, places, head] = maximum + jnp.log2(total)
