"""Tiny random checkpoints, written by transformers as a user's would be."""

import contextlib
import io
from pathlib import Path
from typing import Any, NamedTuple

VOCAB_SIZE = 512
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,  # at head_dim 16 and theta 10000, bands in all three regions
}


# initializer_range is this over the square root of the hidden size: 0.1 for TINY. Large enough that a fault shows
# (small weights only repeat the last token), with activations alike at all sizes, so that one tolerance serves them.
INITIALIZER_SCALE = 1.2


class Checkpoint(NamedTuple):
    """A model to be made: its class in transformers without "ForCausalLM", and what its config says."""

    name: str
    family: str
    changes: dict[str, Any]


def llama_heads(num_heads: int, num_kv_heads: int, head_dim: int) -> dict[str, int]:
    """Config entries of a layout whose heads fill the hidden size."""
    return {
        "num_attention_heads": num_heads,
        "num_key_value_heads": num_kv_heads,
        "head_dim": head_dim,
        "hidden_size": num_heads * head_dim,
    }


TINY_CONFIG = {
    "vocab_size": VOCAB_SIZE,
    **llama_heads(9, 3, 16),
    "intermediate_size": 288,
    "num_hidden_layers": 2,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": False,
    "dtype": "float32",
}
TINY = Checkpoint("tiny", "Llama", {})


def make_model(checkpoint: Checkpoint, seed: int = 0) -> Any:
    """The model in torch, on the CPU, float32, eager attention; norms and biases random too, not ones and zeros."""
    import torch
    import transformers

    config_class = getattr(transformers, f"{checkpoint.family}Config")
    model_class = getattr(transformers, f"{checkpoint.family}ForCausalLM")
    torch.manual_seed(seed)
    entries = {**TINY_CONFIG, **checkpoint.changes}
    entries["initializer_range"] = INITIALIZER_SCALE / entries["hidden_size"] ** 0.5
    model = model_class(config_class(**entries))
    with torch.no_grad():
        for name, tensor in model.named_parameters():
            if "norm" in name or name.endswith("bias"):
                tensor.add_(torch.randn_like(tensor) * 0.1)
    return as_oracle(model)


def as_oracle(model: Any) -> Any:
    """What everything is compared with: evaluation mode, eager attention, one thread."""
    import torch

    # Torch's threads wait for one another in busy loops: beside XLA's, or on a busy machine, two are slower than one.
    torch.set_num_threads(1)
    model.set_attn_implementation("eager")
    return model.eval()


def write_checkpoint(folder: Path, checkpoint: Checkpoint, seed: int = 0) -> Any:
    """Saves the model to folder and returns it."""
    model = make_model(checkpoint, seed)
    with contextlib.redirect_stderr(io.StringIO()):  # a progress bar
        model.save_pretrained(folder)
    return model
