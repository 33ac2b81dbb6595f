"""config.json of a Hugging Face checkpoint -> ModelConfig.

The JSON is read as it stands: importing transformers takes seconds, and no code of a checkpoint is ever run.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from paxpage.config import DTYPES, ModelConfig, RopeScaling, require, require_int

REQUIRED = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
LLAMA3_FIELDS = ("factor", "low_freq_factor", "high_freq_factor")
SUPPORTED_ROPE_TYPES = "default, llama3"


class Family(NamedTuple):
    """What sets one architecture apart, and what transformers assumes where its config.json leaves a key out."""

    model_type: str
    num_kv_heads: int | None  # None: as many as query heads
    max_position_embeddings: int
    head_dim: int | None = None  # None: hidden_size / num_attention_heads
    sliding_window: int | None = None  # in force unless the file says null
    has_qkv_bias: bool = False
    has_qk_norm: bool = False


FAMILIES = {
    "LlamaForCausalLM": Family("llama", None, 2048),
    "MistralForCausalLM": Family("mistral", 8, 131072, sliding_window=4096),
    "Qwen2ForCausalLM": Family("qwen2", 32, 32768, has_qkv_bias=True),
    "Qwen3ForCausalLM": Family("qwen3", 32, 32768, head_dim=128, has_qk_norm=True),
}


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in a file. Raises ValueError when the file holds anything else."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} cannot be read as JSON: {error}") from error
    require(isinstance(value, dict), str(path), type(value).__name__, "a JSON object")
    return value


def from_hf(raw: Mapping[str, Any]) -> ModelConfig:
    """The contents of config.json -> ModelConfig.

    dtype is float32 where the file names none (see has_dtype). Raises ValueError, by name, for an architecture, a
    RoPE type or an option that the models do not compute.
    """
    architecture = _architecture(raw)
    family = FAMILIES[architecture]
    _refuse_unsupported(raw, family)
    return ModelConfig(
        architecture=architecture,
        vocab_size=raw["vocab_size"],
        hidden_size=raw["hidden_size"],
        intermediate_size=raw["intermediate_size"],
        num_layers=raw["num_hidden_layers"],
        num_heads=raw["num_attention_heads"],
        num_kv_heads=_num_kv_heads(raw, family),
        head_dim=_head_dim(raw, family),
        max_position_embeddings=_context(raw, family),
        rms_norm_eps=_positive(raw, "rms_norm_eps", 1e-6),
        rope_theta=_rope_theta(raw),
        rope_scaling=_rope_scaling(raw),
        is_tied=bool(raw.get("tie_word_embeddings", False)),
        has_qkv_bias=family.has_qkv_bias,
        has_qk_norm=family.has_qk_norm,
        dtype=_dtype(raw),
    )


def has_dtype(raw: Mapping[str, Any]) -> bool:
    """Whether the file names the checkpoint's dtype."""
    return _dtype_entry(raw) is not None


def _architecture(raw: Mapping[str, Any]) -> str:
    supported = ", ".join(FAMILIES)
    names = raw.get("architectures") or []
    if not names:
        by_type = {family.model_type: name for name, family in FAMILIES.items()}
        require(raw.get("model_type") in by_type, "model_type", raw.get("model_type"), ", ".join(by_type))
        return by_type[raw["model_type"]]
    require(isinstance(names, list) and names[0] in FAMILIES, "architectures", names, supported)
    return names[0]


def _refuse_unsupported(raw: Mapping[str, Any], family: Family) -> None:
    missing = [key for key in REQUIRED if not isinstance(raw.get(key), int)]
    require(
        not missing, "config.json", f"without {', '.join(missing)}", f"a whole number for each of {', '.join(REQUIRED)}"
    )
    require(raw.get("hidden_act", "silu") == "silu", "hidden_act", raw.get("hidden_act"), "silu")
    for key in ("attention_bias", "mlp_bias", "use_sliding_window"):
        require(not raw.get(key), key, raw.get(key), "false")
    if family.sliding_window is not None:
        window = raw.get("sliding_window", family.sliding_window)
        require(window is None, "sliding_window", window, "null (attention over the whole context)")
    require(not raw.get("quantization_config"), "quantization_config", raw.get("quantization_config"), "null")
    layer_types = raw.get("layer_types") or []
    require(set(layer_types) <= {"full_attention"}, "layer_types", layer_types, "full_attention only")


