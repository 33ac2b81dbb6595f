"""GGUF headers, metadata and tensors, against the gguf library; damage is a ValueError wherever it lies."""

import random
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Q

from paxpage.config import RopeScaling
from paxpage.models.generation import GenerationDefaults
from paxpage.models.gguf_config import ROPE_FACTORS, checkpoint_name, model_config
from paxpage.models.gguf_files import dequantizable, dequantizer, open_gguf, raw_rows
from paxpage.models.hf_config import from_hf, read_json
from paxpage.models.loading import LoadOptions, load_model, load_params, open_model
from tests.unit.models.checkpoints import (
    ROPE_LLAMA3,
    SIZES,
    add_value,
    close,
    expected_params,
    gguf_metadata,
    read_hf,
    write_gguf,
)
from tests.unit.models.conftest import Saver
from tests.unit.models.test_checkpoint import assert_equal

QUIET = LoadOptions(show_progress=False)
ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}


def llama_file(saved: Saver, path: Path, metadata: dict[str, Any] | None = None, **extra: np.ndarray) -> Path:
    tensors = read_hf(saved("LlamaForCausalLM"))
    return write_gguf(path / "model.gguf", tensors | extra, metadata=metadata)


@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("is_tied", [False, True])
def test_every_family_equals_its_hugging_face_checkpoint(
    arch: str, is_tied: bool, saved: Saver, tmp_path: Path
) -> None:
    folder = saved(ARCHITECTURES[arch], tie_word_embeddings=is_tied, rms_norm_eps=1e-5)
    tensors = read_hf(folder)
    source = open_model(str(write_gguf(tmp_path / "tiny.gguf", tensors, arch)), QUIET)
    assert source.config == from_hf(read_json(folder / "config.json"))
    assert source.name == "tiny"
    assert_equal(load_params(source), expected_params(tensors), "float32")


@pytest.mark.parametrize("quantization", [Q.F16, Q.BF16, Q.Q8_0, Q.Q4_0, Q.Q4_1, Q.Q5_0, Q.Q5_1])
def test_quantised_files(quantization: Q, saved: Saver, tmp_path: Path) -> None:
    """Rows are quantised after they were put in llama.cpp's order, which must not matter: blocks lie within a row."""
    tensors = read_hf(saved("LlamaForCausalLM"))
    source = open_model(str(write_gguf(tmp_path / "a.gguf", tensors, quantization=quantization)), QUIET)
    rounded = {
        name: value
        if value.ndim == 1
        else gguf.quants.dequantize(gguf.quants.quantize(value, quantization), quantization)
        for name, value in tensors.items()
    }
    assert_equal(load_params(source), expected_params(rounded), "float32")
    assert source.config.dtype == ("float16" if quantization == Q.F16 else "bfloat16")


@pytest.mark.parametrize("name", dequantizable())
def test_dequantisation_is_the_library_s(name: str) -> None:
    quantization = Q[name]
    _, block_bytes = gguf.GGML_QUANT_SIZES[quantization]
    raw = np.random.default_rng(0).integers(0, 120, (40, 4 * block_bytes), np.uint8)  # small exponents: no infinities
    ours = dequantizer(quantization)(raw)
    np.testing.assert_array_equal(ours, gguf.quants.dequantize(raw, quantization))
    assert ours.shape[0] == 40 and ours.size > 40


def test_what_cannot_be_dequantised_is_refused_by_name(saved: Saver, tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "a.gguf", "llama")
    for key, value in gguf_metadata("llama").items():
        add_value(writer, key, value)
    writer.add_tensor("token_embd.weight", np.zeros((80, 96), np.int8), raw_dtype=Q.I8)
    close(writer)
    with pytest.raises(ValueError, match=r"quantisation is 'I8'; allowed: F32, F16, Q4_0"):
        open_model(str(tmp_path / "a.gguf"), QUIET)


