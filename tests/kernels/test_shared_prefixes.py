"""Which rows of a batch share which beginnings, and how that is cut into work: numpy alone."""

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_kernels.paged_attention.cascade import (
    MAX_PIECES,
    TILE_KEYS,
    WINDOW_COST,
    Group,
    Piece,
    Rules,
    SharedPrefixes,
    find_groups,
    max_pieces,
    may_share,
    piece_size,
    rules_for,
    shared_prefixes,
)
from pallas_kernels.paged_attention.config import Geometry

LLAMA = Geometry(32, 8, 128, 16, "bfloat16", "bfloat16")
SMALL = Rules(block_size=16, chunk_queries=5, window_rows=16, num_lanes=4, min_saved_tokens=64)
WIDTH = 12


def tables_of(prefixes: list[list[int]], width: int = WIDTH) -> np.ndarray:
    """A table a row: the given blocks, and from there on blocks of its own."""
    tables = 1000 * (1 + np.arange(len(prefixes), dtype=np.int32)[:, None]) + np.arange(width, dtype=np.int32)
    for row, blocks in enumerate(prefixes):
        tables[row, : len(blocks)] = blocks
    return tables


def num_common(tables: np.ndarray, rows: list[int], most: int) -> int:
    """Columns in which all the rows are equal, from the first on."""
    return next((c for c in range(most) if len({int(tables[row, c]) for row in rows}) > 1), most)


@st.composite
def batches(draw: st.DrawFn) -> tuple[np.ndarray, np.ndarray]:
    """Block tables with a few beginnings, some of which begin alike, and seq_lens; in any order."""
    trunk = draw(st.lists(st.integers(0, 3), max_size=WIDTH))
    beginnings = [trunk[: draw(st.integers(0, len(trunk)))] for _ in range(3)]
    beginnings = [b + draw(st.lists(st.integers(4, 6), max_size=WIDTH - len(b))) for b in beginnings]
    chosen = draw(st.lists(st.integers(0, 2), min_size=1, max_size=40))
    blocks = [[1 + 10 * place + block for place, block in enumerate(beginnings[index])] for index in chosen]
    seq_lens = [draw(st.one_of(st.just(WIDTH * 16), st.integers(0, WIDTH * 16))) for _ in chosen]
    return tables_of(blocks), np.array(seq_lens, np.int32)


@settings(deadline=None)
@given(batches())
def test_groups_have_exactly_the_beginnings_that_their_rows_have_in_common(
    batch: tuple[np.ndarray, np.ndarray],
) -> None:
    tables, seq_lens = batch
    num_blocks = (seq_lens - 1) // SMALL.block_size
    groups = find_groups(tables, np.arange(len(tables)), num_blocks, SMALL)
    seen: set[int] = set()
    for rows, length in groups:
        assert length == num_common(tables, rows.tolist(), int(num_blocks[rows].min()))
        assert (len(rows) - WINDOW_COST) * length * 16 >= SMALL.min_saved_tokens
        assert sorted(rows.tolist()) == rows.tolist() and not seen & set(rows.tolist())
        seen |= set(rows.tolist())


