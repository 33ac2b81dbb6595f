"""Arrays that do not fit one another, which JAX would broadcast or clamp, are refused by name."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import kv_cache_write, paged_attention, rope_kv_cache_write
from tests.helpers.fixtures import unchecked_types

__all__ = ["unchecked_types"]

CACHE = (2, 10, 2, 16, 8)
ATTENTION = {
    "q": jnp.ones((5, 4, 8)),
    "k_cache": jnp.ones(CACHE),
    "v_cache": jnp.ones(CACHE),
    "block_tables": jnp.array([[1, 2], [3, 4]]),
    "seq_lens": jnp.array([20, 2]),
    "query_start_loc": jnp.array([0, 3, 5]),
    "layer": 0,
}
WRITE = {
    "k_cache": jnp.ones(CACHE),
    "v_cache": jnp.ones(CACHE),
    "k": jnp.ones((5, 2, 8)),
    "v": jnp.ones((5, 2, 8)),
    "slot_mapping": jnp.array([16, 17, 18, 48, 49]),
    "layer": 1,
}
ROPE = {
    "k_cache": jnp.ones(CACHE),
    "v_cache": jnp.ones(CACHE),
    "qkv": jnp.ones((5, 8, 8)),
    "cos": jnp.ones((5, 4)),
    "sin": jnp.ones((5, 4)),
    "slot_mapping": jnp.array([16, 17, 18, 48, 49]),
    "layer": 1,
}
KERNELS: dict[str, tuple[Callable[..., Any], dict[str, Any]]] = {
    "paged_attention": (paged_attention, ATTENTION),
    "kv_cache_write": (kv_cache_write, WRITE),
    "rope_kv_cache_write": (rope_kv_cache_write, ROPE),
}
OF_ALL = {
    "one layer's cache": ({"k_cache": jnp.ones(CACHE[1:])}, r"k_cache's shape is \(10, 2, 16, 8\); allowed: \[num_lay"),
    "fewer blocks of values": ({"v_cache": jnp.ones((2, 5, 2, 16, 8))}, r"v_cache's shape is .*; allowed: \(2, 10, 2"),
    "a layer too many": ({"layer": 2}, r"layer is 2; allowed: 0 to 1"),
    "a layer before the first": ({"layer": np.int64(-1)}, r"layer is -1; allowed: 0 to 1"),
}
OWN = [
    (
        "paged_attention",
        {"q": jnp.ones((4, 8))},
        r"q's shape is \(4, 8\); allowed: \[num_tokens, num_heads, head_dim\]",
    ),
    ("paged_attention", {"q": jnp.ones((0, 4, 8))}, r"q's shape is \(0, 4, 8\); allowed: .* one token at least"),
    ("paged_attention", {"seq_lens": jnp.ones((0,), int)}, r"seq_lens's shape is \(0,\); allowed: \[num_rows\]"),
    ("paged_attention", {"seq_lens": jnp.ones((6,), int)}, r"seq_lens's shape is \(6,\); allowed: .* 1 to 5 rows"),
    (
        "paged_attention",
        {"block_tables": jnp.ones((1, 2), int)},
        r"block_tables's shape is \(1, 2\); allowed: \[2, blo",
    ),
    ("paged_attention", {"query_start_loc": jnp.array([0, 5])}, r"query_start_loc's shape is \(2,\); allowed: \(3,\)"),
    ("kv_cache_write", {"k": jnp.ones((5, 1, 8))}, r"k's shape is \(5, 1, 8\); allowed: \(5, 2, 8\)"),
    ("kv_cache_write", {"v": jnp.ones((1, 2, 8))}, r"v's shape is \(1, 2, 8\); allowed: \(5, 2, 8\)"),
    ("rope_kv_cache_write", {"qkv": jnp.ones((8, 8))}, r"qkv's shape is \(8, 8\); allowed: more than 2 \* 2 heads"),
    ("rope_kv_cache_write", {"cos": jnp.ones((1, 4))}, r"cos's shape is \(1, 4\); allowed: \(5, 4\)"),
    ("rope_kv_cache_write", {"sin": jnp.ones((5, 1))}, r"sin's shape is \(5, 1\); allowed: \(5, 4\)"),
    ("rope_kv_cache_write", {"slot_mapping": jnp.array([16])}, r"slot_mapping's shape is \(1,\); allowed: \(5,\)"),
]
MISFITS = OWN + [(kernel, *misfit) for kernel in KERNELS for misfit in OF_ALL.values()]


def _call(kernel: str, changes: dict[str, Any]) -> Any:
    function, arguments = KERNELS[kernel]
    arguments = arguments | changes
    layer = arguments.pop("layer")
    return function(*arguments.values(), layer=layer)


@pytest.mark.parametrize("kernel", KERNELS)
def test_what_fits_is_taken(kernel: str) -> None:
    jax.block_until_ready(_call(kernel, {}))


@pytest.mark.parametrize(("kernel", "changes", "message"), MISFITS)
def test_what_does_not_fit_is_refused_by_name(kernel: str, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=rf"^{message}"):
        _call(kernel, changes)
