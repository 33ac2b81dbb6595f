"""Tokenizers rebuilt from GGUF metadata: the embedded model's as it is known to be, the others against transformers."""

from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from paxpage.models.embedded import default_model_path
from paxpage.models.gguf_files import GGUFFile, open_gguf
from paxpage.models.gguf_tokenizer import (
    BYTE,
    CONTROL,
    NORMAL,
    PRE_TOKENIZERS,
    UNKNOWN,
    USER_DEFINED,
    gguf_tokenizer,
    sentencepiece_merges,
)

THE = 1195  # the id of "the"
ODD_STRINGS = [
    "",
    " ",
    "Hello world",
    "  two  spaces ",
    "1234567890 12.5% 2³ ٣٤ Ⅳ",
    "I'll, they've; DON'T it's 'quoted'",
    "A 世ab",
    "世 界🙂 end",
    " 你好 ",
    "naïve café",
    "nai\u0308ve cafe\u0301",
    "한국어 깰",
    "ไทย",
    "🇪🇸👨‍👩‍👧",
    "tabs\tand\r\n\r\nlines \n  \n x",
    "snake_case && <b>html</b> != 'x'...",
    "def f(x):\n    return x ** 2  # ok\n",
    "\x00\x07 control \u200b\ufeff",
    "<|im_start|>user\nHi<|im_end|>",
]


@pytest.fixture(scope="module")
def smol_file() -> GGUFFile:
    return open_gguf(default_model_path())


@pytest.fixture(scope="module")
def smol(smol_file: GGUFFile) -> Any:
    return gguf_tokenizer(smol_file)


def changed(file: GGUFFile, **entries: Any) -> GGUFFile:
    """The file with other tokenizer metadata; None removes a key."""
    metadata = file.metadata | {f"tokenizer.ggml.{key}": value for key, value in entries.items()}
    return file._replace(metadata={key: value for key, value in metadata.items() if value is not None})


@pytest.fixture(scope="module")
def small_file(smol_file: GGUFFile) -> GGUFFile:
    """The first 4,000 tokens of the vocabulary: quick to build, as long as the ids do not matter."""
    tokens = smol_file.metadata["tokenizer.ggml.tokens"][:4000]
    known = set(tokens)
    merges = [merge for merge in smol_file.metadata["tokenizer.ggml.merges"] if merge.replace(" ", "") in known]
    types = smol_file.metadata["tokenizer.ggml.token_type"][:4000]
    return changed(smol_file, tokens=tokens, token_type=types, merges=merges)


@pytest.mark.parametrize("text", ODD_STRINGS)
def test_smollm2_round_trip(text: str, smol: Any) -> None:
    token_ids = smol.encode(text)
    assert smol.decode(token_ids) == text
    assert all(0 <= token_id < 49152 for token_id in token_ids)


@pytest.mark.parametrize(
    ("text", "token_ids"),
    [
        ("Hello world", [19556, 905]),
        ("12345 a1b2", [33, 34, 35, 36, 37, 253, 33, 82, 34]),  # each digit alone, and no space with it
        ("<|im_start|>user\nhi<|im_end|>", [1, 4093, 198, 6004, 2]),
        ("A 世ab", [49, 216, 7906, 240, 369]),
    ],
)
def test_smollm2_ids(text: str, token_ids: list[int], smol: Any) -> None:
    assert smol.encode(text) == token_ids


def test_smollm2_special_tokens(smol: Any) -> None:
    assert (smol.bos_token, smol.eos_token, smol.unk_token) == ("<|im_start|>", "<|im_end|>", "<|endoftext|>")
    assert (smol.bos_token_id, smol.eos_token_id) == (1, 2)
    assert smol.encode("x")[0] not in (0, 1, 2)
    assert smol.decode([1, 4093, 198, 6004, 2], skip_special_tokens=True) == "user\nhi"
    assert len(smol) == 49152


def test_smollm2_chat_template(smol: Any) -> None:
    text = smol.apply_chat_template([{"role": "user", "content": "Hi"}], tokenize=False, add_generation_prompt=True)
    system = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"
    turns = ["system\n" + system, "user\nHi"]
    assert text == "".join(f"<|im_start|>{turn}<|im_end|>\n" for turn in turns) + "<|im_start|>assistant\n"


def transformers_twin(file: GGUFFile, name: str) -> Any:
    """The same vocabulary in the class that transformers itself has for a family."""
    import transformers
    from transformers.convert_slow_tokenizer import TikTokenConverter

    vocabulary = {token: i for i, token in enumerate(file.metadata["tokenizer.ggml.tokens"])}
    merges = [tuple(merge.split(" ")) for merge in file.metadata["tokenizer.ggml.merges"]]
    if name == "qwen2":
        return transformers.Qwen2Tokenizer(vocab=vocabulary, merges=merges)
    twin = transformers.GPT2Tokenizer(vocab=vocabulary, merges=merges)
    if name.startswith("llama"):
        from tokenizers import Regex, pre_tokenizers

        words = pre_tokenizers.Split(Regex(TikTokenConverter().pattern), "isolated")
        twin.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [words, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
        )
    return twin


