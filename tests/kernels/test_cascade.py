"""Attention over shared prefixes on Mosaic GPU: interpreted on the CPU with a race detector; on a GPU at real sizes."""

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import paged_attention
from pallas_kernels.paged_attention import cascade, mosaic_cascade
from pallas_kernels.paged_attention.cascade import Rules, SharedPrefixes
from pallas_kernels.paged_attention.config import Geometry
from pallas_kernels.paged_attention.mosaic_decode import MosaicDecodeConfig, decode
from pallas_kernels.paged_attention.mosaic_prefill import MosaicPrefillConfig, prefill, prefill_config
from pallas_kernels.paged_attention.shapes import AttentionShape, HeadLayout, Row
from pallas_kernels.paged_attention.triton_common import Refs
from tests.helpers.attention_cases import LAYER, AttentionCase, Garbage, Padding, dense_attention, make_case

# Scores of rows beside the windows' own are computed, and then not used.
pytestmark = pytest.mark.filterwarnings("ignore:invalid value encountered in matmul:RuntimeWarning")

TOLERANCE = {"bfloat16": 2e-2, "float16": 4e-3}
LONG, SHORT, NONE = 560, 144, 0  # tokens of two prefixes: 4.4 and 1.1 tiles of keys; and of none
# Which prefix each row has, and how many tokens of its own.
ROWS = [(LONG, 1), (SHORT, 20), (LONG, 17), (NONE, 70), (LONG, 100), (SHORT, 1), (LONG, 16), (SHORT, 9), (SHORT, 33)]
FEW_ROWS = [(SHORT, 1), (SHORT, 20), (NONE, 5), (SHORT, 70), (SHORT, 16)]
EVEN, ODD = HeadLayout(2, 1, 64), HeadLayout(1, 1, 64)
# The same, and how many queries: of two prefixes prefill chunks, of the third rows of one query.
FIRST, SECOND, THIRD = 48, 160, 112
CHUNKED = [
    ((FIRST, 40), 18),
    ((THIRD, 5), 1),
    ((SECOND, 17), 17),
    *[((THIRD, own), 1) for own in (1, 30, 16)],
    ((FIRST, 66), 66),
    ((NONE, 25), 17),
    ((SECOND, 90), 30),
    ((FIRST, 20), 20),
    ((NONE, 40), 2),
    ((SECOND, 19), 17),
    ((FIRST, 30), 19),
    ((SECOND, 64), 37),
]


