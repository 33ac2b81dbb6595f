"""Rows whose block tables begin with the same blocks: found on the host, cut into work for the device.

Such rows' queries can be stacked against the shared blocks, which are then read once for all of them and not once for
each (Hydragen, Juravsky et al., 2024, sec. 3): a matrix product in the place of many products of a vector with a
matrix. mosaic_cascade.py computes it. Here is numpy only: this runs before a step.

Rows of one query save memory traffic. Prefill chunks save arithmetic, where they are short: their kernel multiplies 64
queries of two heads at a time, whether or not a chunk fills that. And where there are so few of them that most of the
GPU would wait for those few, a prefix, be it of one row alone, is cut into pieces that are computed side by side.
"""

import bisect
import itertools
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from pallas_kernels.paged_attention.config import Geometry, decode_queries

MAX_PIECES = 16  # of rows of one query; and of prefill chunks, where these are cut into more than one for a window
TILE_KEYS = 128  # a piece begins at a multiple of this within its prefix
CHUNK = 8  # windows begin at a multiple of 8 tokens, as copies into swizzled memory want it
CONSUMER_ROWS, NUM_CONSUMERS = 64, 2  # tokens that a warpgroup multiplies at a time, and warpgroups that do
NUM_MULTIPROCESSORS = 132
# A window, full or not, takes as long as reading the prefix for this many rows (8B's heads: 2.3; 1B's: 2.8).
WINDOW_COST = 3
MIN_SAVED_BYTES = 1 << 25  # of a layer's keys and values: 8 us on an H200, what one more kernel takes at the least
MIN_SAVED_TILES = 8  # of keys and 64 queries of two heads: about 2 us each, and to merge and to wait takes its time too
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

    Row r's first num_tokens[r] keys are those of num_pieces[r] pieces, of which every stride[r]-th is one, from
    first_piece[r] on. None of its own queries' keys is among them. Of rows of one query the stride is 1. Of a prefill
    chunk the window of a piece may end before its queries do: they go on in the piece behind it.
    """

    pieces: Any  # [max_pieces(num_tokens, ...), 5], or MAX_PIECES if no row has more than one query; fields of Piece
    total: Any  # [1], pieces that there are; the rest is padding
    num_tokens: Any  # [num_rows], 0 for rows that share nothing, and then so are the next
    first_piece: Any  # [num_rows]
    num_pieces: Any  # [num_rows]
    place: Any  # [num_rows], of the row's first query in its first piece's window
    stride: Any  # [num_rows], from one of the row's pieces to the next


class Rules(NamedTuple):
    """What decides whether sharing pays, and how it is cut into pieces."""

    block_size: int
    chunk_queries: int  # fewest queries of a row that the prefill kernel takes
    window_rows: int  # queries of a head that are multiplied at a time
    num_lanes: int  # pieces that are computed at the same time
    min_saved_tokens: int  # keys of a layer, less what windows cost, that a group must save
    min_saved_tiles: int = MIN_SAVED_TILES  # of keys, one after the other, that prefill chunks must save


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


class Stack(NamedTuple):
    """Prefill chunks that share a beginning, or one alone with what comes before it; their tokens in windows."""

    members: np.ndarray  # indices in Chunks, ascending
    num_tokens: int  # of the beginning
    windows: list[int]  # where in the batch each begins, in chunks of 8 tokens

    @property
    def num_tiles(self) -> int:
        """Tiles of keys of the beginning."""
        return -(-self.num_tokens // TILE_KEYS)


class Chunks(NamedTuple):
    """A batch's prefill chunks."""

    rows: np.ndarray  # indices in the batch, ascending
    starts: np.ndarray  # the batch's tokens starts[i] .. ends[i] - 1 are chunk i's
    ends: np.ndarray
    contexts: np.ndarray  # tokens before each
    tiles: np.ndarray  # of queries, that the prefill kernel cuts each into
    most_windows: int  # that there is room for