@pytest.mark.parametrize("name", ["gpt-2", "llama-bpe", "llama3", "llama-v3", "qwen2"])
def test_other_pre_tokenizers_equal_transformers(name: str, small_file: GGUFFile) -> None:
    ours = gguf_tokenizer(changed(small_file, pre=name))
    twin = transformers_twin(small_file, name)
    for text in ODD_STRINGS[:-1]:  # the last has special tokens, which the twins do not know
        assert ours.encode(text) == twin.encode(text, add_special_tokens=False), text


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("gpt-2", ["Ab", "1234", "ĠDON", "'", "T"]),
        ("smollm", ["Ab", "1", "2", "3", "4", "ĠDON", "'", "T"]),
        ("llama3", ["Ab", "123", "4", "ĠDON", "'T"]),
        ("qwen2", ["Ab", "1", "2", "3", "4", "ĠDON", "'T"]),
    ],
)
def test_words(name: str, words: list[str], small_file: GGUFFile) -> None:
    ours = gguf_tokenizer(changed(small_file, pre=name)).backend_tokenizer
    assert [word for word, _ in ours.pre_tokenizer.pre_tokenize_str("Ab1234 DON'T")] == words
    assert (ours.encode("nai\u0308ve").ids == ours.encode("na\u00efve").ids) == (name == "qwen2")


def test_llama3_takes_a_word_that_is_a_token_as_it_is(small_file: GGUFFile) -> None:
    tokens = [*small_file.metadata["tokenizer.ggml.tokens"][:-1], "zqxjk"]
    for name, expected in (("llama3", True), ("qwen2", False)):
        ours = gguf_tokenizer(changed(small_file, pre=name, tokens=tokens, merges=[]))
        assert (ours.encode("zqxjk") == [3999]) == expected


@pytest.mark.parametrize("name", ["default", "tekken", "", None, ["smollm"]])
def test_an_unknown_pre_tokenizer_is_refused_by_name(name: Any, small_file: GGUFFile) -> None:
    with pytest.raises(ValueError) as caught:
        gguf_tokenizer(changed(small_file, pre=name))
    message = str(caught.value)
    assert "tokenizer.ggml.pre" in message and repr(name) in message and ", ".join(PRE_TOKENIZERS) in message


def test_an_unknown_model_is_refused_by_name(small_file: GGUFFile) -> None:
    with pytest.raises(ValueError, match=r"tokenizer\.ggml\.model .* is 'rwkv'; allowed: gpt2, llama"):
        gguf_tokenizer(changed(small_file, model="rwkv"))


@pytest.mark.parametrize(
    ("entries", "expected"),
    [
        ({"add_bos_token": True}, [1, THE]),
        ({"add_eos_token": True}, [THE, 2]),
        ({"add_bos_token": True, "add_eos_token": True}, [1, THE, 2]),
        ({"add_bos_token": None}, [THE]),
        ({"add_bos_token": None, "pre": "llama-bpe"}, [1, THE]),
        ({"add_bos_token": False, "pre": "llama-bpe"}, [THE]),
    ],
)
def test_what_is_added_to_a_text(entries: dict[str, Any], expected: list[int], small_file: GGUFFile) -> None:
    ours = gguf_tokenizer(changed(small_file, **entries))
    assert ours.encode("the") == expected
    assert ours.encode("the", add_special_tokens=False) == [THE]


def test_user_defined_tokens_are_found_in_text_and_shown(small_file: GGUFFile) -> None:
    types = list(small_file.metadata["tokenizer.ggml.token_type"])
    types[3] = USER_DEFINED  # <repo_name>
    ours = gguf_tokenizer(changed(small_file, token_type=types))
    token_ids = ours.encode("a<repo_name>b")
    assert token_ids[1] == 3 and len(token_ids) == 3
    assert ours.decode(token_ids, skip_special_tokens=True) == "a<repo_name>b"


