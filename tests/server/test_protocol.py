"""What requests are accepted, and what the refusal of others says."""

import json
from typing import Any

import pytest

from paxpage.engine.sampling_params import SamplingParams
from paxpage.engine.structured_outputs import StructuredOutputsParams
from paxpage.server.errors import ApiError
from paxpage.server.protocol import MAX_PROMPTS, ChatCompletionRequest, CompletionRequest, TokenizeRequest, parse_body

USER = {"role": "user", "content": "x"}
CHAT = {"messages": [USER]}
COMPLETION = {"prompt": "x"}
MANY = ["a"] * (MAX_PROMPTS + 1)
DEFAULTS = SamplingParams(temperature=0.6, top_p=0.9)


def chat(**fields: Any) -> ChatCompletionRequest:
    return parse_body(ChatCompletionRequest, json.dumps({**CHAT, **fields}).encode())


def completion(**fields: Any) -> CompletionRequest:
    return parse_body(CompletionRequest, json.dumps({**COMPLETION, **fields}).encode())


@pytest.mark.parametrize(
    ("prompt", "parsed"),
    [
        ("ab", ["ab"]),
        ("", [""]),
        (["a", "b"], ["a", "b"]),
        ([1, 2], [[1, 2]]),
        ([[1], [2, 3]], [[1], [2, 3]]),
        ([1] * (MAX_PROMPTS + 1), [[1] * (MAX_PROMPTS + 1)]),
        (["a"] * MAX_PROMPTS, ["a"] * MAX_PROMPTS),
    ],
)
def test_every_form_of_prompt_becomes_a_list_of_prompts(prompt: object, parsed: object) -> None:
    assert completion(prompt=prompt).prompt == parsed


def test_an_answer_has_so_many_choices_at_most() -> None:
    assert completion(prompt=["a"] * 128, n=128).n == 128
    with pytest.raises(ApiError, match="n is 128; allowed: at most 127 for 129 prompts") as raised:
        completion(prompt=["a"] * 129, n=128)
    assert (raised.value.status, raised.value.param) == (400, "n")


@pytest.mark.parametrize("prompt", [None, 5, [], [[]], [1, "a"], ["a", [1]], [True], [1.5], {"a": 1}, [[1], []], MANY])
def test_other_prompts_are_refused_by_name(prompt: object) -> None:
    with pytest.raises(ApiError, match=r"^prompt ") as raised:
        completion(prompt=prompt)
    assert (raised.value.status, raised.value.param) == (400, "prompt")


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"max_tokens": "5"}, "max_tokens"),
        ({"max_tokens": 1.5}, "max_tokens"),
        ({"max_tokens": True}, "max_tokens"),
        ({"stream": "yes"}, "stream"),
        ({"stream": 1}, "stream"),
        ({"temperature": []}, "temperature"),
        ({"temperature": "hot"}, "temperature"),
        ({"temperature": True}, "temperature"),
        ({"temperature": float("nan")}, "temperature"),
        ({"top_p": float("inf")}, "top_p"),
        ({"seed": "7"}, "seed"),
        ({"seed": 7.5}, "seed"),
        ({"stop": 5}, "stop"),
        ({"stop": ["a", 5]}, "stop"),
        ({"stop_token_ids": ["a"]}, "stop_token_ids.0"),
        ({"no_such_field": 1}, "no_such_field"),
        ({"stream": True, "stream_options": {"other": True}}, "stream_options.other"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"best_of": 3}, "best_of"),
        ({"user": 5}, "user"),
        *(({"request_id": value}, "request_id") for value in ("x" * 129, "", " x", "x\n", "é", 5)),
    ],
)
@pytest.mark.parametrize("make", [chat, completion])
def test_faulty_fields_are_refused_by_name(make: Any, fields: dict[str, object], param: str) -> None:
    with pytest.raises(ApiError) as raised:
        make(**fields)
    assert (raised.value.status, raised.value.param) == (400, param)
    assert param in raised.value.message


NEUTRAL_VALUES = {
    "presence_penalty": [None, 0, 0.0],
    "frequency_penalty": [None, 0, 0.0],
    "repetition_penalty": [None, 1, 1.0],
    "logit_bias": [None, {}],
    "bad_words": [None, []],
    "allowed_token_ids": [None],
    "prompt_logprobs": [None],
    "truncate_prompt_tokens": [None],
    "best_of": [None, 1],
    "echo": [None, False],
    "response_format": [None, {"type": "text"}],
    "structured_outputs": [None],
    "store": [None, False],
}
UNSUPPORTED_VALUES = {
    "store": [True],
}


