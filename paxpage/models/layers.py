"""Layers that several families share. Weights of Linear are [out_features, in_features], as checkpoints store them."""

import math

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from pallas_kernels import add_rms_norm
from pallas_kernels.rms_norm.xla import rms_norm
from paxpage.config import ModelConfig, RopeScaling
from paxpage.models.protocol import Angles


def matmul(x: Float[Array, "... in_features"], weight: Float[Array, "out_features in_features"]) -> Array:
    """x @ weight.T; float32 operands are multiplied in full precision (a GPU's default would be TF32)."""
    if x.shape[:-1] == (1,) and weight.dtype == jnp.bfloat16:
        return jax.lax.platform_dependent(x, weight, cpu=_one_row_product, default=_product)
    return _product(x, weight)


def _product(x: Array, weight: Array) -> Array:
    contract_last = (((x.ndim - 1,), (1,)), ((), ()))
    precision = jax.lax.Precision.HIGHEST if weight.dtype == jnp.float32 else None
    return jax.lax.dot_general(x, weight, contract_last, precision=precision)


def _one_row_product(x: Array, weight: Array) -> Array:
    # With one row XLA's CPU compiler first converts all of a bfloat16 weight to float32, at every step.
    return _product(jnp.pad(x, ((0, 1), (0, 0))), weight)[:1]


class Linear(nnx.Module):
    """y = x @ weight.T (+ bias)."""

    def __init__(self, in_features: int, out_features: int, dtype: str, has_bias: bool = False) -> None:
        self.weight = nnx.Param(jnp.zeros((out_features, in_features), dtype))
        if has_bias:
            self.bias = nnx.Param(jnp.zeros((out_features,), dtype))
        self.has_bias = has_bias

    def __call__(self, x: Float[Array, "num_tokens in_features"]) -> Float[Array, "num_tokens out_features"]:
        y = matmul(x, self.weight[...])
        return y + self.bias[...] if self.has_bias else y


class Embedding(nnx.Module):
    """Token id -> row of weight [vocab_size, hidden_size]."""

    def __init__(self, vocab_size: int, hidden_size: int, dtype: str) -> None:
        self.weight = nnx.Param(jnp.zeros((vocab_size, hidden_size), dtype))

    def __call__(self, token_ids: Int[Array, " num_tokens"]) -> Float[Array, "num_tokens hidden_size"]:
        return self.weight[...].at[token_ids].get(mode="clip")


class RMSNorm(nnx.Module):
    """x / rms(x) * weight over the last axis, computed in float32 (Zhang and Sennrich, 2019)."""

    def __init__(self, size: int, eps: float, dtype: str) -> None:
        self.weight = nnx.Param(jnp.ones((size,), dtype))
        self.eps = eps

    def __call__(self, x: Float[Array, "*batch size"]) -> Float[Array, "*batch size"]:
        return rms_norm(x, self.weight[...], self.eps)

    def add(
        self, x: Float[Array, "num_tokens size"], delta: Float[Array, "num_tokens size"] | None
    ) -> tuple[Array, Array]:
        """(x + delta, its norm) in one pass, on a GPU in one kernel; delta None: (x, its norm)."""
        return add_rms_norm(x, delta, self.weight[...], eps=self.eps)


class GatedMLP(nnx.Module):
    """down(silu(gate x) * up x), gate and up as one matrix, gate rows first (Shazeer, 2020)."""

    def __init__(self, config: ModelConfig, dtype: str) -> None:
        self.gate_up_proj = Linear(config.hidden_size, 2 * config.intermediate_size, dtype)
        self.down_proj = Linear(config.intermediate_size, config.hidden_size, dtype)

    def __call__(self, x: Float[Array, "num_tokens hidden_size"]) -> Float[Array, "num_tokens hidden_size"]:
        return self.down_proj(silu_and_multiply(self.gate_up_proj(x)))


@jax.jit
def silu_and_multiply(gate_up: Float[Array, "num_tokens twice_size"]) -> Float[Array, "num_tokens size"]:
    """silu(gate) * up, gate the first half of the last axis."""
    gate, up = jnp.split(gate_up, 2, axis=-1)
    return jax.nn.silu(gate) * up


def rope_frequencies(config: ModelConfig) -> Float[Array, " half"]:
    """Radians per position of each pair of dimensions: theta ** (-2 i / head_dim), scaled where the config says so."""
    exponents = jnp.arange(0, config.head_dim, 2, dtype=jnp.float32) / config.head_dim
    frequencies = 1.0 / (config.rope_theta**exponents)
    return frequencies if config.rope_scaling is None else _scale_llama3(frequencies, config.rope_scaling)


def _scale_llama3(frequencies: Float[Array, " half"], scaling: RopeScaling) -> Float[Array, " half"]:
    """Long wavelengths are stretched by factor, short ones kept, those between interpolated (Llama 3.1)."""
    num_turns = scaling.original_max_position_embeddings * frequencies / (2 * math.pi)
    span = scaling.high_freq_factor - scaling.low_freq_factor
    keep = jnp.clip((num_turns - scaling.low_freq_factor) / span, 0.0, 1.0)
    return keep * frequencies + (1 - keep) * frequencies / scaling.factor


class Rope(nnx.Module):
    """Rotary position embedding, rotating dimension i with dimension i + head_dim / 2 (Su et al., 2021)."""

    def __init__(self, config: ModelConfig) -> None:
        self.config = config

    def angles(self, positions: Int[Array, " num_tokens"]) -> Angles:
        """Made once a step, used by every layer."""
        angles = positions.astype(jnp.float32)[:, None] * rope_frequencies(self.config)
        return Angles(jnp.cos(angles), jnp.sin(angles))
