"""Attention over paged keys and values, and what goes with it; jax, numpy and jaxtyping are all it needs."""

from pallas_kernels.kv_cache_write.api import kv_cache_write
from pallas_kernels.paged_attention.api import paged_attention
from pallas_kernels.rms_norm.api import add_rms_norm
from pallas_kernels.rope_kv_cache_write.api import rope_kv_cache_write
from pallas_kernels.top_k_top_p.api import top_k_top_p_draw

__all__ = ["add_rms_norm", "kv_cache_write", "paged_attention", "rope_kv_cache_write", "top_k_top_p_draw"]