def test_header_equals_the_library_s(tmp_path: Path) -> None:
    path = tmp_path / "a.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_uint8("a", 1), writer.add_int8("b", -1), writer.add_uint16("c", 2), writer.add_int16("d", -2)
    writer.add_uint32("e", 3), writer.add_int32("f", -3), writer.add_uint64("g", 2**60), writer.add_int64("h", -4)
    (
        writer.add_float32("i", 0.1),
        writer.add_float64("j", 0.1),
        writer.add_bool("k", True),
        writer.add_string("l", "é🙂"),
    )
    writer.add_array("m", ["", "x", "世界"]), writer.add_array("n", [1.5, 2.5]), writer.add_array("o", [3, -4])
    writer.add_custom_alignment(64)
    writer.add_tensor("three", np.arange(24, dtype=np.float32).reshape(2, 3, 4))
    writer.add_tensor("half", np.arange(5, dtype=np.float16))
    writer.add_tensor("q", np.arange(68, dtype=np.uint8).reshape(2, 34), raw_dtype=Q.Q8_0)
    close(writer)
    ours, theirs = open_gguf(path), gguf.GGUFReader(path)
    fields = {key: field.contents() for key, field in theirs.fields.items() if not key.startswith("GGUF.")}
    assert ours.metadata == fields and list(ours.metadata) == list(fields)
    assert list(ours.tensors) == ["three", "half", "q"]
    for tensor in theirs.tensors:
        own = ours.tensors[tensor.name]
        assert (own.offset, own.num_bytes, own.quantization) == (tensor.data_offset, tensor.n_bytes, tensor.tensor_type)
        assert own.shape == tuple(reversed(tensor.shape.tolist()))
        assert raw_rows(ours, tensor.name).tobytes() == np.asarray(tensor.data).tobytes()


def test_numbers_mean_what_was_written(saved: Saver, tmp_path: Path) -> None:
    metadata = {"llama.attention.layer_norm_rms_epsilon": 1e-6, "llama.rope.freq_base": 500000.0}
    config = model_config(open_gguf(llama_file(saved, tmp_path, metadata)))
    assert (config.rms_norm_eps, config.rope_theta, config.dtype, config.is_tied) == (1e-6, 500000.0, "float32", False)


def test_head_dim_and_key_value_heads_have_defaults(saved: Saver, tmp_path: Path) -> None:
    absent = {"llama.attention.key_length": None, "llama.attention.value_length": None, "llama.rope.freq_base": None}
    file = open_gguf(llama_file(saved, tmp_path, absent | {"llama.attention.head_count_kv": None}))
    config = model_config(file)
    assert (config.head_dim, config.num_kv_heads, config.rope_theta) == (24, 4, 10000.0)


@pytest.mark.parametrize(
    ("metadata", "words"),
    [
        ({"general.architecture": "mamba"}, ["general.architecture", "mamba", "llama, qwen2, qwen3"]),
        ({"llama.block_count": None}, ["llama.block_count", "None"]),
        ({"llama.context_length": None}, ["llama.context_length"]),
        ({"llama.attention.layer_norm_rms_epsilon": None}, ["layer_norm_rms_epsilon"]),
        ({"llama.expert_count": 8}, ["expert_count", "8"]),
        ({"llama.attention.sliding_window": 64}, ["sliding_window", "64"]),
        ({"llama.rope.scaling.type": "yarn"}, ["rope.scaling.type", "yarn"]),
        ({"llama.rope.scaling.factor": 4.0}, ["rope.scaling.factor", "4.0"]),
        ({"llama.rope.dimension_count": 8}, ["rope.dimension_count", "8", "16"]),
        ({"llama.attention.value_length": 8}, ["value_length", "8", "16"]),
        ({"split.count": 3}, ["split.count", "3"]),
        ({"llama.attention.head_count_kv": [2, 2]}, ["head_count_kv", "[2, 2]"]),
    ],
)
def test_what_is_not_computed_is_refused_by_name(
    metadata: dict[str, Any], words: list[str], saved: Saver, tmp_path: Path
) -> None:
    path = llama_file(saved, tmp_path, {key: value for key, value in metadata.items() if key != "general.architecture"})
    if "general.architecture" in metadata:
        path.write_bytes(path.read_bytes().replace(b"llama", b"mamba", 2))
    with pytest.raises(ValueError) as caught:
        open_model(str(path), QUIET)
    assert all(word in str(caught.value) for word in words), str(caught.value)