@pytest.mark.parametrize(("field", "value"), [(f, v) for f, values in NEUTRAL_VALUES.items() for v in values])
@pytest.mark.parametrize("make", [chat, completion])
def test_neutral_values_of_options_to_come_are_accepted(make: Any, field: str, value: object) -> None:
    assert make(**{field: value}).sampling_params(DEFAULTS).temperature == 0.6


@pytest.mark.parametrize(("field", "value"), [(f, v) for f, values in UNSUPPORTED_VALUES.items() for v in values])
@pytest.mark.parametrize("make", [chat, completion])
def test_options_to_come_are_refused_by_name(make: Any, field: str, value: object) -> None:
    with pytest.raises(ApiError, match=f"^{field} is .*not supported yet") as raised:
        make(**{field: value})
    assert raised.value.param == field


SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
NAMED = {"name": "form", "schema": SCHEMA, "strict": True, "description": "a form"}


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"response_format": {"type": "json_object"}}, StructuredOutputsParams(json_object=True)),
        ({"response_format": {"type": "json_schema", "json_schema": NAMED}}, StructuredOutputsParams(json=SCHEMA)),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": {}, "strict": None}}},
            StructuredOutputsParams(json={}),
        ),
        ({"structured_outputs": {"json": SCHEMA}}, StructuredOutputsParams(json=SCHEMA)),
        ({"structured_outputs": {"regex": "a+", "json": None}}, StructuredOutputsParams(regex="a+")),
        ({"structured_outputs": {"choice": ["a", "b"]}}, StructuredOutputsParams(choice=["a", "b"])),
        ({"structured_outputs": {"grammar": "start: X"}}, StructuredOutputsParams(grammar="start: X")),
        (
            {"structured_outputs": {"json_object": True}, "response_format": {"type": "text"}},
            StructuredOutputsParams(json_object=True),
        ),
    ],
)
@pytest.mark.parametrize("make", [chat, completion])
def test_structured_outputs_are_asked_for_in_two_ways(
    make: Any, fields: Any, expected: StructuredOutputsParams
) -> None:
    assert make(**fields).sampling_params(DEFAULTS).structured_outputs == expected
    assert make().sampling_params(DEFAULTS).structured_outputs is None


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"response_format": "json"}, "response_format is 'json'; allowed: "),
        ({"response_format": {"type": "xml"}}, "response_format is .*; allowed: "),
        ({"response_format": {"type": "json_object", "schema": {}}}, "response_format is .*; allowed: "),
        ({"response_format": {"type": "json_schema"}}, "response_format is .*; allowed: "),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}},
            "response_format has the json_sch",
        ),
        (
            {"response_format": {"type": "json_schema", "json_schema": {**NAMED, "strict": "yes"}}},
            "response_format has the json_schema",
        ),
        (
            {"response_format": {"type": "json_schema", "json_schema": {**NAMED, "x": 1}}},
            "response_format has the json",
        ),
        ({"structured_outputs": "regex"}, "structured_outputs is 'regex'; allowed: an object with one of json, regex"),
        ({"structured_outputs": {"regexp": "a"}}, "structured_outputs is .*; allowed: an object with one of json"),
        ({"structured_outputs": {}}, "structured_outputs is refused: structured_outputs is .*; allowed: exactly one"),
        ({"structured_outputs": {"regex": ""}}, "structured_outputs is refused: structured_outputs.regex is ''"),
        (
            {"structured_outputs": {"regex": "a"}, "response_format": {"type": "json_object"}},
            "structured_outputs is 'given'; allowed: null beside a response_format",
        ),
    ],
)
@pytest.mark.parametrize("make", [chat, completion])
def test_faulty_structured_outputs_are_refused_by_name(make: Any, fields: Any, message: str) -> None:
    with pytest.raises(ApiError, match=f"^{message}") as raised:
        make(**fields)
    assert raised.value.param in fields


def test_an_echo_is_for_completions_alone() -> None:
    assert completion(echo=True).is_echo and not completion(echo=False).is_echo
    with pytest.raises(ApiError, match=r"^echo is True.*not supported"):
        chat(echo=True)


FUNCTION = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}


