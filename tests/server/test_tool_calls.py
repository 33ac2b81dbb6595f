"""Calls of tools in the text of a model: what is one, what is text, and that cuts change nothing."""

import json
import time
from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from transformers import AddedToken

from paxpage import serve
from paxpage.engine.sampling_params import SamplingParams
from paxpage.server.chat import params_for_tools
from paxpage.server.launch import tool_policy
from paxpage.server.protocol import ChatCompletionRequest, parse_body
from paxpage.server.tool_calls import (
    FORMATS,
    Part,
    ToolCall,
    ToolCallParser,
    choose_policy,
    guess_format,
    read_whole,
)
from tests.helpers.fixtures import unchecked_types
from tests.server.tiny import make_tokenizer

__all__ = ["unchecked_types"]

NAMES = ("f", "weather")
CALL = '{"name": "f", "arguments": {"a": 1}}'
F = ToolCall("f", '{"a": 1}')
W = ToolCall("weather", '{"city": "Rome"}')
WEATHER = '{"name": "weather", "parameters": {"city": "Rome"}}'


def read(form: str, text: str, **options: Any) -> tuple[str | None, list[ToolCall]]:
    return read_whole(ToolCallParser(FORMATS[form], NAMES, **options), text)


@pytest.mark.parametrize(
    ("text", "content", "calls"),
    [
        ("", "", []),
        (" \n", " \n", []),
        ("Hello <b>", "Hello <b>", []),
        (f"<tool_call>{CALL}</tool_call>", None, [F]),
        (f"\n<tool_call>\n{CALL}\n</tool_call>\n", None, [F]),
        (f"Let me see.\n<tool_call>{WEATHER}</tool_call>", "Let me see.\n", [W]),
        (f"<tool_call>{CALL}</tool_call>\n<tool_call>{WEATHER}</tool_call>", None, [F, W]),
        (f"a<tool_call>{CALL}</tool_call> b <tool_call>{WEATHER}</tool_call>c", "a b c", [F, W]),
        (f"<tool_call>{CALL}", None, [F]),  # the end of sequence came in place of the closing tag
        (f"<tool_call>{CALL}</tool_ca", "</tool_ca", [F]),
        (f"<tool_call>{CALL} and more", " and more", [F]),
        ('<tool_call>{"name": "f"}</tool_call>', None, [ToolCall("f", "{}")]),
        ('<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}</tool_call>', None, [F]),
        (
            '<tool_call>{"name": "f", "arguments": {"t": "</tool_call> } \\" \\\\"}}</tool_call>',
            None,
            [ToolCall("f", '{"t": "</tool_call> } \\" \\\\"}')],
        ),
        ('<tool_call>{"name": "f", "arguments": {"t": "a\nb"}}', None, [ToolCall("f", '{"t": "a\\nb"}')]),
        ('<tool_call>{"name": "f", "arguments": {"t": "世"}}', None, [ToolCall("f", '{"t": "世"}')]),
        ('<tool_call>{"name": "f", "arguments": {"t": "\\ud800"}}', None, [ToolCall("f", '{"t": "\\ud800"}')]),
    ],
)
def test_hermes(text: str, content: str | None, calls: list[ToolCall]) -> None:
    assert read("hermes", text) == (content, calls)


@pytest.mark.parametrize(
    "body",
    [
        "",
        "hello",
        "{",
        "{}",
        "[1]",
        "{not JSON}",
        '{"name": "f", "arguments": {"a": 1}',
        '{"name": "f", "arguments": [1]}',
        '{"name": "f", "arguments": null}',
        '{"name": "f", "arguments": {"a": NaN}}',
        '{"name": "f", "arguments": {"a": 1e999}}',
        '{"name": "f", "arguments": "{"}',
        '{"name": "g", "arguments": {}}',
        '{"name": ["f"], "arguments": {}}',
        '{"arguments": {}}',
        "<function=f>\n<parameter=a>1</parameter></function>",
        '{"name": "f", "arguments": ' + '{"a": ' * 5000 + "1" + "}" * 5000 + "}",
        '{"name": "f", "arguments": {"a": ' + "9" * 5000 + "}}",
    ],
)
def test_what_is_no_call_is_text_and_hides_none_that_follows(body: str) -> None:
    text = f"<tool_call>{body}</tool_call>"
    assert read("hermes", text) == (text, [])
    assert read("hermes", f"{text}\n<tool_call>{CALL}</tool_call>") == (text + "\n", [F])


