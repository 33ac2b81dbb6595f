"""Structured outputs over HTTP: both endpoints, streams, the openai client, refusals.

TINY's two ends of sequence are tokens of text, which a grammar lets come only where it may end.
"""

import json
import re
import time
from typing import Any

import openai
import pytest

from tests.server.process import ServerProcess

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "pattern": "^[A-Z][a-z]{1,6}$"},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "is_here": {"type": "boolean"},
    },
    "required": ["name", "age", "is_here"],
    "additionalProperties": False,
}
FORMAT: Any = {"type": "json_schema", "json_schema": {"name": "person", "schema": PERSON, "strict": True}}
HELLO: Any = [{"role": "user", "content": "Hi"}]
SAMPLED = {"temperature": 1.0, "max_tokens": 300, "seed": 1}


def check_person(text: str) -> None:
    person = json.loads(text)
    assert list(person) == ["name", "age", "is_here"]
    assert re.fullmatch("[A-Z][a-z]{1,6}", person["name"]) and type(person["is_here"]) is bool
    assert type(person["age"]) is int and 0 <= person["age"] <= 120


@pytest.fixture(scope="module")
def client(shared_tiny: ServerProcess) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{shared_tiny.url}/v1", api_key="none", max_retries=0)


def test_the_openai_client_gets_json(tiny: ServerProcess, client: openai.OpenAI) -> None:
    ask: Any = {"model": "TINY", "messages": HELLO, "response_format": FORMAT, "extra_body": {"ignore_eos": True}}
    answer = client.chat.completions.create(**ask, **SAMPLED, n=3)
    assert [choice.finish_reason for choice in answer.choices] == ["stop"] * 3
    texts = [choice.message.content or "" for choice in answer.choices]
    for text in texts:
        check_person(text)
    assert len(set(texts)) > 1
    pieces = ["", "", ""]
    for chunk in client.chat.completions.create(**ask, **SAMPLED, n=3, stream=True):
        for choice in chunk.choices:
            pieces[choice.index] += choice.delta.content or ""
    assert pieces == texts


def test_any_object(tiny: ServerProcess, client: openai.OpenAI) -> None:
    answers = [
        client.chat.completions.create(
            model="TINY",
            messages=HELLO,
            response_format={"type": "json_object"},
            max_tokens=400,
            seed=seed,
            temperature=1.0,
            extra_body={"ignore_eos": True},
        )
        for seed in range(4)
    ]
    whole = [choice for answer in answers for choice in answer.choices if choice.finish_reason == "stop"]
    assert whole and all(isinstance(json.loads(choice.message.content or ""), dict) for choice in whole)


@pytest.mark.parametrize(
    ("structured", "pattern"),
    [
        ({"regex": "[a-c]{2,5}-[0-9]{3}"}, "[a-c]{2,5}-[0-9]{3}"),
        ({"choice": ["kettle", "seven doors"]}, "kettle|seven doors"),
        ({"grammar": 'start: "(" start ")" | "x"'}, r"\(*x\)*"),
        ({"grammar": 'root ::= "a" root | "b"'}, "a*b"),
        ({"json": {"enum": ["p", 5]}}, r'\s*("p"|5)\s*'),
    ],
)
def test_each_kind_on_completions(tiny: ServerProcess, structured: dict[str, Any], pattern: str) -> None:
    body = {**SAMPLED, "prompt": "The blue kettle", "structured_outputs": structured, "ignore_eos": True, "n": 4}
    response = tiny.post("completions", body)
    assert response.status_code == 200, response.text
    whole = [choice for choice in response.json()["choices"] if choice["finish_reason"] == "stop"]
    assert whole and all(re.fullmatch(pattern, choice["text"]) for choice in whole), response.text
    streamed = ["", "", "", ""]
    for event in list(tiny.stream("completions", body))[:-1]:
        streamed[event["choices"][0]["index"]] += event["choices"][0]["text"]
    assert streamed == [choice["text"] for choice in response.json()["choices"]]


