"""Text that comes a few tokens at a time, and the strings that end it."""

from collections.abc import Sequence

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from paxpage.engine.detokenizer import (
    NUM_CONTEXT_TOKENS,
    REPLACEMENT,
    Decode,
    Detokenizer,
    StopChecker,
    TokenDecoder,
    decode_after,
    find_stop,
    longest_partial_stop,
)
from tests.unit.engine.tokenizers_for_tests import Coder, byte_fallback, byte_level

CASE_13_TEXTS = ("A 世ab", "世 界🙂 end", " 你好 ", "naïve café", "한국어 깰", "ไทย", "🇪🇸👨‍👩‍👧")
FAST = settings(max_examples=60, derandomize=True, deadline=None)
CODERS = pytest.mark.parametrize("kind", ["byte_level", "byte_fallback"])


def coder_of(kind: str) -> Coder:
    return byte_level() if kind == "byte_level" else byte_fallback()


def pieces_of(decode: Decode, token_ids: Sequence[int], chunk: int = 1, context: Sequence[int] = ()) -> list[str]:
    decoder = TokenDecoder(decode, context)
    pieces = [decoder.push(token_ids[start : start + chunk]) for start in range(0, len(token_ids), chunk)]
    return [*pieces, decoder.flush()]


# Decoding


@CODERS
@pytest.mark.parametrize("chunk", [1, 2, 3])
@pytest.mark.parametrize("text", CASE_13_TEXTS)
def test_characters_cut_between_tokens(kind: str, text: str, chunk: int) -> None:
    """sgl-project/sglang#31598: a character was sent twice when half of the next one was pending."""
    coder = coder_of(kind)
    token_ids = coder.encode(text)
    pieces = pieces_of(coder.decode, token_ids, chunk)
    assert "".join(pieces) == coder.decode(token_ids) == text
    assert not any(REPLACEMENT in piece for piece in pieces)
    assert pieces[-1] == "", "whole characters are not held back"


@CODERS
def test_the_texts_do_cut_characters(kind: str) -> None:
    """Otherwise the test above would show nothing."""
    coder = coder_of(kind)
    cut = [text for text in CASE_13_TEXTS if any(REPLACEMENT in coder.decode([i]) for i in coder.encode(text))]
    assert len(cut) >= 4


@CODERS
@FAST
@given(text=st.text(max_size=60), chunk=st.integers(1, 5))
@example(text="世" * 30 + " the end", chunk=1)
def test_any_text_comes_out_as_it_went_in(kind: str, text: str, chunk: int) -> None:
    coder = coder_of(kind)
    token_ids = coder.encode(text)
    whole = coder.decode(token_ids)
    pieces = pieces_of(coder.decode, token_ids, chunk)
    assert "".join(pieces) == whole
    if REPLACEMENT not in whole:
        assert not any(REPLACEMENT in piece for piece in pieces)


@CODERS
@FAST
@given(prompt=st.text(max_size=30), text=st.text(max_size=30))
def test_text_after_a_prompt(kind: str, prompt: str, text: str) -> None:
    """Joined, the pieces are what the whole has beyond the prompt, leading spaces included."""
    coder = coder_of(kind)
    token_ids = coder.encode(f"{prompt}x {text}")
    num_prompt_ids = len(coder.encode(f"{prompt}x"))
    prompt_ids, output_ids = token_ids[:num_prompt_ids], token_ids[num_prompt_ids:]
    if REPLACEMENT in coder.decode(token_ids):
        return
    expected = coder.decode(token_ids).removeprefix(coder.decode(prompt_ids).rstrip(REPLACEMENT))
    pieces = pieces_of(coder.decode, output_ids, 1, prompt_ids)
    assert "".join(pieces) == expected == decode_after(coder.decode, prompt_ids, output_ids)


