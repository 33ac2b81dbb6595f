"""The contract of paged_attention: every backend against dense attention in float64, over shapes.CONTRACT."""

import re

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import paged_attention
from pallas_kernels.paged_attention import shapes
from pallas_kernels.paged_attention.api import BACKENDS, BLOCK_SIZES
from pallas_kernels.paged_attention.config import Geometry
from pallas_kernels.paged_attention.mosaic_limits import unsupported
from pallas_kernels.paged_attention.shapes import CONTRACT, AttentionShape, Row
from tests.helpers.attention_cases import LAYER, NUM_LAYERS, AttentionCase, Garbage, Padding, make_case, padding_for

TOLERANCE = {"float32": 1e-5, "bfloat16": 2e-2, "float16": 2e-2}
BY_NAME = {shape.name: shape for shape in CONTRACT}
SMALL = {kind: BY_NAME[f"{kind}-6x2x96-block32"] for kind in shapes.STEP_KINDS}
SMALL_OF_MOSAIC = {kind: BY_NAME[f"{kind}-14x2x64-block16"] for kind in shapes.STEP_KINDS}
ODD_LAYOUTS = [shape for shape in CONTRACT if shape.head_dim in (40, 80)]
EVEN_LAYOUTS = [shape for shape in CONTRACT if shape not in ODD_LAYOUTS]


def small(kind: str, backend: str) -> AttentionShape:
    """A step of this kind that the backend takes."""
    return (SMALL_OF_MOSAIC if backend == "mosaic" else SMALL)[kind]


def finest(backend: str) -> str:
    """The dtype in which the backend is held to the least error."""
    return "float16" if backend == "mosaic" else "float32"


def refusal(shape: AttentionShape, backend: str, dtype: str, cache_dtype: str | None = None) -> str | None:
    """What a backend has against these arrays."""
    heads = (shape.num_heads, shape.num_kv_heads, shape.head_dim)
    geometry = Geometry(*heads, shape.block_size, dtype, cache_dtype or dtype)
    return unsupported(geometry) if backend == "mosaic" else None


def _run(
    case: AttentionCase,
    backend: str,
    *,
    layer: int = LAYER,
    scale: float | None = None,
    row_order: np.ndarray | None = None,
) -> np.ndarray:
    order = None if row_order is None else jnp.asarray(row_order)
    out = paged_attention(*case.arguments, layer=layer, scale=scale, row_order=order, backend=backend)
    assert out.shape == case.q.shape and out.dtype == case.q.dtype
    return np.asarray(out.astype(jnp.float32))


def _assert_close(out: np.ndarray, case: AttentionCase, dtype: str) -> None:
    np.testing.assert_allclose(out, case.expected, rtol=0, atol=TOLERANCE[dtype])


def _check(shape: AttentionShape, backend: str, dtype: str) -> None:
    case, reason = make_case(shape, padding_for(shape), dtype=dtype), refusal(shape, backend, dtype)
    if reason is None:
        _assert_close(_run(case, backend), case, dtype)
    else:
        with pytest.raises(ValueError, match=re.escape(reason)):
            _run(case, backend)


@pytest.mark.parametrize("shape", CONTRACT, ids=lambda shape: shape.name)
def test_float32(shape: AttentionShape, backend: str) -> None:
    _check(shape, backend, "float32")


@pytest.mark.parametrize("shape", ODD_LAYOUTS, ids=lambda shape: shape.name)
def test_bfloat16(shape: AttentionShape, backend: str) -> None:
    _check(shape, backend, "bfloat16")


@pytest.mark.parametrize("shape", EVEN_LAYOUTS, ids=lambda shape: shape.name)
def test_bfloat16_of_what_is_served(shape: AttentionShape, serving_backend: str) -> None:
    _check(shape, serving_backend, "bfloat16")


@pytest.mark.parametrize("kind", SMALL)
def test_float16(kind: str, backend: str) -> None:
    _check(small(kind, backend), backend, "float16")


