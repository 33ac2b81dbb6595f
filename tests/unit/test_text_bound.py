"""No text has fewer tokens than text_bound says, of any tokenizer for which it says anything."""

import unicodedata
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import (
    AddedToken,
    PreTokenizedString,
    Regex,
    Tokenizer,
    models,
    normalizers,
    pre_tokenizers,
    processors,
)
from transformers import PreTrainedTokenizerFast

from paxpage.models.embedded import default_model_path
from paxpage.models.gguf_files import open_gguf
from paxpage.models.gguf_tokenizer import gguf_tokenizer
from paxpage.prompts import encode_plain, encode_text
from paxpage.text_bound import MAX_COMPOSED, text_bound
from tests.server.tiny import make_tokenizer

LONGEST = "abcdefgh"
SPACE = "\u2581"
COMPOSED = "\u1f82\u1f83\u1f84\u1f85\u1f86\u1f87\u1f92\u1f93"  # each of four characters
DECOMPOSED = unicodedata.normalize("NFD", COMPOSED)
BYTES = pre_tokenizers.ByteLevel.alphabet()


def grown(*words: str) -> tuple[list[str], list[tuple[str, str]]]:
    """Tokens and merges that make a token of each word, a character at a time."""
    merges = [(word[:i], word[i]) for word in words for i in range(1, len(word))]
    return [first + second for first, second in merges], list(dict.fromkeys(merges))


def bpe(alphabet: list[str], *words: str, **options: Any) -> models.BPE:
    tokens, merges = grown(*words)
    vocabulary = dict.fromkeys([*alphabet, *tokens])
    return models.BPE({token: i for i, token in enumerate(vocabulary)}, merges, **options)


def over_bytes(*, without: str = "") -> Tokenizer:
    """BPE over the characters of bytes, with a token of eight."""
    tokenizer = Tokenizer(bpe([byte for byte in sorted(BYTES) if byte not in without], LONGEST))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    return tokenizer


def with_fallback(*, num_bytes: int = 256, longest: str = LONGEST) -> Tokenizer:
    """SentencePiece's BPE as Llama 2 has it."""
    alphabet = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(num_bytes)), SPACE, *longest]
    tokenizer = Tokenizer(bpe(alphabet, longest, byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend(SPACE), normalizers.Replace(" ", SPACE)])
    return tokenizer


def changed(tokenizer: Tokenizer, **parts: Any) -> Tokenizer:
    for name, part in parts.items():
        setattr(tokenizer, name, part)
    return tokenizer


def with_added(tokenizer: Tokenizer, *tokens: AddedToken) -> Tokenizer:
    tokenizer.add_tokens(list(tokens))
    return tokenizer


def wrapped(tokenizer: Tokenizer) -> Any:
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


def smollm2() -> Any:
    return gguf_tokenizer(open_gguf(default_model_path()))


def like_qwen() -> Tokenizer:
    words = pre_tokenizers.Split(Regex(r"\p{L}+|\s+|[^\s\p{L}]+"), "isolated")
    steps = [pre_tokenizers.Digits(), pre_tokenizers.Punctuation(), words]
    bytes_last = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    splitter = pre_tokenizers.Sequence([*steps, bytes_last])
    return changed(over_bytes(), normalizer=normalizers.NFC(), pre_tokenizer=splitter)


def composing(form: Any) -> Tokenizer:
    """Eight composed characters are a token."""
    tokenizer = with_fallback(longest=COMPOSED)
    return changed(tokenizer, normalizer=normalizers.Sequence([form, normalizers.Lowercase()]))


def truncating() -> Tokenizer:
    tokenizer = over_bytes()
    tokenizer.enable_truncation(2)
    return tokenizer


def between_ends() -> Tokenizer:
    tokenizer = with_added(over_bytes(), AddedToken("<s>", special=True), AddedToken("</s>", special=True))
    template = processors.TemplateProcessing(single="<s> $A </s>", special_tokens=[("<s>", 256), ("</s>", 257)])
    return changed(tokenizer, post_processor=processors.Sequence([processors.ByteLevel(), template]))


