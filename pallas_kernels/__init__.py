"""Attention over paged keys and values, importable without paxpage: jax, numpy and jaxtyping are all it needs."""

from pallas_kernels.kv_cache_write.api import kv_cache_write
from pallas_kernels.paged_attention.api import paged_attention

__all__ = ["kv_cache_write", "paged_attention"]