def test_cache_of_another_dtype(backend: str) -> None:
    """Scores and sums are float32: nothing is missing but what the cache itself rounded away."""
    shape = small("mixed", backend)
    case = make_case(shape, padding_for(shape), cache_dtype="bfloat16")
    reason = refusal(shape, backend, "float32", "bfloat16")
    if reason is None:
        _assert_close(_run(case, backend), case, "float32")
    else:
        with pytest.raises(ValueError, match=re.escape(reason)):
            _run(case, backend)


@pytest.mark.parametrize("kind", SMALL)
@pytest.mark.parametrize("entries", ["last", "far", "other"])
@pytest.mark.parametrize("slots", [np.nan, np.inf, 1e30])
def test_what_no_row_owns_has_no_effect(kind: str, entries: str, slots: float, backend: str) -> None:
    """Bit for bit the output of a clean cache: garbage is removed by selection, not by a factor of zero."""
    shape, dtype = small(kind, backend), "bfloat16" if backend == "mosaic" else "float32"  # which hold 1e30
    clean = make_case(shape, padding_for(shape), dtype=dtype, garbage=Garbage(0.0, "last"))
    dirty = make_case(shape, padding_for(shape), dtype=dtype, garbage=Garbage(slots, entries))
    assert not np.array_equal(clean.k_cache, dirty.k_cache)
    np.testing.assert_array_equal(_run(dirty, backend), _run(clean, backend))


@pytest.mark.parametrize("kind", SMALL)
def test_padding_is_zero(kind: str, backend: str) -> None:
    """Whatever the padding tokens' queries and the padding rows' tables hold."""
    shape = small(kind, backend)
    case = make_case(shape, padding_for(shape), dtype=finest(backend), garbage=Garbage(np.nan, "last"))
    padded = _run(case, backend)[shape.num_tokens :]
    assert padded.size > 0
    np.testing.assert_array_equal(padded, 0)


@pytest.mark.parametrize("is_decode", [True, False])
def test_a_batch_of_padding_alone_is_zero(is_decode: bool, backend: str) -> None:
    shape = small("decode" if is_decode else "mixed", backend)
    padding = padding_for(shape)._replace(num_tokens=8 if is_decode else 160)
    case = make_case(shape._replace(rows=()), padding, dtype=finest(backend))
    np.testing.assert_array_equal(_run(case, backend), 0)


def test_empty_rows_between_others(backend: str) -> None:
    """seq_len 0 in a decode batch is a row that attends to nothing, wherever it stands."""
    shape, dtype = small("decode", backend), finest(backend)
    case = make_case(shape, padding_for(shape), dtype=dtype)
    for empty in (0, 3):
        case.seq_lens[empty] = 0
        case.expected[empty] = 0
    _assert_close(_run(case, backend), case, dtype)


@pytest.mark.parametrize("layer", range(NUM_LAYERS))
@pytest.mark.parametrize("kind", ["decode", "mixed"])
def test_every_layer_reads_its_own(layer: int, kind: str, backend: str) -> None:
    """The other layers are all NaN."""
    shape, dtype = small(kind, backend), finest(backend)
    case = make_case(shape, padding_for(shape), dtype=dtype, layer=layer)
    _assert_close(_run(case, backend, layer=layer), case, dtype)


@pytest.mark.parametrize("kind", ["decode", "mixed"])
def test_explicit_scale(kind: str, backend: str) -> None:
    shape, dtype = small(kind, backend), finest(backend)
    case = make_case(shape, padding_for(shape), dtype=dtype, scale=0.25)
    _assert_close(_run(case, backend, scale=0.25), case, dtype)
    default = make_case(shape, padding_for(shape), dtype=dtype)
    assert np.abs(case.expected - default.expected).max() > 1e-2