@settings(deadline=None)
@given(batches())
def test_no_group_that_pays_is_left(batch: tuple[np.ndarray, np.ndarray]) -> None:
    """Against all groups there could be among the rows that are left: those of one row's first blocks."""
    tables, seq_lens = batch
    num_blocks = (seq_lens - 1) // SMALL.block_size
    groups = find_groups(tables, np.arange(len(tables)), num_blocks, SMALL)
    left = sorted(set(range(len(tables))) - {row for group in groups for row in group.rows.tolist()})
    for row in left:
        for length in range(1, int(num_blocks[row]) + 1):
            alike = [r for r in left if num_blocks[r] >= length and (tables[r, :length] == tables[row, :length]).all()]
            num_windows = -(-len(alike) // SMALL.window_rows)
            assert (len(alike) - WINDOW_COST * num_windows) * length * 16 < SMALL.min_saved_tokens


@settings(deadline=None)
@given(batches(), st.integers(1, 6), st.lists(st.sampled_from([0, 1, 1, 1, 3, 5, 9, 18, 40]), min_size=40, max_size=40))
def test_pieces_cover_each_rows_prefix_once(
    batch: tuple[np.ndarray, np.ndarray], num_lanes: int, counts: list[int]
) -> None:
    """Of all kinds of rows, under rules by which everything pays that can be shared."""
    tables, seq_lens = batch
    rules = SMALL._replace(num_lanes=num_lanes, min_saved_tiles=-1000)
    queries = np.minimum(counts[: len(tables)], seq_lens)
    contexts, starts = seq_lens - queries, np.cumsum([0, *queries])
    shared = shared_prefixes(tables, np.arange(len(tables)), contexts, starts, rules)
    if shared is not None:
        check(shared, tables, contexts, starts, rules)


def check(shared: SharedPrefixes, tables: np.ndarray, contexts: np.ndarray, starts: np.ndarray, rules: Rules) -> None:
    """What the kernels take for granted: for each query, one place in a window of each of its row's pieces."""
    total, counts = int(shared.total[0]), np.diff(starts)
    assert 1 <= total <= len(shared.pieces) == (MAX_PIECES if max(counts) == 1 else max_pieces(int(starts[-1]), rules))
    assert all(field.dtype == np.int32 for field in shared)
    for row, (num_tokens, first, count, place, stride) in enumerate(zip(*shared[2:], strict=True)):
        if num_tokens == 0:
            assert first == count == place == stride == 0
            continue
        assert counts[row] == 1 or counts[row] >= rules.chunk_queries
        assert num_tokens % 16 == 0 and num_tokens <= contexts[row]
        assert count > 0 and (stride == 1 or counts[row] > 1)
        for query in range(counts[row]):
            windows, places = np.divmod(
                place + query + rules.window_rows * (first + stride * np.arange(count)), rules.window_rows
            )
            pieces = [Piece(*shared.pieces[window].tolist()) for window in windows]
            assert max(windows) < total and {piece.num_tokens for piece in pieces} == {num_tokens}
            assert all((tables[piece.row] == tables[row])[: num_tokens // 16].all() for piece in pieces)
            assert {8 * piece.chunk + at for piece, at in zip(pieces, places, strict=True)} == {starts[row] + query}
            ends = np.cumsum([0] + [piece.num_tiles for piece in pieces])
            assert [piece.first_tile for piece in pieces] == ends[:-1].tolist() and min(np.diff(ends)) > 0
            assert ends[-1] == -(-num_tokens // TILE_KEYS)


def test_the_workload_of_many_users_on_one_system_prompt() -> None:
    """64 rows, 4000 shared tokens: one piece for each lane, all of one size."""
    tables = tables_of([list(range(1, 251))] * 64, 272)
    shared = shared_prefixes(tables, np.arange(64), np.full(64, 4032), np.arange(65), rules_for(LLAMA))
    assert shared is not None
    check(shared, tables, np.full(64, 4032), np.arange(65), rules_for(LLAMA))
    assert shared.pieces[:9].tolist() == [[0, 0, 4000, 4 * piece, 4] for piece in range(8)] + [[0] * 5]
    assert shared.num_pieces.tolist() == [8] * 64 and shared.place.tolist() == list(range(64))


def test_several_groups_and_rows_that_stand_anywhere() -> None:
    """By way of the rows of a larger table."""
    long, short = list(range(1, 101)), list(range(500, 540))
    prefixes = [long if row % 2 else short for row in range(100)]
    order = np.random.default_rng(0).permutation(100)
    tables = tables_of(prefixes, 272)
    shared = shared_prefixes(tables, order, np.full(100, 3999), np.arange(101), rules_for(LLAMA))
    assert shared is not None
    check(shared, tables[order], np.full(100, 3999), np.arange(101), rules_for(LLAMA))
    assert shared.num_tokens.tolist() == [1600 if row % 2 else 640 for row in order]


def test_of_nested_beginnings_the_one_that_saves_most_is_taken() -> None:
    """40 rows share 50 blocks, 8 of them 60 more."""
    tables = tables_of([list(range(1, 51 + (60 if row < 8 else 0))) for row in range(40)], 272)
    groups = find_groups(tables, np.arange(40), np.full(40, 200), rules_for(LLAMA))
    assert [(len(rows), length) for rows, length in groups] == [(40, 50)]


def test_one_row_that_shares_less_does_not_spoil_it() -> None:
    tables = tables_of([list(range(1, 251))] * 20 + [[1, 2, 3]], 272)
    (group,) = find_groups(tables, np.arange(21), np.full(21, 250), rules_for(LLAMA))
    assert isinstance(group, Group) and group.rows.tolist() == list(range(20)) and group.num_blocks == 250


@pytest.mark.parametrize(
    ("num_rows", "num_blocks", "is_worth_it"), [(64, 250, True), (64, 4, False), (256, 2, False), (4, 250, False)]
)
def test_short_or_lonely_beginnings_are_left_alone(num_rows: int, num_blocks: int, is_worth_it: bool) -> None:
    tables, rows = tables_of([list(range(1, num_blocks + 1))] * num_rows, 272), np.arange(num_rows)
    assert (
        shared_prefixes(tables, rows, np.full(num_rows, 4299), np.arange(num_rows + 1), rules_for(LLAMA)) is not None
    ) == is_worth_it
    assert may_share(tables, rows, rules_for(LLAMA)) == is_worth_it


def test_null_blocks_are_nobodys_beginning() -> None:
    tables = np.zeros((64, 272), np.int32)
    assert not may_share(tables, np.arange(64), rules_for(LLAMA))
    assert shared_prefixes(tables, np.arange(64), np.zeros(64, np.int32), np.arange(65), rules_for(LLAMA)) is None


def test_a_last_block_that_is_being_written_is_not_shared() -> None:
    """Forks of one sequence have all blocks in common but the one that the step writes to."""
    tables = tables_of([list(range(1, 101))] * 32, 272)
    shared = shared_prefixes(tables, np.arange(32), np.full(32, 1599), np.arange(33), rules_for(LLAMA))
    assert shared is not None and shared.num_tokens.tolist() == [99 * 16] * 32


@pytest.mark.parametrize(
    ("tiles", "num_lanes", "size"),
    [([32], 8, 4), ([32] * 4, 8, 16), ([10], 66, 1), ([8, 8, 8], 8, 4), ([5] * 16, 4, 5), ([3], 1, 3)],
)
def test_pieces_keep_all_lanes_busy(tiles: list[int], num_lanes: int, size: int) -> None:
    assert piece_size(tiles, num_lanes) == size
    assert sum(-(-count // size) for count in tiles) <= MAX_PIECES


@pytest.mark.parametrize(
    ("chunks", "num_windows", "num_pieces"),
    [
        ([(250, 0, 32)] * 64, 32, 1),
        ([(250, 0, 8)] * 64, 8, 1),
        ([(62, 8, 16)] * 128, 32, 1),
        ([(250, 0, 5)] * 16, 2, 4),
        ([(0, 4000, 32)], 1, 8),
        ([(0, 4000, 32), (0, 2000, 100)], 3, 4),
        ([(250, 100, 1)] * 64 + [(250, 40, 30)], 1, 8),
    ],
    ids=["32 queries", "8", "16", "few rows", "one row", "two rows", "beside decode rows"],
)
def test_chunks_whose_beginnings_are_computed_apart(
    chunks: list[tuple[int, int, int]], num_windows: int, num_pieces: int
) -> None:
    """Blocks that all have in common, tokens before the chunk that are the row's own, and its queries.

    Many rows are stacked; the beginnings of a few rows are cut into pieces, for all of the GPU.
    """
    rules, tables = rules_for(LLAMA), tables_of([list(range(1, num_blocks + 1)) for num_blocks, *_ in chunks], 272)
    contexts, starts = np.array([16 * n + own for n, own, _ in chunks]), np.cumsum([0] + [n for *_, n in chunks])
    shared = shared_prefixes(tables, np.arange(len(chunks)), contexts, starts, rules)
    assert shared is not None
    check(shared, tables, contexts, starts, rules)
    is_chunk = np.diff(starts) > 1
    assert shared.num_tokens.all() and max(shared.num_pieces[is_chunk]) == num_pieces
    assert len({chunk for row, chunk, *_ in shared.pieces[: shared.total[0]].tolist() if is_chunk[row]}) == num_windows


@pytest.mark.parametrize(
    "chunks",
    [
        [(250, 0, 64)] * 16,  # fill their tiles by themselves
        [(250, 0, 4)] * 64,  # are the decode kernel's
        [(0, 0, 512)] * 4,
        [(0, 0, 2000), (0, 4000, 32)],  # one hides behind the other
        [(0, 900, 32)],
    ],
    ids=["64 queries", "4 queries", "no context", "beside a long one", "short context"],
)
def test_chunks_that_are_left_alone(chunks: list[tuple[int, int, int]]) -> None:
    rules, tables = rules_for(LLAMA), tables_of([list(range(1, num_blocks + 1)) for num_blocks, *_ in chunks], 272)
    contexts, starts = np.array([16 * n + own for n, own, _ in chunks]), np.cumsum([0] + [n for *_, n in chunks])
    assert shared_prefixes(tables, np.arange(len(chunks)), contexts, starts, rules) is None


def test_more_groups_of_chunks_than_there_is_room_for() -> None:
    """Four, whose rows stand between each other's: as many are taken as fit."""
    rules = rules_for(LLAMA)
    tables = tables_of([list(range(300 * (row % 4) + 1, 300 * (row % 4) + 251)) for row in range(128)], 272)
    shared = shared_prefixes(tables, np.arange(128), np.full(128, 4000), np.arange(0, 8 * 129, 8), rules)
    assert shared is not None
    check(shared, tables, np.full(128, 4000), np.arange(0, 8 * 129, 8), rules)
    assert (shared.num_tokens > 0).sum() == 64 and shared.total[0] == MAX_PIECES + 1024 // 64


def test_rules_follow_the_heads() -> None:
    """An odd group is multiplied a head at a time, in windows twice as wide; smaller heads must save more tokens."""
    assert rules_for(LLAMA) == Rules(16, 5, 64, 8, 8192)
    assert rules_for(dataclasses.replace(LLAMA, head_dim=64)).min_saved_tokens == 16384
    assert rules_for(dataclasses.replace(LLAMA, num_heads=28, num_kv_heads=4))[1:4] == (3, 128, 4)
