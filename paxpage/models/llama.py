"""Llama 2, 3, 3.1, 3.2, SmolLM2, TinyLlama, and Mistral without a sliding window (Touvron et al., 2023)."""

from flax import nnx
from jaxtyping import Array, Float, Int

from paxpage.config import ModelConfig
from paxpage.models.layers import Embedding, GatedMLP, Linear, RMSNorm, Rope, matmul
from paxpage.models.protocol import Angles, Attend, KVSpec

Hidden = Float[Array, "num_tokens hidden_size"]


class Attention(nnx.Module):
    """Grouped-query attention. Queries, keys and values come from one matrix, rows in that order."""

    def __init__(self, config: ModelConfig, dtype: str) -> None:
        self.config = config
        num_rows = (config.num_heads + 2 * config.num_kv_heads) * config.head_dim
        self.qkv_proj = Linear(config.hidden_size, num_rows, dtype, config.has_qkv_bias)
        self.o_proj = Linear(config.num_heads * config.head_dim, config.hidden_size, dtype)

    def __call__(
        self, x: Float[Array, "num_tokens hidden_size"], angles: Angles, layer: int, attend: Attend
    ) -> Float[Array, "num_tokens hidden_size"]:
        qkv = self.qkv_proj(x).reshape(x.shape[0], -1, self.config.head_dim)
        out = self.attention(qkv, angles, layer, attend)
        return self.o_proj(out.reshape(x.shape[0], -1))

    def attention(
        self,
        qkv: Float[Array, "num_tokens num_heads_and_2_num_kv_heads head_dim"],
        angles: Angles,
        layer: int,
        attend: Attend,
    ) -> Float[Array, "num_tokens num_heads head_dim"]:
        """From the projected heads on; a family may do something to them before they are rotated."""
        return attend.rotary(layer, qkv, angles)


class DecoderLayer(nnx.Module):
    """x + attention(norm x), then x + mlp(norm x); what the last part adds is left for the next norm to add."""

    def __init__(self, config: ModelConfig, dtype: str, attention: type[Attention]) -> None:
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps, dtype)
        self.self_attn = attention(config, dtype)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps, dtype)
        self.mlp = GatedMLP(config, dtype)

    def __call__(
        self, x: Hidden, delta: Hidden | None, angles: Angles, layer: int, attend: Attend
    ) -> tuple[Hidden, Hidden]:
        x, normed = self.input_layernorm.add(x, delta)
        x, normed = self.post_attention_layernorm.add(x, self.self_attn(normed, angles, layer, attend))
        return x, self.mlp(normed)


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
        delta = None
        for index, layer in enumerate(self.layers):
            x, delta = layer(x, delta, angles, index, attend)
        return self.norm.add(x, delta)[1]

    def compute_logits(self, hidden: Float[Array, "num_rows hidden_size"]) -> Float[Array, "num_rows vocab_size"]:
        """Through the output head, or the embedding where the two are tied."""
        head = self.embed_tokens if self.config.is_tied else self.lm_head
        return matmul(hidden, head.weight[...])