def test_a_long_row_beside_short_ones(backend: str) -> None:
    """Several chunks of keys and several groups of tiles, in which rows of one key wait for one of hundreds."""
    rows = (Row(0, 3), Row(700, 40), Row(0, 1), Row(5, 150), Row(300, 1))
    shape, dtype = small("mixed", backend)._replace(rows=rows), finest(backend)
    case = make_case(shape, Padding(256, 8, 64, 128), dtype=dtype)
    _assert_close(_run(case, backend), case, dtype)


def test_decode_of_uneven_rows(backend: str) -> None:
    """More rows than one group of tiles holds, the longest of them first, last and in between."""
    rows = tuple(Row(context, 1) for context in (500, 3, 0, 127, 128, 129, 1, 255, 256, 2, 40, 399))
    shape, dtype = small("decode", backend)._replace(rows=rows), finest(backend)
    case = make_case(shape, Padding(16, 16, 40, 256), dtype=dtype)
    _assert_close(_run(case, backend), case, dtype)


@pytest.mark.parametrize("kind", ["decode", "mixed"])
def test_the_order_in_which_rows_are_begun_changes_nothing(kind: str, backend: str) -> None:
    """Bit for bit."""
    shape, dtype = small(kind, backend), finest(backend)
    case = make_case(shape, padding_for(shape), dtype=dtype)
    orders = (np.argsort(-case.seq_lens), np.argsort(case.seq_lens))
    outs = [_run(case, backend, row_order=order.astype(np.int32)) for order in orders]
    np.testing.assert_array_equal(outs[0], outs[1])
    np.testing.assert_array_equal(outs[0], _run(case, backend))
    _assert_close(outs[0], case, dtype)


def test_large_scores_do_not_overflow(backend: str) -> None:
    """exp is taken of differences to the row's maximum alone."""
    shape, factor = small("mixed", backend), {"float32": 1000.0, "float16": 100.0}[finest(backend)]
    case = make_case(shape, padding_for(shape), dtype=finest(backend), query_factor=factor)
    np.testing.assert_allclose(_run(case, backend), case.expected, rtol=0, atol=1e-2)


def test_unknown_backend_is_refused_by_name() -> None:
    case = make_case(SMALL["decode"], padding_for(SMALL["decode"]))
    with pytest.raises(ValueError, match=r"backend is 'cudnn'; allowed: .*reference.*xla"):
        _run(case, "cudnn")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_heads": 7}, r"num_heads is 7; allowed: multiples of num_kv_heads \(2\)"),
        ({"block_size": 24}, r"block_size is 24; allowed: 8, 16, 32, 64, 128"),
        ({"block_size": 4}, r"block_size is 4; allowed: 8, 16, 32, 64, 128"),
    ],
)
def test_unsupported_shape_is_refused_by_name(change: dict[str, int], message: str, backend: str) -> None:
    shape = SMALL["decode"]._replace(num_heads=6, rows=(Row(2, 1),))
    case = make_case(shape._replace(block_size=change.get("block_size", 16)), Padding(8, 8, 4, 32))
    q = np.zeros((8, change.get("num_heads", 6), 96), np.float32)
    with pytest.raises(ValueError, match=message):
        paged_attention(jnp.asarray(q), *case.arguments[1:], layer=0, backend=backend)


def test_shapes_are_what_the_engine_may_ask_for() -> None:
    """The list itself: unique names, every supported block size, and the borders that bugs were reported at."""
    everything = CONTRACT + shapes.WORKLOADS
    assert len({shape.name for shape in everything}) == len(everything)
    assert {shape.block_size for shape in CONTRACT} == set(BLOCK_SIZES)
    assert all(shape.num_heads % shape.num_kv_heads == 0 for shape in everything)
    assert {row.seq_len for row in SMALL["decode"].rows} >= {1, 15, 16, 17, 33, 130}
    assert {"reference", "xla"} <= set(BACKENDS)
    assert all(shape.is_decode == ("decode" in shape.name) for shape in everything)
