"""Grammars by themselves: what is refused and why, what a mask holds, and what the device makes of it."""

import importlib.util
import json
import re
import threading
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from paxpage.engine import grammars, sampler
from paxpage.engine.batch import num_mask_words
from paxpage.engine.grammars import GrammarCompiler, token_mask
from paxpage.engine.request import FinishReason, Request
from paxpage.engine.sampling_params import SamplingParams
from paxpage.engine.scheduler import ScheduledRow
from paxpage.engine.structured_outputs import StructuredOutputsParams
from tests.server.tiny import make_tokenizer
from tests.unit.engine.tokenizers_for_tests import byte_fallback

TOKENIZER_SIZE, VOCAB_SIZE = 512, 700
PROMPT = [60, 61]


class Wrapped:
    """As much of a transformers tokenizer as is asked for."""

    def __init__(self, backend: Any, eos_token_id: int | None, special_ids: list[int]) -> None:
        self.backend_tokenizer, self.eos_token_id, self.all_special_ids = backend, eos_token_id, special_ids

    def __len__(self) -> int:
        return self.backend_tokenizer.get_vocab_size()


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return make_tokenizer()


@pytest.fixture(scope="module")
def compiler(tokenizer: Any) -> GrammarCompiler:
    """Of a model that has more logits than there are tokens."""
    return GrammarCompiler(tokenizer, VOCAB_SIZE)


def make_request(compiler: GrammarCompiler, params: SamplingParams, eos_ids: frozenset[int] = frozenset()) -> Request:
    request = Request("r", PROMPT, params, max_tokens=100, eos_token_ids=eos_ids)
    assert params.structured_outputs is not None
    request.grammar = compiler.compile(params.structured_outputs).start(request)
    return request


