"""What the Mosaic GPU kernels take; apart from them, since importing their backend takes time."""

from pallas_kernels.paged_attention.config import BLOCK_SIZES, Geometry

DTYPES = ("bfloat16", "float16")
HEAD_DIMS = (64, 128)
MAX_GROUP = 16


def unsupported(geometry: Geometry) -> str | None:
    """Why the Mosaic kernels cannot take these arrays, naming what they could; None if they can."""
    if geometry.dtype not in DTYPES or geometry.cache_dtype != geometry.dtype:
        found = f"q is {geometry.dtype}, the cache {geometry.cache_dtype}"
        return f"{found}; allowed: the same dtype for both, {' or '.join(DTYPES)}"
    if geometry.head_dim not in HEAD_DIMS:
        return f"head_dim is {geometry.head_dim}; allowed: {', '.join(map(str, HEAD_DIMS))}"
    if geometry.block_size not in BLOCK_SIZES:
        return f"block_size is {geometry.block_size}; allowed: {', '.join(map(str, BLOCK_SIZES))}"
    if geometry.group > MAX_GROUP:
        return f"num_heads / num_kv_heads is {geometry.group}; allowed: up to {MAX_GROUP}"
    return None
