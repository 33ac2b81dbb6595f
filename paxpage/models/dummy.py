"""Random weights, made on the device: for measuring speed without a checkpoint."""

import functools

import jax
import jax.numpy as jnp

from paxpage.models.checkpoint import flatten, unflatten
from paxpage.models.registry import Params

INITIALIZER_RANGE = 0.02  # standard deviation, as models of these families are initialised
MAX_UINT32 = 2**32 - 1


def dummy_params(abstract: Params, seed: int) -> Params:
    """Normal weights of standard deviation 0.02, norms one, in the shapes and dtypes of abstract. seed: 0 to 2**63 - 1.

    The same seed gives the same params. One function is compiled per shape, not per tensor.
    """
    key = jax.random.fold_in(jax.random.key(seed & MAX_UINT32), seed >> 32)
    flat = flatten(abstract)
    return unflatten({path: _fill(path, leaf, key, index) for index, (path, leaf) in enumerate(flat.items())})


def _fill(path: str, leaf: jax.ShapeDtypeStruct, key: jax.Array, index: int) -> jax.Array:
    if path.endswith("norm.weight"):
        return jnp.ones(leaf.shape, leaf.dtype)
    return _normal(key, index, leaf.shape, leaf.dtype.name)


@functools.partial(jax.jit, static_argnames=("shape", "dtype"))
def _normal(key: jax.Array, index: int | jax.Array, shape: tuple[int, ...], dtype: str) -> jax.Array:
    return INITIALIZER_RANGE * jax.random.normal(jax.random.fold_in(key, index), shape, dtype)
