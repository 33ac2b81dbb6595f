"""Decode on Mosaic GPU: interpreted on the CPU with its race detector; on a GPU also with its rows split."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.paged_attention.config import Geometry, decode_queries
from pallas_kernels.paged_attention.mosaic_decode import MosaicDecodeConfig, Plan, decode, decode_config, fit
from pallas_kernels.paged_attention.shapes import AttentionShape, HeadLayout, Row
from pallas_kernels.paged_attention.triton_common import Refs
from tests.helpers.attention_cases import LAYER, AttentionCase, Garbage, Padding, make_case

TOLERANCE = {"bfloat16": 2e-2, "float16": 4e-3}
UNTOUCHED = 7.0
ROWS = tuple(Row(length - 1, 1) for length in (1, 16, 17, 64, 130))
MIXED_ROWS = (Row(129, 1), Row(0, 17), Row(15, 2), Row(62, 5), Row(5, 6), Row(0, 3))
# num_heads, num_kv_heads, head_dim, block_size: groups of 4, 3, 7, 16 and 1, inside and across aligned eights.
LAYOUTS = [(8, 2, 128, 16), (9, 3, 64, 128), (14, 2, 64, 8), (16, 1, 64, 64), (2, 2, 64, 32)]
SMALL = AttentionShape("small", *LAYOUTS[0], ROWS)


def shape_of(layout: tuple[int, int, int, int], rows: tuple[Row, ...]) -> AttentionShape:
    return AttentionShape("x".join(map(str, layout)), *layout, rows)


def case_of(shape: AttentionShape, dtype: str, garbage: Garbage | None = None) -> AttentionCase:
    num_tokens = len(shape.rows) + 1 if shape.is_decode else 40
    padding = Padding(num_tokens, len(shape.rows) + 1, -(-160 // shape.block_size), shape.num_blocks + 12)
    return make_case(shape, padding, dtype=dtype, garbage=garbage)


def run(
    case: AttentionCase,
    shape: AttentionShape,
    config: MosaicDecodeConfig,
    interpret: plgpu.InterpretGPUParams | None = None,
    *,
    order: jax.Array | None = None,
    is_out_given: bool = False,
) -> np.ndarray:
    q, k, v, *rows = case.arguments
    geometry = Geometry(*shape[1:5], q.dtype.name, k.dtype.name)
    arrays = Refs(jnp.full((1,), LAYER, jnp.int32), *rows, q, k, v)
    out = jnp.full_like(q, UNTOUCHED) if is_out_given else None
    call = functools.partial(decode, geometry=geometry, config=config, scale=shape.head_dim**-0.5, interpret=interpret)
    got = jax.jit(call)(arrays, out, row_order=order)
    assert got.shape == q.shape and got.dtype == q.dtype
    return np.asarray(got.astype(jnp.float32))


def interpreted(
    case: AttentionCase,
    shape: AttentionShape,
    *,
    num_stages: int = 2,
    order: jax.Array | None = None,
    is_out_given: bool = False,
) -> np.ndarray:
    config, interpret = MosaicDecodeConfig(64, num_stages, 1), plgpu.InterpretGPUParams(detect_races=True)
    return run(case, shape, config, interpret, order=order, is_out_given=is_out_given)


def assert_close(got: np.ndarray, case: AttentionCase, dtype: str) -> None:
    np.testing.assert_allclose(got, case.expected, rtol=0, atol=TOLERANCE[dtype])


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: "x".join(map(str, layout)))
def test_every_row_one_query(layout: tuple[int, int, int, int]) -> None:
    shape = shape_of(layout, ROWS)
    case = case_of(shape, "bfloat16")
    assert_close(interpreted(case, shape), case, "bfloat16")


def test_float16_and_a_deeper_ring() -> None:
    case = case_of(SMALL, "float16")
    assert_close(interpreted(case, SMALL, num_stages=3), case, "float16")


def test_what_no_row_owns_has_no_effect() -> None:
    """Bit for bit, in slots of a row's last block and in table entries past it; in another order of rows, too."""
    clean = interpreted(case_of(SMALL, "bfloat16", Garbage(0.0, "last")), SMALL)
    order = jnp.asarray(np.roll(np.arange(len(ROWS) + 1, dtype=np.int32), 3))
    for garbage in (Garbage(np.nan, "far"), Garbage(1e30, "other")):
        dirty = interpreted(case_of(SMALL, "bfloat16", garbage), SMALL, order=order)
        np.testing.assert_array_equal(dirty, clean)


@pytest.mark.parametrize("is_out_given", [True, False])
def test_rows_of_few_queries_beside_others(is_out_given: bool) -> None:
    """Each query sees its own past; rows of more queries, and padding, are left as they were."""
    shape = shape_of((6, 2, 64, 128), MIXED_ROWS)
    case = case_of(shape, "bfloat16")
    check_mixed(interpreted(case, shape, is_out_given=is_out_given), case, shape, is_out_given)