def _num_kv_heads(raw: Mapping[str, Any], family: Family) -> int:
    number = raw.get("num_key_value_heads", family.num_kv_heads)
    number = raw["num_attention_heads"] if number is None else number
    require_int("num_key_value_heads", number, 1)
    return number


def _context(raw: Mapping[str, Any], family: Family) -> int:
    length = raw.get("max_position_embeddings", family.max_position_embeddings)
    require_int("max_position_embeddings", length, 1)
    return length


def _positive(raw: Mapping[str, Any], key: str, default: float) -> float:
    value = raw.get(key, default)
    require(isinstance(value, (int, float)) and value > 0, key, value, "a positive number")
    return float(value)


def _head_dim(raw: Mapping[str, Any], family: Family) -> int:
    explicit = raw.get("head_dim", family.head_dim)
    if explicit is not None:
        require_int("head_dim", explicit, 1)
        return explicit
    hidden_size, num_heads = raw["hidden_size"], raw["num_attention_heads"]
    is_valid = num_heads > 0 and hidden_size % num_heads == 0
    require(is_valid, "hidden_size", hidden_size, f"a multiple of num_attention_heads ({num_heads}), or give head_dim")
    return hidden_size // num_heads


def _rope_entry(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    """The RoPE block: "rope_scaling" of transformers 4, or "rope_parameters" of transformers 5."""
    entry = raw.get("rope_scaling") or raw.get("rope_parameters") or {}
    require(isinstance(entry, Mapping), "rope_scaling", entry, "null or a JSON object")
    is_flat = not any(isinstance(value, Mapping) for value in entry.values())
    require(is_flat, "rope_parameters", entry, "one block for all layers")
    return entry


def _rope_theta(raw: Mapping[str, Any]) -> float:
    return _positive({**raw, **_rope_entry(raw)}, "rope_theta", 10000.0)


def _rope_scaling(raw: Mapping[str, Any]) -> RopeScaling | None:
    entry = _rope_entry(raw)
    rope_type = entry.get("rope_type") or entry.get("type") or "default"
    require(rope_type in SUPPORTED_ROPE_TYPES.split(", "), "rope_type", rope_type, SUPPORTED_ROPE_TYPES)
    share = entry.get("partial_rotary_factor") or raw.get("partial_rotary_factor") or 1.0
    require(share == 1.0, "partial_rotary_factor", share, "1.0")
    return None if rope_type == "default" else _llama3(entry, raw)


def _llama3(entry: Mapping[str, Any], raw: Mapping[str, Any]) -> RopeScaling:
    missing = [field for field in LLAMA3_FIELDS if not isinstance(entry.get(field), (int, float))]
    require(not missing, "rope_scaling", dict(entry), f"numbers for {', '.join(LLAMA3_FIELDS)} with rope_type llama3")
    factor, low, high = (float(entry[field]) for field in LLAMA3_FIELDS)
    require(factor >= 1, "rope_scaling factor", factor, "a number >= 1")
    require(high > low, "rope_scaling high_freq_factor", high, f"a number above low_freq_factor ({low})")
    # transformers takes the context length itself where the block does not say what it was before scaling
    original = entry.get("original_max_position_embeddings", raw.get("max_position_embeddings"))
    require(
        isinstance(original, int) and original > 0, "original_max_position_embeddings", original, "a positive integer"
    )
    return RopeScaling(factor, low, high, original)


def _dtype_entry(raw: Mapping[str, Any]) -> object:
    return raw.get("dtype") or raw.get("torch_dtype")


def _dtype(raw: Mapping[str, Any]) -> str:
    entry = _dtype_entry(raw)
    if entry is None:
        return "float32"
    name = str(entry).removeprefix("torch.")
    require(name in DTYPES[1:], "dtype in config.json", entry, ", ".join(DTYPES[1:]))
    return name
