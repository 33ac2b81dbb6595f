"""config.json -> ModelConfig: as transformers reads it, and no more than the models compute."""

import json
from pathlib import Path
from typing import Any

import pytest

from paxpage.config import RopeScaling
from paxpage.models.hf_config import FAMILIES, from_hf, has_dtype, read_json
from tests.unit.models.checkpoints import MODEL_TYPES, ROPE_LLAMA3, SIZES

SPARSE = {key: SIZES[key] for key in SIZES if key not in ("num_key_value_heads", "head_dim", "max_position_embeddings")}
WINDOW = {"sliding_window": None}  # Mistral's window is in force unless the file says null


def raw(architecture: str = "LlamaForCausalLM", **keys: Any) -> dict[str, Any]:
    model_type = MODEL_TYPES[architecture]
    return {"architectures": [architecture], "model_type": model_type, **SIZES, **WINDOW, **keys}


SPARSE_VARIANTS: list[dict[str, Any]] = [
    {},
    {"num_key_value_heads": 3, "num_attention_heads": 12},
    {"head_dim": 24, "tie_word_embeddings": True, "rms_norm_eps": 1e-5},
    {"rope_theta": 500000.0, "max_position_embeddings": 77},
    {"rope_scaling": dict(ROPE_LLAMA3)},
    {"rope_parameters": {"rope_theta": 1e6, "rope_type": "default"}},
    {"rope_theta": 5.0, "rope_parameters": {"rope_theta": 7.0, **ROPE_LLAMA3}},
]


