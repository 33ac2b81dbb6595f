"""GGUF metadata -> ModelConfig and GenerationDefaults, and GGUF tensor names -> the names that checkpoints use."""

import math
from typing import Any, NamedTuple

import numpy as np
from gguf import GGMLQuantizationType

from paxpage.config import ModelConfig, RopeScaling, require
from paxpage.models.generation import GenerationDefaults, eos_ids
from paxpage.models.gguf_files import GGUFFile, dequantizer, raw_rows

ROPE_FACTORS = "rope_freqs.weight"
LLAMA3_CONTEXT = 8192.0  # of Llama 3 before it was stretched; only its ratio to the two frequency factors matters
LLAMA3_LOW_HIGH = (1.0, 4.0)  # as in every published Llama 3.1 and 3.2
EOS_KEYS = ("eos_token_id", "eot_token_id", "eom_token_id")
SAMPLING_KEYS = {
    "temperature": "temp",
    "top_p": "top_p",
    "top_k": "top_k",
    "min_p": "min_p",
    "repetition_penalty": "penalty_repeat",
}
OUTSIDE_LAYERS = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
IN_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


class GGUFFamily(NamedTuple):
    """What sets one of GGUF's architectures apart."""

    architecture: str  # ModelConfig's
    has_qkv_bias: bool = False
    has_qk_norm: bool = False
    is_interleaved: bool = False  # rows of q and k lie pair by pair, as llama.cpp rotates them


FAMILIES = {
    "llama": GGUFFamily("LlamaForCausalLM", is_interleaved=True),
    "qwen2": GGUFFamily("Qwen2ForCausalLM", has_qkv_bias=True),
    "qwen3": GGUFFamily("Qwen3ForCausalLM", has_qk_norm=True),
}


def family(file: GGUFFile) -> GGUFFamily:
    """Raises ValueError for an architecture that is not supported."""
    name = file.metadata.get("general.architecture", "")
    require(
        isinstance(name, str) and name in FAMILIES, f"general.architecture of {file.path}", name, ", ".join(FAMILIES)
    )
    return FAMILIES[name]


def model_config(file: GGUFFile) -> ModelConfig:
    """Raises ValueError, by name, for a key that is missing and for what the models do not compute.

    dtype is the file's own for float32, float16 and bfloat16 weights, and bfloat16 for quantised ones.
    """
    traits = family(file)
    _refuse_unsupported(file)
    hidden_size, num_heads = _required(file, "embedding_length"), _required(file, "attention.head_count")
    return ModelConfig(
        architecture=traits.architecture,
        vocab_size=_vocab_size(file),
        hidden_size=hidden_size,
        intermediate_size=_required(file, "feed_forward_length"),
        num_layers=_required(file, "block_count"),
        num_heads=num_heads,
        num_kv_heads=_required(file, "attention.head_count_kv", int, num_heads),
        head_dim=_head_dim(file, hidden_size, num_heads),
        max_position_embeddings=_required(file, "context_length"),
        # float32 in the file: 9.999999747e-06 is 1e-5
        rms_norm_eps=_shortest(_required(file, "attention.layer_norm_rms_epsilon", float)),
        rope_theta=_rope_theta(file),
        rope_scaling=_rope_scaling(file),
        is_tied="output.weight" not in file.tensors,
        has_qkv_bias=traits.has_qkv_bias,
        has_qk_norm=traits.has_qk_norm,
        dtype=_dtype(file),
    )


def generation_defaults(file: GGUFFile) -> GenerationDefaults:
    """End of sequence: the file's eos, eot and eom token ids, in that order."""
    metadata = file.metadata
    eos = [metadata[f"tokenizer.ggml.{key}"] for key in EOS_KEYS if f"tokenizer.ggml.{key}" in metadata]
    sampling: dict[str, Any] = {}
    for field, key in SAMPLING_KEYS.items():
        value = metadata.get(f"general.sampling.{key}")
        sampling[field] = _shortest(value) if isinstance(value, float) else value
    return GenerationDefaults(eos_ids(eos), metadata.get("tokenizer.ggml.bos_token_id"), **sampling)


def checkpoint_name(name: str) -> str:
    """blk.3.attn_q.weight -> model.layers.3.self_attn.q_proj.weight; a name unknown to it comes back as it is."""
    if name in OUTSIDE_LAYERS:
        return OUTSIDE_LAYERS[name]
    parts = name.split(".")
    if len(parts) == 4 and parts[0] == "blk" and parts[2] in IN_LAYER:
        return f"model.layers.{parts[1]}.{IN_LAYER[parts[2]]}.{parts[3]}"
    return name


def _optional(file: GGUFFile, key: str, default: Any) -> Any:
    return file.metadata.get(f"{file.metadata['general.architecture']}.{key}", default)


def _required(file: GGUFFile, key: str, kind: type = int, default: Any = None) -> Any:
    value = _optional(file, key, default)
    full_key = f"{file.metadata['general.architecture']}.{key}"
    require(isinstance(value, kind), f"{full_key} in {file.path}", value, f"one {kind.__name__}")
    return value


