"""tool_choice "required" or a function's name: the answer is calls, and their arguments follow the tools' schemas."""

import json
from types import SimpleNamespace
from typing import Any

import openai
import pytest
from tokenizers import AddedToken

from paxpage import serve
from paxpage.engine.grammars import compile_grammar, read_vocabulary
from paxpage.engine.sampling_params import SamplingParams
from paxpage.server.chat import params_for_tools
from paxpage.server.forced_calls import forced_calls
from paxpage.server.launch import tool_policy
from paxpage.server.protocol import ChatCompletionRequest, parse_body
from paxpage.server.tool_calls import FORMATS, ToolCallParser, read_whole
from tests.helpers.fixtures import unchecked_types
from tests.server.parrot import SCRIPTS
from tests.server.process import ServerProcess
from tests.server.test_openai_client import Result, streamed_result, whole_result
from tests.server.tiny import VOCAB_SIZE, make_tokenizer

__all__ = ["unchecked_types"]


def tool(name: str, **fields: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, **fields}}


WEATHER = {
    "$defs": {"unit": {"enum": ["C", "F"]}},
    "properties": {"city": {"enum": ["Rome", "Oslo"]}, "unit": {"$ref": "#/$defs/unit"}},
    "description": 'a // b ::= "c"\n',
    "required": ["city", "unit"],
}
HARD_NAME = 'q"\\世// x'
OPEN = {"type": ["object", "null"], "properties": {"a": {"type": "integer"}}, "additionalProperties": True}
TOOLS: list[Any] = [
    tool("weather", parameters=WEATHER),
    tool(HARD_NAME),
    tool("any", parameters={}),
    tool("open", parameters=OPEN),
]
ROME = ("weather", {"city": "Rome", "unit": "F"})
NAMED: Any = {"type": "function", "function": {"name": "weather"}}


# The grammar


def written(form: str, space: str, calls: list[tuple[str, Any]]) -> str:
    """Calls as models write them."""
    if form == "llama3_json":
        texts = [json.dumps({"name": name, "parameters": arguments}, ensure_ascii=False) for name, arguments in calls]
        return "; ".join(texts)
    texts = [json.dumps({"name": name, "arguments": arguments}, ensure_ascii=False) for name, arguments in calls]
    return space.join(f"<tool_call>{space}{text}{space}</tool_call>" for text in texts)


@pytest.mark.parametrize("is_special", [None, False, True])
@pytest.mark.parametrize("form", FORMATS)
def test_a_grammar_lets_calls_through_and_nothing_else(form: str, is_special: bool | None) -> None:
    """is_special: of the tags, where they are tokens."""
    tokenizer, marks = make_tokenizer(), ["<tool_call>", "</tool_call>"] if is_special is not None else []
    tokenizer.add_tokens([AddedToken(mark, special=bool(is_special), normalized=False) for mark in marks])
    vocabulary = read_vocabulary(tokenizer, VOCAB_SIZE + 2)
    for is_one in (False, True):
        source = forced_calls(TOOLS, FORMATS[form], marks, is_one=is_one).source
        grammar: Any = compile_grammar(source, vocabulary)
        cases: list[tuple[list[tuple[str, Any]], bool]] = [
            ([ROME], True),
            ([(HARD_NAME, {})], True),
            ([ROME, ("any", {"z": [1, {"世": None}]})], not is_one),
            ([(HARD_NAME, {"a": 1})], False),
            ([("weather", {"city": "Rome"})], False),
            ([("weather", {"city": "Paris", "unit": "F"})], False),
            ([("weather", {"city": "Rome", "unit": "F", "other": 1})], False),
            ([("open", {"a": 1, "b": 2})], True),
            ([("other", {})], False),
            ([("any", 5)], False),
            ([], False),
        ]
        for calls, is_right in cases:
            for space in ("", "\n"):
                text = written(form, space, calls)
                matcher, ids = grammar._matcher.deep_copy(), tokenizer.encode(text, add_special_tokens=False)
                is_whole = matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()
                assert is_whole is is_right, text
                content, found = read_whole(ToolCallParser(FORMATS[form], ["weather", HARD_NAME, "any", "open"]), text)
                if is_right:
                    assert (content, [(name, json.loads(arguments)) for name, arguments in found]) == (None, calls)
        assert not grammar._matcher.is_accepting()


@pytest.mark.parametrize("parameters", [{"type": "string"}, {"type": ["string", "null"]}, [], "x", True])
def test_parameters_that_describe_no_object_are_refused(parameters: Any) -> None:
    tools = [tool("f"), tool("g", parameters=parameters)]
    with pytest.raises(ValueError, match=r"^tools\.1\.function\.parameters is .*allowed: a JSON schema of type"):
        forced_calls(tools, FORMATS["hermes"], (), name="g", is_one=True)
    forced_calls(tools, FORMATS["hermes"], (), name="f", is_one=True)


