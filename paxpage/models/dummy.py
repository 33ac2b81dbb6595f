"""Random weights, made on the device: for measuring speed without a checkpoint."""

import functools
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp

from paxpage.models.checkpoint import flatten, unflatten
from paxpage.models.registry import Params

INITIALIZER_RANGE = 0.02  # standard deviation, as models of these families are initialised
MAX_UINT32 = 2**32 - 1


def dummy_params(abstract: Params, seed: int) -> Params:
    """Normal weights of standard deviation 0.02, norms one, in the shapes and dtypes of abstract. seed: 0 to 2**63 - 1.

    The same seed gives the same params. One function is compiled per shape, not per tensor, and all of them at once.
    """
    key = jax.random.fold_in(jax.random.key(seed & MAX_UINT32), seed >> 32)
    flat = flatten(abstract)
    kinds = dict.fromkeys(_kind(leaf) for path, leaf in flat.items() if not is_norm(path))
    with ThreadPoolExecutor() as pool:
        compiled = pool.map(lambda kind: _normal.lower(key, 0, *kind).compile(), kinds)
        normals = dict(zip(kinds, compiled, strict=True))
    params = {
        path: jnp.ones(leaf.shape, leaf.dtype) if is_norm(path) else normals[_kind(leaf)](key, index)
        for index, (path, leaf) in enumerate(flat.items())
    }
    return unflatten(params)


def is_norm(path: str) -> bool:
    """Whether a norm's weight is at this path."""
    return path.endswith("norm.weight")


def _kind(leaf: jax.ShapeDtypeStruct) -> tuple[tuple[int, ...], str]:
    return leaf.shape, leaf.dtype.name


@functools.partial(jax.jit, static_argnames=("shape", "dtype"))
def _normal(key: jax.Array, index: int | jax.Array, shape: tuple[int, ...], dtype: str) -> jax.Array:
    return INITIALIZER_RANGE * jax.random.normal(jax.random.fold_in(key, index), shape, dtype)