@pytest.mark.parametrize("tools", [[{"type": "function"}], {}, [5], [{**FUNCTION, "type": "other"}], "weather"])
def test_faulty_tools_are_refused(tools: object) -> None:
    with pytest.raises(ApiError, match=r"^tools is"):
        chat(tools=tools)


NAMED = {"type": "function", "function": {"name": "weather"}}


@pytest.mark.parametrize(
    ("tool_choice", "tools", "forces"),
    [
        (None, [FUNCTION], False),
        ("auto", [FUNCTION], False),
        ("none", None, False),
        ("required", [FUNCTION], True),
        (NAMED, [FUNCTION], True),
    ],
)
def test_tools_for_the_template(tool_choice: Any, tools: Any, forces: bool) -> None:
    request = chat(tools=[FUNCTION], tool_choice=tool_choice)
    assert (request.tools_for_template, request.forces_call) == (tools, forces)
    assert request.tool_names == (["weather"] if tools else [])
    assert chat(tools=[]).tools_for_template is None


@pytest.mark.parametrize(
    ("tools", "tool_choice"),
    [
        ([FUNCTION], "any"),
        ([FUNCTION], 5),
        ([FUNCTION], {"type": "function"}),
        ([FUNCTION], {"type": "allowed_tools", "allowed_tools": {}}),
        ([FUNCTION], {"type": "function", "function": {"name": "other"}}),
        ([FUNCTION], {"type": "function", "function": {"name": "weather", "strict": True}}),
        ([], "required"),
        (None, NAMED),
    ],
)
def test_faulty_tool_choices_are_refused(tools: Any, tool_choice: Any) -> None:
    with pytest.raises(ApiError, match=r"^tool_choice is .*allowed") as raised:
        chat(tools=tools, tool_choice=tool_choice)
    assert raised.value.param == "tool_choice"


def test_tool_calls_and_their_results_for_the_template() -> None:
    call = {"id": "1", "type": "function", "function": {"name": "weather", "arguments": "{}"}}
    asked = {"role": "assistant", "content": None, "tool_calls": [call]}
    result = {"role": "tool", "tool_call_id": "1", "content": "sunny"}
    request = chat(messages=[USER, asked, {"role": "assistant", "tool_calls": [call]}, result])
    assert [m.for_template() for m in request.messages] == [USER, asked, asked, result]


@pytest.mark.parametrize(
    ("field", "value", "named"),
    [
        ("logit_bias", [], "logit_bias is"),
        ("logit_bias", 5, "logit_bias is 5"),
        *(("logit_bias", {key: 1}, "logit_bias has the key") for key in ("abc", "-1", "1.5", "", " 5", "9" * 20)),
        *(("logit_bias", {"5": value}, "logit_bias has ") for value in ("x", None, True, [])),
        ("allowed_token_ids", 5, "allowed_token_ids is 5"),
        ("allowed_token_ids", ["a"], "allowed_token_ids.0 is 'a'"),
        ("bad_words", "abc", "bad_words is 'abc'"),
        ("bad_words", [5], "bad_words is"),
        ("bad_words", [[]], "bad_words is"),
        ("presence_penalty", "0", "presence_penalty is '0'"),
        ("frequency_penalty", False, "frequency_penalty is False"),
        ("repetition_penalty", [], "repetition_penalty is"),
        ("truncate_prompt_tokens", 0, "truncate_prompt_tokens is 0"),
        ("truncate_prompt_tokens", -2, "truncate_prompt_tokens is -2"),
        ("prompt_logprobs", "1", "prompt_logprobs is '1'"),
    ],
)
@pytest.mark.parametrize("make", [chat, completion])
def test_faulty_options_are_refused_by_name(make: Any, field: str, value: object, named: str) -> None:
    with pytest.raises(ApiError) as raised:
        make(**{field: value})
    assert raised.value.message.startswith(named)
    assert raised.value.status == 400 and raised.value.param.startswith(field)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("presence_penalty", 2.5),
        ("frequency_penalty", -3),
        ("repetition_penalty", 0),
        ("logit_bias", {"5": 1e30}),
        ("allowed_token_ids", []),
        ("bad_words", [""]),
    ],
)
@pytest.mark.parametrize("make", [chat, completion])
def test_values_that_sampling_params_refuse_name_the_field(make: Any, field: str, value: object) -> None:
    with pytest.raises(ValueError, match=f"^{field} "):
        make(**{field: value}).sampling_params(DEFAULTS)


