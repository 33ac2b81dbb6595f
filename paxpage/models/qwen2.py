"""Qwen2 and Qwen2.5: Llama with biases on queries, keys and values (ModelConfig.has_qkv_bias)."""

from paxpage.models.llama import LlamaForCausalLM


class Qwen2ForCausalLM(LlamaForCausalLM):
    """The biases live in qkv_proj; the rest is Llama's."""