def case_of(
    layout: HeadLayout,
    rows: list[tuple[int, int]],
    block_size: int = 16,
    dtype: str = "bfloat16",
    garbage: Garbage | None = None,
    chunks: Mapping[int, int] | None = None,
) -> AttentionCase:
    """Rows whose tables begin with the first row's of the same prefix, and some rows of padding.

    chunks: which rows have other than one query, and how many.
    """
    queries = np.ones(len(rows), int)
    for index, count in (chunks or {}).items():
        queries[index] = count
    new_rows = tuple(Row(sum(row) - count, count) for row, count in zip(rows, queries.tolist(), strict=True))
    shape = AttentionShape("shared", *layout, block_size, new_rows)
    num_rows, blocks_per_row = len(rows) + 1, max(map(sum, rows)) // block_size + 3
    num_tokens = num_rows if chunks is None else -(-shape.num_tokens // 8) * 8 + 8
    padding = Padding(num_tokens, num_rows, blocks_per_row, shape.num_blocks + 12)
    case = make_case(shape, padding, dtype=dtype, garbage=garbage)
    for index, (num_shared, num_own) in enumerate(rows):
        if num_shared == NONE:
            continue
        first = next(row for row, (other, _) in enumerate(rows) if other == num_shared)
        case.block_tables[index, : num_shared // block_size] = case.block_tables[first, : num_shared // block_size]
        positions = np.arange(num_shared + num_own)
        slots = case.block_tables[index, positions // block_size], slice(None), positions % block_size
        keys, values = case.k_cache[LAYER][slots], case.v_cache[LAYER][slots]
        tokens = slice(*case.query_start_loc[index : index + 2])
        context = sum(rows[index]) - int(queries[index])
        case.expected[tokens] = dense_attention(case.q[tokens], keys, values, context, None)
    return case


def geometry_of(case: AttentionCase) -> Geometry:
    _, num_heads, head_dim = case.q.shape
    return Geometry(
        num_heads, case.k_cache.shape[2], head_dim, case.k_cache.shape[3], case.q.dtype.name, case.q.dtype.name
    )


def shared_in(case: AttentionCase, **changes: int) -> SharedPrefixes:
    """What is found, by rules under which next to nothing pays."""
    rules = cascade.rules_for(geometry_of(case))._replace(**({"min_saved_tokens": 100} | changes))
    contexts = case.seq_lens - np.diff(case.query_start_loc)
    shared = cascade.shared_prefixes(case.block_tables, np.arange(len(contexts)), contexts, case.query_start_loc, rules)
    assert shared is not None
    return shared


def attend(
    arrays: Refs, shared: SharedPrefixes, geometry: Geometry, tiles: MosaicPrefillConfig, interpret: Any
) -> jax.Array:
    """As mosaic.paged_attention, which cannot be interpreted."""
    scale = geometry.head_dim**-0.5
    prefix = mosaic_cascade.attend_prefixes(arrays, shared, geometry, tiles, scale, interpret)
    out = decode(arrays, None, geometry, MosaicDecodeConfig(64, 2, 1), scale, interpret, prefix=prefix)
    if len(arrays.q) == len(arrays.seq_lens):
        return out
    return prefill(arrays, out, geometry, tiles, scale, interpret, prefix=prefix)


def interpreted(case: AttentionCase, shared: SharedPrefixes) -> np.ndarray:
    """Two programs, so that each takes several tiles."""
    q, k, v, *rows = case.arguments
    geometry = geometry_of(case)
    arrays = Refs(jnp.full((1,), LAYER, jnp.int32), *rows, q, k, v)
    tiles = dataclasses.replace(prefill_config(geometry), num_programs=2)
    used = max(int(shared.total[0]), 1)  # the interpreter's time goes by how much memory there is for more
    shared = SharedPrefixes(*map(jnp.asarray, shared._replace(pieces=shared.pieces[:used])))
    out = attend(arrays, shared, geometry, tiles, plgpu.InterpretGPUParams(detect_races=True))
    assert out.shape == q.shape and out.dtype == q.dtype
    return np.asarray(out.astype(jnp.float32))


@pytest.mark.parametrize(
    ("layout", "block_size", "dtype"), [(EVEN, 16, "bfloat16"), (ODD, 8, "float16")], ids=["two heads", "one head"]
)
def test_agrees_with_dense_attention(
    layout: HeadLayout, block_size: int, dtype: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two groups whose rows stand between each other's, a row that shares nothing, and padding.

    There are more pieces of the longer prefix than are merged at a time.
    """
    case = case_of(layout, ROWS, block_size, dtype)
    shared = shared_in(case)
    assert shared.num_tokens.tolist() == [num_shared for num_shared, _ in ROWS] + [0]
    assert set(shared.num_pieces.tolist()) == {0, 2, 5}
    np.testing.assert_allclose(interpreted(case, shared), case.expected, rtol=0, atol=TOLERANCE[dtype])
    assert "RACE DETECTED" not in capsys.readouterr().out


def test_rows_beside_prefill_chunks(capsys: pytest.CaptureFixture[str]) -> None:
    """A chunk that stands between rows that share, and a row of two queries, which the decode kernel takes too."""
    case = case_of(EVEN, [*ROWS[:3], (NONE, 90), (NONE, 30), *ROWS[4:]], chunks={3: 20, 4: 2})
    shared = shared_in(case)
    assert shared.num_tokens.tolist() == [LONG, SHORT, LONG, 0, 0, LONG, SHORT, LONG, SHORT, SHORT, 0]
    np.testing.assert_allclose(interpreted(case, shared), case.expected, rtol=0, atol=TOLERANCE["bfloat16"])
    assert "RACE DETECTED" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("layout", "block_size", "dtype", "num_pieces"),
    [(EVEN, 16, "bfloat16", {0, 1, 2}), (ODD, 8, "float16", {0, 1})],
    ids=["two heads", "one head"],
)
def test_prefill_chunks(
    layout: HeadLayout, block_size: int, dtype: str, num_pieces: set[int], capsys: pytest.CaptureFixture[str]
) -> None:
    """Two groups of chunks between each other, that begin and end anywhere; rows of one query that share, and others.

    Chunks longer than a window, and some that stand in two; prefixes as they are, and cut in pieces, read by way of
    one row each.
    """
    rows, chunks = zip(*CHUNKED, strict=True)
    case = case_of(layout, list(rows), block_size, dtype, chunks=dict(enumerate(chunks)))
    shared = shared_in(case, min_saved_tokens=40, min_saved_tiles=-100, **({} if 2 in num_pieces else {"num_lanes": 1}))
    assert shared.num_tokens.tolist() == [num_shared for num_shared, _ in rows] + [0]
    assert set(shared.num_pieces.tolist()) == num_pieces
    named = shared.pieces[: int(shared.total[0]), 0]
    for row in set(range(len(rows))) - set(named.tolist()):  # its part of the table is not read
        case.block_tables[row, : shared.num_tokens[row] // block_size] = case.k_cache.shape[1] - 1
    np.testing.assert_allclose(interpreted(case, shared), case.expected, rtol=0, atol=TOLERANCE[dtype])
    assert "RACE DETECTED" not in capsys.readouterr().out


def test_what_no_row_owns_and_what_is_shared_is_not_read() -> None:
    """Bit for bit: rows' last blocks, the tile of keys behind the prefix, and the prefix of all rows but one."""
    clean, dirty = (case_of(EVEN, FEW_ROWS, garbage=Garbage(*slots)) for slots in ((0.0, "last"), (np.nan, "far")))
    shared = shared_in(clean)
    (named,) = set(shared.pieces[: int(shared.total[0]), 0].tolist())
    for row, num_tokens in enumerate(shared.num_tokens.tolist()):
        if row != named:
            dirty.block_tables[row, : num_tokens // 16] = dirty.k_cache.shape[1] - 1
    np.testing.assert_array_equal(interpreted(dirty, shared), interpreted(clean, shared))


def test_it_changes_no_result(backend: str) -> None:
    """By no more than rounding, whether or not the backend makes use of it."""
    case = case_of(EVEN, ROWS)
    out = functools.partial(paged_attention, layer=LAYER, backend=backend)(
        *case.arguments, shared=SharedPrefixes(*map(jnp.asarray, shared_in(case)))
    )
    np.testing.assert_allclose(out.astype(jnp.float32), case.expected, rtol=0, atol=TOLERANCE["bfloat16"])


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize(
    ("layout", "block_size"),
    [
        (HeadLayout(32, 8, 128), 16),
        (HeadLayout(32, 8, 64), 16),
        (HeadLayout(28, 4, 128), 8),
        (HeadLayout(9, 3, 64), 128),
        (HeadLayout(16, 1, 128), 32),
    ],
    ids=str,
)
def test_on_a_gpu_at_real_sizes(layout: HeadLayout, block_size: int, dtype: str) -> None:
    """Three prefixes, each in two windows, and a row of padding; against float64 and against no sharing."""
    lengths = (1024, 512, 0, 640)
    rows = [(lengths[row % 4], 1 + 37 * row % 200) for row in range(99)]
    case = case_of(layout, rows, block_size, dtype)
    shared = SharedPrefixes(*map(jnp.asarray, shared_in(case)))
    on_gpu = jax.jit(functools.partial(paged_attention, layer=LAYER, backend="mosaic"))
    out, plain = (np.asarray(on_gpu(*case.arguments, shared=s).astype(jnp.float32)) for s in (shared, None))
    np.testing.assert_allclose(out, case.expected, rtol=0, atol=TOLERANCE[dtype])
    np.testing.assert_allclose(out, plain, rtol=0, atol=TOLERANCE[dtype])
    np.testing.assert_array_equal(out[len(rows) :], 0)


@pytest.mark.gpu
@pytest.mark.parametrize("layout", [HeadLayout(32, 8, 128), HeadLayout(32, 8, 64), HeadLayout(9, 3, 64)], ids=str)
def test_beside_prefill_chunks_on_a_gpu(layout: HeadLayout) -> None:
    lengths = (1024, 512, 0, 640)
    rows = [(lengths[row % 4], 100 + 37 * row % 200) for row in range(99)]
    case = case_of(layout, rows, chunks={2: 40, 6: 2, 50: 64})
    shared = SharedPrefixes(*map(jnp.asarray, shared_in(case)))
    on_gpu = jax.jit(functools.partial(paged_attention, layer=LAYER, backend="mosaic"))
    out, plain = (np.asarray(on_gpu(*case.arguments, shared=s).astype(jnp.float32)) for s in (shared, None))
    np.testing.assert_allclose(out, case.expected, rtol=0, atol=TOLERANCE["bfloat16"])
    np.testing.assert_allclose(out, plain, rtol=0, atol=TOLERANCE["bfloat16"])


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("num_rows", [40, 3])
@pytest.mark.parametrize(
    "layout", [HeadLayout(32, 8, 128), HeadLayout(32, 8, 64), HeadLayout(28, 4, 128), HeadLayout(9, 3, 64)], ids=str
)
def test_prefill_chunks_on_a_gpu(layout: HeadLayout, num_rows: int, dtype: str) -> None:
    """Stacks of chunks of three prefixes between each other and rows of one query; or few, whose contexts are cut."""
    lengths = (1024, 512, 0, 640) if num_rows > 3 else (NONE,)
    rows = [
        (lengths[row // 10 % len(lengths)], (150 if num_rows > 3 else 1500) + 37 * row % 200) for row in range(num_rows)
    ]
    chunks = {row: 17 + 7 * row % 30 for row in range(num_rows) if row % 5}
    case = case_of(layout, rows, dtype=dtype, chunks=chunks)
    found = shared_in(case, min_saved_tiles=-1000)
    is_shared = found.num_tokens[list(chunks)] > 0
    assert is_shared.sum() >= 20 if num_rows > 3 else is_shared.all() and found.num_pieces.max() > 1
    shared = SharedPrefixes(*map(jnp.asarray, found))
    on_gpu = jax.jit(functools.partial(paged_attention, layer=LAYER, backend="mosaic"))
    out, plain = (np.asarray(on_gpu(*case.arguments, shared=s).astype(jnp.float32)) for s in (shared, None))
    np.testing.assert_allclose(out, case.expected, rtol=0, atol=TOLERANCE[dtype])
    np.testing.assert_allclose(out, plain, rtol=0, atol=TOLERANCE[dtype])


@pytest.mark.parametrize("layout", [HeadLayout(32, 8, 128), HeadLayout(9, 3, 64)], ids=str)
def test_lowers_for_a_gpu(layout: HeadLayout) -> None:
    geometry = Geometry(*layout, 16, "bfloat16", "bfloat16")
    ints = [jax.ShapeDtypeStruct(shape, jnp.int32) for shape in [(1,), (64, 9), (64,), (65,)]]
    cache = jax.ShapeDtypeStruct((2, 9, layout.num_kv_heads, 16, layout.head_dim), jnp.bfloat16)
    shapes = [(cascade.MAX_PIECES, len(cascade.Piece._fields)), (1,), *[(64,)] * 5]
    shared = SharedPrefixes(*(jax.ShapeDtypeStruct(shape, jnp.int32) for shape in shapes))

    run = functools.partial(attend, geometry=geometry, tiles=prefill_config(geometry), interpret=None)
    for num_tokens in (64, 256):
        q = jax.ShapeDtypeStruct((num_tokens, layout.num_heads, layout.head_dim), jnp.bfloat16)
        lowered = jax.jit(run).trace(Refs(*ints, q, cache, cache), shared).lower(lowering_platforms=("cuda",))
        kernels = ["prefixes", "decode"] + (["prefill"] if num_tokens > 64 else [])
        assert all(f"paged_attention_{kernel}" in lowered.as_text() for kernel in kernels)


def test_windows_are_those_of_the_kernel() -> None:
    """cascade.py, which must not import Mosaic, repeats two of its rules."""
    for layout in (HeadLayout(32, 8, 128), HeadLayout(28, 4, 128), HeadLayout(9, 3, 64)):
        geometry = Geometry(*layout, 16, "bfloat16", "bfloat16")
        rules, plan = (
            cascade.rules_for(geometry),
            mosaic_cascade.plan_for(geometry, prefill_config(geometry), 1.0, None),
        )
        assert isinstance(rules, Rules)
        assert (rules.window_rows, rules.num_lanes) == (plan.queries_per_tile, max(1, 132 // plan.head_tiles))
        assert plan.config.tile_keys == cascade.TILE_KEYS
