"""TINY: a random two-layer Llama with a byte-level tokenizer, as a Hugging Face folder."""

import json
from pathlib import Path
from typing import Any

VOCAB_SIZE = 512
MAX_MODEL_LEN = 8192
BOS, EOS = "<s>", "</s>"
TEMPLATE = (
    "{{ bos_token }}{% for tool in tools or [] %}{{ tool.function.name }}|{% endfor %}"
    "{% for message in messages %}<|{{ message.role }}|>"
    "{% for call in message.tool_calls or [] %}{{ call.function.name }}({{ call.function.arguments.city }}){% endfor %}"
    "{{ message.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
TRAINING_TEXT = (
    "The blue kettle stands on the stove and the seven doors of the house are open to the garden. "
    "Whoever comes through them in the morning finds the water warm, the bread on the table and the "
    "letters of the day in order. Nothing is kept waiting: what ends makes room for what comes next. "
    "There are other houses on the street, with other kettles, and other people in the other gardens. "
    "Beyond them a railway runs along the river, past meadows, windmills, an orchard and two small villages, until it "
    "reaches the harbour where heavy ships unload copper, oranges, timber and salt before winter closes the channel. "
    "Children count wagons from the bridge; their grandparents remember quieter evenings without engines or lamps. "
)


def make_tiny(folder: Path) -> Path:
    """Writes the model, its tokenizer and a generation config whose two EOS ids its greedy runs come across."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=144,
        intermediate_size=288,
        num_hidden_layers=2,
        num_attention_heads=9,
        num_key_value_heads=3,
        head_dim=16,
        max_position_embeddings=MAX_MODEL_LEN,
        initializer_range=0.1,
        tie_word_embeddings=False,
        bos_token_id=0,
        eos_token_id=None,
        dtype="float32",
    )
    model = LlamaForCausalLM(config).eval()
    model.save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    eos_ids = [greedy(model, [60], 6)[-1], greedy(model, [70], 9)[-1]]
    assert eos_ids[0] != eos_ids[1]
    (folder / "generation_config.json").write_text(json.dumps({"bos_token_id": 0, "eos_token_id": eos_ids}))
    return folder


def greedy(model: Any, prompt: list[int], num_tokens: int) -> list[int]:
    """transformers' greedy continuation, end of sequence ignored."""
    import torch

    ids = torch.tensor([prompt])
    with torch.no_grad():
        for _ in range(num_tokens):
            ids = torch.cat([ids, model(ids).logits[:, -1:].argmax(-1)], dim=1)
    return ids[0, len(prompt) :].tolist()


def make_tokenizer(*, has_template: bool = True, vocab_size: int = VOCAB_SIZE) -> Any:
    """A byte-level BPE tokenizer that adds a BOS, with a chat template that begins with one."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[BOS, EOS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([TRAINING_TEXT] * 2, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(single=f"{BOS} $A", special_tokens=[(BOS, 0)])
    wrapped = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token=BOS, eos_token=EOS)
    if has_template:
        wrapped.chat_template = TEMPLATE
    return wrapped
