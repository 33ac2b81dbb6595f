"""Structured outputs through the whole engine: whatever a random model wants to say, it says what the grammar lets it.

The model has more logits than its tokenizer has tokens.
"""

import json
import shutil
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest
import regex as regexes
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from paxpage import LLM, CompletionOutput, RequestOutput, SamplingParams, StructuredOutputsParams
from paxpage.engine.compilation import CompilationCounter
from paxpage.engine.grammars import GrammarCompiler
from paxpage.engine.request import Request
from paxpage.engine.scheduler import ScheduledRow
from tests.helpers.engines import (
    Arrival,
    assert_idle,
    complete,
    greedy_params,
    ids,
    serve,
    steps_in_flight,
    token_budget,
    tokens_alone,
)
from tests.helpers.fixtures import shelf, unchecked_types
from tests.helpers.oracle import GAPS, logits_of
from tests.helpers.shelf import ROOMY, Shelf, num_useful_blocks
from tests.server.tiny import make_tokenizer

__all__ = ["shelf", "unchecked_types"]

IN_FLIGHT = pytest.mark.parametrize("num_in_flight", [0, 1])
PROMPT, EOS_ID = list(range(50, 70)), 1
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "tags": {"type": "array", "items": {"enum": ["a", "bc", 7, None]}, "maxItems": 3},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}
COSTLY = "(a?){500}a{500}"  # more than the lexer may build, which shows after the first token