# name: (a tokenizer, characters a token that are to be found, a text that has as few tokens as can be)
BOUNDED: dict[str, tuple[Callable[[], Any], int, str]] = {
    "SmolLM2's": (smollm2, 81, "\n" + " " * 80),
    "trained": (make_tokenizer, 9, " remember"),
    "bytes": (lambda: wrapped(over_bytes()), 8, LONGEST),
    "like Qwen's": (lambda: wrapped(like_qwen()), 32, LONGEST),
    "composed": (lambda: wrapped(composing(normalizers.NFC())), 32, DECOMPOSED),
    "composed by compatibility": (lambda: wrapped(composing(normalizers.NFKC())), 32, DECOMPOSED),
    "decomposed": (lambda: wrapped(changed(over_bytes(), normalizer=normalizers.NFD())), 8, LONGEST),
    "a normalizer of bytes": (
        lambda: wrapped(changed(over_bytes(), normalizer=normalizers.ByteLevel(), pre_tokenizer=None)),
        8,
        LONGEST,
    ),
    "byte fallback": (lambda: wrapped(with_fallback()), 8, LONGEST),
    "byte fallback, Metaspace": (
        lambda: wrapped(changed(with_fallback(), normalizer=None, pre_tokenizer=pre_tokenizers.Metaspace())),
        8,
        LONGEST,
    ),
    "a long added token": (lambda: wrapped(with_added(over_bytes(), AddedToken("x" * 30))), 30, "x" * 30),
    "an added token that normalising makes longer": (
        lambda: wrapped(
            with_added(
                changed(over_bytes(), normalizer=normalizers.Replace("x", "yyyyy")), AddedToken("xxx", normalized=True)
            )
        ),
        15,
        "y" * 15,
    ),
    "a template": (lambda: wrapped(between_ends()), 8, LONGEST),
    "truncation, which transformers takes off": (lambda: wrapped(truncating()), 8, LONGEST),
}


@pytest.fixture(scope="module", params=BOUNDED)
def bounded(request: pytest.FixtureRequest) -> tuple[Any, int, str]:
    make, longest, text = BOUNDED[request.param]
    return make(), longest, text


def texts() -> st.SearchStrategy[str]:
    """Of what tokenizers treat in ways of their own: spaces, controls, marks that compose, tokens of every kind."""
    pieces = [
        LONGEST,
        DECOMPOSED,
        COMPOSED,
        "<s>",
        "</s>",
        "xxx",
        "x" * 30,
        " ",
        "\n" + " " * 80,
        "\x04",
        "\x00",
        "\ufdfa",
    ]
    pieces += [
        "\u1100\u1161\u11a8",
        "\u0958",
        "\u212b",
        "\U0001f1ea",
        "\ufeff",
        SPACE,
        "Ġ",
        "yyy",
        "'ll",
        "123",
        "<unk>",
        "<0x41>",
    ]
    return st.lists(st.one_of(st.sampled_from(pieces), st.text(max_size=8)), max_size=12).map("".join)


def test_no_text_has_fewer_tokens(bounded: tuple[Any, int, str]) -> None:
    tokenizer, longest, _ = bounded
    bound = text_bound(tokenizer)
    assert bound is not None and bound.longest == longest

    @settings(max_examples=60, deadline=None)
    @given(texts(), st.integers(1, 40))
    def check(text: str, times: int) -> None:
        for repeated in (text, text * times):
            fewest = bound.fewest_tokens(repeated)
            assert fewest <= len(encode_plain(tokenizer, "text", repeated))
            assert fewest <= len(encode_text(tokenizer, repeated))

    check()


