"""What joins the splits of a decode row: against numpy in float64, splits and rows without a key included."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.paged_attention.config import Geometry
from pallas_kernels.paged_attention.triton_common import MASKED, Softmax
from pallas_kernels.paged_attention.triton_decode import tile_rows_of
from pallas_kernels.paged_attention.triton_merge import merge_decode

BACKENDS = {"triton": False, "triton_interpret": True}  # and whether each is interpreted
NUM_ROWS = 3
EMPTY_ROW = 1
LAYOUTS = [(4, 4, 40), (9, 3, 64), (32, 2, 128), (5, 1, 256)]  # query heads, key heads, head_dim


def make_parts(geometry: Geometry, num_splits: int) -> Softmax:
    """Random; a third of the splits, and all of one row's, have seen no key. What is padding is no number."""
    rng = np.random.default_rng(num_splits)
    pairs = (num_splits, NUM_ROWS, geometry.num_kv_heads, tile_rows_of(geometry))
    is_empty = rng.random(pairs) < 1 / 3
    is_empty[0, 0] = False
    is_empty[:, EMPTY_ROW] = True
    maximum = np.where(is_empty, MASKED, 20 * rng.normal(size=pairs))
    total = np.where(is_empty, 0, 1 + rng.random(pairs))
    values = np.where(is_empty[..., None], 0, rng.normal(size=(*pairs, geometry.padded_dim)))
    values[..., geometry.head_dim :] = np.nan
    for part in (maximum, total, values):
        part[:, :, :, geometry.group :] = np.nan
    return Softmax(*(part.astype(np.float32) for part in (maximum, total, values)))


def expected(parts: Softmax, geometry: Geometry) -> np.ndarray:
    maximum, total, values = (part[:, :, :, : geometry.group].astype(np.float64) for part in parts)
    weights = np.where(maximum <= MASKED, 0, np.exp2(maximum - maximum.max(axis=0)))
    whole = (total * weights).sum(axis=0)
    merged = (values * weights[..., None]).sum(axis=0) / np.where(whole == 0, 1, whole)[..., None]
    return merged[..., : geometry.head_dim].reshape(NUM_ROWS, geometry.num_heads, -1)


@pytest.mark.parametrize("num_splits", [2, 3, 16])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_joins_splits(layout: tuple[int, int, int], num_splits: int, backend: str) -> None:
    geometry = Geometry(*layout, 16, "float32", "float32")
    parts = make_parts(geometry, num_splits)
    arrays = Softmax(*map(jnp.asarray, parts))
    run = functools.partial(merge_decode, geometry=geometry, interpret=BACKENDS[backend])
    merged = np.asarray(jax.jit(run)(arrays))
    np.testing.assert_allclose(merged, expected(parts, geometry), rtol=1e-5, atol=1e-6)
    assert not merged[EMPTY_ROW].any()
