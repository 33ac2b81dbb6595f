"""The Mosaic GPU prefill kernel in JAX's interpreter, with its race detector on; and lowered for a GPU."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.paged_attention import mosaic_prefill
from pallas_kernels.paged_attention.config import Geometry, decode_queries
from pallas_kernels.paged_attention.mosaic_prefill import cut_tiles, prefill_config
from pallas_kernels.paged_attention.shapes import AttentionShape, HeadLayout, Row
from pallas_kernels.paged_attention.triton_common import Refs
from tests.helpers.attention_cases import LAYER, AttentionCase, Garbage, Padding, make_case

# Scores of slots that no row owns are computed, and then not selected.
pytestmark = pytest.mark.filterwarnings("ignore:invalid value encountered in matmul:RuntimeWarning")

UNTOUCHED = 7.0
EVEN, ODD, WIDE = HeadLayout(4, 2, 64), HeadLayout(2, 2, 64), HeadLayout(1, 1, 128)  # groups of 2, 1 and 1


def make_shape(layout: HeadLayout, block_size: int, *rows: tuple[int, int]) -> AttentionShape:
    return AttentionShape("test", *layout, block_size, tuple(Row(*row) for row in rows))


def geometry_of(shape: AttentionShape, dtype: str = "bfloat16") -> Geometry:
    return Geometry(shape.num_heads, shape.num_kv_heads, shape.head_dim, shape.block_size, dtype, dtype)


def padding_of(shape: AttentionShape, num_tokens: int | None = None) -> Padding:
    blocks_per_row = max(-(-row.seq_len // shape.block_size) for row in shape.rows) + 2
    num_tokens = -(-shape.num_tokens // 8) * 8 + 8 if num_tokens is None else num_tokens
    return Padding(num_tokens, len(shape.rows) + 2, blocks_per_row, shape.num_blocks + 8)


def run(case: AttentionCase, geometry: Geometry, scale: float | None = None) -> np.ndarray:
    """Two programs, so that each takes several tiles."""
    q, k, v, *rows = case.arguments
    config = dataclasses.replace(prefill_config(geometry), num_programs=2)
    arrays = Refs(jnp.full((1,), LAYER, jnp.int32), *rows, q, k, v)
    interpret = plgpu.InterpretGPUParams(detect_races=True)
    scale = geometry.head_dim**-0.5 if scale is None else scale
    out = mosaic_prefill.prefill(arrays, jnp.full(q.shape, UNTOUCHED, q.dtype), geometry, config, scale, interpret)
    assert out.shape == q.shape and out.dtype == q.dtype
    return np.asarray(out.astype(jnp.float32))


def expected(case: AttentionCase, shape: AttentionShape, geometry: Geometry) -> np.ndarray:
    """The dense answer of its rows, zeros behind the last row, elsewhere what was there before."""
    wanted = np.full_like(case.expected, UNTOUCHED)
    wanted[shape.num_tokens :] = 0
    ends = np.cumsum([row.num_new for row in shape.rows])
    for row, end in zip(shape.rows, ends, strict=True):
        if row.num_new > decode_queries(geometry):
            wanted[end - row.num_new : end] = case.expected[end - row.num_new : end]
    return wanted


@pytest.mark.parametrize(
    ("shape", "dtype", "num_tokens"),
    [
        # Chunks that begin and end anywhere, between rows of the decode kernel's and of padding.
        (make_shape(EVEN, 16, (20, 1), (0, 17), (100, 70), (3, 2)), "bfloat16", None),
        # Two halves of 64 queries for one head; tails of blocks.
        (make_shape(ODD, 8, (3, 1), (60, 133)), "float16", None),
        # A block as large as a tile of keys; a number of tokens that is no multiple of 8, and smaller than a tile.
        (make_shape(WIDE, 128, (130, 19)), "bfloat16", 19),
    ],
    ids=["ragged", "odd-group", "one-row"],
)
def test_agrees_with_dense_attention(
    shape: AttentionShape, dtype: str, num_tokens: int | None, capsys: pytest.CaptureFixture[str]
) -> None:
    geometry = geometry_of(shape, dtype)
    case = make_case(shape, padding_of(shape, num_tokens), dtype=dtype)
    np.testing.assert_allclose(run(case, geometry), expected(case, shape, geometry), rtol=0, atol=2e-2)
    assert "RACE DETECTED" not in capsys.readouterr().out


def test_what_no_row_owns_has_no_effect() -> None:
    """Bit for bit, with a scale of the caller's; in the last block's tail, in the blocks past it and in q."""
    shape = make_shape(WIDE, 16, (15, 18))
    geometry, padding = geometry_of(shape), padding_of(shape)
    clean = make_case(shape, padding, dtype="bfloat16", garbage=Garbage(0.0, "last"), scale=0.25)
    dirty = make_case(shape, padding, dtype="bfloat16", garbage=Garbage(np.nan, "far"), scale=0.25)
    assert not np.array_equal(clean.v_cache, dirty.v_cache)
    out = run(clean, geometry, scale=0.25)
    np.testing.assert_array_equal(run(dirty, geometry, scale=0.25), out)
    np.testing.assert_allclose(out, expected(clean, shape, geometry), rtol=0, atol=2e-2)


def test_a_batch_without_prefill_is_left_alone() -> None:
    shape = make_shape(EVEN, 16, (4, 1), (7, 2))
    case, geometry = make_case(shape, padding_of(shape), dtype="bfloat16"), geometry_of(shape)
    np.testing.assert_array_equal(run(case, geometry), expected(case, shape, geometry))


BATCHES = [
    [(0, 4096)],
    [(0, 1), (0, 17), (5, 19), (0, 64), (100, 129), (7, 3), (640, 200)],
    [(10, 20)] * 20,
    [(5, 1)] * 4,
]


@pytest.mark.parametrize("layout", [EVEN, ODD], ids=["two heads", "one head"])
def test_tiles_cover_each_query_once_and_begin_with_the_heaviest(layout: HeadLayout) -> None:
    geometry, num_tokens, num_rows = geometry_of(make_shape(layout, 16)), 4096, 24
    config, queries = prefill_config(geometry), 64 if layout is EVEN else 128
    cut = jax.jit(functools.partial(cut_tiles, num_tokens=num_tokens, geometry=geometry, config=config))
    for batch in BATCHES:
        rows = np.array(batch + [(0, 0)] * (num_rows - len(batch)), np.int32)
        starts = np.concatenate([[0], np.cumsum(rows[:, 1], dtype=np.int32)])
        tiles = cut(jnp.asarray(starts), jnp.asarray(rows.sum(axis=1, dtype=np.int32)))
        covered, num_keys = np.zeros(num_tokens, int), []
        num_tiles = int(tiles.num_tiles[0])
        for row, chunk in zip(tiles.rows[:num_tiles].tolist(), tiles.chunks[:num_tiles].tolist(), strict=True):
            first, end = max(8 * chunk, starts[row]), min(8 * chunk + queries, starts[row + 1])
            assert first < end
            covered[first:end] += 1
            num_keys.append(rows[row].sum() - starts[row + 1] + 8 * chunk + queries)
        is_prefill = np.repeat(rows[:, 1] > decode_queries(geometry), rows[:, 1])
        np.testing.assert_array_equal(covered[: len(is_prefill)], is_prefill)
        assert not covered[len(is_prefill) :].any()
        assert num_keys == sorted(num_keys, reverse=True)


def test_what_is_not_supported_is_refused_by_name() -> None:
    shape = make_shape(EVEN, 16, (0, 17))
    case, geometry = make_case(shape, padding_of(shape), dtype="bfloat16"), geometry_of(shape)
    with pytest.raises(ValueError, match="float32"):
        run(case, dataclasses.replace(geometry, dtype="float32", cache_dtype="float32"))
    with pytest.raises(ValueError, match="head_dim is 80"):
        run(case, dataclasses.replace(geometry, head_dim=80))
    with pytest.raises(ValueError, match=r"scale is -1\.0; allowed: more than 0"):
        run(case, geometry, scale=-1.0)


@pytest.mark.parametrize(("layout", "block_size"), [(HeadLayout(32, 8, 128), 16), (HeadLayout(9, 3, 64), 8)])
def test_lowers_for_a_gpu(layout: HeadLayout, block_size: int) -> None:
    """The compiler's layouts hold what the kernel asks of them; the interpreter knows none."""
    geometry = geometry_of(make_shape(layout, block_size))
    ints = [jax.ShapeDtypeStruct(shape, jnp.int32) for shape in [(1,), (4, 9), (4,), (5,)]]
    q = jax.ShapeDtypeStruct((64, layout.num_heads, layout.head_dim), jnp.bfloat16)
    cache = jax.ShapeDtypeStruct((2, 9, layout.num_kv_heads, block_size, layout.head_dim), jnp.bfloat16)
    run_one = functools.partial(
        mosaic_prefill.prefill, geometry=geometry, config=prefill_config(geometry), scale=0.1, interpret=None
    )
    lowered = jax.jit(run_one).trace(Refs(*ints, q, cache, cache), q).lower(lowering_platforms=("cuda",))
    assert "paged_attention_prefill" in lowered.as_text()