@pytest.fixture(scope="module")
def llm(shelf: Shelf, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    """TINY with a tokenizer, whose end of sequence is the model's."""
    folder = tmp_path_factory.mktemp("structured") / "TINY"
    shutil.copytree(shelf.tiny_folder, folder)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": EOS_ID}))
    make_tokenizer(vocab_size=450).save_pretrained(folder)
    limits = ROOMY._replace(num_blocks=num_useful_blocks(ROOMY))  # the shelf's: what is compiled is in the cache
    sizes = {field: getattr(limits, field) for field in ("max_num_seqs", "max_num_batched_tokens", "num_blocks")}
    with LLM(str(folder), **sizes, max_model_len=limits.max_model_len, show_progress=False) as built:
        assert built.engine.generation.eos_token_ids == (EOS_ID,)
        yield built


@pytest.fixture(autouse=True)
def _idle_afterwards(llm: LLM) -> Iterator[None]:
    yield
    assert_idle(llm.engine)


def structured(**fields: Any) -> SamplingParams:
    """Sampling options, and what of them is a StructuredOutputsParams'."""
    kinds = {kind: fields.pop(kind) for kind in ("json", "regex", "choice", "grammar", "json_object") if kind in fields}
    return SamplingParams(structured_outputs=StructuredOutputsParams(**kinds), **{"max_tokens": 60, **fields})


def generate(llm: LLM, params: SamplingParams, prompt: Sequence[int] = PROMPT) -> list[CompletionOutput]:
    return llm.generate(ids(prompt), params, use_tqdm=False)[0].outputs


# What comes is right, whatever the model wants


ATOMS = st.sampled_from(["a", "b", "[c-f]", "[0-9]", " the", "\\.", "é", "[€-₰]", "\\n", "(kettle|door)"])


def _combined(children: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    return st.one_of(
        st.lists(children, min_size=2, max_size=4).map("".join),
        st.lists(children, min_size=2, max_size=3).map(lambda parts: f"({'|'.join(parts)})"),
        st.tuples(children, st.sampled_from(["?", "*", "+", "{2,3}"])).map(lambda pair: f"({pair[0]}){pair[1]}"),
    )


OPTIONS = st.fixed_dictionaries(
    {
        "temperature": st.sampled_from([0.0, 0.7, 2.0, 1e6]),
        "seed": st.integers(0, 99),
        "n": st.integers(1, 3),
        "top_k": st.sampled_from([0, 1, 5]),
        "top_p": st.sampled_from([1.0, 0.5]),
        "min_p": st.sampled_from([0.0, 0.3]),
        "max_tokens": st.integers(1, 24),
        "min_tokens": st.just(0),
        "ignore_eos": st.booleans(),
    }
)
# Without shrinking: an example is some hundred steps of a model.
PROPERTY = settings(
    max_examples=25, deadline=None, suppress_health_check=list(HealthCheck), phases=[Phase.explicit, Phase.generate]
)


@PROPERTY
@given(pattern=st.recursive(ATOMS, _combined, max_leaves=6), options=OPTIONS, num_in_flight=st.integers(0, 1))
def test_any_output_matches_its_regex(llm: LLM, pattern: str, options: dict[str, Any], num_in_flight: int) -> None:
    with steps_in_flight(llm, num_in_flight):
        samples = generate(llm, structured(regex=pattern, **options))
    assert len(samples) == options["n"]
    for sample in samples:
        is_whole = sample.finish_reason == "stop"
        text = sample.text if is_whole else sample.text.rstrip("\ufffd")  # the end of it may be half a character
        assert regexes.fullmatch(pattern, text, partial=not is_whole), (pattern, sample)
        assert is_whole or (sample.finish_reason, len(sample.token_ids)) == ("length", options["max_tokens"])


LEAVES = st.sampled_from(
    [
        {"type": "integer", "minimum": -3, "maximum": 40},
        {"type": "boolean"},
        {"type": "null"},
        {"enum": ["red", "green", 5]},
        {"type": "string", "maxLength": 4},
        {"type": "string", "pattern": "^[a-c]{1,3}$"},
    ]
)


def _nested(children: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    names = st.lists(st.sampled_from(["a", "b", "kettle", "größe"]), min_size=1, max_size=3, unique=True)
    properties = names.flatmap(lambda keys: st.fixed_dictionaries(dict.fromkeys(keys, children)))
    objects = properties.map(
        lambda each: {"type": "object", "properties": each, "required": [*each], "additionalProperties": False}
    )
    arrays = children.map(lambda items: {"type": "array", "items": items, "minItems": 1, "maxItems": 2})
    return st.one_of(objects, arrays)


def follows(value: Any, schema: dict[str, Any]) -> bool:
    """Of the schemas above."""
    match schema.get("type"):
        case None:
            return value in schema["enum"]
        case "integer":
            return type(value) is int and schema["minimum"] <= value <= schema["maximum"]
        case "boolean":
            return isinstance(value, bool)
        case "null":
            return value is None
        case "string":
            is_match = regexes.search(schema.get("pattern", ""), value) is not None
            return is_match and len(value) <= schema.get("maxLength", 99)
        case "array":
            is_short = schema.get("minItems", 0) <= len(value) <= schema["maxItems"]
            return is_short and all(follows(item, schema["items"]) for item in value)
        case _:
            parts = schema["properties"]
            return list(value) == list(parts) and all(follows(value[key], part) for key, part in parts.items())


@PROPERTY
@given(schema=st.recursive(LEAVES, _nested, max_leaves=4), options=OPTIONS, is_compact=st.booleans())
def test_any_output_follows_its_schema(llm: LLM, schema: Any, options: dict[str, Any], is_compact: bool) -> None:
    asked = {**schema, "x-guidance": {"whitespace_flexible": False}} if is_compact else schema
    options = {**options, "max_tokens": 280}
    for sample in generate(llm, structured(json=asked, **options)):
        if sample.finish_reason == "stop":
            assert follows(json.loads(sample.text), schema), (schema, sample)
        else:  # lost in white space
            assert not is_compact and sample.finish_reason == "length", (schema, sample)


def test_any_object_and_any_grammar(llm: LLM) -> None:
    words = 'start: word (" " word)* "!"\nword: "tick" | "tock"'
    params = structured(grammar=words, n=4, temperature=3.0, seed=1, max_tokens=250)
    for sample in generate(llm, params):
        assert regexes.fullmatch("t[io]ck( t[io]ck)*!", sample.text, partial=sample.finish_reason == "length")
    outputs = [generate(llm, structured(json_object=True, seed=seed, max_tokens=200))[0] for seed in range(6)]
    whole = [json.loads(output.text) for output in outputs if output.finish_reason == "stop"]
    assert whole and all(isinstance(value, dict) for value in whole)
    assert {generate(llm, structured(choice=["the door", "a", "a kettle"], seed=s))[0].text for s in range(9)} <= {
        "the door",
        "a",
        "a kettle",
    }


def test_the_greedy_choice_is_the_likeliest_that_may_come(llm: LLM, shelf: Shelf) -> None:
    """By transformers' logits; and the log-probabilities are the model's own, of all tokens."""
    params = structured(regex="([a-z]+ ){2,}[0-9]+", temperature=0.0, max_tokens=24, logprobs=3)
    (sample,) = generate(llm, params)
    compiler = GrammarCompiler(llm.engine.tokenizer, llm.engine.vocab_size)
    request = Request("r", PROMPT, params, max_tokens=99, eos_token_ids=frozenset({EOS_ID}))
    request.grammar = compiler.compile(params.structured_outputs).start(request)
    logits = logits_of(shelf.tiny_oracle, PROMPT + sample.token_ids)[len(PROMPT) - 1 : -1].astype(np.float64)
    num_steered = 0
    assert sample.logprobs is not None
    for row, token_id, entries in zip(logits, sample.token_ids, sample.logprobs, strict=True):
        (mask,) = compiler.masks([ScheduledRow(request, len(request.token_ids) - 1, 1, True, -1)], 1)
        is_allowed = np.unpackbits(mask.view(np.uint8), bitorder="little")[: len(row)] == 1
        assert is_allowed[token_id] and row[is_allowed].max() - row[token_id] < GAPS["float32"]
        logprobs = row - np.log(np.exp(row - row.max()).sum()) - row.max()
        assert entries[token_id].logprob == pytest.approx(logprobs[token_id], abs=1e-3)
        best = max(entries.values(), key=lambda entry: entry.logprob)
        assert best.logprob == pytest.approx(logprobs.max(), abs=1e-3) and best.rank == 1
        num_steered += entries[token_id].rank > 1
        request.append(token_id)
    assert num_steered > 5


# Company, order and accidents change nothing


MIXTURE = [
    structured(json=PERSON, temperature=1.0, seed=1, max_tokens=90),
    # Of so few tokens that one which is counted twice, or late, comes at another time.
    structured(regex="[ab]{60}", temperature=1.0, seed=2, frequency_penalty=0.5, presence_penalty=0.7),
    greedy_params(50),
    structured(regex="[a-z ]+", temperature=0.9, seed=3, logit_bias={97: -100, 100: 5}, repetition_penalty=1.4),
    structured(json_object=True, temperature=1.0, seed=4, bad_words=["the"], max_tokens=50),
    SamplingParams(temperature=0.9, seed=5, frequency_penalty=1.1, max_tokens=40, ignore_eos=True),
    structured(grammar='start: "a" | "b" start', temperature=0.5, seed=6, min_tokens=5),
    structured(regex="[0-9 ]{40,}", allowed_token_ids=[*range(18, 28), 222], seed=7, logprobs=2),
]
PROMPTS = [[(37 * i + 11 * j) % 400 + 50 for j in range(20 + 10 * i)] for i in range(len(MIXTURE))]


@pytest.fixture(scope="module")
def alone(llm: LLM) -> list[list[int]]:
    """Each of MIXTURE's outputs: alone, synchronously, on an empty cache."""
    with steps_in_flight(llm, 0):
        outputs = [tokens_alone(llm, prompt, params) for prompt, params in zip(PROMPTS, MIXTURE, strict=True)]
    assert sum(len(output) > 20 for output in outputs) >= 5
    return outputs


@IN_FLIGHT
def test_together_as_alone(llm: LLM, alone: list[list[int]], num_in_flight: int) -> None:
    """At once in chunks, then again from the prefix cache, then each arriving two steps after the last."""
    arrivals = {
        str(i): Arrival(*pair, at_step=2 * i) for i, pair in enumerate(zip(PROMPTS[::-1], MIXTURE[::-1], strict=True))
    }
    llm.reset_prefix_cache()
    with steps_in_flight(llm, num_in_flight):
        for _ in range(2):
            with token_budget(llm, 33):
                assert [sample.token_ids for sample in complete(llm, PROMPTS, MIXTURE)] == alone
        outputs = serve(llm.engine, arrivals)
    assert [outputs[str(i)].outputs[0].token_ids for i in range(len(PROMPTS))] == alone[::-1]


@IN_FLIGHT
def test_preempted_as_alone(llm: LLM, alone: list[list[int]], num_in_flight: int) -> None:
    llm.reset_prefix_cache()
    pool, before = llm.engine._manager.pool, llm.engine.stats().num_preemptions
    taken = pool.allocate(pool.num_usable - 25)
    with steps_in_flight(llm, num_in_flight):
        assert [sample.token_ids for sample in complete(llm, PROMPTS, MIXTURE)] == alone
    pool.release(taken)
    assert llm.engine.stats().num_preemptions > before


@IN_FLIGHT
def test_samples_are_requests_of_their_own(llm: LLM, num_in_flight: int) -> None:
    """They fork from one prompt, each with its own place in the grammar."""
    params = structured(json=PERSON, temperature=1.0, seed=10, n=4, max_tokens=80)
    with steps_in_flight(llm, num_in_flight):
        together = generate(llm, params)
    expected = [tokens_alone(llm, PROMPT, params.for_child(index)) for index in range(4)]
    assert [sample.token_ids for sample in together] == expected
    assert len(set(map(tuple, expected))) == 4


@IN_FLIGHT
@pytest.mark.parametrize("half", ["start", "draw"])
def test_a_failed_step_is_computed_again(
    llm: LLM, alone: list[list[int]], monkeypatch: pytest.MonkeyPatch, num_in_flight: int, half: str
) -> None:
    """What the step before had brought is not lost, whichever half of the step fails."""
    runner = llm.engine.runner
    work, calls = getattr(runner, half), []

    def fail_once(*arguments: Any) -> Any:
        calls.append(1)
        if len(calls) == 12:
            raise RuntimeError("injected")
        return work(*arguments)

    monkeypatch.setattr(runner, half, fail_once)
    before, streamed = llm.engine.stats().num_failed_steps, [[] for _ in PROMPTS]
    with steps_in_flight(llm, num_in_flight):
        for index, (prompt, params) in enumerate(zip(PROMPTS, MIXTURE, strict=True)):
            llm.engine.add_request(str(index), prompt, params)
        while llm.engine.has_unfinished_requests():
            for delta in llm.engine.step():
                streamed[int(delta.request_id)] += delta.token_ids
    assert streamed == alone
    assert llm.engine.stats().num_failed_steps == before + 1


@IN_FLIGHT
def test_a_grammar_that_fails_ends_its_request_alone(llm: LLM, alone: list[list[int]], num_in_flight: int) -> None:
    costly = structured(regex=COSTLY, temperature=0.0)
    hopeless = structured(regex="[0-9]{9}", allowed_token_ids=[300])
    with steps_in_flight(llm, num_in_flight):
        *others, first, second = complete(llm, [*PROMPTS, PROMPT, PROMPT], [*MIXTURE, costly, hopeless])
    assert [sample.token_ids for sample in others] == alone
    assert (first.finish_reason, second.finish_reason) == ("error", "error")
    assert str(first.stop_reason).startswith("structured_outputs cannot be followed: lexer error")
    assert second.stop_reason == "structured_outputs cannot be followed: no token is left that may come"
    assert second.token_ids == [] and second.text == "" and set(first.text) <= {"a"}


def test_nothing_compiles_for_a_grammar(llm: LLM) -> None:
    counter = CompilationCounter()
    try:
        for num_in_flight in (0, 1):
            with steps_in_flight(llm, num_in_flight):
                for count in (1, 2, len(PROMPTS)):
                    complete(llm, PROMPTS[:count], MIXTURE[:count])
        assert counter.num_compilations == 0
    finally:
        counter.close()


# Ends


@IN_FLIGHT
def test_what_ends_an_output(llm: LLM, num_in_flight: int) -> None:
    """The grammar itself, an end of sequence, max_tokens, a stop string, a stop token."""
    (letter,) = llm.engine.tokenizer.encode("c", add_special_tokens=False)
    cases: dict[str, tuple[dict[str, Any], str, str | int | None, str]] = {
        "grammar": ({"regex": "abc"}, "stop", None, "abc"),
        "grammar, before min_tokens": ({"regex": "abc", "min_tokens": 9}, "stop", None, "abc"),
        "grammar, at max_tokens": ({"regex": "a", "max_tokens": 1}, "stop", None, "a"),
        "grammar, end of sequence ignored": ({"regex": "abc", "ignore_eos": True}, "stop", None, "abc"),
        "end of sequence": ({"regex": "a*", "logit_bias": {EOS_ID: 100}}, "stop", None, ""),
        "max_tokens": ({"regex": "[ab]{9}", "max_tokens": 4}, "length", None, None),
        "stop string": ({"regex": "a{3}xyz", "stop": "xy"}, "stop", "xy", "aaa"),
        "stop string, kept": (
            {"regex": "a{3}xyz", "stop": "xy", "include_stop_str_in_output": True},
            *("stop", "xy", "aaaxy"),
        ),
        "stop token": ({"regex": "[b]{2}c[d]{2}", "stop_token_ids": [letter]}, "stop", letter, "bb"),
        "a special stop token": ({"regex": "[ab]{3,}", "stop_token_ids": [0], "logit_bias": {0: 100}}, "stop", 0, None),
    }
    with steps_in_flight(llm, num_in_flight):
        for name, (fields, finish_reason, stop_reason, text) in cases.items():
            (sample,) = generate(llm, structured(temperature=0.0, **fields))
            assert (sample.finish_reason, sample.stop_reason) == (finish_reason, stop_reason), (name, sample)
            assert text is None or sample.text == text, (name, sample)
            assert llm.engine.tokenizer.decode(sample.token_ids, skip_special_tokens=True).startswith(sample.text[:3])


def test_min_tokens_hold_while_the_grammar_lets_them(llm: LLM) -> None:
    for min_tokens in (0, 1, 7):
        (sample,) = generate(
            llm, structured(regex="a*", min_tokens=min_tokens, logit_bias={EOS_ID: 100}, temperature=0.0)
        )
        assert sample.finish_reason == "stop" and len(sample.token_ids) == min_tokens + 1


@IN_FLIGHT
def test_a_stream_is_the_whole_in_pieces(llm: LLM, num_in_flight: int) -> None:
    """And an abort in the middle leaves nothing behind."""
    params = structured(json=PERSON, temperature=1.0, seed=3, n=2, max_tokens=60)
    engine, texts, output = llm.engine, ["", ""], None
    with steps_in_flight(llm, num_in_flight):
        engine.add_request("stream", PROMPT, params)
        engine.add_request("left", PROMPT, structured(regex="a{200}"))
        for num_steps in range(200):
            if num_steps == 5:
                assert engine.abort(["left"])[0].finish_reason == "abort"
            for delta in engine.step():
                if delta.request_id == "stream":
                    texts[delta.index] += delta.text
                    output = delta.output or output
            if not engine.has_unfinished_requests():
                break
    assert isinstance(output, RequestOutput) and [sample.text for sample in output.outputs] == texts
    assert output.outputs[0].token_ids == tokens_alone(llm, PROMPT, params.for_child(0))


# What is asked of models that cannot


def test_a_model_without_a_tokenizer_says_so(shelf: Shelf) -> None:
    with pytest.raises(ValueError, match=r"^structured_outputs is .*; allowed: None: this model has no tokenizer"):
        generate(shelf.tiny(), structured(regex="a"))


def test_a_refused_grammar_takes_no_room(llm: LLM) -> None:
    with pytest.raises(ValueError, match=r"^structured_outputs.regex cannot be followed: .*look-around"):
        llm.generate([ids(PROMPT)] * 2, [greedy_params(5), structured(regex="a(?=b)")], use_tqdm=False)


def test_a_real_model_fills_a_form_in(shelf: Shelf) -> None:
    """SmolLM2, greedy: what it is asked for is JSON, and about what was asked."""
    schema = {
        "type": "object",
        "properties": {"city": {"type": "string", "maxLength": 30}, "country": {"enum": ["France", "Peru", "Japan"]}},
        "required": ["city", "country"],
        "additionalProperties": False,
    }
    messages = [{"role": "user", "content": "Which city is the capital of France? Answer in JSON: city, country."}]
    params = structured(json=schema, temperature=0.0, max_tokens=80)
    (output,) = shelf.smol().chat(messages, params, use_tqdm=False)
    (sample,) = output.outputs
    assert sample.finish_reason == "stop"
    assert json.loads(sample.text) == {"city": "Paris", "country": "France"}