@pytest.mark.parametrize(
    ("text", "content", "calls"),
    [
        ("Hello", "Hello", []),
        (WEATHER, None, [W]),
        (f" {WEATHER}\n", None, [W]),
        (f"<|python_tag|>{WEATHER}", None, [W]),
        (f"Sure: <|python_tag|>{WEATHER}", "Sure: ", [W]),
        (f"{WEATHER}; {CALL}", None, [W, F]),
        (f"{WEATHER}; that is all", "; that is all", [W]),
        (f"{WEATHER}\n{CALL}", "\n" + CALL, [W]),
        (f"Sure: {WEATHER}", "Sure: " + WEATHER, []),
        ('{"name": "Bob", "parameters": {}}', '{"name": "Bob", "parameters": {}}', []),
        ('{"answer": 5}', '{"answer": 5}', []),
        ("<|python_tag|>print(1)", "<|python_tag|>print(1)", []),
    ],
)
def test_llama3_json(text: str, content: str | None, calls: list[ToolCall]) -> None:
    assert read("llama3_json", text) == (content, calls)


def test_calls_that_may_not_be_parallel_stay_text() -> None:
    rest = f"\n<tool_call>{WEATHER}</tool_call>"
    assert read("hermes", f"<tool_call>{CALL}</tool_call>{rest}", max_calls=1) == (rest, [F])
    assert read("llama3_json", f"{CALL};{WEATHER}", max_calls=1) == (f";{WEATHER}", [F])


PIECES = (
    *(
        "<tool_call>",
        "</tool_call>",
        "<tool_call",
        "<|python_tag|>",
        "<|python",
        CALL,
        WEATHER,
        ";",
        " ",
        "\n",
        "{",
        "}",
    ),
    *('"', "\\", '{"name": "f", "arguments": {', '{"name": "g"}', "text", "<", "世"),
)
TEXTS = st.lists(st.sampled_from(PIECES) | st.text(max_size=3), max_size=12).map("".join)


def joined(parts: Iterable[Part]) -> list[Part]:
    """Parts with neighbouring texts made one."""
    merged: list[Part] = []
    for part in parts:
        if isinstance(part, str) and merged and isinstance(merged[-1], str):
            merged[-1] += part
        else:
            merged.append(part)
    return merged


@given(form=st.sampled_from(sorted(FORMATS)), text=TEXTS, data=st.data(), max_calls=st.sampled_from([None, 1]))
def test_cuts_change_nothing(form: str, text: str, data: st.DataObject, max_calls: int | None) -> None:
    whole, cut = (ToolCallParser(FORMATS[form], NAMES, max_calls) for _ in range(2))
    expected = joined([*whole.feed(text), *whole.finish()])
    found: list[Part] = []
    while text:
        size = data.draw(st.integers(0, len(text)) if data.draw(st.booleans()) else st.just(1))
        found += cut.feed(text[:size])
        text = text[size:]
    assert joined([*found, *cut.finish()]) == expected


def unspaced(text: str) -> str:
    return "".join(text.split())


@given(form=st.sampled_from(sorted(FORMATS)), text=TEXTS)
@example(form="hermes", text=f"<tool_call>{CALL} x")
def test_nothing_is_lost(form: str, text: str) -> None:
    """What is given out stands in the text in its order; what is left out is what marks a call, and space."""
    parser = ToolCallParser(FORMATS[form], NAMES)
    place, source = 0, unspaced(text)
    left_out = ""
    for part in joined([*parser.feed(text), *parser.finish()]):
        wanted = [unspaced(part)] if isinstance(part, str) else [unspaced(CALL if part == F else WEATHER)]
        found = source.index(wanted[0], place)
        left_out += source[place:found]
        place = found + len(wanted[0])
    left_out += source[place:]
    for mark in ("<tool_call>", "</tool_call>", "<|python_tag|>", ";"):
        left_out = left_out.replace(mark, "")
    assert left_out == ""


