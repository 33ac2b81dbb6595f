"""The bytes that one token stands for, also where they are only part of a character."""

import functools
import json
import re
from typing import Any

REPLACEMENT = "\ufffd"  # what decoding gives for bytes that are no whole character
BYTE_PIECE = re.compile(r"<0x([0-9A-F]{2})>")


@functools.cache
def byte_of_letter() -> dict[str, int]:
    """How byte-level tokenizers spell bytes: printable ones as themselves, the rest from U+0100 on, in order."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    spelled = {chr(byte): byte for byte in printable}
    return {**spelled, **{chr(0x100 + place): byte for place, byte in enumerate(others)}}


class TokenBytes:
    """Knows the bytes of every token of one tokenizer (a transformers.PreTrainedTokenizerBase, or None)."""

    def __init__(self, tokenizer: Any):
        self._tokenizer = tokenizer
        self._is_byte_level = tokenizer is not None and _is_byte_level(tokenizer)

    def text(self, *token_ids: int, skip_special_tokens: bool = False) -> str:
        """What the tokens decode to together; nothing without a tokenizer."""
        if self._tokenizer is None:
            return ""
        return self._tokenizer.backend_tokenizer.decode(list(token_ids), skip_special_tokens=skip_special_tokens)

    def of(self, token_id: int, text: str) -> bytes:
        """The token's bytes; text is what it decodes to alone."""
        if REPLACEMENT not in text or self._tokenizer is None:
            return text.encode()
        return self._from_piece(self._tokenizer.convert_ids_to_tokens(token_id), text)

    def _from_piece(self, piece: str, text: str) -> bytes:
        byte_piece = BYTE_PIECE.fullmatch(piece)
        if byte_piece is not None:
            return bytes([int(byte_piece[1], 16)])
        letters = byte_of_letter()
        if self._is_byte_level and all(letter in letters for letter in piece):
            return bytes(letters[letter] for letter in piece)
        return text.encode()


def _is_byte_level(tokenizer: Any) -> bool:
    decoder = tokenizer.backend_tokenizer.decoder
    state = {} if decoder is None else json.loads(decoder.__getstate__())
    return "ByteLevel" in [state.get("type"), *(part.get("type") for part in state.get("decoders", []))]


def count_characters(data: bytes) -> int:
    """How many UTF-8 characters begin in data."""
    return sum(byte & 0xC0 != 0x80 for byte in data)


def spell(data: bytes) -> str:
    """A token as text: its characters or, where it is only part of one, OpenAI's "bytes:" and their hexadecimals."""
    try:
        return data.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)
