"""Tiny checkpoints written the way their owners' tools write them."""

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf import GGMLQuantizationType

ROPE_LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}

# head_dim is not hidden_size / num_attention_heads, and every row is a multiple of the 32 that most quantisations take
SIZES = {
    "vocab_size": 80,
    "hidden_size": 96,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 128,
}
MODEL_TYPES = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
}


def save_hf(folder: Path, architecture: str, dtype: str = "float32", shard_size: str = "1GB", **options: Any) -> Path:
    """A random checkpoint written by transformers; folder is returned."""
    import torch
    import transformers

    torch.manual_seed(0)
    window = {"sliding_window": None} if architecture == "MistralForCausalLM" else {}
    config = transformers.AutoConfig.for_model(MODEL_TYPES[architecture], **{**SIZES, **window, **options})
    model = getattr(transformers, architecture)(config).to(getattr(torch, dtype))
    for name, parameter in model.named_parameters():
        if name.endswith(("bias", "norm.weight")):  # zeros and ones as they come would hide a mistake
            parameter.data.normal_()
    model.save_pretrained(folder, max_shard_size=shard_size)
    return folder


def read_hf(folder: Path) -> dict[str, np.ndarray]:
    """All tensors of a folder, by name, in float32."""
    from safetensors import safe_open

    tensors = {}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, framework="numpy") as file:
            tensors |= {name: file.get_tensor(name).astype(np.float32) for name in file.keys()}  # noqa: SIM118
    return tensors


def rewrite_hf(folder: Path, tensors: dict[str, np.ndarray], **config: Any) -> Path:
    """Replaces the tensors of a folder, and some keys of its config.json (None removes a key)."""
    from safetensors.numpy import save_file

    for path in folder.glob("*.safetensors*"):
        path.unlink()
    save_file(tensors, folder / "model.safetensors")
    raw = json.loads((folder / "config.json").read_text()) | config
    (folder / "config.json").write_text(json.dumps({key: value for key, value in raw.items() if value is not None}))
    return folder


def pair_rows(weight: np.ndarray, num_heads: int) -> np.ndarray:
    """Rows of q or k as llama.cpp wants them: halves of each head interleaved."""
    num_rows = weight.shape[0]
    heads = weight.reshape(num_heads, 2, num_rows // num_heads // 2, -1)
    return heads.swapaxes(1, 2).reshape(weight.shape)


def write_gguf(
    path: Path,
    tensors: dict[str, np.ndarray],
    arch: str = "llama",
    quantization: GGMLQuantizationType = GGMLQuantizationType.F32,
    metadata: dict[str, Any] | None = None,
) -> Path:
    """A GGUF file with the tensors of a Hugging Face checkpoint of SIZES. metadata: changes; None removes a key."""
    writer = gguf.GGUFWriter(path, arch)
    for key, value in {**gguf_metadata(arch), **(metadata or {})}.items():
        if value is not None:
            add_value(writer, key, value)
    names = gguf.get_tensor_name_map(getattr(gguf.MODEL_ARCH, arch.upper()), SIZES["num_hidden_layers"])
    for name, tensor in tensors.items():
        stem, _, suffix = name.rpartition(".")
        own = names.get_name(stem)
        if arch == "llama" and stem.endswith(("q_proj", "k_proj")):
            key = "num_attention_heads" if stem.endswith("q_proj") else "num_key_value_heads"
            tensor = pair_rows(tensor, SIZES[key])
        add_tensor(writer, f"{own}.{suffix}" if own else name, tensor, quantization)
    close(writer)
    return path


def gguf_metadata(arch: str) -> dict[str, Any]:
    """What converters write for SIZES."""
    return {
        f"{arch}.block_count": SIZES["num_hidden_layers"],
        f"{arch}.context_length": SIZES["max_position_embeddings"],
        f"{arch}.embedding_length": SIZES["hidden_size"],
        f"{arch}.feed_forward_length": SIZES["intermediate_size"],
        f"{arch}.attention.head_count": SIZES["num_attention_heads"],
        f"{arch}.attention.head_count_kv": SIZES["num_key_value_heads"],
        f"{arch}.attention.key_length": SIZES["head_dim"],
        f"{arch}.attention.value_length": SIZES["head_dim"],
        f"{arch}.attention.layer_norm_rms_epsilon": 1e-5,
        f"{arch}.rope.freq_base": 10000.0,
    }


def add_value(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    """Adds a metadata entry of the type that its value has."""
    adders: dict[type, Any] = {
        bool: writer.add_bool,
        int: writer.add_uint32,
        float: writer.add_float32,
        str: writer.add_string,
        list: writer.add_array,
    }
    adders[type(value)](key, value)


def add_tensor(writer: gguf.GGUFWriter, name: str, tensor: np.ndarray, quantization: GGMLQuantizationType) -> None:
    """Vectors stay float32, as converters leave them."""
    if tensor.ndim == 1:
        writer.add_tensor(name, tensor)
    else:
        writer.add_tensor(name, gguf.quants.quantize(tensor, quantization), raw_dtype=quantization)


def close(writer: gguf.GGUFWriter) -> None:
    """Writes everything out."""
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def expected_params(tensors: dict[str, np.ndarray], num_layers: int = SIZES["num_hidden_layers"]) -> dict[str, Any]:
    """paxpage's params by dotted name, put together by hand from a Hugging Face checkpoint."""
    params = {name.removeprefix("model."): tensor for name, tensor in tensors.items()}
    for layer in range(num_layers):
        for fused, parts in {"self_attn.qkv_proj": "qkv", "mlp.gate_up_proj": ("gate", "up")}.items():
            for kind in ("weight", "bias"):
                block = fused.partition(".")[0]
                names = [f"layers.{layer}.{block}.{part}_proj.{kind}" for part in parts]
                if names[0] in params:
                    params[f"layers.{layer}.{fused}.{kind}"] = np.concatenate([params.pop(name) for name in names])
    return params


def mapped_kib(path: str | Path) -> int:
    """Memory that the mapped pages of a file, or of a folder's files, take in this process; Linux only."""
    name, total, is_inside = str(Path(path).resolve()), 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if line.startswith("Rss:") and is_inside:
            total += int(line.split()[1])
        elif "-" in line.split(" ", 1)[0]:  # a mapping's first line: addresses, ..., the file's path
            is_inside = name in line
    return total