def rules_for(geometry: Geometry) -> Rules:
    """As mosaic_cascade.py multiplies: two heads for 64 rows or, where a group of heads is odd, one head for 128."""
    heads_at_once = NUM_CONSUMERS if geometry.group % NUM_CONSUMERS == 0 else 1
    token_bytes = 2 * geometry.num_kv_heads * geometry.head_dim * geometry.item_bytes
    return Rules(
        geometry.block_size,
        chunk_queries=decode_queries(geometry) + 1,
        window_rows=CONSUMER_ROWS * NUM_CONSUMERS // heads_at_once,
        num_lanes=max(1, NUM_MULTIPROCESSORS * heads_at_once // geometry.num_heads),
        min_saved_tokens=MIN_SAVED_BYTES // token_bytes,
    )


def max_pieces(num_tokens: int, rules: Rules) -> int:
    """Of a step of num_tokens tokens that takes prefill chunks; a step of decode rows alone has MAX_PIECES."""
    return 2 * MAX_PIECES + num_tokens // rules.window_rows


def may_share(block_tables: np.ndarray, table_rows: np.ndarray, rules: Rules) -> bool:
    """Of rows of one query: False where shared_prefixes would find nothing, as one column of the tables shows."""
    return bool(_repeated_blocks(_blocks_where_it_pays(block_tables, table_rows, rules)))


def shared_prefixes(
    block_tables: np.ndarray, table_rows: np.ndarray, contexts: np.ndarray, starts: np.ndarray, rules: Rules
) -> SharedPrefixes | None:
    """The shared beginnings of a batch's rows that are worth it; None if there are none.

    block_tables: int32 [any, blocks_per_row]; row r of the batch has block_tables[table_rows[r]], 0 past its blocks.
    Its queries are the batch's tokens starts[r] .. starts[r + 1] - 1, and before them it has contexts[r] tokens in the
    cache. Rows of more than one query that are not the prefill kernel's share nothing.
    """
    counts = np.diff(starts)
    chunks = _chunks(contexts, starts, rules)
    stacks = _stacks(block_tables, table_rows, chunks, rules) if len(chunks.rows) else []
    alone = np.where(counts == 1, contexts // rules.block_size, 0)
    groups = find_groups(block_tables, table_rows, alone, rules) if alone.any() else []
    windows = sorted((w for group in groups for w in _windows(group, starts, rules)), key=lambda w: -w.num_saved)
    windows = [window for window in windows[:MAX_PIECES] if window.num_saved > 0]
    if not stacks and not windows:
        return None
    most = MAX_PIECES if counts.max() == 1 else max_pieces(int(starts[-1]), rules)
    of_rows = np.zeros((len(SharedPrefixes._fields) - 2, len(counts)), np.int32)
    pieces = _lay(stacks, chunks, of_rows, rules)  # first, since most of them are larger
    pieces += _cut(windows, len(pieces), starts, of_rows, rules)
    padding = [(0,) * len(Piece._fields)] * (most - len(pieces))
    return SharedPrefixes(np.array(pieces + padding, np.int32), np.array([len(pieces)], np.int32), *of_rows)


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


def _windows(group: Group, starts: np.ndarray, rules: Rules) -> Iterator[Window]:
    """The group's rows in windows, from the first on; where others stand between, the windows are less full."""
    rows = group.rows
    while len(rows):
        chunk = int(starts[rows[0]]) // CHUNK
        num_inside = int(np.searchsorted(starts[rows], chunk * CHUNK + rules.window_rows))
        yield Window(rows[:num_inside], chunk, group.num_blocks * rules.block_size)
        rows = rows[num_inside:]


def _cut(
    windows: list[Window], first_piece: int, starts: np.ndarray, of_rows: np.ndarray, rules: Rules
) -> list[tuple[int, ...]]:
    """Pieces of about equal size, window by window, numbered from first_piece on; fills in their columns of of_rows."""
    pieces: list[tuple[int, ...]] = []
    tiles = [-(-window.num_tokens // TILE_KEYS) for window in windows]
    size = piece_size(tiles, rules.num_lanes) if tiles else 0
    for window, num_tiles in zip(windows, tiles, strict=True):
        count = -(-num_tiles // size)
        places = starts[window.rows] - window.chunk * CHUNK
        _fill(of_rows, window.rows, window.num_tokens, first_piece + len(pieces), count, places, 1)
        for ends in itertools.pairwise(_ends(num_tiles, count)):
            pieces.append(_piece(int(window.rows[0]), window.chunk, window.num_tokens, ends))
    return pieces


def _fill(of_rows: np.ndarray, rows: np.ndarray, *values: Any) -> None:
    """Writes the fields of some rows, each one value or one for each of them."""
    for field, value in zip(of_rows, values, strict=True):
        field[rows] = value


def _ends(num_tiles: int, count: int) -> list[int]:
    """Where count pieces of about equal size begin and end."""
    return [num_tiles * number // count for number in range(count + 1)]


def _piece(row: int, chunk: int, num_tokens: int, ends: tuple[int, int]) -> tuple[int, ...]:
    return row, chunk, num_tokens, ends[0], ends[1] - ends[0]


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


def _stacks(block_tables: np.ndarray, table_rows: np.ndarray, chunks: Chunks, rules: Rules) -> list[Stack]:
    """The prefill chunks whose beginnings are best computed apart; none if that saves too little."""
    num_blocks = np.zeros(len(table_rows), np.int32)
    num_blocks[chunks.rows] = chunks.contexts // rules.block_size
    found = find_groups(block_tables, table_rows, num_blocks, rules)
    groups = [_stack(chunks, chunks.rows.searchsorted(rows), length, rules) for rows, length in found]
    stacks = _fitting(groups, chunks)
    loners = _loners(chunks, stacks, rules)
    options = [option for option in (stacks, stacks + loners if loners else []) if option]
    if not options:
        return []
    num_tiles = [_busiest(option, chunks, rules) for option in options]
    best = int(np.argmin(num_tiles))
    return options[best] if _busiest([], chunks, rules) - num_tiles[best] >= rules.min_saved_tiles else []


def _chunks(contexts: np.ndarray, starts: np.ndarray, rules: Rules) -> Chunks:
    rows = np.flatnonzero(np.diff(starts) >= rules.chunk_queries)
    firsts, ends = starts[rows], starts[rows + 1]
    tiles = -(-(ends - firsts // CHUNK * CHUNK) // rules.window_rows)
    return Chunks(rows, firsts, ends, contexts[rows], tiles, MAX_PIECES + int(starts[-1]) // rules.window_rows)


def _stack(chunks: Chunks, members: np.ndarray, num_blocks: int, rules: Rules) -> Stack:
    """Windows one behind the other, but for tokens that are other rows'."""
    firsts, ends = chunks.starts[members].tolist(), chunks.ends[members].tolist()
    windows, done = [], 0
    while done < ends[-1]:
        first = firsts[bisect.bisect_right(ends, done)]
        windows.append(max(first, done) // CHUNK)
        done = windows[-1] * CHUNK + rules.window_rows
    return Stack(members, num_blocks * rules.block_size, windows)


def _fitting(stacks: list[Stack], chunks: Chunks) -> list[Stack]:
    """Those that save most, of all that save tiles of queries, in as many windows as there is room for."""
    saved = [int(chunks.tiles[stack.members].sum()) - len(stack.windows) for stack in stacks]
    fitting, room = [], chunks.most_windows
    for place in sorted(range(len(stacks)), key=lambda place: -saved[place] * stacks[place].num_tokens):
        num_windows = len(stacks[place].windows)
        if saved[place] > 0 and num_windows <= room:
            fitting.append(stacks[place])
            room -= num_windows
    return fitting


def _loners(chunks: Chunks, stacks: list[Stack], rules: Rules) -> list[Stack]:
    """Every other chunk with a long context as a stack of its own, if there are so few that they will be cut."""
    is_alone = chunks.contexts >= max(rules.min_saved_tiles * TILE_KEYS, rules.block_size)
    for stack in stacks:
        is_alone[stack.members] = False
    members = np.flatnonzero(is_alone)
    if chunks.tiles[members].sum() + sum(len(stack.windows) for stack in stacks) > _most_to_cut(rules):
        return []
    return [_stack(chunks, np.array([i]), int(chunks.contexts[i]) // rules.block_size, rules) for i in members]


def _most_to_cut(rules: Rules) -> int:
    """Windows; with more, those of prefill chunks are pieces as they are."""
    return min(rules.num_lanes, MAX_PIECES) // 2


def _busiest(stacks: list[Stack], chunks: Chunks, rules: Rules) -> float:
    """Tiles of keys that the busiest multiprocessor goes through, in both kernels together."""
    own = chunks.contexts + chunks.ends - chunks.starts
    for stack in stacks:
        own[stack.members] -= stack.num_tokens
    own = -(-own // TILE_KEYS)
    counts = _piece_counts(stacks, rules)
    sizes = [-(-stack.num_tiles // count) + 1 for stack, count in zip(stacks, counts, strict=True)]  # see piece_size
    numbers = [len(stack.windows) * count for stack, count in zip(stacks, counts, strict=True)]
    return _rounds(own, chunks.tiles, rules) + _rounds(np.array(sizes), np.array(numbers), rules)


def _rounds(sizes: np.ndarray, numbers: np.ndarray, rules: Rules) -> float:
    """Of the busiest of num_lanes lanes that take `numbers` pieces of work of these sizes."""
    return max(float(sizes.max(initial=0)), float(sizes @ numbers) / rules.num_lanes)


def _piece_counts(stacks: list[Stack], rules: Rules) -> list[int]:
    """How many pieces each stack's beginning is cut into."""
    tiles = [stack.num_tiles for stack in stacks for _ in stack.windows]
    if not tiles or len(tiles) > _most_to_cut(rules):
        return [1] * len(stacks)
    size = piece_size(tiles, rules.num_lanes)
    return [-(-stack.num_tiles // size) for stack in stacks]


def _lay(stacks: list[Stack], chunks: Chunks, of_rows: np.ndarray, rules: Rules) -> list[tuple[int, ...]]:
    """Pieces, as many times all windows of a stack as it has pieces; fills in their rows' columns of of_rows."""
    pieces: list[tuple[int, ...]] = []
    for stack, count in zip(stacks, _piece_counts(stacks, rules), strict=True):
        windows, firsts, rows = np.array(stack.windows), chunks.starts[stack.members], chunks.rows[stack.members]
        number = windows.searchsorted(firsts // CHUNK, side="right") - 1
        places = firsts - windows[number] * CHUNK
        _fill(of_rows, rows, stack.num_tokens, len(pieces) + number, count, places, len(windows))
        for ends in itertools.pairwise(_ends(stack.num_tiles, count)):
            pieces += [_piece(int(rows[0]), chunk, stack.num_tokens, ends) for chunk in stack.windows]
    return pieces
