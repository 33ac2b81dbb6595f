"""How few tokens a text can possibly be: what tells that it is too long before it is tokenised.

A token stands for no more characters than its own text has, so a text has at least its length divided by the longest
token's. That holds only where nothing of a text is lost on its way to tokens, which is asked of the tokenizer's parts:
each of them is one that is known to keep characters, or there is no bound.
"""

import json
from collections.abc import Container, Iterator
from typing import Any, NamedTuple

MAX_COMPOSED = 4  # characters of a text that become one in a composed form: those of the longest decomposition
COMPOSING_NORMALIZERS = ("NFC", "NFKC")
KEEPING_NORMALIZERS = ("NFD", "NFKD", "Lowercase", "Prepend", "ByteLevel")
KEEPING_SPLITTERS = ("ByteLevel", "Digits", "Metaspace")
SPLITTERS_BY_BEHAVIOUR = ("Split", "Punctuation")
KEEPING_BEHAVIOURS = ("Isolated", "MergedWithPrevious", "MergedWithNext", "Contiguous")
ADDING_PROCESSORS = ("ByteLevel", "BertProcessing", "RobertaProcessing")
LISTS = ("normalizers", "pretokenizers", "processors")  # what a Sequence of each kind calls its parts
ENTRY_POINTS = ("__call__", "encode", "_encode_plus")  # of transformers' tokenizers; a class may have its own
NUM_ASCII, NUM_BYTES = 128, 256
LATER_BYTES = range(0x80, 0xC0)  # of a character's UTF-8, all but the first

Part = dict[str, Any]  # as in tokenizer.json: its "type", and options


class TextBound(NamedTuple):
    """From below, of the number of tokens."""

    longest: int  # characters of a text that a token stands for at most
    vanishing: str  # characters that may be no token at all

    def fewest_tokens(self, text: str) -> int:
        """As many tokens as the text has at least."""
        num_characters = len(text) - sum(map(text.count, self.vanishing))
        return -(-num_characters // self.longest)


def text_bound(tokenizer: Any) -> TextBound | None:
    """What a tokenizer's parts promise; None where they promise nothing, or are not all known.

    tokenizer: a transformers.PreTrainedTokenizerBase. Only BPE promises anything, over bytes or with single bytes for
    unknown characters: the other models make one token of an unknown word, or of several unknown characters.
    """
    from tokenizers import models
    from transformers import PreTrainedTokenizerFast

    is_plain = isinstance(tokenizer, PreTrainedTokenizerFast) and all(
        getattr(type(tokenizer), name) is getattr(PreTrainedTokenizerFast, name) for name in ENTRY_POINTS
    )
    if not is_plain or not isinstance(tokenizer.backend_tokenizer.model, models.BPE):
        return None
    backend = tokenizer.backend_tokenizer
    try:
        normalizers, splitters, processors = (
            _parts(part) for part in (backend.normalizer, backend.pre_tokenizer, backend.post_processor)
        )
    except Exception:  # a part written in Python cannot be asked
        return None
    if not all(map(_is_splitter_keeping, splitters)) or not all(map(_is_processor_adding, processors)):
        return None
    kinds = [part["type"] for part in splitters] + [part["type"] for part in normalizers[-1:]]
    vanishing = _vanishing(backend, is_byte_level="ByteLevel" in kinds)
    num_composed = _num_composed(normalizers)
    longest = _longest_token(backend)
    if vanishing is None or num_composed is None or longest is None or (vanishing and normalizers):
        return None
    return TextBound(longest * num_composed, vanishing)


def _parts(part: Any) -> list[Part]:
    """A normalizer, pre-tokenizer or post-processor as a list of simple ones."""
    return [] if part is None else list(_flatten(json.loads(part.__getstate__())))


def _flatten(part: Part) -> Iterator[Part]:
    if part["type"] != "Sequence":
        yield part
        return
    for inner in next(part[name] for name in LISTS if name in part):
        yield from _flatten(inner)


def _num_composed(normalizers: list[Part]) -> int | None:
    """How many characters of a text may become one of the normalised text; None: no telling."""
    product = 1
    for part in normalizers:
        kind = part["type"]
        if kind in COMPOSING_NORMALIZERS:
            product *= MAX_COMPOSED
        elif kind not in KEEPING_NORMALIZERS and not _is_replacing_evenly(part):
            return None
    return product


def _is_replacing_evenly(part: Part) -> bool:
    """Whether it replaces a string, which a regular expression is not, by one that is no shorter."""
    pattern = part.get("pattern") if part["type"] == "Replace" else None
    return isinstance(pattern, dict) and "String" in pattern and len(part["content"]) >= len(pattern["String"])


def _is_splitter_keeping(part: Part) -> bool:
    if part["type"] in SPLITTERS_BY_BEHAVIOUR:
        return part["behavior"] in KEEPING_BEHAVIOURS
    return part["type"] in KEEPING_SPLITTERS


def _is_processor_adding(part: Part) -> bool:
    if part["type"] == "TemplateProcessing":
        return any(piece.get("Sequence", {}).get("id") == "A" for piece in part["single"])
    return part["type"] in ADDING_PROCESSORS


def _vanishing(backend: Any, *, is_byte_level: bool) -> str | None:
    """Characters that the model may leave out of a text; None where that can be any."""
    model = backend.model
    if model.continuing_subword_prefix or model.end_of_word_suffix:
        return None
    vocabulary = backend.get_vocab(with_added_tokens=False)
    if model.byte_fallback and all(f"<0x{byte:02X}>" in vocabulary for byte in range(NUM_BYTES)):
        return ""
    return _missing_ascii(vocabulary) if is_byte_level else None


def _missing_ascii(vocabulary: Container[str]) -> str | None:
    """ASCII characters that are no tokens over bytes; None if a longer character may have none of its bytes either."""
    from tokenizers import normalizers

    spell = normalizers.ByteLevel().normalize_str  # a character for each byte of a text's UTF-8
    later_bytes = [spell(chr(code))[1] for code in LATER_BYTES]  # U+0080 to U+00BF end in the byte of their number
    if not all(byte in vocabulary for byte in later_bytes):
        return None
    return "".join(chr(code) for code in range(NUM_ASCII) if spell(chr(code)) not in vocabulary)


def _longest_token(backend: Any) -> int | None:
    """In characters of the normalised text; None if a token may also take the spaces around it, however many."""
    added = backend.get_added_tokens_decoder().values()
    if any(token.lstrip or token.rstrip for token in added):
        return None
    texts = [token.content for token in added]
    if backend.normalizer is not None:  # some added tokens are looked for in the normalised text, normalised too
        texts += [backend.normalizer.normalize_str(text) for text in texts]
    return max(map(len, (*backend.get_vocab(with_added_tokens=False), *texts)), default=None)