def test_a_text_of_longest_tokens(bounded: tuple[Any, int, str]) -> None:
    """Of nearly all these tokenizers a higher bound would be wrong: there is a text that has as many tokens."""
    tokenizer, longest, text = bounded
    bound = text_bound(tokenizer)
    assert bound is not None and bound.fewest_tokens(text * 5) == -(-5 * len(text) // longest)
    assert len(text) in (longest, 8)
    assert len(encode_plain(tokenizer, "text", text * 5)) in (5, 6)  # SentencePiece has a space before a text


def test_characters_that_are_no_tokens_do_not_count() -> None:
    """SmolLM2's tokenizer has none for some control characters, and leaves them out."""
    tokenizer = smollm2()
    bound = text_bound(tokenizer)
    assert bound is not None and encode_plain(tokenizer, "text", bound.vanishing * 1000) == []
    assert bound.fewest_tokens("\x04" * 1000) == 0 and bound.fewest_tokens("\x03\x04" * 1000) == 13


def test_no_character_is_composed_of_more() -> None:
    characters = map(chr, (*range(0xD800), *range(0xE000, 0x110000)))
    assert max(len(unicodedata.normalize("NFD", character)) for character in characters) == MAX_COMPOSED


# Tokenizers without a bound: of each there is a text of fewer tokens than its length divided by the longest token's


class OwnTokenizer(PreTrainedTokenizerFast):
    """Reads the last character alone."""

    def _encode_plus(self, text: str, **options: Any) -> Any:
        return super()._encode_plus(text[-1:], **options)


class Dropping:
    """A pre-tokenizer in Python."""

    def pre_tokenize(self, pretok: PreTokenizedString) -> None:
        pretok.split(lambda index, text: [text[:1]])


def python_splitter() -> Any:
    tokenizer = wrapped(over_bytes())
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.PreTokenizer.custom(Dropping())
    return tokenizer


def of_model(model: Any) -> Any:
    return wrapped(changed(Tokenizer(model), pre_tokenizer=pre_tokenizers.Metaspace(prepend_scheme="never")))


def normalized(normalizer: Any) -> Any:
    return wrapped(changed(over_bytes(), normalizer=normalizer))


def split(splitter: Any) -> Any:
    bytes_last = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return wrapped(changed(over_bytes(), pre_tokenizer=pre_tokenizers.Sequence([splitter, bytes_last])))


UNKNOWN = {"<unk>": 0, "a": 1}
UNBOUNDED: dict[str, tuple[Callable[[], Any], str]] = {
    "WordLevel": (lambda: of_model(models.WordLevel(UNKNOWN, unk_token="<unk>")), "z"),
    "WordPiece": (lambda: of_model(models.WordPiece(UNKNOWN, unk_token="<unk>")), "z"),
    "Unigram": (lambda: of_model(models.Unigram([("<unk>", 0.0), ("a", -1.0)], unk_id=0)), "z"),
    "BPE that fuses what is unknown": (
        lambda: of_model(models.BPE(UNKNOWN, [], unk_token="<unk>", fuse_unk=True)),
        "z",
    ),
    "BPE that leaves out what is unknown": (lambda: of_model(models.BPE(UNKNOWN, [])), "z"),
    "byte fallback without all bytes": (lambda: wrapped(with_fallback(num_bytes=200)), "\uff21"),
    "bytes without one that may follow": (lambda: wrapped(over_bytes(without="Ãĥĩ")), "\u00c7"),
    "marks of inner pieces": (
        lambda: wrapped(
            changed(
                Tokenizer(bpe(sorted(BYTES), continuing_subword_prefix="##")), pre_tokenizer=over_bytes().pre_tokenizer
            )
        ),
        "z",
    ),
    "marks of last pieces": (
        lambda: wrapped(
            changed(Tokenizer(bpe(sorted(BYTES), end_of_word_suffix="</w>")), pre_tokenizer=over_bytes().pre_tokenizer)
        ),
        " z",
    ),
    "stripped": (lambda: normalized(normalizers.Strip()), " "),
    "accents stripped": (lambda: normalized(normalizers.StripAccents()), "\u0301"),
    "BERT's normalizer": (lambda: normalized(normalizers.BertNormalizer()), "\x00"),
    "Nmt": (lambda: normalized(normalizers.Nmt()), "\x01"),
    "a regular expression replaced": (lambda: normalized(normalizers.Replace(Regex("z+"), "z")), "z"),
    "a string replaced by a shorter one": (lambda: normalized(normalizers.Replace("z" * 20, "z")), "z"),
    "a sequence with one of these": (
        lambda: normalized(normalizers.Sequence([normalizers.NFC(), normalizers.Strip()])),
        " ",
    ),
    "controls left out, and composed": (
        lambda: wrapped(changed(over_bytes(without="Ą"), normalizer=normalizers.NFC())),
        "\x04",
    ),
    "bytes before the last normalizer": (
        lambda: wrapped(
            changed(
                Tokenizer(bpe(sorted(BYTES))),
                normalizer=normalizers.Sequence([normalizers.ByteLevel(), normalizers.Replace("z", "\u03a9")]),
            )
        ),
        "z",
    ),
    "split at spaces": (lambda: split(pre_tokenizers.Whitespace()), " "),
    "split at white space": (lambda: split(pre_tokenizers.WhitespaceSplit()), " "),
    "BERT's splitter": (lambda: split(pre_tokenizers.BertPreTokenizer()), " "),
    "split at a character": (lambda: split(pre_tokenizers.CharDelimiterSplit("z")), "z"),
    "a pattern removed": (lambda: split(pre_tokenizers.Split("z", "removed")), "z"),
    "punctuation removed": (lambda: split(pre_tokenizers.Punctuation("removed")), "!"),
    "a splitter in Python": (python_splitter, "z"),
    "an added token that takes the spaces around it": (
        lambda: wrapped(with_added(over_bytes(), AddedToken("<s>", rstrip=True))),
        "<s>" + " " * 100,
    ),
    "a template without the text": (
        lambda: wrapped(
            changed(
                between_ends(),
                post_processor=processors.TemplateProcessing(single="<s>", special_tokens=[("<s>", 256)]),
            )
        ),
        "z",
    ),
    "a class of one's own": (lambda: OwnTokenizer(tokenizer_object=over_bytes()), "z"),
}


@pytest.mark.parametrize("kind", UNBOUNDED)
def test_what_may_lose_characters_has_no_bound(kind: str) -> None:
    make, text = UNBOUNDED[kind]
    tokenizer = make()
    assert text_bound(tokenizer) is None
    longest = max(map(len, tokenizer.get_vocab()))
    assert len(encode_plain(tokenizer, "text", text * 100)) * longest < 100 * len(text)


def test_what_is_no_tokenizer_of_transformers_has_no_bound() -> None:
    assert text_bound(object()) is None
