"""What StructuredOutputsParams takes, and what it says of mistakes."""

from typing import Any

import pytest

from paxpage import SamplingParams, StructuredOutputsParams
from paxpage.engine.structured_outputs import MAX_GRAMMAR_CHARS
from tests.helpers.fixtures import unchecked_types

__all__ = ["unchecked_types"]

SCHEMA = {"type": "object", "properties": {"größe": {"type": "integer"}}}

SOURCES: dict[str, tuple[dict[str, Any], str]] = {
    "a schema": ({"json": SCHEMA}, '{"type": "object", "properties": {"gr\\u00f6\\u00dfe": {"type": "integer"}}}'),
    "its text": ({"json": '{"type": "integer"}'}, '{"type": "integer"}'),
    "an empty schema": ({"json": {}}, "{}"),
    "a regex": ({"regex": "[a-z]+"}, "[a-z]+"),
    "a choice": ({"choice": ("ja", 'ne"in')}, '["ja", "ne\\"in"]'),
    "a grammar": ({"grammar": 'start: "a"'}, 'start: "a"'),
    "any object": ({"json_object": True, "json": None}, '{"type": "object"}'),
}


@pytest.mark.parametrize("name", SOURCES)
def test_each_kind_has_one_source(name: str) -> None:
    fields, text = SOURCES[name]
    params = StructuredOutputsParams(**fields)
    assert params.source == (next(iter(fields)), text)
    assert params.source == StructuredOutputsParams(**fields).source


DEEP: dict[str, Any] = {}
for _ in range(5000):
    DEEP = {"items": DEEP}

MISTAKES: dict[str, tuple[dict[str, Any], str]] = {
    "nothing": ({}, r"structured_outputs is \[\]; allowed: exactly one of json, regex, choice, grammar, json_object"),
    "no object": ({"json_object": False}, r"structured_outputs is \[\]; allowed: exactly one of"),
    "two": ({"regex": "a", "choice": ["a"]}, r"structured_outputs is \['regex', 'choice'\]; allowed: exactly one of"),
    "a list as schema": ({"json": [1]}, r"structured_outputs.json is \[1\]; allowed: a JSON schema"),
    "text that is no JSON": ({"json": "{"}, r"structured_outputs.json is no JSON schema: .*; allowed: a JSON schema"),
    "text that is no object": ({"json": "true"}, r"structured_outputs.json is 'true'; allowed: a JSON schema"),
    "what JSON cannot say": ({"json": {"a": {1}}}, r"structured_outputs.json is no JSON schema: "),
    "not a number": ({"json": {"maximum": float("nan")}}, r"structured_outputs.json is no JSON schema: "),
    "a deep schema": ({"json": DEEP}, r"structured_outputs.json is no JSON schema: "),
    "a number as regex": ({"regex": 5}, r"structured_outputs.regex is 5; allowed: a non-empty string"),
    "an empty regex": ({"regex": ""}, r"structured_outputs.regex is ''; allowed: a non-empty string"),
    "an empty grammar": ({"grammar": ""}, r"structured_outputs.grammar is ''; allowed: a non-empty string"),
    "an empty choice": ({"choice": []}, r"structured_outputs.choice is \[\]; allowed: a list of at least one"),
    "an empty string": ({"choice": ["a", ""]}, r"structured_outputs.choice is \['a', ''\]; allowed: a list of"),
    "a string as choice": ({"choice": "ab"}, r"structured_outputs.choice is 'ab'; allowed: a list of"),
    "a text as flag": ({"json_object": "yes"}, r"structured_outputs.json_object is 'yes'; allowed: True, or None"),
    "half a character": ({"regex": "a\ud800"}, r"structured_outputs.regex is not valid Unicode at character 1"),
    "half a choice": ({"choice": ["\ud800"]}, r"structured_outputs.choice is not valid Unicode"),
    "a long one": (
        {"regex": "a" * (MAX_GRAMMAR_CHARS + 1)},
        r"structured_outputs.regex is '131073 characters long'; allowed: at most 131072 characters",
    ),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_mistakes_are_named(name: str) -> None:
    fields, message = MISTAKES[name]
    with pytest.raises(ValueError, match=rf"^{message}"):
        StructuredOutputsParams(**fields)


def test_sampling_params_take_nothing_else() -> None:
    params = StructuredOutputsParams(regex="a")
    assert SamplingParams(structured_outputs=params, n=3).for_child(2).structured_outputs is params
    with pytest.raises(
        ValueError, match=r"^structured_outputs is \{'regex': 'a'\}; allowed: a StructuredOutputsParams"
    ):
        SamplingParams(structured_outputs={"regex": "a"})  # type: ignore[arg-type]