def test_a_prompt_that_ends_within_a_character() -> None:
    coder = byte_fallback()
    prompt_ids, output_ids = [*coder.encode("a"), coder.byte_ids[0xE7]], [coder.byte_ids[0x95], coder.byte_ids[0x8C]]
    assert coder.decode([*prompt_ids, *output_ids]) == "a界"
    assert "".join(pieces_of(coder.decode, output_ids, 1, prompt_ids)) == "界"
    assert decode_after(coder.decode, prompt_ids, output_ids) == "界"


def test_a_prompts_last_tokens_that_begin_within_a_character() -> None:
    """The context is cut from a long prompt, never between the bytes of one character."""
    coder = byte_fallback()
    prompt_ids = coder.encode("界界界")
    assert coder.decode(prompt_ids[-NUM_CONTEXT_TOKENS:]).startswith(REPLACEMENT)
    output_ids = coder.encode("界 the")[1:]
    assert "".join(pieces_of(coder.decode, output_ids, 1, prompt_ids)) == "界 the"
    assert decode_after(coder.decode, prompt_ids, output_ids) == "界 the"


JUNK_BYTES = st.lists(st.sampled_from([0x80, 0xB8, 0x96, 0xE4, 0xF0, 0x9F, 0xC3, 0x61, 0x20]), max_size=40)


@FAST
@given(junk=JUNK_BYTES, chunk=st.integers(1, 4))
@example(junk=[0x80] * 7 + [0xE4, 0xB8, 0x96, 0x61], chunk=1)
@example(junk=[0xE4] * 30, chunk=1)
def test_wrong_bytes_come_out_as_in_the_whole(junk: list[int], chunk: int) -> None:
    coder = byte_level()
    token_ids = [coder.byte_ids[byte] for byte in junk]
    assert "".join(pieces_of(coder.decode, token_ids, chunk)) == bytes(junk).decode(errors="replace")


@FAST
@given(token_ids=st.lists(st.integers(0, 49151), max_size=40))
def test_any_ids_come_out_as_in_the_whole(token_ids: list[int]) -> None:
    coder = byte_level()
    assert "".join(pieces_of(coder.decode, token_ids)) == coder.decode(token_ids)


@FAST
@given(numbers=st.lists(st.integers(0, 999), max_size=40))
@example(numbers=[0xE4, 0xB8, 0x96, 0xE4])
def test_wrong_bytes_spoil_nothing_that_follows(numbers: list[int]) -> None:
    """With byte fallback one wrong byte spoils the bytes around it; what is out already stays, streamed or not."""
    coder = byte_fallback()
    token_ids = [3 + number % (coder.vocab_size - 3) for number in numbers] + coder.encode("x the end")
    streamed = "".join(pieces_of(coder.decode, token_ids))
    assert streamed.endswith("x the end")
    assert streamed == decode_after(coder.decode, (), token_ids)


@pytest.mark.parametrize("num_wrong", [1, 8, 9, 50])
def test_wrong_bytes_are_not_held_back_for_ever(num_wrong: int) -> None:
    coder = byte_level()
    decoder = TokenDecoder(coder.decode)
    sent = decoder.push([coder.byte_ids[0x80]] * num_wrong)
    assert sent == REPLACEMENT * len(sent)
    assert num_wrong - len(sent) <= 3 + 8
    assert sent + decoder.flush() == REPLACEMENT * num_wrong


def test_a_space_after_many_skipped_tokens_stays() -> None:
    """The tokenizer strips the space before a text's first word: context without text would make this one the first."""
    coder = byte_fallback()
    first, second = coder.encode("the end")
    token_ids = [first, *[coder.special_id] * 40, second]
    assert "".join(pieces_of(coder.decode, token_ids)) == coder.decode(token_ids) == "the end"


def test_the_work_for_a_token_does_not_grow() -> None:
    coder = byte_level()
    sizes = []

    def decode(token_ids: Sequence[int]) -> str:
        sizes.append(len(token_ids))
        return coder.decode(token_ids)

    pieces_of(decode, coder.encode("The quick brown fox jumps over the lazy dog. 世界 " * 20))
    assert max(sizes) <= 40