@pytest.mark.parametrize("make", [chat, completion])
def test_the_adjusting_options_are_taken(make: Any) -> None:
    options = {
        "presence_penalty": 1,
        "frequency_penalty": 0.5,
        "repetition_penalty": 1.1,
        "logit_bias": {"5": -100, "007": 3.5},
        "allowed_token_ids": [1, 2],
        "bad_words": ["a", [5, 6]],
        "prompt_logprobs": 2,
    }
    params = make(**options).sampling_params(DEFAULTS)
    assert params.logit_bias == {5: -100, 7: 3.5}
    assert {field: getattr(params, field) for field in options if field != "logit_bias"} == {
        field: value for field, value in options.items() if field != "logit_bias"
    }


def test_prompt_logprobs_and_echo_want_what_they_need() -> None:
    assert completion(echo=True, logprobs=3).sampling_params(DEFAULTS).prompt_logprobs == 3
    assert completion(echo=True, logprobs=1, prompt_logprobs=4).sampling_params(DEFAULTS).prompt_logprobs == 4
    assert completion(echo=True).sampling_params(DEFAULTS).prompt_logprobs is None
    assert completion(logprobs=3).sampling_params(DEFAULTS).prompt_logprobs is None
    with pytest.raises(ApiError, match=r"^prompt_logprobs is 1; allowed: null when stream is true"):
        completion(prompt_logprobs=1, stream=True)
    with pytest.raises(ValueError, match=r"^prompt_logprobs is 21; allowed: 0 to 20"):
        chat(prompt_logprobs=21).check_limits(20)


def test_an_echo_of_no_tokens_scores_the_prompt() -> None:
    request = completion(echo=True, max_tokens=0, logprobs=0)
    assert request.is_scoring and request.sampling_params(DEFAULTS).max_tokens == 1
    with pytest.raises(ValueError, match="max_tokens is 0"):
        completion(max_tokens=0).sampling_params(DEFAULTS)


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "prompt"),
        ({"prompt": "a", "messages": [USER]}, "prompt"),
        ({"prompt": 5}, "prompt"),
        ({"messages": []}, "messages"),
        ({"prompt": "a", "add_generation_prompt": True}, "add_generation_prompt"),
        ({"messages": [USER], "add_special_tokens": True}, "add_special_tokens"),
        ({"prompt": "a", "other": 1}, "other"),
    ],
)
def test_faulty_bodies_of_tokenize(body: dict[str, Any], param: str) -> None:
    with pytest.raises(ApiError) as raised:
        parse_body(TokenizeRequest, json.dumps(body).encode())
    assert (raised.value.status, raised.value.param) == (400, param)


@pytest.mark.parametrize(
    ("messages", "param"),
    [
        ([], "messages"),
        ("hi", "messages"),
        (None, "messages"),
        ([{}], "messages.0.role"),
        ([{"role": 5, "content": "x"}], "messages.0.role"),
        ([{"role": "alien", "content": "x"}], "messages.0.role"),
        ([USER, {"role": "user", "content": 7}], "messages.1.content"),
        ([{"role": "user"}], "messages.0.content"),
        ([{"role": "user", "content": None}], "messages.0.content"),
        ([{"role": "user", "content": []}], "messages.0.content"),
        ([{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}], "messages.0.content"),
        ([{"role": "user", "content": "x", "colour": 1}], "messages.0.colour"),
        ([{"role": "user", "content": "x", "tool_calls": [{}]}], "messages.0.tool_calls"),
        ([{"role": "assistant", "content": "x", "tool_calls": [5]}], "messages.0.tool_calls.0"),
        ([{"role": "user", "content": "x", "tool_call_id": "1"}], "messages.0.tool_call_id"),
    ],
)
def test_faulty_messages_are_refused_by_name(messages: object, param: str) -> None:
    with pytest.raises(ApiError) as raised:
        chat(messages=messages)
    assert (raised.value.status, raised.value.param) == (400, param)


def test_messages_missing() -> None:
    with pytest.raises(ApiError, match=r"^messages is missing"):
        parse_body(ChatCompletionRequest, b"{}")


@pytest.mark.parametrize(
    "body", [b"{", b"[]", b"null", b"5", b'"x"', b"\xff", b'{"prompt": "\\ud800"}', b'{"prompt": "a",}', b"[" * 100_000]
)
def test_bodies_that_are_no_json_object(body: bytes) -> None:
    with pytest.raises(ApiError, match=r"^the body ") as raised:
        parse_body(CompletionRequest, body)
    assert (raised.value.status, raised.value.param) == (400, None)