@pytest.mark.parametrize(
    ("entries", "words"),
    [
        ({"tokens": None}, "tokenizer.ggml.tokens"),
        ({"tokens": [1, 2]}, "tokenizer.ggml.tokens"),
        ({"token_type": [1, 2]}, "tokenizer.ggml.token_type is '2 entries'; allowed: 4000 entries"),
        ({"merges": ["Ġ t", "a b c"]}, "damaged tokenizer"),
        ({"merges": ["never seen"]}, "damaged tokenizer"),
        ({"eos_token_id": 4000}, "tokenizer.ggml.eos_token_id is 4000; allowed: 0 to 3999"),
        ({"bos_token_id": "one"}, "tokenizer.ggml.bos_token_id"),
        ({"bos_token_id": None, "add_bos_token": True}, "tokenizer.ggml.bos_token_id"),
        ({"model": "llama"}, "tokenizer.ggml.scores"),
    ],
)
def test_damaged_tables_are_named(entries: dict[str, Any], words: str, small_file: GGUFFile) -> None:
    with pytest.raises(ValueError) as caught:
        gguf_tokenizer(changed(small_file, **entries))
    assert words in str(caught.value)


WORDS = ["▁", "h", "e", "l", "o", "w", "r", "d", "he", "ll", "lo", "llo", "hello", "▁hello", "▁w", "or", "orl", "▁wor"]
RANKS = [20, 21, 22, 23, 24, 25, 26, 27, 3, 1, 2, 9, 8, 7, 5, 4, 10, 6]  # the lower the better
SCORES = [-float(rank) for rank in RANKS]


def sentencepiece_metadata(**entries: Any) -> dict[str, Any]:
    byte_tokens = [f"<0x{value:02X}>" for value in range(256)]
    tokens = ["<unk>", "<s>", "</s>", *byte_tokens, *WORDS, "<tool>"]
    return {
        "model": "llama",
        "tokens": tokens,
        "scores": [0.0, 0.0, 0.0, *([0.0] * 256), *SCORES, 0.0],
        "token_type": [UNKNOWN, CONTROL, CONTROL, *([BYTE] * 256), *([NORMAL] * len(WORDS)), USER_DEFINED],
        "unknown_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
        **entries,
    }


def sentencepiece_file(**entries: Any) -> GGUFFile:
    empty = GGUFFile(Path("spm.gguf"), {}, {}, np.zeros(0, np.uint8))
    return changed(empty, **sentencepiece_metadata(**entries))


def reference_pieces(text: str) -> list[str]:
    """SentencePiece's BPE by its definition: join the neighbours whose union scores best, the leftmost first."""
    scores = dict(zip(WORDS, SCORES, strict=True))
    pieces = list("▁" + text.replace(" ", "▁"))
    while True:
        unions = [(-scores[a + b], i) for i, (a, b) in enumerate(pairwise(pieces)) if a + b in scores]
        if not unions:
            break
        _, i = min(unions)
        pieces[i : i + 2] = [pieces[i] + pieces[i + 1]]
    fallback = [[p] if p in scores else [f"<0x{byte:02X}>" for byte in p.encode()] for p in pieces]
    return [piece for group in fallback for piece in group]


@pytest.mark.parametrize(
    "text",
    [
        "hello world",
        "hello",
        "llo lo ll",
        "hellohello  world",
        "wor worl orlo",
        "",
        " ",
        "oror",
        "h世e🙂",
        "lllllo",
        "Xhe",
    ],
)
def test_sentencepiece_pieces(text: str) -> None:
    ours = gguf_tokenizer(sentencepiece_file())
    expected = reference_pieces(text) if text else []
    assert ours.convert_ids_to_tokens(ours.encode(text, add_special_tokens=False)) == expected
    assert ours.decode(ours.encode(text), skip_special_tokens=True) == text


def test_sentencepiece_merges_are_in_the_order_of_scores() -> None:
    merges = sentencepiece_merges(["a", "b", "ab", "aba", "<s>"], [-1.0, -2.0, -4.0, -3.0, 0.0], [1, 1, 1, 1, 3])
    assert merges == [("ab", "a"), ("a", "b")]


def test_sentencepiece_adds_bos_and_keeps_special_tokens_whole() -> None:
    ours = gguf_tokenizer(sentencepiece_file())
    assert ours.encode("hello") == [1, *ours.encode("hello", add_special_tokens=False)]
    assert ours.encode("hello</s>")[-1] == 2
    token_ids = ours.encode("hello<tool>")
    assert ours.convert_ids_to_tokens(token_ids) == ["<s>", "▁hello", "<tool>"]
    assert ours.decode(token_ids, skip_special_tokens=True) == "hello<tool>"
    quiet = gguf_tokenizer(sentencepiece_file(add_bos_token=False, add_eos_token=True))
    assert quiet.convert_ids_to_tokens(quiet.encode("hello")) == ["▁hello", "</s>"]


def test_sentencepiece_without_the_leading_space() -> None:
    ours = gguf_tokenizer(sentencepiece_file(add_space_prefix=False))
    for text in ("hello", " hello"):
        token_ids = ours.encode(text, add_special_tokens=False)
        assert ours.decode(token_ids) == text
    assert ours.convert_ids_to_tokens(ours.encode("hello", add_special_tokens=False)) == ["hello"]
