"""Attention over paged keys and values, importable without paxpage: jax, numpy and jaxtyping are all it needs."""

from pallas_kernels.kv_cache_write.api import kv_cache_write
from pallas_kernels.paged_attention.api import paged_attention
from pallas_kernels.rms_norm.api import add_rms_norm
from pallas_kernels.rope_kv_cache_write.api import rope_kv_cache_write

__all__ = ["add_rms_norm", "kv_cache_write", "paged_attention", "rope_kv_cache_write"]