def test_overflowing_numbers() -> None:
    for field in ("max_tokens", "temperature", "seed"):
        with pytest.raises(ApiError, match=f"^{field} is "):
            parse_body(CompletionRequest, b'{"prompt": "a", "%s": 1e400}' % field.encode())


def test_text_parts_equal_their_string() -> None:
    parts = [{"type": "text", "text": "a b"}, {"type": "text", "text": " c"}]
    request = chat(messages=[{"role": "user", "content": parts}])
    assert [m.for_template() for m in request.messages] == [{"role": "user", "content": "a b c"}]


def test_messages_for_the_template() -> None:
    copied = {"role": "assistant", "content": "y", "refusal": None, "tool_calls": None, "annotations": []}
    request = chat(messages=[{"role": "developer", "content": "s"}, {**USER, "name": "Ann"}, copied])
    assert [m.for_template() for m in request.messages] == [
        {"role": "system", "content": "s"},
        {"role": "user", "content": "x", "name": "Ann"},
        {"role": "assistant", "content": "y"},
    ]


def test_null_and_absent_mean_the_servers_default() -> None:
    nothing = completion(temperature=None, top_p=None, max_tokens=None, n=None, seed=None, stop=None, logprobs=None)
    for request in (nothing, completion()):
        assert request.sampling_params(DEFAULTS) == DEFAULTS
    assert DEFAULTS.max_tokens == 16


def test_given_options_replace_defaults() -> None:
    request = completion(temperature=0, top_k=5, stop=["a"], seed=-1, n=2, min_tokens=3, ignore_eos=True, logprobs=0)
    params = request.sampling_params(DEFAULTS)
    assert params == SamplingParams(
        temperature=0.0, top_p=0.9, top_k=5, stop=["a"], seed=-1, n=2, min_tokens=3, ignore_eos=True, logprobs=0
    )


def test_a_chat_may_use_all_the_context() -> None:
    assert chat().sampling_params(DEFAULTS).max_tokens is None
    assert chat(min_tokens=100).sampling_params(DEFAULTS).min_tokens == 100
    assert chat(max_tokens=5).sampling_params(DEFAULTS).max_tokens == 5
    assert chat(max_completion_tokens=6).sampling_params(DEFAULTS).max_tokens == 6
    assert chat(max_tokens=7, max_completion_tokens=7).sampling_params(DEFAULTS).max_tokens == 7
    with pytest.raises(ApiError, match=r"^max_completion_tokens is 6"):
        chat(max_tokens=5, max_completion_tokens=6)
    with pytest.raises(ApiError, match=r"^max_completion_tokens is 0; allowed: an integer >= 1"):
        chat(max_completion_tokens=0)


@pytest.mark.parametrize("value", [-1, 0, 2**70])
def test_limits_out_of_range_are_the_engines_to_refuse(value: int) -> None:
    request = completion(max_tokens=value, top_k=value)
    with pytest.raises(ValueError, match=f"is {value}"):
        request.sampling_params(DEFAULTS)


@pytest.mark.parametrize(
    ("fields", "num_logprobs"),
    [({}, None), ({"logprobs": False}, None), ({"logprobs": True}, 0), ({"logprobs": True, "top_logprobs": 5}, 5)],
)
def test_chat_logprobs(fields: dict[str, object], num_logprobs: int | None) -> None:
    assert chat(**fields).sampling_params(DEFAULTS).logprobs == num_logprobs


def test_logprobs_that_are_refused() -> None:
    for fields in ({"top_logprobs": 5}, {"logprobs": 2}, {"logprobs": False, "top_logprobs": 5}):
        with pytest.raises(ApiError, match="logprobs is"):
            chat(**fields)
    for request, name in (
        (chat(logprobs=True, top_logprobs=21), "top_logprobs"),
        (completion(logprobs=-1), "logprobs"),
    ):
        with pytest.raises(ValueError, match=f"^{name} is .*0 to 20"):
            request.check_limits(20)
    completion(logprobs=20).check_limits(20)


def test_generation_prompt_and_continuation() -> None:
    assert chat().has_generation_prompt
    assert not chat(add_generation_prompt=False).has_generation_prompt
    assert not chat(continue_final_message=True).has_generation_prompt
    with pytest.raises(ApiError, match=r"^continue_final_message is"):
        chat(continue_final_message=True, add_generation_prompt=True)