def ids_of(mask: np.ndarray) -> set[int]:
    return set(np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")).tolist())


def next_ids(compiler: GrammarCompiler, *requests: Request) -> list[set[int]]:
    """Tokens that may come next, of each request in a batch that has a row without a grammar first."""
    plain = Request("plain", PROMPT, SamplingParams(), max_tokens=9)
    rows = [ScheduledRow(each, len(each.token_ids) - 1, 1, True, -1) for each in (plain, *requests)]
    masks = compiler.masks(rows, len(rows) + 2)
    assert masks.shape == (len(rows) + 2, num_mask_words(compiler._vocab_size)) and masks.dtype == np.uint32
    assert (masks[[0, -1, -2]] == 2**32 - 1).all()
    return [ids_of(mask) for mask in masks[1 : len(rows)]]


def regex(pattern: str, **options: Any) -> SamplingParams:
    return SamplingParams(structured_outputs=StructuredOutputsParams(regex=pattern), **options)


def texts(tokenizer: Any, ids: set[int]) -> set[str]:
    return {tokenizer.decode([token_id]) for token_id in ids}


def test_only_text_that_fits_may_come(compiler: GrammarCompiler, tokenizer: Any) -> None:
    request = make_request(compiler, regex("the[a-z]? [0-9]{3}"))
    for text in ("the", " ", "1", "2", "3"):
        (ids,) = next_ids(compiler, request)
        assert text in texts(tokenizer, ids)
        assert all(re.fullmatch("t?h?e?[a-z]?|[a-z]? ?|[0-9]", each) for each in texts(tokenizer, ids))
        reason = request.append(tokenizer.encode(text, add_special_tokens=False)[0])
    assert reason is FinishReason.STOP


def test_no_special_token_and_none_past_the_tokenizer_may_come(compiler: GrammarCompiler, tokenizer: Any) -> None:
    request = make_request(compiler, regex("(.|\\n)*", ignore_eos=True))
    (ids,) = next_ids(compiler, request)
    assert ids and max(ids) < len(tokenizer) and not ids & set(tokenizer.all_special_ids)
    assert ids == {i for i in range(2, len(tokenizer)) if i in ids}
    grammar = StructuredOutputsParams(grammar=r"start: /[<>\/s]+/")
    (ids,) = next_ids(compiler, make_request(compiler, SamplingParams(structured_outputs=grammar, ignore_eos=True)))
    assert "<" in texts(tokenizer, ids) and not ids & set(tokenizer.all_special_ids)


def test_ends_come_where_the_grammar_may_end_and_nowhere_else(compiler: GrammarCompiler, tokenizer: Any) -> None:
    """Even if a token of text is an end of sequence: it then ends the request wherever it comes."""
    (letter,) = tokenizer.encode("b", add_special_tokens=False)
    (other,) = tokenizer.encode("a", add_special_tokens=False)
    eos_ids, stop = frozenset({1, letter}), 300
    request = make_request(compiler, regex("[ab]{2,}", stop_token_ids=[stop], min_tokens=2), eos_ids)
    for num_output in range(3):
        (ids,) = next_ids(compiler, request)
        assert (ids & {1, letter} == eos_ids) == (num_output >= 2) and (num_output >= 2 or not ids & eos_ids)
        assert (stop in ids) == (num_output >= 2)
        assert request.append(other) is None
    assert request.append(letter) is FinishReason.STOP
    assert request.has_end_token and request.stop_reason is None


def test_an_end_of_sequence_is_text_when_it_is_ignored(compiler: GrammarCompiler, tokenizer: Any) -> None:
    (letter,) = tokenizer.encode("b", add_special_tokens=False)
    request = make_request(compiler, regex("[ab]{2,3}", ignore_eos=True), frozenset({letter}))
    assert [request.append(letter) for _ in range(3)] == [None, None, FinishReason.STOP]
    assert request.num_output_tokens == 3 and not request.has_end_token and request.stop_reason is None


def test_the_grammar_ends_the_request_before_min_tokens(compiler: GrammarCompiler, tokenizer: Any) -> None:
    request = make_request(compiler, regex("a", min_tokens=9))
    assert request.append(tokenizer.encode("a", add_special_tokens=False)[0]) is FinishReason.STOP


def test_an_end_that_comes_to_light_late_adds_no_token(compiler: GrammarCompiler) -> None:
    """Nothing but an end may come, and there is no token for it."""
    grammar = StructuredOutputsParams(grammar='start: "a" | ""')
    request = make_request(compiler, SamplingParams(structured_outputs=grammar, allowed_token_ids=[400]))
    (ids,) = next_ids(compiler, request)
    assert ids >= set(range(VOCAB_SIZE)), "whatever comes is dropped"
    assert request.append(5) is FinishReason.STOP
    assert request.output_token_ids == [] and request.num_dropped == 1 and request.stop_reason is None


def test_allowed_tokens_that_leave_none_end_the_request_with_an_error(compiler: GrammarCompiler) -> None:
    other = make_request(compiler, regex("[0-9]{4}"))
    request = make_request(compiler, regex("[0-9]{4}", allowed_token_ids=[400]))
    (_, ids) = next_ids(compiler, request, other)
    assert request.append(5) is FinishReason.ERROR and request.output_token_ids == []
    assert request.stop_reason == "structured_outputs cannot be followed: no token is left that may come"
    assert ids and other.grammar.finish_reason is None


def test_a_matcher_that_fails_ends_its_request_alone(compiler: GrammarCompiler, tokenizer: Any) -> None:
    costly, other = (make_request(compiler, regex(pattern)) for pattern in ("(a?){500}a{500}", "a{9}"))
    (letter,) = tokenizer.encode("a", add_special_tokens=False)
    for _ in range(3):
        next_ids(compiler, costly, other)
        if reason := costly.append(letter):
            break
        assert other.append(letter) is None
    assert reason is FinishReason.ERROR
    assert str(costly.stop_reason).startswith("structured_outputs cannot be followed: lexer error: too many")
    assert next_ids(compiler, other)[0] and other.append(letter) is None


def test_samples_do_not_share_their_places(compiler: GrammarCompiler, tokenizer: Any) -> None:
    first, second = (make_request(compiler, regex("ab")) for _ in range(2))
    before = next_ids(compiler, second)
    first.append(tokenizer.encode("a", add_special_tokens=False)[0])
    assert texts(tokenizer, next_ids(compiler, first)[0]) == {"b"}
    assert next_ids(compiler, second) == before


GROWING = {
    "allOf": [{"anyOf": [{"type": "object", "properties": {f"{i}{j}": {}}} for j in "abcd"]} for i in "12345678"]
}
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "look-around": ({"regex": "(?=a)b"}, r"regex cannot be followed: .*look-around"),
    "a damaged regex": ({"regex": "(a"}, r"regex cannot be followed: .*unclosed group"),
    "an unknown type": ({"json": {"type": "alien"}}, r"json cannot be followed: .*alien"),
    "a keyword that is not followed": (
        {"json": {"type": "array", "uniqueItems": True}},
        r"json cannot be followed: Unimplemented keys.*uniqueItems",
    ),
    "a schema of nothing": ({"json": {"type": "integer", "minimum": 5, "maximum": 4}}, r"json cannot be followed: "),
    "a schema that grows": ({"json": GROWING}, r"json cannot be followed: schema too large"),
    "a damaged grammar": ({"grammar": "start: nothing"}, r"grammar cannot be followed: .*nothing"),
    "a damaged GBNF": ({"grammar": "root ::= ("}, r"grammar cannot be followed: .*GBNF"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_followed_is_refused_in_time(name: str, compiler: GrammarCompiler) -> None:
    fields, message = REFUSED[name]
    start_s = time.monotonic()
    with pytest.raises(ValueError, match=rf"^structured_outputs\.{message}") as raised:
        compiler.compile(StructuredOutputsParams(**fields))
    assert time.monotonic() - start_s < 5 and len(str(raised.value)) < 400


def test_both_dialects_of_grammars(compiler: GrammarCompiler, tokenizer: Any) -> None:
    for text in ('start: "a" | "b"', 'root ::= "a" | "b"'):
        params = SamplingParams(structured_outputs=StructuredOutputsParams(grammar=text))
        assert texts(tokenizer, next_ids(compiler, make_request(compiler, params))[0]) == {"a", "b"}


def test_white_space_has_an_end(compiler: GrammarCompiler, tokenizer: Any) -> None:
    params = SamplingParams(structured_outputs=StructuredOutputsParams(json={"type": "array", "items": {}}))
    request = make_request(compiler, params)
    request.append(tokenizer.encode("[", add_special_tokens=False)[0])
    (newline,) = tokenizer.encode("\n", add_special_tokens=False)
    num = 0
    while newline in next_ids(compiler, request)[0]:
        request.append(newline)
        num += 1
    assert num == 40 and request.append(tokenizer.encode("]", add_special_tokens=False)[0]) is FinishReason.STOP


def test_grammars_are_kept_for_the_next_request(tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    compiler, compiled = GrammarCompiler(tokenizer, VOCAB_SIZE), []
    compile_grammar = grammars.compile_grammar
    monkeypatch.setattr(grammars, "MAX_KEPT_GRAMMARS", 2)

    def counted(source: Any, vocabulary: Any) -> Any:
        compiled.append(source.text)
        return compile_grammar(source, vocabulary)

    monkeypatch.setattr(grammars, "compile_grammar", counted)
    for pattern in ("a", "b", "a", "c", "a", "b"):
        compiler.compile(StructuredOutputsParams(regex=pattern))
    assert compiled == ["a", "b", "c", "b"]
    compiler.close()


def test_compiling_has_a_time_limit(tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    compiler, is_over = GrammarCompiler(tokenizer, VOCAB_SIZE), threading.Event()
    monkeypatch.setattr(grammars, "COMPILE_TIMEOUT_S", 0.05)
    monkeypatch.setattr(grammars, "compile_grammar", lambda *_: is_over.wait(20))
    with pytest.raises(
        ValueError, match=r"^structured_outputs\.regex cannot be followed: compiling it takes longer than 0.05 s"
    ):
        compiler.compile(StructuredOutputsParams(regex="a"))  # fmt: skip
    is_over.set()
    compiler.close()


def test_what_is_missing_is_named(
    tokenizer: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    params = StructuredOutputsParams(regex="a")
    with pytest.raises(ValueError, match=r"^structured_outputs is .*; allowed: None: this model has no tokenizer"):
        GrammarCompiler(None, VOCAB_SIZE).compile(params)
    special_free = Wrapped(tokenizer.backend_tokenizer, None, [])
    with pytest.raises(ValueError, match=r"^structured_outputs is .*tokenizer has no special tokens"):
        GrammarCompiler(special_free, VOCAB_SIZE).compile(params)
    GrammarCompiler(special_free, VOCAB_SIZE).load()
    assert "tokenizer has no special tokens" in caplog.text
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "llguidance" else find_spec(name))
    with pytest.raises(ValueError, match=r"^structured_outputs is .*pip install 'paxpage\[structured\]'"):
        GrammarCompiler(tokenizer, VOCAB_SIZE).compile(params)
    GrammarCompiler(tokenizer, VOCAB_SIZE).load()  # as a server does at its start: nothing happens


def test_a_tokenizer_of_more_tokens_than_the_model_has(tokenizer: Any) -> None:
    compiler = GrammarCompiler(tokenizer, 320)
    (ids,) = next_ids(compiler, make_request(compiler, regex("[a-z ]+")))
    assert ids and max(ids) < 320
    compiler.close()


def test_bytes_of_one_character(tokenizer: Any) -> None:
    """A vocabulary that has no token for it, byte-level or with byte tokens: only its own bytes may come."""
    coder = byte_fallback()
    backend = coder.encode.__closure__[0].cell_contents  # type: ignore[index]
    for each, first in ((Wrapped(backend, coder.special_id, []), 3 + 0xE2), (tokenizer, None)):
        compiler = GrammarCompiler(each, VOCAB_SIZE)
        request = make_request(compiler, regex("\u20ac"))
        for place in range(3):
            (ids,) = next_ids(compiler, request)
            assert len(ids) == 1 and (place or first is None or ids == {first})
            reason = request.append(ids.pop())
        assert reason is FinishReason.STOP
        assert each.backend_tokenizer.decode(request.output_token_ids).strip() == "\u20ac"
        compiler.close()


@pytest.mark.parametrize("vocab_size", [5, 31, 32, 33, 64, 700])
def test_the_device_masks_what_the_host_says(vocab_size: int) -> None:
    rng = np.random.default_rng(vocab_size)
    logits = rng.normal(size=(4, vocab_size)).astype(np.float32)
    is_allowed = rng.random((4, vocab_size)) < 0.5
    is_allowed[3] = True
    masks = np.stack([token_mask(np.flatnonzero(row).tolist(), vocab_size) for row in is_allowed])
    masked = np.asarray(jax.jit(sampler.mask)(jnp.asarray(logits), masks))
    np.testing.assert_array_equal(masked, np.where(is_allowed, logits, -np.inf))


def test_schemas_of_many_kinds_compile(compiler: GrammarCompiler) -> None:
    """Those that people send."""
    person = {"type": "object", "properties": {"name": {"type": "string"}, "age": {"type": "integer"}}}
    for schema in (
        {},
        {"$defs": {"p": person}, "type": "array", "items": {"$ref": "#/$defs/p"}, "minItems": 1, "maxItems": 3},
        {"anyOf": [{"type": "string", "format": "date-time"}, {"type": "null"}, {"const": 5}, {"enum": ["a", 1]}]},
        {"type": "string", "pattern": "^[A-Z]{2}[0-9]+$", "minLength": 3, "maxLength": 9},
        {"type": "object", "additionalProperties": {"type": "number", "minimum": 0.5}},
        {**person, "required": ["name", "age"], "additionalProperties": False},
    ):
        compiler.compile(StructuredOutputsParams(json=schema))
        compiler.compile(StructuredOutputsParams(json=json.dumps(schema)))