def check_mixed(got: np.ndarray, case: AttentionCase, shape: AttentionShape, is_out_given: bool) -> None:
    most = decode_queries(Geometry(*shape[1:5], "bfloat16", "bfloat16"))
    is_mine = np.repeat([row.num_new <= most for row in shape.rows], [row.num_new for row in shape.rows])
    is_mine = np.concatenate([is_mine, np.zeros(len(got) - len(is_mine), bool)])
    assert 0 < is_mine.sum() < shape.num_tokens
    np.testing.assert_allclose(got[is_mine], case.expected[is_mine], rtol=0, atol=TOLERANCE["bfloat16"])
    if is_out_given:
        np.testing.assert_array_equal(got[~is_mine], UNTOUCHED)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"head_dim": 80}, "head_dim is 80; allowed: 64, 128"),
        (
            {"dtype": "float32"},
            "q is float32, the cache bfloat16; allowed: the same dtype for both, bfloat16 or float16",
        ),
        ({"num_heads": 17, "num_kv_heads": 1}, "num_heads / num_kv_heads is 17; allowed: up to 16"),
        ({"block_size": 24}, "block_size is 24; allowed: 8, 16, 32, 64, 128"),
    ],
)
def test_unsupported_arrays_are_refused_by_name(change: dict, message: str) -> None:
    sizes = {"num_heads": 8, "num_kv_heads": 2, "head_dim": 64, "block_size": 16, "dtype": "bfloat16"} | change
    geometry = Geometry(**sizes, cache_dtype="bfloat16")
    arrays = Refs(*[jnp.zeros((1,), jnp.int32)] * 4, *[jnp.zeros((1, 8, 64))] * 3)
    with pytest.raises(ValueError, match=message):
        decode(arrays, None, geometry, MosaicDecodeConfig(64, 2, 1), 1.0, None)


def test_splits_are_refused_where_they_cannot_be_interpreted() -> None:
    case = case_of(SMALL, "bfloat16")
    with pytest.raises(ValueError, match="num_splits is 2; allowed: 1 in the interpreter"):
        run(case, SMALL, MosaicDecodeConfig(64, 2, 2), plgpu.InterpretGPUParams())


@pytest.mark.parametrize(
    ("num_rows", "num_splits", "num_stages"),
    [(1, 8, 3), (3, 4, 3), (8, 2, 3), (16, 1, 3), (25, 1, 2), (33, 1, 2), (34, 1, 3), (256, 1, 3)],
)
def test_rows_are_split_while_there_are_too_few(num_rows: int, num_splits: int, num_stages: int) -> None:
    """8 key heads of 128; of heads of half the size a tile has twice as many keys."""
    for head_dim, tile_keys in ((128, 64), (64, 128)):
        geometry = Geometry(32, 8, head_dim, 16, "bfloat16", "bfloat16")
        assert decode_config(geometry, num_rows, 4096) == MosaicDecodeConfig(tile_keys, num_stages, num_splits)
        assert decode_config(geometry, num_rows, 128).num_splits == 1


@pytest.mark.parametrize("has_starts", [True, False])
@pytest.mark.parametrize(
    "layout", [HeadLayout(32, 8, 128), HeadLayout(28, 4, 128), HeadLayout(9, 3, 64), HeadLayout(32, 32, 128)]
)
@pytest.mark.parametrize("num_splits", [1, 16])
def test_any_config_is_made_to_fit(layout: HeadLayout, has_starts: bool, num_splits: int) -> None:
    """Into shared memory, twice if rows are not split, and into registers, which hold at most 32 columns."""
    geometry = Geometry(*layout, 16, "bfloat16", "bfloat16")
    plan = fit(Plan(geometry, MosaicDecodeConfig(64, 6, num_splits), 1.0, has_starts))
    assert plan.num_columns <= 32
    assert plan.num_chunks * plan.num_queries >= (decode_queries(geometry) if has_starts else 1)
    tile_bytes = plan.config.num_stages * 64 * layout.head_dim * 4
    part_bytes = 0 if num_splits == 1 else plan.config.num_splits * plan.num_columns * (layout.head_dim + 64) * 4
    assert tile_bytes + part_bytes < (113 if num_splits == 1 else 227) * 1024
    assert 2 <= plan.config.num_stages <= 6 and 1 <= plan.config.num_splits <= num_splits


@pytest.mark.gpu
@pytest.mark.parametrize("num_splits", [1, 4, 16])
@pytest.mark.parametrize("layout", LAYOUTS[:2], ids=lambda layout: "x".join(map(str, layout)))
def test_on_a_gpu_with_rows_split(layout: tuple[int, int, int, int], num_splits: int) -> None:
    config = MosaicDecodeConfig(64, 2, num_splits)
    decoding, mixed = shape_of(layout, ROWS), shape_of(layout, MIXED_ROWS)
    case = case_of(decoding, "bfloat16")
    assert_close(run(case, decoding, config), case, "bfloat16")
    case = case_of(mixed, "bfloat16")
    check_mixed(run(case, mixed, config, is_out_given=True), case, mixed, is_out_given=True)