PLAIN = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text()
VALUES = PLAIN | st.lists(PLAIN, max_size=3) | st.dictionaries(st.text(max_size=3), PLAIN | st.lists(PLAIN), max_size=3)


@given(
    arguments=st.dictionaries(st.text(max_size=5), VALUES, max_size=3),
    is_ascii=st.booleans(),
    form=st.sampled_from(sorted(FORMATS)),
)
def test_any_arguments_come_through(arguments: dict[str, Any], is_ascii: bool, form: str) -> None:
    text = json.dumps({"name": "f", "parameters": arguments}, ensure_ascii=is_ascii)
    content, (call,) = read(form, FORMATS[form].opening + text)
    assert content is None and call.name == "f" and json.loads(call.arguments) == arguments
    call.arguments.encode()


@pytest.mark.parametrize("form", sorted(FORMATS))
@pytest.mark.parametrize("piece", ["<tool_call>{", "<tool_call>", '"', "{", "\\", "<", " "])
def test_long_texts_take_time_in_proportion(form: str, piece: str) -> None:
    parser = ToolCallParser(FORMATS[form], NAMES)
    start_s = time.monotonic()
    for _ in range(20_000):
        parser.feed(piece)
    parser.finish()
    assert time.monotonic() - start_s < 2


# Which format


HERMES_TEMPLATE = (
    '{{- \'<tool_call></tool_call> tags:\\n<tool_call>\\n{\\"name\\": <function-name>, \\"arguments\\": ...}\' }}'
)
LLAMA_TEMPLATE = '{{- \'Respond in the format {"name": function name, "parameters": dictionary of argument name}\' }}'
CODER_TEMPLATE = "<tool_call>\n<function=example>\n<parameter=arguments>"


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        (None, None),
        ("{{ messages }}", None),
        (HERMES_TEMPLATE, "hermes"),
        (LLAMA_TEMPLATE, "llama3_json"),
        (CODER_TEMPLATE, None),
        ({"default": "{{ messages }}", "tool_use": HERMES_TEMPLATE}, "hermes"),
        ({"default": LLAMA_TEMPLATE}, "llama3_json"),
    ],
)
def test_the_format_is_told_from_the_template(template: Any, expected: str | None) -> None:
    assert guess_format(template) == (expected and FORMATS[expected])


def test_the_flags_decide() -> None:
    assert choose_policy("hermes", True, None, {"<tool_call>": True}).is_opening_special
    assert choose_policy("llama3_json", True, HERMES_TEMPLATE, {}).call_format == FORMATS["llama3_json"]
    choose_policy("none", True, HERMES_TEMPLATE, {}).require_parser()
    for parser, is_enabled in (("auto", True), ("hermes", False), ("none", False)):
        with pytest.raises(ValueError, match=r"tools is 'given'.*tool_call_parser"):
            choose_policy(parser, is_enabled, None, {}).require_parser()


def test_an_opening_that_is_a_special_token_is_shown() -> None:
    """Some checkpoints mark it as one, and texts leave special tokens out."""
    tokenizer = make_tokenizer()
    options = serve.make_options(serve.parse_flags(["serve", "--tool_call_parser=hermes"]))
    assert not tool_policy(options, tokenizer).is_opening_special
    tokenizer.add_tokens([AddedToken("<tool_call>", special=True)])
    policy = tool_policy(options, tokenizer)
    assert policy.is_opening_special
    context: Any = SimpleNamespace(tool_policy=policy)
    tools = [{"type": "function", "function": {"name": "f"}}]
    for fields, is_skipped in (
        ({"tools": tools}, False),
        ({"tools": tools, "skip_special_tokens": True}, True),
        ({"tools": tools, "tool_choice": "none"}, True),
        ({}, True),
    ):
        body = {"messages": [{"role": "user", "content": "x"}], **fields}
        request = parse_body(ChatCompletionRequest, json.dumps(body).encode())
        params = params_for_tools(context, request, request.sampling_params(SamplingParams()))
        assert params.skip_special_tokens is is_skipped
