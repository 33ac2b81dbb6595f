"""Qwen3 (dense): Llama with each head's query and key normalised before the rotation."""

import jax.numpy as jnp
from jaxtyping import Array, Float

from pallas_kernels.rope_kv_cache_write.xla import rotate
from paxpage.config import ModelConfig
from paxpage.models.layers import RMSNorm
from paxpage.models.llama import Attention, LlamaForCausalLM
from paxpage.models.protocol import Angles, Attend


class Qwen3Attention(Attention):
    """Attention with an RMSNorm over head_dim on queries and on keys."""

    def __init__(self, config: ModelConfig, dtype: str) -> None:
        super().__init__(config, dtype)
        self.q_norm = RMSNorm(config.head_dim, config.rms_norm_eps, dtype)
        self.k_norm = RMSNorm(config.head_dim, config.rms_norm_eps, dtype)

    def attention(
        self,
        qkv: Float[Array, "num_tokens num_heads_and_2_num_kv_heads head_dim"],
        angles: Angles,
        layer: int,
        attend: Attend,
    ) -> Float[Array, "num_tokens num_heads head_dim"]:
        """RMSNorm per head, then Llama's."""
        num_heads, num_kv_heads = self.config.num_heads, self.config.num_kv_heads
        q, k, v = jnp.split(qkv, (num_heads, num_heads + num_kv_heads), axis=1)
        return attend(layer, rotate(self.q_norm(q), *angles), rotate(self.k_norm(k), *angles), v)


class Qwen3ForCausalLM(LlamaForCausalLM):
    """The attention differs; the rest is Llama's."""

    attention = Qwen3Attention