@pytest.mark.parametrize("architecture", FAMILIES)
@pytest.mark.parametrize("variant", SPARSE_VARIANTS, ids=lambda variant: "+".join(variant) or "bare")
def test_what_a_file_leaves_out_is_what_transformers_assumes(
    architecture: str, variant: dict[str, Any], tmp_path: Path
) -> None:
    from transformers import AutoConfig

    heads = {"num_attention_heads": 32, "hidden_size": 256}  # the default of 32 key-value heads fits
    keys = {"architectures": [architecture], "model_type": MODEL_TYPES[architecture], **SPARSE, **heads}
    keys |= WINDOW | variant
    if variant.get("num_attention_heads"):
        keys["hidden_size"] = 192
    (tmp_path / "config.json").write_text(json.dumps(keys))
    theirs = AutoConfig.from_pretrained(tmp_path)
    ours = from_hf(read_json(tmp_path / "config.json"))
    rope = theirs.rope_parameters
    assert ours.num_kv_heads == theirs.num_key_value_heads
    assert ours.head_dim == getattr(theirs, "head_dim", theirs.hidden_size // theirs.num_attention_heads)
    assert ours.max_position_embeddings == theirs.max_position_embeddings
    assert ours.rms_norm_eps == theirs.rms_norm_eps
    assert ours.is_tied == theirs.tie_word_embeddings
    assert ours.rope_theta == rope["rope_theta"]
    assert (ours.rope_scaling is None) == (rope["rope_type"] == "default")
    if ours.rope_scaling is not None:
        assert ours.rope_scaling.factor == rope["factor"]
        assert ours.rope_scaling.original_max_position_embeddings == rope["original_max_position_embeddings"]


def test_every_number_is_taken() -> None:
    config = from_hf(raw(rope_theta=123.0, rms_norm_eps=1e-4, tie_word_embeddings=True, dtype="bfloat16"))
    assert (config.vocab_size, config.hidden_size, config.intermediate_size, config.num_layers) == (80, 96, 128, 2)
    assert (config.num_heads, config.num_kv_heads, config.head_dim, config.max_position_embeddings) == (4, 2, 16, 128)
    assert (config.rope_theta, config.rms_norm_eps, config.is_tied, config.dtype) == (123.0, 1e-4, True, "bfloat16")


@pytest.mark.parametrize("architecture", FAMILIES)
def test_families_differ_in_bias_and_norm(architecture: str) -> None:
    config = from_hf(raw(architecture))
    assert config.architecture == architecture
    assert config.has_qkv_bias == (architecture == "Qwen2ForCausalLM")
    assert config.has_qk_norm == (architecture == "Qwen3ForCausalLM")


def test_all_spellings_of_llama3_scaling_agree() -> None:
    block = {key: value for key, value in ROPE_LLAMA3.items() if key != "rope_type"}
    spellings = [
        raw(rope_scaling={**block, "rope_type": "llama3"}, rope_theta=500000.0),
        raw(rope_scaling={**block, "type": "llama3"}, rope_theta=500000.0),
        raw(rope_parameters={**block, "rope_type": "llama3", "rope_theta": 500000.0}),
        raw(rope_parameters={**block, "rope_type": "llama3"}, rope_theta=500000.0, rope_scaling=None),
    ]
    configs = {from_hf(spelling) for spelling in spellings}
    assert len(configs) == 1
    assert configs.pop().rope_scaling == RopeScaling(8.0, 1.0, 4.0, 64)


@pytest.mark.parametrize(
    "spelling", [{"dtype": "float16"}, {"torch_dtype": "float16"}, {"torch_dtype": "torch.float16"}]
)
def test_dtype_spellings(spelling: dict[str, str]) -> None:
    assert from_hf(raw(**spelling)).dtype == "float16"
    assert has_dtype(raw(**spelling)) and not has_dtype(raw())


def test_an_architecture_may_be_told_by_model_type_alone() -> None:
    keys = raw("Qwen3ForCausalLM")
    del keys["architectures"]
    assert from_hf(keys).architecture == "Qwen3ForCausalLM"


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, ["architectures", "GPT2LMHeadModel", *FAMILIES]),
        ({"architectures": [], "model_type": "gpt2"}, ["model_type", "gpt2", "qwen3"]),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 2.0}}, ["rope_type", "yarn", "llama3"]),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, ["rope_type", "linear"]),
        ({"rope_parameters": {"rope_type": "dynamic"}}, ["rope_type", "dynamic"]),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 2.0}}, ["rope_scaling", "low_freq_factor"]),
        ({"rope_scaling": {**ROPE_LLAMA3, "high_freq_factor": 1.0}}, ["high_freq_factor"]),
        ({"rope_scaling": {**ROPE_LLAMA3, "factor": 0.5}}, ["factor", "0.5"]),
        ({"rope_scaling": "llama3"}, ["rope_scaling", "llama3"]),
        ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, ["rope_parameters"]),
        ({"rope_theta": 0}, ["rope_theta"]),
        ({"partial_rotary_factor": 0.5}, ["partial_rotary_factor", "0.5"]),
        ({"attention_bias": True}, ["attention_bias", "True"]),
        ({"mlp_bias": True}, ["mlp_bias", "True"]),
        ({"hidden_act": "gelu"}, ["hidden_act", "gelu", "silu"]),
        ({"quantization_config": {"quant_method": "gptq"}}, ["quantization_config", "gptq"]),
        ({"layer_types": ["sliding_attention", "full_attention"]}, ["layer_types", "sliding_attention"]),
        ({"hidden_size": None}, ["config.json", "hidden_size"]),
        ({"head_dim": None, "hidden_size": 33}, ["hidden_size", "33"]),
        ({"head_dim": 7}, ["head_dim", "7"]),
        ({"num_key_value_heads": 3}, ["num_heads", "num_kv_heads"]),
        ({"max_position_embeddings": "long"}, ["max_position_embeddings", "long"]),
        ({"rms_norm_eps": None}, ["rms_norm_eps"]),
        ({"dtype": "float64"}, ["dtype", "float64", "bfloat16"]),
    ],
)
def test_what_is_not_computed_is_refused_by_name(keys: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(ValueError) as caught:
        from_hf(raw(**keys))
    assert all(word in str(caught.value) for word in words), str(caught.value)


@pytest.mark.parametrize(
    ("architecture", "keys", "field"),
    [
        ("MistralForCausalLM", {"sliding_window": 4096}, "sliding_window"),
        ("Qwen2ForCausalLM", {"use_sliding_window": True}, "use_sliding_window"),
        ("Qwen3ForCausalLM", {"use_sliding_window": True}, "use_sliding_window"),
    ],
)
def test_sliding_windows_are_refused(architecture: str, keys: dict[str, Any], field: str) -> None:
    with pytest.raises(ValueError, match=field):
        from_hf(raw(architecture, **keys))


def test_a_window_that_is_switched_off_is_let_be() -> None:
    assert from_hf(raw("Qwen2ForCausalLM", use_sliding_window=False, sliding_window=4096)).architecture


def test_mistral_without_the_key_has_a_window() -> None:
    keys = raw("MistralForCausalLM")
    del keys["sliding_window"]
    with pytest.raises(ValueError, match="sliding_window is 4096"):
        from_hf(keys)


@pytest.mark.parametrize("text", ["{", "[]", "\x00\xff", ""])
def test_a_broken_file_is_named(text: str, tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_bytes(text.encode("latin-1"))
    with pytest.raises(ValueError, match=r"config\.json"):
        read_json(path)
