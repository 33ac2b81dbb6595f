"""Rows of one query whose block tables begin with the same blocks: found on the host, cut into work for the device.

Such rows' queries can be stacked against the shared blocks, which are then read once for all of them and not once for
each (Hydragen, Juravsky et al., 2024, sec. 3): a matrix product in the place of many products of a vector with a
matrix. mosaic_cascade.py computes it. Here is numpy only: this runs before a step.

Prefill chunks are left out, since they have nothing to gain: their kernel multiplies 64 queries of two heads at a time,
is bound by arithmetic, and a chunk's own queries fill that.
"""

import itertools
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from pallas_kernels.paged_attention.config import Geometry

MAX_PIECES = 16
TILE_KEYS = 128  # a piece begins at a multiple of this within its prefix
CHUNK = 8  # windows begin at a multiple of 8 tokens, as copies into swizzled memory want it
CONSUMER_ROWS, NUM_CONSUMERS = 64, 2  # tokens that a warpgroup multiplies at a time, and warpgroups that do
NUM_MULTIPROCESSORS = 132
# A window, full or not, takes as long as reading the prefix for this many rows (8B's heads: 2.3; 1B's: 2.8).
WINDOW_COST = 3
MIN_SAVED_BYTES = 1 << 25  # of a layer's keys and values: 8 us on an H200, what one more kernel takes at the least
MAX_TRIES = 16  # comparisons of many rows with one, about 20 us each


class Piece(NamedTuple):
    """Some consecutive keys of a shared prefix, and a window of the batch's tokens that are multiplied by them.

    All tokens of the window are computed; those whose row does not share the prefix are not used.
    """

    row: Any  # one that has the prefix in its block table
    chunk: Any  # the window is tokens chunk * 8 .. chunk * 8 + window_rows - 1
    num_tokens: Any  # of the whole prefix: whole blocks
    first_tile: Any  # in tiles of TILE_KEYS keys
    num_tiles: Any


class SharedPrefixes(NamedTuple):
    """Which rows of a batch share which beginnings, int32. All zeros: none.

    Row r's first num_tokens[r] keys are those of pieces first_piece[r] .. first_piece[r] + num_pieces[r] - 1. At least
    one of its keys, its own query's, is not among them.
    """

    pieces: Any  # [MAX_PIECES, 5], the fields of Piece
    total: Any  # [1], pieces that there are; the rest is padding
    num_tokens: Any  # [num_rows], 0 for rows that share nothing, and then so are the next
    first_piece: Any  # [num_rows]
    num_pieces: Any  # [num_rows]
    place: Any  # [num_rows], of the row's query in its pieces' window


class Rules(NamedTuple):
    """What decides whether sharing pays, and how it is cut into pieces."""

    block_size: int
    window_rows: int  # queries of a head that are multiplied at a time
    num_lanes: int  # pieces that are computed at the same time
    min_saved_tokens: int  # keys of a layer, less what windows cost, that a group must save


class Group(NamedTuple):
    """Rows with a common beginning."""

    rows: np.ndarray  # indices in the batch, ascending
    num_blocks: int  # that they have in common


class Window(NamedTuple):
    """Rows of a group that are multiplied at the same time."""

    rows: np.ndarray
    chunk: int
    num_tokens: int

    @property
    def num_saved(self) -> int:
        """Keys that need not be read, less what takes as long."""
        return (len(self.rows) - WINDOW_COST) * self.num_tokens


