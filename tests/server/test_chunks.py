"""The shapes of answers and of streams, written from engine events without a server."""

import dataclasses
import json
from typing import Any

from paxpage.engine.sampling_params import SamplingParams
from paxpage.outputs import CompletionDelta, CompletionOutput, Logprob, RequestMetrics, RequestOutput
from paxpage.server.chat import ChatChunks, whole_chat
from paxpage.server.completions import CompletionChunks, whole_completion
from paxpage.server.generation import AnswerHead, merge_deltas
from paxpage.server.http import event
from paxpage.server.logprobs import LogprobFormatter
from paxpage.server.protocol import ChatCompletionRequest, CompletionRequest
from paxpage.server.token_bytes import TokenBytes
from tests.server.scripted_engine import ScriptedPrepared

HEAD = AnswerHead("id-1", 7, "m")
USAGE = {
    "prompt_tokens": 2,
    "completion_tokens": 3,
    "total_tokens": 5,
    "prompt_tokens_details": {"cached_tokens": 1},
}
PARAMS = SamplingParams()
FORMATTER = LogprobFormatter(TokenBytes(None))
METRICS = RequestMetrics(0.0, 1.0, 2.0, 3.0, 0)


def delta(request_id: str, text: str, ids: list[int], reason: str | None = None, **more: Any) -> CompletionDelta:
    fields = {"index": 0, "logprobs": None, "stop_reason": None, "output": None, **more}
    return CompletionDelta(request_id=request_id, text=text, token_ids=ids, finish_reason=reason, **fields)


def output(request_id: str, text: str, ids: list[int], **more: Any) -> RequestOutput:
    fields = {"cumulative_logprob": None, "logprobs": None, "finish_reason": "stop", "stop_reason": "!", **more}
    sample = CompletionOutput(index=0, text=text, token_ids=ids, **fields)
    return RequestOutput(request_id, None, [5, 6], [sample], True, METRICS, num_cached_tokens=1)


def written(chunks: list[Any]) -> list[dict[str, Any]]:
    return [json.loads(chunk.to_json()) for chunk in chunks]


def chat_chunks(**fields: Any) -> ChatChunks:
    request = ChatCompletionRequest(messages=[{"role": "user", "content": "x"}], stream=True, **fields)
    return ChatChunks(HEAD, request, ScriptedPrepared("r", [5, 6], request.sampling_params(PARAMS)), FORMATTER)


def completion_chunks(**fields: Any) -> CompletionChunks:
    request = CompletionRequest(**{"prompt": "x", "stream": True, **fields})
    params = request.sampling_params(PARAMS)
    prepared = [ScriptedPrepared(f"r{i}", [5, 6], params) for i in range(len(request.prompt))]
    return CompletionChunks(HEAD, request, prepared, FORMATTER)


def test_a_whole_completion_has_exactly_the_fields_of_the_api() -> None:
    request = CompletionRequest(prompt="x")
    answer = json.loads(whole_completion(HEAD, request, [output("r0", "abc", [1, 2, 3])], FORMATTER).to_json())
    choice = {"index": 0, "text": "abc", "logprobs": None, "finish_reason": "stop", "stop_reason": "!"}
    assert answer == {
        "id": "id-1",
        "object": "text_completion",
        "created": 7,
        "model": "m",
        "choices": [choice],
        "usage": USAGE,
    }


def test_choices_of_several_prompts_are_numbered_through() -> None:
    request = CompletionRequest(prompt=["x", "y"], return_token_ids=True)
    answer = whole_completion(HEAD, request, [output("r0", "a", [1]), output("r1", "b", [2])], FORMATTER)
    assert [(c.index, c.text, c.token_ids, c.prompt_token_ids) for c in answer.choices] == [
        (0, "a", [1], [5, 6]),
        (1, "b", [2], [5, 6]),
    ]