def test_one_error_names_all_misfits(saved: Saver, tmp_path: Path) -> None:
    tensors = read_hf(saved("LlamaForCausalLM"))
    del tensors["model.norm.weight"]
    tensors["model.layers.0.mlp.up_proj.weight"] = np.zeros((64, 96), np.float32)
    tensors["blk.0.attn_q.bias"] = np.zeros(64, np.float32)
    with pytest.raises(ValueError) as caught:
        open_model(str(write_gguf(tmp_path / "a.gguf", tensors)), QUIET)
    message = str(caught.value)
    assert "3 tensor(s)" in message and "model.norm.weight [96] is missing" in message
    assert "model.layers.0.self_attn.q_proj.bias [64] is extra" in message
    assert "model.layers.0.mlp.up_proj.weight is [64, 96], expected [128, 96]" in message


def test_names_that_are_not_shared_are_kept() -> None:
    assert checkpoint_name("blk.3.ffn_gate_inp.weight") == "blk.3.ffn_gate_inp.weight"
    assert checkpoint_name("blk.3.attn_q_norm.weight") == "model.layers.3.self_attn.q_norm.weight"
    assert checkpoint_name("output.weight") == "lm_head.weight"


def converter_divisors(head_dim: int, theta: float, scaling: dict[str, Any]) -> np.ndarray:
    """What llama.cpp's converter stores as rope_freqs.weight, written from Llama 3.1's definition."""
    divisors = []
    for pair in range(head_dim // 2):
        wavelength = 2 * np.pi * theta ** (2 * pair / head_dim)
        num_turns = scaling["original_max_position_embeddings"] / wavelength
        low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
        share = min(max((num_turns - low) / (high - low), 0.0), 1.0)
        divisors.append(1 / ((1 - share) / scaling["factor"] + share))
    return np.array(divisors, np.float32)


LLAMA31 = ROPE_LLAMA3 | {"original_max_position_embeddings": 8192}


@pytest.mark.parametrize(
    ("head_dim", "theta", "scaling", "context"),
    [
        (128, 500000.0, LLAMA31, None),  # Llama 3.1
        (64, 500000.0, LLAMA31 | {"factor": 32.0}, None),  # Llama 3.2 1B
        (16, 10000.0, ROPE_LLAMA3, 64),
        (128, 500000.0, LLAMA31 | {"low_freq_factor": 2.0, "high_freq_factor": 5.0}, None),
    ],
)
def test_llama3_scaling_is_found_again(
    head_dim: int, theta: float, scaling: dict[str, Any], context: int | None, tmp_path: Path
) -> None:
    head = {"llama.attention.key_length": head_dim, "llama.attention.value_length": head_dim}
    metadata = head | {"llama.rope.freq_base": theta, "llama.rope.scaling.original_context_length": context}
    divisors = converter_divisors(head_dim, theta, scaling)
    embedding = np.zeros((80, 96), np.float32)
    tensors = {"model.embed_tokens.weight": embedding, ROPE_FACTORS: divisors}
    config = model_config(open_gguf(write_gguf(tmp_path / "a.gguf", tensors, metadata=metadata)))
    factors = (scaling["factor"], scaling["low_freq_factor"], scaling["high_freq_factor"])
    assert config.rope_scaling == RopeScaling(*factors, scaling["original_max_position_embeddings"])


def test_scaling_known_by_its_result_alone_is_equivalent(tmp_path: Path) -> None:
    """Without the original context length only its ratios to the two factors are known, and only they matter."""
    tensors = {"model.embed_tokens.weight": np.zeros((80, 96), np.float32)}
    tensors[ROPE_FACTORS] = converter_divisors(16, 10000.0, ROPE_LLAMA3)
    scaling = model_config(open_gguf(write_gguf(tmp_path / "a.gguf", tensors))).rope_scaling
    assert scaling is not None and scaling.factor == 8.0
    ratio = scaling.original_max_position_embeddings / 64
    assert (scaling.low_freq_factor / ratio, scaling.high_freq_factor / ratio) == pytest.approx((1.0, 4.0), rel=1e-3)


def test_divisors_of_one_are_no_scaling(tmp_path: Path) -> None:
    tensors = {"model.embed_tokens.weight": np.zeros((80, 96), np.float32), ROPE_FACTORS: np.ones(8, np.float32)}
    assert model_config(open_gguf(write_gguf(tmp_path / "a.gguf", tensors))).rope_scaling is None


@pytest.mark.parametrize("divisors", [np.linspace(1, 40, 8), np.ones(4), np.array([8.0, 1, 8, 1, 8, 1, 8, 1])])
def test_other_divisors_are_refused(divisors: np.ndarray, tmp_path: Path) -> None:
    tensors = {"model.embed_tokens.weight": np.zeros((80, 96), np.float32), ROPE_FACTORS: divisors.astype(np.float32)}
    with pytest.raises(ValueError, match=r"rope_freqs\.weight"):
        model_config(open_gguf(write_gguf(tmp_path / "a.gguf", tensors)))


def test_generation_defaults(saved: Saver, tmp_path: Path) -> None:
    metadata = {"tokenizer.ggml.eos_token_id": 7, "tokenizer.ggml.eot_token_id": 9, "tokenizer.ggml.bos_token_id": 1}
    sampling = {"general.sampling.temp": 0.6, "general.sampling.top_k": 20, "general.sampling.top_p": 0.95}
    source = open_model(str(llama_file(saved, tmp_path, metadata | sampling)), QUIET)
    assert source.generation == GenerationDefaults((7, 9), 1, temperature=0.6, top_p=0.95, top_k=20)


def test_a_file_cut_short_anywhere(saved: Saver, tmp_path: Path) -> None:
    whole = llama_file(saved, tmp_path, {"tokenizer.ggml.tokens": ["a", "b"], "n": [1, 2, 3]}).read_bytes()
    path = tmp_path / "short.gguf"
    for num_bytes in [*range(0, 3000, 37), len(whole) // 2, len(whole) - 40]:
        path.write_bytes(whole[:num_bytes])
        with pytest.raises(ValueError, match=r"short\.gguf|GGUF"):
            open_model(str(path), QUIET)


def test_damage_in_the_header_is_a_value_error_or_harmless(saved: Saver, tmp_path: Path) -> None:
    path = llama_file(saved, tmp_path, {"tokenizer.ggml.tokens": ["a", "b"], "n": [1, 2, 3]})
    whole = path.read_bytes()
    generator = random.Random(0)
    num_refused = 0
    for _ in range(100):
        damaged = bytearray(whole)
        damaged[generator.randrange(1500)] = generator.randrange(256)
        path.write_bytes(bytes(damaged))
        try:
            open_model(str(path), QUIET)
        except ValueError:
            num_refused += 1
    assert num_refused > 30


@pytest.mark.parametrize("content", [b"", b"GGUF", b"not a model", b"GGUF\x00\x00\x00\x03" + bytes(100)])
def test_other_files_are_refused(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "other.gguf"
    path.write_bytes(content)
    with pytest.raises(ValueError, match="GGUF"):
        open_model(str(path), QUIET)


@pytest.mark.parametrize("kind", [None, "none", "no_vocab"])
def test_a_file_without_a_tokenizer(kind: str | None, saved: Saver, tmp_path: Path) -> None:
    loaded = load_model(str(llama_file(saved, tmp_path, {"tokenizer.ggml.model": kind})), QUIET)
    assert loaded.tokenizer is None and loaded.generation.eos_token_ids == ()


def test_a_folder_with_one_gguf_file(saved: Saver, tmp_path: Path) -> None:
    llama_file(saved, tmp_path)
    assert open_model(str(tmp_path), QUIET).config.num_layers == SIZES["num_hidden_layers"]
    (tmp_path / "second.gguf").write_bytes(b"")
    with pytest.raises(ValueError, match=r"one \.gguf file"):
        open_model(str(tmp_path), QUIET)
