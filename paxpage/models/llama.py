"""Llama 2, 3, 3.1, 3.2, SmolLM2, TinyLlama, and Mistral without a sliding window (Touvron et al., 2023)."""

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from paxpage.config import ModelConfig
from paxpage.models.layers import Embedding, GatedMLP, Linear, RMSNorm, Rope, matmul, rotate
from paxpage.models.protocol import Attend, KVSpec


class Attention(nnx.Module):
    """Grouped-query attention. Queries, keys and values come from one matrix, rows in that order."""

    def __init__(self, config: ModelConfig, dtype: str) -> None:
        self.config = config
        num_rows = (config.num_heads + 2 * config.num_kv_heads) * config.head_dim
        self.qkv_proj = Linear(config.hidden_size, num_rows, dtype, config.has_qkv_bias)
        self.o_proj = Linear(config.num_heads * config.head_dim, config.hidden_size, dtype)

    def __call__(
        self, x: Float[Array, "num_tokens hidden_size"], angles: tuple[Array, Array], layer: int, attend: Attend
    ) -> Float[Array, "num_tokens hidden_size"]:
        q, k, v = self._split_heads(self.qkv_proj(x))
        q, k = self.normalise(q, k)
        out = attend(layer, rotate(q, angles), rotate(k, angles), v)
        return self.o_proj(out.reshape(x.shape[0], -1))

    def normalise(self, q: Array, k: Array) -> tuple[Array, Array]:
        """What a family does to queries and keys before they are rotated: here nothing."""
        return q, k

    def _split_heads(self, qkv: Float[Array, "num_tokens num_rows"]) -> tuple[Array, Array, Array]:
        heads = qkv.reshape(qkv.shape[0], -1, self.config.head_dim)
        num_heads, num_kv_heads = self.config.num_heads, self.config.num_kv_heads
        q, k, v = jnp.split(heads, (num_heads, num_heads + num_kv_heads), axis=1)
        return q, k, v


class DecoderLayer(nnx.Module):
    """x + attention(norm x), then x + mlp(norm x)."""

    def __init__(self, config: ModelConfig, dtype: str, attention: type[Attention]) -> None:
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps, dtype)
        self.self_attn = attention(config, dtype)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps, dtype)
        self.mlp = GatedMLP(config, dtype)

    def __call__(
        self, x: Float[Array, "num_tokens hidden_size"], angles: tuple[Array, Array], layer: int, attend: Attend
    ) -> Float[Array, "num_tokens hidden_size"]:
        x = x + self.self_attn(self.input_layernorm(x), angles, layer, attend)
        return x + self.mlp(self.post_attention_layernorm(x))


class LlamaForCausalLM(nnx.Module):
    """The whole model; layers are unrolled in Python (a scan over stacked weights would copy each layer's first)."""

    attention: type[Attention] = Attention

    def __init__(self, config: ModelConfig, dtype: str) -> None:
        self.config = config
        self.kv_spec = KVSpec(config.num_layers, config.num_kv_heads, config.head_dim)
        self.embed_tokens = Embedding(config.vocab_size, config.hidden_size, dtype)
        self.layers = nnx.List([DecoderLayer(config, dtype, self.attention) for _ in range(config.num_layers)])
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps, dtype)
        self.rope = Rope(config)
        if not config.is_tied:
            self.lm_head = Linear(config.hidden_size, config.vocab_size, dtype)

    def __call__(
        self, token_ids: Int[Array, " num_tokens"], positions: Int[Array, " num_tokens"], attend: Attend
    ) -> Float[Array, "num_tokens hidden_size"]:
        x = self.embed_tokens(token_ids)
        angles = self.rope.angles(positions)
        for index, layer in enumerate(self.layers):
            x = layer(x, angles, index, attend)
        return self.norm(x)

    def compute_logits(self, hidden: Float[Array, "num_rows hidden_size"]) -> Float[Array, "num_rows vocab_size"]:
        """Through the output head, or the embedding where the two are tied."""
        head = self.embed_tokens if self.config.is_tied else self.lm_head
        return matmul(hidden, head.weight[...])
