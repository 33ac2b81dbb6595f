"""Models that benchmarks know by name: shapes alone, with random weights."""

import contextlib
import json
import pathlib
import tempfile
from collections.abc import Iterator
from typing import Any

LLAMA3 = {
    "rope_type": "llama3",
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
COMMON = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 128256,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "hidden_act": "silu",
    "torch_dtype": "bfloat16",
}
CONFIGS: dict[str, dict[str, Any]] = {
    "llama8b": COMMON
    | {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32}
    | {"head_dim": 128, "rope_scaling": LLAMA3 | {"factor": 8.0}, "tie_word_embeddings": False},
    "llama1b": COMMON
    | {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "num_attention_heads": 32}
    | {"head_dim": 64, "rope_scaling": LLAMA3 | {"factor": 32.0}, "tie_word_embeddings": True},
}


@contextlib.contextmanager
def model_path(name: str, load_format: str) -> Iterator[tuple[str, str]]:
    """A model's path and load format: of a key of CONFIGS a folder that lives as long as the context."""
    if name not in CONFIGS:
        yield name, load_format
        return
    with tempfile.TemporaryDirectory() as folder:
        pathlib.Path(folder, "config.json").write_text(json.dumps(CONFIGS[name]))
        yield folder, "dummy"