def test_an_end_of_sequence_comes_only_where_the_grammar_may_end(tiny: ServerProcess) -> None:
    for seed in range(6):
        body = {**SAMPLED, "seed": seed, "prompt": [60], "structured_outputs": {"regex": "[A-Za-z ]{12,}"}}
        (choice,) = tiny.post("completions", body).json()["choices"]
        assert choice["finish_reason"] in ("stop", "length") and re.fullmatch("[A-Za-z ]{12,}", choice["text"]), choice


def test_beside_all_other_options(tiny: ServerProcess) -> None:
    body = {
        **SAMPLED,
        "messages": HELLO,
        "response_format": FORMAT,
        "ignore_eos": True,
        "frequency_penalty": 0.5,
        "logit_bias": {"200": -100},
        "logprobs": True,
        "top_logprobs": 2,
        "min_tokens": 3,
        "stop": ["no such text"],
        "return_token_ids": True,
    }
    answer = tiny.post("chat/completions", body).json()
    (choice,) = answer["choices"]
    check_person(choice["message"]["content"])
    assert len(choice["logprobs"]["content"]) == len(choice["token_ids"]) == answer["usage"]["completion_tokens"]
    assert "".join(entry["token"] for entry in choice["logprobs"]["content"]) == choice["message"]["content"]


def nested(depth: int) -> dict[str, Any]:
    """A schema so many objects deep."""
    return {"properties": {"a": nested(depth - 1)}} if depth else {}


REFUSED: dict[str, tuple[dict[str, Any], str, str]] = {
    "a regex": ({"structured_outputs": {"regex": "a(?=b)"}}, "structured_outputs", "look-around"),
    "a number": ({"structured_outputs": {"regex": 5}}, "structured_outputs", "regex is 5; allowed: a non-empty string"),
    "a grammar": ({"structured_outputs": {"grammar": "start: ("}}, "structured_outputs", "cannot be followed"),
    "a long regex": ({"structured_outputs": {"regex": "a" * 200_000}}, "structured_outputs", "at most 131072 charact"),
    "a schema": (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"uniqueItems": True}}}},
        *("response_format", "uniqueItems"),
    ),
    "a deep schema": (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": nested(75)}}},
        *("response_format", "structured_outputs.json cannot be followed: recursion limit"),
    ),
    "two": (
        {"structured_outputs": {"regex": "a"}, "response_format": {"type": "json_object"}},
        *("structured_outputs", "null beside a response_format"),
    ),
    "an unknown kind": ({"structured_outputs": {"yaml": "a"}}, "structured_outputs", "exactly one|with one of json"),
    "an unknown format": ({"response_format": {"type": "yaml"}}, "response_format", "json_schema"),
}


@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.parametrize("is_chat", [False, True])
def test_what_cannot_be_followed_is_400(tiny: ServerProcess, name: str, is_chat: bool) -> None:
    fields, param, message = REFUSED[name]
    path, body = ("chat/completions", {"messages": HELLO}) if is_chat else ("completions", {"prompt": "x"})
    start_s = time.monotonic()
    response = tiny.post(path, {**body, **fields, "stream": True})
    assert response.status_code == 400 and time.monotonic() - start_s < 2
    error = response.json()["error"]
    assert error["param"] == param and re.search(message, error["message"]), error
    assert len(error["message"]) < 600


def test_a_grammar_that_fails_on_its_way(tiny: ServerProcess) -> None:
    """Its choice says so; the server is none the worse for it."""
    body = {"prompt": "x", "structured_outputs": {"regex": "(a?){500}a{500}"}, "max_tokens": 50, "ignore_eos": True}
    (choice,) = tiny.post("completions", body).json()["choices"]
    assert choice["finish_reason"] == "error" and "cannot be followed" in choice["stop_reason"]
    *_, last, done = tiny.stream("completions", body)
    assert last["choices"][0]["finish_reason"] == "error" and done == "[DONE]"
    tiny.wait_idle()
    tiny.check_alive()
