"""The checkpoints that are compared with transformers: every family and every head layout, tied and untied."""

from tests.helpers.checkpoints import LLAMA3_ROPE, TINY, Checkpoint, llama_heads

PROMPTS = ([100], list(range(50, 67)), [(50 + 7 * j) % 400 for j in range(40)])

TIED = {"tie_word_embeddings": True}

CHECKPOINTS = (
    TINY,
    Checkpoint("llama3-rope-4x2x128", "Llama", {**llama_heads(4, 2, 128), "rope_parameters": LLAMA3_ROPE}),
    Checkpoint("smollm2-9x3x64-tied", "Llama", {**llama_heads(9, 3, 64), **TIED, "rms_norm_eps": 1e-5}),
    Checkpoint("mistral-6x2x96", "Mistral", {**llama_heads(6, 2, 96), "sliding_window": None}),
    Checkpoint("qwen2-14x2x64-tied", "Qwen2", {**llama_heads(14, 2, 64), **TIED}),
    Checkpoint("qwen2-5x1x80", "Qwen2", llama_heads(5, 1, 80)),
    Checkpoint("qwen3-4x2x128-narrow", "Qwen3", {**llama_heads(4, 2, 128), "hidden_size": 256}),
    Checkpoint("qwen3-9x3x64-tied", "Qwen3", {**llama_heads(9, 3, 64), **TIED, "hidden_size": 144}),
    Checkpoint("llama-8x1x256-narrow", "Llama", {**llama_heads(8, 1, 256), "hidden_size": 192}),
    Checkpoint("mistral-5x1x80-wide", "Mistral", {**llama_heads(5, 1, 80), "hidden_size": 480, "sliding_window": None}),
)

SERVED_NAMES = ("llama3-rope-4x2x128", "smollm2-9x3x64-tied", "mistral-6x2x96", "qwen2-5x1x80", "qwen3-4x2x128-narrow")
SERVED = [checkpoint for checkpoint in CHECKPOINTS if checkpoint.name in SERVED_NAMES]  # for the engine as a whole
