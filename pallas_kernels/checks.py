"""What the arrays of one call must have in common. JAX would broadcast or clamp most misfits without a word."""

import numpy as np
from jaxtyping import Array, Int


def check_shape(name: str, array: Array, shape: tuple[int, ...]) -> None:
    """Raises ValueError naming the array, its shape and the one allowed."""
    if array.shape != shape:
        raise ValueError(f"{name}'s shape is {array.shape}; allowed: {shape}, as the other arrays have it")


def check_caches(k_cache: Array, v_cache: Array, layer: int | Int[Array, ""]) -> None:
    """Raises ValueError for caches that are not a pair, and for a layer that they do not have, unless it is traced."""
    if k_cache.ndim != 5:
        allowed = "[num_layers, num_blocks, num_kv_heads, block_size, head_dim]"
        raise ValueError(f"k_cache's shape is {k_cache.shape}; allowed: {allowed}")
    check_shape("v_cache", v_cache, k_cache.shape)
    num_layers = k_cache.shape[0]
    if isinstance(layer, (int, np.integer)) and not 0 <= layer < num_layers:
        raise ValueError(f"layer is {layer}; allowed: 0 to {num_layers - 1}, those of the caches")