def test_tags_that_are_tokens_are_asked_for_by_name_and_shown() -> None:
    tokenizer = make_tokenizer()
    tokenizer.add_tokens([AddedToken("<tool_call>", special=True), AddedToken("</tool_call>", special=True)])
    options = serve.make_options(serve.parse_flags(["serve", "--tool_call_parser=hermes"]))
    context: Any = SimpleNamespace(tool_policy=tool_policy(options, tokenizer))
    fields = {"tools": TOOLS, "tool_choice": NAMED, "skip_special_tokens": True}
    body = {"messages": [{"role": "user", "content": "x"}], **fields}
    request = parse_body(ChatCompletionRequest, json.dumps(body).encode())
    params = params_for_tools(context, request, request.sampling_params(SamplingParams()))
    assert params.structured_outputs is not None and params.skip_special_tokens is False
    assert "call: <tool_call> " in (params.structured_outputs.grammar or "")


# Over HTTP, where the model has no tag among its tokens


def ask(client: openai.OpenAI, **options: Any) -> Any:
    """It ends as soon as it may, unless told; a piece of the model's that ends a call and begins the next is banned."""
    given: dict[str, Any] = {"tools": TOOLS[:1], "tool_choice": "required", "temperature": 1.0, "seed": 3, **options}
    given = {"logit_bias": {"1": 100}, "extra_body": {"bad_words": [SCRIPTS["B"][1]]}, **given}
    messages: Any = [{"role": "user", "content": "What about A"}]
    return client.chat.completions.create(model="PARROT", messages=messages, **given)


def check_calls(result: Result, reason: str) -> None:
    content, calls, finish_reason = result
    assert (content, finish_reason) == (None, reason) and calls
    for name, text in calls:
        arguments = json.loads(text)
        assert name == "weather" and arguments.keys() == {"city", "unit"}
        assert arguments["city"] in ("Rome", "Oslo") and arguments["unit"] in ("C", "F")


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({}, "tool_calls"),
        ({"parallel_tool_calls": False, "logit_bias": {}}, "tool_calls"),
        ({"tool_choice": NAMED, "logit_bias": {}}, "stop"),
        ({"tools": TOOLS, "tool_choice": NAMED, "logit_bias": {}}, "stop"),
    ],
)
def test_every_answer_is_a_call(client: openai.OpenAI, options: dict[str, Any], reason: str) -> None:
    whole = ask(client, n=4, max_tokens=2000, **options)
    results = [whole_result(choice) for choice in whole.choices]
    for result in results:
        check_calls(result, reason)
        assert len(result[1]) == 1
    assert len({str(result) for result in results}) > 1
    chunks = list(ask(client, n=4, max_tokens=2000, stream=True, stream_options={"include_usage": True}, **options))
    assert [streamed_result(chunks, index) for index in range(4)] == results
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens


def test_a_model_that_would_rather_talk_calls_nevertheless(client: openai.OpenAI) -> None:
    """Greedily it says "Let me" first, which no call begins with."""
    check_calls(whole_result(ask(client, temperature=0, parallel_tool_calls=False).choices[0]), "tool_calls")


def test_calls_go_on_until_the_model_ends_them(client: openai.OpenAI) -> None:
    """A call that is cut is text, as where none is forced."""
    for max_tokens, least in ((3, 0), (400, 2)):
        (choice,) = ask(client, max_tokens=max_tokens, logit_bias={"1": -100}).choices
        content, calls, reason = whole_result(choice)
        assert (reason, len(calls) >= least) == ("length", True) and "<" in (content or "<")


NOT = {"type": "object", "properties": {"a": {"not": {"type": "string"}}}}


@pytest.mark.parametrize(
    ("options", "param", "message"),
    [
        ({"tools": []}, "tool_choice", "no tools"),
        ({"tool_choice": {"type": "function", "function": {"name": "time"}}}, "tool_choice", "'time'.*weather"),
        ({"response_format": {"type": "json_object"}}, "response_format", "tool_choice"),
        ({"extra_body": {"structured_outputs": {"regex": "a"}}}, "structured_outputs", "tool_choice"),
        ({"tools": [tool("f", parameters=NOT)]}, "tools", '^.*tools cannot be followed.*"not"'),
        ({"tools": [tool("f", parameters={"type": "string"})]}, "tools", r"tools\.0\.function\.parameters"),
        (
            {"tools": [tool("f", description="x", parameters={"x": "y" * 140_000})]},
            "tools",
            "tools is '140.* characters",
        ),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_what_cannot_be_forced_is_refused_by_name(
    client: openai.OpenAI, options: dict[str, Any], param: str, message: str, stream: bool
) -> None:
    with pytest.raises(openai.BadRequestError, match=message) as raised:
        ask(client, stream=stream, **options)
    assert raised.value.param == param


def test_a_server_that_parses_no_calls_forces_none(tiny: ServerProcess) -> None:
    body = {"messages": [{"role": "user", "content": "x"}], "tools": TOOLS, "tool_choice": "required"}
    error = tiny.post("chat/completions", body).json()["error"]
    assert (error["code"], error["param"]) == (400, "tool_choice") and "tool_call_parser" in error["message"]
