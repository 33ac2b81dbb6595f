"""The bytes of tokens that are only part of a character."""

from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from paxpage.outputs import Logprob
from paxpage.server.logprobs import LogprobFormatter
from paxpage.server.token_bytes import TokenBytes, byte_of_letter, count_characters, spell
from tests.server.tiny import make_tokenizer

TEXTS = ["a 世界 b", "naïve café", "🇪🇸👨‍👩‍👧", "한국어\n\t "]


def pieces(tokenizer: Any, text: str) -> list[tuple[int, str]]:
    """Token ids with what each decodes to alone."""
    ids = tokenizer.encode(text, add_special_tokens=False)
    return [(token_id, tokenizer.backend_tokenizer.decode([token_id], skip_special_tokens=False)) for token_id in ids]


@pytest.mark.parametrize("text", TEXTS)
def test_the_bytes_of_byte_level_tokens_join_to_the_text(text: str) -> None:
    tokenizer = make_tokenizer()
    parts = pieces(tokenizer, text)
    assert any("\ufffd" in part for _, part in parts) == (not text.isascii())
    assert b"".join(TokenBytes(tokenizer).of(*part) for part in parts).decode() == text


def test_byte_fallback_pieces() -> None:
    vocab = {"<unk>": 0, "<0xE4>": 1, "<0xB8>": 2, "<0x96>": 3, "\u2581x": 4}
    tokenizer = Tokenizer(models.BPE(vocab, [], unk_token="<unk>", byte_fallback=True))
    tokenizer.decoder = decoders.Sequence([decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()])
    token_bytes = TokenBytes(PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>"))
    assert b"".join(token_bytes.of(token_id, "\ufffd") for token_id in (1, 2, 3)).decode() == "世"
    assert token_bytes.of(4, " x") == b" x"


def test_a_replacement_character_that_is_meant() -> None:
    tokenizer = make_tokenizer()
    assert b"".join(TokenBytes(tokenizer).of(*part) for part in pieces(tokenizer, "\ufffd")) == "\ufffd".encode()
    assert TokenBytes(None).of(5, "\ufffd") == "\ufffd".encode()


def test_every_byte_has_one_letter() -> None:
    assert sorted(byte_of_letter().values()) == list(range(256))
    assert [byte_of_letter()[letter] for letter in "aĠĊ"] == [ord("a"), ord(" "), ord("\n")]


def test_spelling_and_counting() -> None:
    assert [spell(data) for data in (b"ab", "é".encode(), b"\xe4\xb8")] == ["ab", "é", "bytes:\\xe4\\xb8"]
    assert [count_characters(data) for data in (b"ab", "é".encode(), b"\xe4\xb8", b"\x96", b"")] == [2, 1, 1, 0, 0]


@pytest.mark.parametrize("text", TEXTS)
def test_offsets_count_whole_characters(text: str) -> None:
    tokenizer = make_tokenizer()
    entries = [{token_id: Logprob(-1.0, 1, part)} for token_id, part in pieces(tokenizer, text)]
    logprobs = LogprobFormatter(TokenBytes(tokenizer)).completion(entries, 0)
    whole = [(offset, token) for offset, token in zip(logprobs.text_offset, logprobs.tokens, strict=True)]
    for offset, token in whole:
        assert token.startswith("bytes:") or text[offset : offset + len(token)] == token
    chat = LogprobFormatter(TokenBytes(tokenizer)).chat(entries, 0)
    assert b"".join(bytes(token.bytes) for token in chat.content).decode() == text
