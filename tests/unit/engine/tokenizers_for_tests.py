"""Two kinds of tokenizer: the embedded model's byte-level one, and one whose unknown characters are bytes."""

import functools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import tokenizers
from tokenizers import Tokenizer, decoders, models, normalizers

from paxpage.models.embedded import default_model_path
from paxpage.models.gguf_files import open_gguf
from paxpage.models.gguf_tokenizer import gguf_tokenizer

SPACE = "\u2581"
WORDS = (f"{SPACE}the", f"{SPACE}end", f"{SPACE}caf", "the", "end", "caf")  # in the order of their merges


class Coder(NamedTuple):
    """Text to ids and back. byte_ids[b] is the token of byte b, where there is one."""

    encode: Callable[[str], list[int]]
    decode: Callable[[Sequence[int]], str]
    byte_ids: dict[int, int]
    vocab_size: int
    special_id: int  # left out of the text


def _coder(tokenizer: Tokenizer, byte_ids: dict[int, int], special_id: int) -> Coder:
    return Coder(
        lambda text: tokenizer.encode(text, add_special_tokens=False).ids,
        lambda ids: tokenizer.decode(ids, skip_special_tokens=True),
        byte_ids,
        tokenizer.get_vocab_size(),
        special_id,
    )


@functools.cache
def byte_level() -> Coder:
    """SmolLM2's, from the embedded GGUF file."""
    tokenizer = gguf_tokenizer(open_gguf(default_model_path())).backend_tokenizer
    end_id = tokenizer.token_to_id("<|im_end|>")
    return _coder(tokenizer, _byte_level_ids(tokenizer), end_id)


def _byte_level_ids(tokenizer: Tokenizer) -> dict[int, int]:
    """Byte-level vocabularies write printable bytes as themselves and the others, in order, from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    chars = {byte: chr(byte) for byte in printable} | {byte: chr(256 + i) for i, byte in enumerate(others)}
    ids = {byte: tokenizer.token_to_id(char) for byte, char in chars.items()}
    return {byte: token_id for byte, token_id in ids.items() if token_id is not None}


@functools.cache
def byte_fallback() -> Coder:
    """A small one in the manner of Llama 2: spaces as U+2581, one put before the text, 256 tokens for bytes."""
    letters = [SPACE, *map(chr, range(0x21, 0x7F)), "é", "世"]
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *letters]
    merges = list(dict.fromkeys((word[:cut], word[cut]) for word in WORDS for cut in range(1, len(word))))
    vocabulary = {piece: index for index, piece in enumerate([*pieces, *map("".join, merges)])}
    model = models.BPE(vocabulary, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    tokenizer = Tokenizer(model)
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend(SPACE), normalizers.Replace(" ", SPACE)])
    steps = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    tokenizer.decoder = decoders.Sequence(steps)
    tokenizer.add_special_tokens([tokenizers.AddedToken(name, special=True) for name in ("<unk>", "<s>", "</s>")])
    return _coder(tokenizer, {byte: 3 + byte for byte in range(256)}, vocabulary["</s>"])
