"""PARROT: a checkpoint that says what was written into it, for tests of answers that no random model gives."""

import itertools
import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from tests.server.tiny import BOS, EOS, MAX_MODEL_LEN, VOCAB_SIZE, make_tokenizer

NUM_TRAINED = 384  # of the vocabulary; the rest is for pieces
# Names the form of calls, as templates of such models do, and ends in the last message, whose last token decides.
TEMPLATE = (
    "{{ bos_token }}{% if tools %}Answer <tool_call>{name, arguments}</tool_call>.{% for tool in tools %}"
    "{{ tool.function.name }}|{% endfor %}{% endif %}"
    "{% for message in messages %}<|{{ message.role }}|>"
    "{% for call in message.tool_calls or [] %}{{ call.function.name }}({{ call.function.arguments.city }}){% endfor %}"
    "{{ message.content }}{% endfor %}"
)


# By the last letter of the last message. Pieces are cut where no cut of a tokenizer would be kind.
SCRIPTS: Mapping[str, tuple[str, ...]] = {
    "A": (
        *("Let me", " see.\n<to", 'ol_call>\n{"na', 'me": "weather", "argu', 'ments": {"city": "Ro'),
        'me"}}\n</tool_call>',
    ),
    "B": (
        *('<tool_call>{"name": "weather", "arguments": {"city": "Oslo"}}</tool', "_call>\n<tool", "_call>"),
        '{"name": "time", "arguments": {"t": "</tool_call>", "world": "世界"}}</tool_call>',
    ),
    "C": ('<tool_call>{"name": "weather", "argum', 'ents": {"city": "Rome"} </tool_call>'),
    "D": ('<tool_call>{"name": "delete_', 'everything", "arguments": {}}</tool_call> D'),
    "E": ("Plain", " text < ", "more"),
    "F": ("Blue", " kettle", ", ", "seven"),
}


def make_parrot(folder: Path, scripts: Mapping[str, Sequence[str]] = SCRIPTS) -> Path:
    """Writes a model that answers a message which ends in a script's letter with its pieces, then ends.

    Each piece is a token of its own, so no piece may come twice. The model looks at nothing but its last token: what
    its layers add is zero, and the head's row of a token is the embedding of the token before it.
    """
    import torch
    from tokenizers import AddedToken
    from transformers import LlamaConfig, LlamaForCausalLM

    pieces = [piece for script in scripts.values() for piece in script]
    assert len(set(pieces)) == len(pieces) <= VOCAB_SIZE - NUM_TRAINED
    tokenizer = make_tokenizer(vocab_size=NUM_TRAINED)
    tokenizer.add_tokens([AddedToken(piece, normalized=False) for piece in pieces])
    tokenizer.chat_template = TEMPLATE
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
        tie_word_embeddings=False,
        bos_token_id=0,
        eos_token_id=None,
        dtype="float32",
    )
    model = LlamaForCausalLM(config)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
        embeddings = torch.nn.functional.normalize(torch.randn(VOCAB_SIZE, 144))
        model.model.embed_tokens.weight.copy_(embeddings)
        model.lm_head.weight.zero_()
        for letter, script in scripts.items():
            tokens = tokenizer.convert_tokens_to_ids([letter, *script, EOS])
            for before, after in itertools.pairwise(tokens):
                model.lm_head.weight[after] += 20 * embeddings[before]
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    ids = {"bos_token_id": tokenizer.convert_tokens_to_ids(BOS), "eos_token_id": tokenizer.convert_tokens_to_ids(EOS)}
    (folder / "generation_config.json").write_text(json.dumps(ids))
    return folder