def rules_for(geometry: Geometry) -> Rules:
    """As mosaic_cascade.py multiplies: two heads for 64 rows or, where a group of heads is odd, one head for 128."""
    heads_at_once = NUM_CONSUMERS if geometry.group % NUM_CONSUMERS == 0 else 1
    token_bytes = 2 * geometry.num_kv_heads * geometry.head_dim * geometry.item_bytes
    return Rules(
        geometry.block_size,
        window_rows=CONSUMER_ROWS * NUM_CONSUMERS // heads_at_once,
        num_lanes=max(1, NUM_MULTIPROCESSORS * heads_at_once // geometry.num_heads),
        min_saved_tokens=MIN_SAVED_BYTES // token_bytes,
    )


def may_share(block_tables: np.ndarray, table_rows: np.ndarray, rules: Rules) -> bool:
    """False where shared_prefixes would find nothing, as can be seen from one column of the tables."""
    return bool(_repeated_blocks(_blocks_where_it_pays(block_tables, table_rows, rules)))


def shared_prefixes(
    block_tables: np.ndarray, table_rows: np.ndarray, seq_lens: np.ndarray, tokens: np.ndarray, rules: Rules
) -> SharedPrefixes | None:
    """The shared beginnings of a batch's rows of one query that are worth it; None if there are none.

    block_tables: int32 [any, blocks_per_row]; row r of the batch has block_tables[table_rows[r]], 0 past its blocks.
    Its query is the batch's token number tokens[r], ascending, and seq_lens[r] tokens are in the cache; 0 for a row
    that attends to nothing or has other than one query.
    """
    groups = find_groups(block_tables, table_rows, (seq_lens - 1) // rules.block_size, rules)
    windows = sorted((w for group in groups for w in _windows(group, tokens, rules)), key=lambda w: -w.num_saved)
    windows = [window for window in windows[:MAX_PIECES] if window.num_saved > 0]
    return _cut(windows, tokens, rules) if windows else None


def find_groups(block_tables: np.ndarray, table_rows: np.ndarray, num_blocks: np.ndarray, rules: Rules) -> list[Group]:
    """Disjoint groups of rows whose tables begin with the same blocks, and how many these are.

    num_blocks: how many of its first blocks each row may share. A group is the one that saves most among all that have
    its first row in them.
    """
    groups, tries = [], MAX_TRIES
    for rows in _candidates(block_tables, table_rows, num_blocks, rules):
        while len(rows) > WINDOW_COST and tries:
            tries -= 1
            common = _num_common(block_tables, table_rows[rows], num_blocks[rows])
            length = _best_length(common, rules)
            is_member = common >= length if length else np.arange(len(rows)) == 0
            if length:
                groups.append(Group(rows[is_member], length))
            rows = rows[~is_member]
    return groups


def _candidates(
    block_tables: np.ndarray, table_rows: np.ndarray, num_blocks: np.ndarray, rules: Rules
) -> Iterator[np.ndarray]:
    """Rows that have the same block where the shortest prefix that is worth it would end, were it all rows'."""
    blocks = _blocks_where_it_pays(block_tables, table_rows, rules)
    fewest = _fewest_blocks(len(table_rows), rules)
    for block in sorted(_repeated_blocks(blocks)):
        yield np.flatnonzero((blocks == block) & (num_blocks >= fewest))


def _fewest_blocks(num_rows: int, rules: Rules) -> int:
    """Of a prefix that is worth it, were it all rows'."""
    return max(1, -(-rules.min_saved_tokens // (max(1, num_rows - WINDOW_COST) * rules.block_size)))


def _blocks_where_it_pays(block_tables: np.ndarray, table_rows: np.ndarray, rules: Rules) -> np.ndarray:
    """The block of each row that ends such a prefix; none if the tables are too narrow or the rows too few."""
    fewest = _fewest_blocks(len(table_rows), rules)
    if len(table_rows) <= WINDOW_COST or fewest > block_tables.shape[1]:
        return np.zeros(0, np.int32)
    return block_tables[table_rows, fewest - 1]


def _repeated_blocks(blocks: np.ndarray) -> set[int]:
    """Blocks that more than WINDOW_COST rows have."""
    ordered = np.sort(blocks)
    return set(ordered[WINDOW_COST:][ordered[WINDOW_COST:] == ordered[:-WINDOW_COST]].tolist()) - {0}


def _num_common(block_tables: np.ndarray, table_rows: np.ndarray, num_blocks: np.ndarray) -> np.ndarray:
    """How many blocks each row has in common with the first, of those that both may share."""
    width = int(num_blocks[0])
    differs = np.ones((len(table_rows), width + 1), bool)  # in the end
    np.not_equal(block_tables[table_rows, :width], block_tables[table_rows[0], :width], out=differs[:, :width])
    return np.minimum(differs.argmax(axis=1), num_blocks)


def _best_length(common: np.ndarray, rules: Rules) -> int:
    """Blocks of the group that saves most; 0 if it saves too little."""
    lengths = np.sort(common)[::-1]
    counts = np.arange(1, len(lengths) + 1)
    saved = (counts - WINDOW_COST * -(-counts // rules.window_rows)) * lengths
    best = int(saved.argmax())
    return int(lengths[best]) if saved[best] * rules.block_size >= max(1, rules.min_saved_tokens) else 0


def _windows(group: Group, tokens: np.ndarray, rules: Rules) -> Iterator[Window]:
    """The group's rows in windows, from the first on; where others stand between, the windows are less full."""
    rows = group.rows
    while len(rows):
        chunk = int(tokens[rows[0]]) // CHUNK
        num_inside = int(np.searchsorted(tokens[rows], chunk * CHUNK + rules.window_rows))
        yield Window(rows[:num_inside], chunk, group.num_blocks * rules.block_size)
        rows = rows[num_inside:]


def _cut(windows: list[Window], tokens: np.ndarray, rules: Rules) -> SharedPrefixes:
    """Pieces of about equal size, window by window."""
    of_rows = np.zeros((4, len(tokens)), np.int32)
    pieces: list[tuple[int, ...]] = []
    tiles = [-(-window.num_tokens // TILE_KEYS) for window in windows]
    size = piece_size(tiles, rules.num_lanes)
    for window, num_tiles in zip(windows, tiles, strict=True):
        count = -(-num_tiles // size)
        of_rows[:, window.rows] = np.array([[window.num_tokens], [len(pieces)], [count], [-window.chunk * CHUNK]])
        ends = [num_tiles * number // count for number in range(count + 1)]
        head = (int(window.rows[0]), window.chunk, window.num_tokens)
        pieces += [(*head, first, end - first) for first, end in itertools.pairwise(ends)]
    of_rows[3] += np.where(of_rows[0] > 0, tokens, 0)
    padding = [(0,) * len(Piece._fields)] * (MAX_PIECES - len(pieces))
    return SharedPrefixes(np.array(pieces + padding, np.int32), np.array([len(pieces)], np.int32), *of_rows)


def piece_size(tiles: list[int], num_lanes: int) -> int:
    """Most tiles of keys of one piece, such that the last of num_lanes lanes is done soonest."""
    costs = {}
    for num_rounds in range(1, -(-MAX_PIECES // num_lanes) + 1):
        limit = min(num_lanes * num_rounds, MAX_PIECES)
        if limit >= len(tiles):
            size = -(-sum(tiles) // limit)
            while sum(-(-count // size) for count in tiles) > limit:
                size += 1
            costs[num_rounds * (size + 1)] = size  # to begin and to end a piece takes about as long as a tile
    return costs[min(costs)]
