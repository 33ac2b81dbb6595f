"""The openai client against a server in a process of its own, whose model says what was written into it."""

import itertools
import json
import threading
from typing import Any

import openai
import pytest

from tests.server.conftest import PARROT_KEY
from tests.server.parrot import SCRIPTS
from tests.server.process import ServerProcess, wait_until

TOOLS: list[Any] = [
    {"type": "function", "function": {"name": name, "parameters": {"type": "object"}}} for name in ("weather", "time")
]
Result = tuple[str | None, list[tuple[str, str]], str]
EXPECTED: dict[str, Result] = {
    "A": ("Let me see.\n", [("weather", '{"city": "Rome"}')], "tool_calls"),
    "B": (
        None,
        [("weather", '{"city": "Oslo"}'), ("time", '{"t": "</tool_call>", "world": "世界"}')],
        "tool_calls",
    ),
    "C": ("".join(SCRIPTS["C"]), [], "stop"),
    "D": ("".join(SCRIPTS["D"]), [], "stop"),
    "E": ("".join(SCRIPTS["E"]), [], "stop"),
}


def ask(letter: str) -> list[Any]:
    return [{"role": "user", "content": f"What about {letter}"}]


def chat(client: openai.OpenAI, letter: str, **options: Any) -> Any:
    return client.chat.completions.create(model="PARROT", messages=ask(letter), temperature=0, **options)


def whole_result(choice: Any) -> Result:
    calls = choice.message.tool_calls or []
    assert all(call.type == "function" and call.id for call in calls)
    assert len({call.id for call in calls}) == len(calls)
    found = [(call.function.name, call.function.arguments) for call in calls]
    return choice.message.content, found, choice.finish_reason


def streamed_result(chunks: list[Any], index: int = 0) -> Result:
    """What a client puts together from the chunks of one choice; checks the order of a call's parts."""
    content, calls, reason = "", [], ""
    choices = [choice for chunk in chunks for choice in chunk.choices if choice.index == index]
    assert choices[0].delta.role == "assistant" and choices[0].delta.content == ""
    for choice in choices:
        assert not reason
        content += choice.delta.content or ""
        reason = choice.finish_reason or ""
        for part in choice.delta.tool_calls or []:
            if part.index == len(calls):
                assert part.id and part.type == "function" and part.function.arguments == ""
                calls.append((part.function.name, ""))
            else:
                assert (part.index, part.id, part.function.name) == (len(calls) - 1, None, None)
                calls[-1] = (calls[-1][0], calls[-1][1] + part.function.arguments)
    return content or None, calls, reason


# Tools


@pytest.mark.parametrize("letter", EXPECTED)
def test_an_answer_is_the_same_whole_and_streamed(client: openai.OpenAI, letter: str) -> None:
    whole = chat(client, letter, tools=TOOLS)
    assert whole_result(whole.choices[0]) == EXPECTED[letter]
    chunks = list(chat(client, letter, tools=TOOLS, stream=True, stream_options={"include_usage": True}))
    assert streamed_result(chunks) == EXPECTED[letter]
    assert (chunks[-1].usage.total_tokens, chunks[-1].choices) == (whole.usage.total_tokens, [])


def test_each_of_n_has_its_own_calls(client: openai.OpenAI) -> None:
    options: dict[str, Any] = {"tools": TOOLS, "n": 3, "logprobs": True, "top_logprobs": 1}
    whole = chat(client, "B", **options)
    assert [whole_result(choice) for choice in whole.choices] == [EXPECTED["B"]] * 3
    ids = {call.id for choice in whole.choices for call in choice.message.tool_calls}
    assert len(ids) == 6
    chunks = list(chat(client, "B", stream=True, **options))
    assert [streamed_result(chunks, index) for index in range(3)] == [EXPECTED["B"]] * 3
    parts = [
        choice.logprobs.content
        for chunk in chunks
        for choice in chunk.choices
        if choice.index == 1 and choice.logprobs is not None
    ]
    assert list(itertools.chain(*parts)) == whole.choices[1].logprobs.content  # no token twice, none left out
    assert len(whole.choices[1].logprobs.content) == len(SCRIPTS["B"]) + 1


def test_calls_are_looked_for_only_where_there_are_tools(client: openai.OpenAI) -> None:
    text = "".join(SCRIPTS["B"])
    for options in ({}, {"tools": TOOLS, "tool_choice": "none"}, {"tools": []}):
        assert whole_result(chat(client, "B", **options).choices[0]) == (text, [], "stop")
    first, second = text.split("\n")
    expected = ("\n" + second, EXPECTED["B"][1][:1], "tool_calls")
    options = {"tools": TOOLS, "parallel_tool_calls": False, "tool_choice": "auto"}
    assert whole_result(chat(client, "B", **options).choices[0]) == expected
    assert streamed_result(list(chat(client, "B", stream=True, **options))) == expected
    assert first.startswith("<tool_call>")


def test_a_call_that_is_cut_is_text_and_its_answer_says_length(client: openai.OpenAI) -> None:
    expected = ("".join(SCRIPTS["A"][:5]), [], "length")
    assert whole_result(chat(client, "A", tools=TOOLS, max_tokens=5).choices[0]) == expected
    assert streamed_result(list(chat(client, "A", tools=TOOLS, max_tokens=5, stream=True))) == expected
    assert whole_result(chat(client, "B", tools=TOOLS, max_tokens=3).choices[0])[1:] == (EXPECTED["B"][1][:1], "length")