def test_a_whole_chat_has_exactly_the_fields_of_the_api() -> None:
    request = ChatCompletionRequest(messages=[{"role": "user", "content": "x"}])
    answer = json.loads(whole_chat(HEAD, request, output("r", "abc", [1, 2, 3]), FORMATTER).to_json())
    message = {"role": "assistant", "content": "abc"}
    choice = {"index": 0, "message": message, "logprobs": None, "finish_reason": "stop", "stop_reason": "!"}
    assert answer == {
        "id": "id-1",
        "object": "chat.completion",
        "created": 7,
        "model": "m",
        "choices": [choice],
        "usage": USAGE,
    }


def test_a_chat_stream_is_role_then_text_then_finish() -> None:
    writer = chat_chunks()
    chunks = written(
        [
            *writer.feed([delta("r", "", [1])]),
            *writer.feed([delta("r", "ab", [2])]),
            *writer.feed([delta("r", "c", [3], "stop", stop_reason="!", output=output("r", "abc", [1, 2, 3]))]),
            *writer.finish(),
        ]
    )
    assert [chunk["choices"][0]["delta"] for chunk in chunks] == [
        {"role": "assistant", "content": ""},
        {"content": "ab"},
        {"content": "c"},
        {},
    ]
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks] == [None, None, None, "stop"]
    assert chunks[-1]["choices"][0]["stop_reason"] == "!"
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
    assert not any("usage" in chunk for chunk in chunks)


def test_a_usage_chunk_ends_the_stream_when_asked_for() -> None:
    for writer, request_id in (
        (chat_chunks(stream_options={"include_usage": True}), "r"),
        (completion_chunks(stream_options={"include_usage": True}), "r0"),
    ):
        end = delta(request_id, "abc", [1, 2, 3], "stop", output=output(request_id, "abc", [1, 2, 3]))
        chunks = written([*writer.feed([end]), *writer.finish()])
        assert [chunk["usage"] for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)
        assert (chunks[-1]["choices"], chunks[-1]["usage"]) == ([], USAGE)


def test_each_choice_of_a_stream_begins_with_its_role() -> None:
    chunks = written(chat_chunks(n=2).feed([delta("r", "a", [1]), delta("r", "b", [2], index=1)]))
    assert [(c["choices"][0]["index"], c["choices"][0]["delta"]) for c in chunks] == [
        (0, {"role": "assistant", "content": ""}),
        (0, {"content": "a"}),
        (1, {"role": "assistant", "content": ""}),
        (1, {"content": "b"}),
    ]


def test_completion_chunks_of_several_prompts_and_samples() -> None:
    writer = completion_chunks(prompt=["x", "y"], n=2)
    chunks = written(
        writer.feed([delta("r0", "a", [1], index=1), delta("r1", "b", [2]), delta("r1", "", [3], index=1)])
    )
    assert [(c["choices"][0]["index"], c["choices"][0]["text"]) for c in chunks] == [(1, "a"), (2, "b")]


def test_token_ids_come_with_the_stream_when_asked_for() -> None:
    writer = completion_chunks(return_token_ids=True)
    chunks = written([*writer.feed([delta("r0", "", [1])]), *writer.feed([delta("r0", "a", [2])])])
    assert [c["choices"][0]["token_ids"] for c in chunks] == [[1], [2]]
    assert [c["choices"][0].get("prompt_token_ids") for c in chunks] == [[5, 6], None]
    chunks = written(chat_chunks(return_token_ids=True).feed([delta("r", "", [1])]))
    assert [c.get("prompt_token_ids") for c in chunks] == [[5, 6], None]
    assert chunks[1]["choices"][0]["token_ids"] == [1]


def test_a_slow_reader_finds_steps_joined() -> None:
    one, two = {1: Logprob(-1.0, 1, "a")}, {2: Logprob(-2.0, 1, "b")}
    deltas = [
        delta("r", "a", [1], logprobs=[one]),
        delta("r", "x", [9], index=1),
        delta("r", "b", [2], "length", logprobs=[two]),
    ]
    merged = merge_deltas(deltas)
    assert [(d.index, d.text, d.token_ids, d.finish_reason) for d in merged] == [
        (0, "ab", [1, 2], "length"),
        (1, "x", [9], None),
    ]
    assert merged[0].logprobs == [one, two]