def _positive(file: GGUFFile, key: str, default: float) -> float:
    value = _optional(file, key, default)
    require(isinstance(value, (int, float)) and value > 0, f"{key} in {file.path}", value, "a positive number")
    return _shortest(float(value))


def _refuse_unsupported(file: GGUFFile) -> None:
    num_experts = _optional(file, "expert_count", 0)
    require(not num_experts, "expert_count", num_experts, "0 (mixtures of experts are not supported)")
    window = _optional(file, "attention.sliding_window", 0)
    require(not window, "attention.sliding_window", window, "0 (attention over the whole context)")
    scaling = _optional(file, "rope.scaling.type", "none")
    require(scaling == "none", "rope.scaling.type", scaling, f"none (or llama3, as {ROPE_FACTORS})")
    for key in ("rope.scale_linear", "rope.scaling.factor"):
        require(_optional(file, key, 1.0) in (0.0, 1.0), key, _optional(file, key, 1.0), "1.0")


def _vocab_size(file: GGUFFile) -> int:
    shape = file.tensors["token_embd.weight"].shape if "token_embd.weight" in file.tensors else ()
    require(len(shape) == 2, f"token_embd.weight of {file.path}", shape, "a matrix")
    return shape[0]


def _head_dim(file: GGUFFile, hidden_size: int, num_heads: int) -> int:
    if _optional(file, "attention.key_length", None) is None:
        is_valid = num_heads > 0 and hidden_size % num_heads == 0
        require(is_valid, "embedding_length", hidden_size, f"a multiple of attention.head_count ({num_heads})")
    head_dim = _required(file, "attention.key_length", int, hidden_size // max(num_heads, 1))
    for key in ("attention.value_length", "rope.dimension_count"):
        require(
            _optional(file, key, head_dim) == head_dim, key, _optional(file, key, head_dim), f"head_dim, {head_dim}"
        )
    return head_dim


def _rope_theta(file: GGUFFile) -> float:
    return _positive(file, "rope.freq_base", 10000.0)


def _rope_scaling(file: GGUFFile) -> RopeScaling | None:
    """llama3 scaling, which GGUF files hold only as its result: one divisor for each pair of dimensions.

    factor is the largest divisor. Between the two wavelength bounds, the share of the unscaled frequency is a
    straight line in 1 / wavelength; its slope and height give the two frequency factors. The result must reproduce
    the file's divisors, or the file is refused.
    """
    if ROPE_FACTORS not in file.tensors:
        return None
    divisors = _read_small(file, ROPE_FACTORS).astype(np.float64)
    head_dim = _head_dim(file, _required(file, "embedding_length"), _required(file, "attention.head_count"))
    require(
        divisors.size == head_dim // 2, f"length of {ROPE_FACTORS}", divisors.size, f"head_dim / 2, {head_dim // 2}"
    )
    if np.all(divisors == 1):
        return None
    frequencies = _rope_theta(file) ** (-np.arange(0, head_dim, 2) / head_dim)
    context = int(_positive(file, "rope.scaling.original_context_length", LLAMA3_CONTEXT))
    num_turns = context * frequencies / (2 * math.pi)
    scaling = _fit_llama3(divisors, num_turns, context)
    is_llama3 = np.allclose(_llama3_divisors(scaling, num_turns), divisors, rtol=1e-4)
    require(is_llama3, ROPE_FACTORS, np.round(divisors, 3).tolist(), "the divisors of llama3 scaling")
    return scaling


def _fit_llama3(divisors: np.ndarray, num_turns: np.ndarray, context: int) -> RopeScaling:
    factor = _shortest(float(divisors.max()))
    between = (divisors > 1) & (divisors < divisors.max())
    low, high = LLAMA3_LOW_HIGH
    if between.sum() >= 2:
        keep = (1 / divisors[between] - 1 / factor) / (1 - 1 / factor)
        slope, height = np.polyfit(num_turns[between], keep, 1)
        low = float(f"{-height / slope:.4g}")
        high = float(f"{(1 - height) / slope:.4g}")
    return RopeScaling(factor, low, high, context)


def _llama3_divisors(scaling: RopeScaling, num_turns: np.ndarray) -> np.ndarray:
    keep = (num_turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    keep = np.clip(keep, 0, 1)
    return 1 / ((1 - keep) / scaling.factor + keep)


def _read_small(file: GGUFFile, name: str) -> np.ndarray:
    rows = np.array(raw_rows(file, name))
    return dequantizer(file.tensors[name].quantization)(rows).reshape(-1)


def _dtype(file: GGUFFile) -> str:
    plain = {GGMLQuantizationType.F32: "float32", GGMLQuantizationType.F16: "float16"}
    matrices = {t.quantization for name, t in file.tensors.items() if len(t.shape) == 2 and name != "token_embd.weight"}
    return plain.get(matrices.pop(), "bfloat16") if len(matrices) == 1 else "bfloat16"


def _shortest(value: float) -> float:
    """The shortest decimal that reads back as the same float32: what was meant when the file was written."""
    return float(str(np.float32(value)))