def test_a_conversation_goes_on_with_the_result(client: openai.OpenAI, parrot: ServerProcess) -> None:
    message = chat(client, "A", tools=TOOLS).choices[0].message
    result = {
        "role": "tool",
        "tool_call_id": message.tool_calls[0].id,
        "content": [{"type": "text", "text": "sunny E"}],
    }
    for said in (message, message.model_dump(), message.model_dump(exclude_none=True)):
        messages: list[Any] = [*ask("A"), said, result]
        answer = client.chat.completions.create(
            model="PARROT", messages=messages, tools=TOOLS, extra_body={"return_token_ids": True}
        )
        assert whole_result(answer.choices[0]) == EXPECTED["E"]
        ids = answer.model_dump()["prompt_token_ids"]
        prompt = parrot.client.post("/detokenize", json={"tokens": ids}).json()["prompt"]
        assert prompt.endswith("<|assistant|>weather(Rome)Let me see.\n<|tool|>sunny E") and "weather|time|" in prompt


# The rest of the API


def test_models(client: openai.OpenAI) -> None:
    (model,) = client.models.list()
    assert (model.id, client.models.retrieve("PARROT").id) == ("PARROT", "PARROT")


def test_completions(client: openai.OpenAI) -> None:
    options: dict[str, Any] = {"model": "PARROT", "temperature": 0}
    whole = client.completions.create(prompt=["E", "F"], n=2, logprobs=1, **options)
    texts = ["".join(SCRIPTS[letter]) for letter in "EEFF"]
    assert [(choice.index, choice.text) for choice in whole.choices] == list(enumerate(texts))
    assert {choice.finish_reason for choice in whole.choices} == {"stop"}
    assert whole.choices[2].logprobs.tokens[:4] == list(SCRIPTS["F"])
    assert whole.usage.completion_tokens == sum(len(SCRIPTS[letter]) + 1 for letter in "EEFF")
    streamed = [""] * 4
    for chunk in client.completions.create(prompt=["E", "F"], n=2, stream=True, **options):
        for choice in chunk.choices:
            streamed[choice.index] += choice.text
    assert streamed == texts
    stopped = client.completions.create(prompt="F", stop=["kettle"], max_tokens=9, **options).choices[0]
    assert (stopped.text, stopped.finish_reason) == ("Blue ", "stop")


def test_chat_with_logprobs_and_usage(client: openai.OpenAI) -> None:
    answer = chat(client, "F", logprobs=True, top_logprobs=3, max_completion_tokens=3, seed=1, user="somebody")
    tokens = answer.choices[0].logprobs.content
    assert [token.token for token in tokens] == list(SCRIPTS["F"][:3])
    assert all(len(token.top_logprobs) == 3 and token.top_logprobs[0].token == token.token for token in tokens)
    assert all(bytes(token.bytes).decode() == token.token and token.logprob <= 0 for token in tokens)
    assert (answer.choices[0].finish_reason, answer.usage.completion_tokens) == ("length", 3)
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + 3
    assert answer.usage.prompt_tokens_details.cached_tokens <= answer.usage.prompt_tokens


@pytest.mark.parametrize(
    ("options", "kind", "param"),
    [
        ({"model": "other"}, openai.NotFoundError, "model"),
        ({"temperature": -1}, openai.BadRequestError, "temperature"),
        ({"max_tokens": 0}, openai.BadRequestError, "max_tokens"),
        ({"messages": []}, openai.BadRequestError, "messages"),
        ({"functions": [{"name": "f"}]}, openai.BadRequestError, "functions"),
        ({"modalities": ["audio"]}, openai.BadRequestError, "modalities"),
        ({"extra_body": {"guided_regexp": "x"}}, openai.BadRequestError, "guided_regexp"),
        ({"stream_options": {"include_usage": True}}, openai.BadRequestError, "stream_options"),
    ],
)
def test_errors_are_the_client_s_own_classes(client: openai.OpenAI, options: Any, kind: Any, param: str) -> None:
    with pytest.raises(kind) as raised:
        client.chat.completions.create(**{"model": "PARROT", "messages": ask("E"), **options})
    assert raised.value.param == param and raised.value.type == kind.__name__
    assert raised.value.code == str(raised.value.status_code)


def test_a_wrong_key_is_an_authentication_error(parrot: ServerProcess) -> None:
    with (
        openai.OpenAI(base_url=f"{parrot.url}/v1", api_key=PARROT_KEY[:-1], max_retries=0) as client,
        pytest.raises(openai.AuthenticationError),
    ):
        client.models.list()


def test_a_client_that_times_out_or_closes_frees_its_request(client: openai.OpenAI, parrot: ServerProcess) -> None:
    endless: dict[str, Any] = {"extra_body": {"ignore_eos": True}, "max_tokens": 8000}
    with pytest.raises(openai.APITimeoutError):
        chat(client.with_options(timeout=0.5), "F", **endless)
    parrot.wait_idle()
    stream = chat(client, "F", stream=True, **endless)
    assert next(iter(stream)).choices[0].delta.role == "assistant"
    wait_until(lambda: parrot.metrics()["num_requests_running"] == 1)
    stream.close()
    parrot.wait_idle()
    assert whole_result(chat(client, "E").choices[0]) == EXPECTED["E"]


def test_streams_side_by_side_stay_apart(client: openai.OpenAI) -> None:
    results: dict[str, Result] = {}

    def read(letter: str) -> None:
        results[letter] = streamed_result(list(chat(client, letter, tools=TOOLS, stream=True)))

    threads = [threading.Thread(target=read, args=(letter,)) for letter in EXPECTED]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert results == EXPECTED


def test_arguments_are_json(client: openai.OpenAI) -> None:
    with client.chat.completions.stream(model="PARROT", messages=ask("B"), tools=TOOLS, temperature=0) as stream:
        message = stream.get_final_completion().choices[0].message
    assert [json.loads(call.function.arguments) for call in message.tool_calls] == [
        {"city": "Oslo"},
        {"t": "</tool_call>", "world": "世界"},
    ]