def test_a_last_step_without_a_token_loses_no_log_probabilities() -> None:
    one = {1: Logprob(-1.0, 1, "a")}
    deltas = [delta("r", "a", [1], logprobs=[one]), delta("r", "", [], "stop")]
    assert [(d.token_ids, d.logprobs, d.finish_reason) for d in merge_deltas(deltas)] == [([1], [one], "stop")]
    assert merge_deltas([delta("r", "a", [1]), delta("r", "b", [2])])[0].logprobs is None


CANDIDATES = {7: Logprob(-1.5, 3, "xy"), 8: Logprob(-0.1, 1, "a"), 9: Logprob(-1.0, 2, "é")}


def test_completion_logprobs() -> None:
    logprobs = FORMATTER.completion([CANDIDATES, {8: Logprob(float("-inf"), 9, "b")}], 4)
    assert logprobs.tokens == ["xy", "b"]
    assert logprobs.text_offset == [4, 6]
    assert logprobs.token_logprobs == [-1.5, -9999.0]
    assert logprobs.top_logprobs[0] == {"xy": -1.5, "a": -0.1, "é": -1.0}


def test_candidates_with_one_text_keep_the_chosen_ones_value() -> None:
    entries = {7: Logprob(-3.0, 2, "\ufffd"), 8: Logprob(-0.1, 1, "\ufffd")}
    assert FORMATTER.completion([entries], 0).top_logprobs == [{"\ufffd": -3.0}]


def test_chat_logprobs_are_the_likeliest_first() -> None:
    entry = FORMATTER.chat([CANDIDATES], 2).content[0]
    assert (entry.token, entry.logprob, entry.bytes) == ("xy", -1.5, [120, 121])
    assert [(top.token, top.logprob, top.bytes) for top in entry.top_logprobs] == [
        ("a", -0.1, [97]),
        ("é", -1.0, [195, 169]),
    ]
    assert FORMATTER.chat([CANDIDATES], 0).content[0].top_logprobs == []


def test_streamed_logprobs_equal_whole_ones() -> None:
    tokens = [CANDIDATES, {8: Logprob(-2.0, 1, "b")}, {9: Logprob(-1.0, 1, "c")}]
    writer = completion_chunks(logprobs=2)
    chunks = written([c for t in tokens for c in writer.feed([delta("r0", "", [1], logprobs=[t])])])
    streamed = [c["choices"][0]["logprobs"] for c in chunks]
    whole = FORMATTER.completion(tokens, 0).model_dump()
    assert {key: [value for part in streamed for value in part[key]] for key in whole} == whole


def test_an_event_is_one_line_and_a_blank_one() -> None:
    assert event('{"a": "é"}') == 'data: {"a": "é"}\n\n'.encode()


def test_an_echo_of_a_prompt_that_was_not_scored_before_the_end() -> None:
    """Null is what is not known, streamed or not."""
    tokens: list[Any] = [None, None]
    aborted = output("r0", "", [], finish_reason="abort", logprobs=[])
    aborted = dataclasses.replace(aborted, prompt_logprobs=tokens)
    writer = completion_chunks(echo=True, logprobs=1)
    ending = delta("r0", "", [], "abort", output=aborted, prompt_logprobs=tokens)
    [chunk] = written(writer.feed([ending]))
    request = CompletionRequest(prompt="x", echo=True, logprobs=1)
    whole = json.loads(whole_completion(HEAD, request, [aborted], FORMATTER).to_json())
    for choice in (chunk["choices"][0], whole["choices"][0]):
        assert (choice["text"], choice["finish_reason"]) == ("x", "abort")
        assert choice["logprobs"]["token_logprobs"] == choice["logprobs"]["top_logprobs"] == [None, None]
        assert len(choice["logprobs"]["tokens"]) == len(choice["logprobs"]["text_offset"]) == 2
