"""Qwen3 (dense): Llama with each head's query and key normalised before the rotation."""

from jaxtyping import Array

from paxpage.config import ModelConfig
from paxpage.models.layers import RMSNorm
from paxpage.models.llama import Attention, LlamaForCausalLM


class Qwen3Attention(Attention):
    """Attention with an RMSNorm over head_dim on queries and on keys."""

    def __init__(self, config: ModelConfig, dtype: str) -> None:
        super().__init__(config, dtype)
        self.q_norm = RMSNorm(config.head_dim, config.rms_norm_eps, dtype)
        self.k_norm = RMSNorm(config.head_dim, config.rms_norm_eps, dtype)

    def normalise(self, q: Array, k: Array) -> tuple[Array, Array]:
        """RMSNorm per head."""
        return self.q_norm(q), self.k_norm(k)


class Qwen3ForCausalLM(LlamaForCausalLM):
    """The attention differs; the rest is Llama's."""

    attention = Qwen3Attention
