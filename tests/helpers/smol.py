"""SMOL: the embedded SmolLM2-135M-Instruct, and transformers' model of the very same dequantised weights."""

from typing import Any

import numpy as np
from jax import Array

from paxpage.config import ModelConfig
from paxpage.models.checkpoint import flatten
from paxpage.models.registry import Params
from tests.helpers.checkpoints import as_oracle


def transformers_model(config: ModelConfig, params: Params) -> Any:
    """LlamaForCausalLM in float32 with paxpage's params, its joined projections cut apart again."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    assert config.rope_scaling is None and not config.has_qkv_bias and not config.has_qk_norm
    hf_config = LlamaConfig(
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_hidden_layers=config.num_layers,
        num_attention_heads=config.num_heads,
        num_key_value_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        max_position_embeddings=config.max_position_embeddings,
        rms_norm_eps=config.rms_norm_eps,
        rope_parameters={"rope_type": "default", "rope_theta": config.rope_theta},
        tie_word_embeddings=config.is_tied,
    )
    with torch.device("meta"):
        model = LlamaForCausalLM(hf_config)
    model.to_empty(device="cpu")
    model.model.rotary_emb = type(model.model.rotary_emb)(hf_config)  # its buffers are no weights
    model.load_state_dict({name: torch.from_numpy(array) for name, array in state_dict(config, params).items()})
    return as_oracle(model)


def state_dict(config: ModelConfig, params: Params) -> dict[str, np.ndarray]:
    """params under transformers' names."""
    tensors: dict[str, np.ndarray] = {}
    for path, array in flatten(params).items():
        tensors.update(_split(config, f"model.{path}" if not path.startswith("lm_head.") else path, array))
    if config.is_tied:
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"]
    return tensors


def _split(config: ModelConfig, name: str, array: Array) -> dict[str, np.ndarray]:
    rows = np.array(array, np.float32)
    num_q, num_kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    if "qkv_proj" in name:
        parts = np.split(rows, [num_q, num_q + num_kv])
        return {name.replace("qkv_proj", f"{part}_proj"): rows for part, rows in zip("qkv", parts, strict=True)}
    if "gate_up_proj" in name:
        parts = np.split(rows, 2)
        names = ("gate_proj", "up_proj")
        return {name.replace("gate_up_proj", part): rows for part, rows in zip(names, parts, strict=True)}
    return {name: rows}