# Stop strings, against a search of the whole text


def end_of(text: str, stops: Sequence[str]) -> tuple[int, str] | None:
    """Where the first stop string to be complete begins, and which; by trying every end."""
    for end in range(len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            longest = max(found, key=len)
            return end - len(longest), longest
    return None


def detokenizer_of(
    tokens: Sequence[str], stops: Sequence[str], *, include_stop: bool = False, min_tokens: int = 0
) -> Detokenizer:
    """For a vocabulary of these tokens: token id i is tokens[i]."""
    decode = lambda token_ids: "".join(tokens[token_id] for token_id in token_ids)  # noqa: E731
    return Detokenizer(decode, [], stops, include_stop=include_stop, min_tokens=min_tokens)


def stream(text: str, sizes: Sequence[int], stops: Sequence[str], *, include_stop: bool = False) -> list[str]:
    """Pieces for text cut into tokens of these sizes (the last size repeated), pushed up to a stop or the end."""
    tokens = tokens_of(text, sizes)
    pieces, detokenizer = [], detokenizer_of(tokens, stops, include_stop=include_stop)
    for token_id in range(len(tokens)):
        pieces.append(detokenizer.push([token_id]))
        if detokenizer.stop_match is not None:
            return pieces
    pieces.append(detokenizer.flush())
    assert detokenizer.text == "".join(pieces)
    return pieces


def tokens_of(text: str, sizes: Sequence[int]) -> list[str]:
    tokens, start = [], 0
    while start < len(text):
        size = sizes[min(len(tokens), len(sizes) - 1)]
        tokens.append(text[start : start + size])
        start += size
    return tokens


TEXTS = st.text("ab", max_size=30)
STOPS = st.lists(st.text("abc", min_size=1, max_size=5), min_size=1, max_size=3)
SIZES = st.lists(st.integers(1, 6), min_size=1, max_size=8)


@settings(FAST, max_examples=400)
@given(text=TEXTS, sizes=SIZES, stops=STOPS, include_stop=st.booleans())
def test_the_text_ends_where_the_first_complete_stop_string_begins(
    text: str, sizes: list[int], stops: list[str], include_stop: bool
) -> None:
    pieces = stream(text, sizes, stops, include_stop=include_stop)
    end = end_of(text, stops)
    expected = text if end is None else text[: end[0]] + (end[1] if include_stop else "")
    assert "".join(pieces) == expected


@settings(FAST, max_examples=400)
@given(text=TEXTS, sizes=SIZES, stops=STOPS)
def test_what_is_held_back_could_become_a_stop_string_and_is_no_more(
    text: str, sizes: list[int], stops: list[str]
) -> None:
    checker, seen, sent = StopChecker(stops), "", ""
    for token in tokens_of(text, sizes):
        seen += token
        piece, match = checker.push(token)
        sent += piece
        if match is not None:
            break
        begins = [n for n in range(len(seen) + 1) if any(s.startswith(seen[n:]) and s != seen[n:] for s in stops)]
        assert sent == seen[: begins[0]]
    assert end_of(text, stops) is None or sent == text[: end_of(text, stops)[0]]


@settings(FAST, max_examples=200)
@given(text=TEXTS, stops=STOPS, min_tokens=st.integers(0, 12))
def test_before_min_tokens_nothing_is_searched(text: str, stops: list[str], min_tokens: int) -> None:
    """One character a token: the text that counts begins with token number min_tokens."""
    detokenizer = detokenizer_of(text, stops, min_tokens=min_tokens)
    for token_id in range(len(text)):
        detokenizer.push([token_id])
        if detokenizer.stop_match is not None:
            break
    else:
        detokenizer.flush()
    passed = text[: max(0, min_tokens - 1)]
    end = end_of(text[len(passed) :], stops)
    assert detokenizer.text == (text if end is None else passed + text[len(passed) :][: end[0]])


@FAST
@given(
    text=st.text("ab世🙂é ", max_size=25),
    stops=st.lists(st.text("ab世🙂é ", min_size=1, max_size=4), min_size=1, max_size=3),
)
def test_stop_strings_over_real_tokens(text: str, stops: list[str]) -> None:
    coder = byte_level()
    detokenizer = Detokenizer(coder.decode, [], stops, include_stop=False, min_tokens=0)
    for token_id in coder.encode(text):
        detokenizer.push([token_id])
        if detokenizer.stop_match is not None:
            break
    else:
        detokenizer.flush()
    end = end_of(text, stops)
    assert detokenizer.text == (text if end is None else text[: end[0]])


@pytest.mark.parametrize(
    ("text", "stops", "expected"),
    [
        ("one two three", ["three", "two"], (4, 7, "two")),
        ("abcdef", ["cdef", "d"], (3, 4, "d")),
        ("abcdef", ["d", "bcd", "cd"], (1, 4, "bcd")),
        ("aaa", ["aa"], (0, 2, "aa")),
        ("abc", ["x"], None),
    ],
)
def test_the_earliest_end_wins_then_the_longest(
    text: str, stops: list[str], expected: tuple[int, int, str] | None
) -> None:
    assert find_stop(text, stops) == expected


@pytest.mark.parametrize(
    ("text", "stops", "expected"),
    [("xab", ["abc"], 2), ("xab", ["b", "bcd"], 1), ("xaa", ["aaa"], 2), ("x", ["abc"], 0)],
)
def test_how_much_may_be_a_beginning(text: str, stops: list[str], expected: int) -> None:
    assert longest_partial_stop(text, stops) == expected


def test_a_stop_string_over_several_tokens_is_never_begun() -> None:
    """vllm-project/vllm#3574: the opening tokens of a stop string were sent before it was complete."""
    assert stream("A B C D E", [2], ["C D E"]) == ["A ", "B ", "", "", ""]
    assert stream("A B C D E", [2], ["C D E"], include_stop=True) == ["A ", "B ", "", "", "C D E"]
    assert stream("A B C D F", [2], ["C D E"]) == ["A ", "B ", "", "", "C D F", ""]


def test_what_comes_after_a_stop_string_in_the_same_token_is_dropped() -> None:
    assert stream("one. two", [8], [". "]) == ["one"]
    assert stream("one. two", [8], [". "], include_stop=True) == ["one. "]


def test_a_match_tells_which_stop_string_it_was() -> None:
    detokenizer = detokenizer_of("ab", ["zz", "b"])
    detokenizer.push([0])
    assert detokenizer.stop_match is None
    detokenizer.push([1])
    assert detokenizer.stop_match is not None and detokenizer.stop_match.stop == "b"


def test_a_stop_string_may_come_to_light_at_the_very_end() -> None:
    """The last, incomplete character is a replacement character once nothing follows."""
    coder = byte_level()
    detokenizer = Detokenizer(coder.decode, [], [f"a{REPLACEMENT}"], include_stop=False, min_tokens=0)
    assert detokenizer.push([*coder.encode("xa"), coder.byte_ids[0xE4]]) == "x"
    assert (detokenizer.flush(), detokenizer.text) == ("", "x")
    assert detokenizer.stop_match is not None


def test_held_text_is_released_when_a_request_ends_otherwise() -> None:
    detokenizer = detokenizer_of(["xab"], ["abc"])
    assert (detokenizer.push([0]), detokenizer.flush(), detokenizer.text) == ("x", "ab", "xab")


def test_several_tokens_at_once() -> None:
    detokenizer = detokenizer_of("abcdef", ["cd"])
    assert detokenizer.push(range(6)) == "ab"
    assert detokenizer.text == "ab"
