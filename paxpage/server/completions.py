"""/v1/completions."""

import functools
import time
from collections.abc import Sequence
from typing import Any

from fastapi import Request
from fastapi.responses import Response

from paxpage.outputs import CompletionDelta, CompletionOutput, RequestOutput
from paxpage.server.async_engine import Prepared
from paxpage.server.generation import (
    AnswerHead,
    ServerContext,
    by_request_id,
    collect_outputs,
    count_prompt_tokens,
    make_usage,
    merge_deltas,
    open_stream,
)
from paxpage.server.http import JSON_TYPE, EventStream, read_json_body
from paxpage.server.logprobs import LogprobFormatter
from paxpage.server.protocol import CompletionRequest, parse_body
from paxpage.server.responses import Completion, CompletionChoice, CompletionLogprobs, ResponseModel


async def create_completion(context: ServerContext, http_request: Request) -> Response:
    """Continues one prompt or several."""
    body = await read_json_body(http_request)
    arrival_time_s = time.monotonic()
    request = parse_body(CompletionRequest, body)
    head = AnswerHead.new("cmpl", request, context.model_name)
    prepare = functools.partial(prepare_completion, context, request, head.id)
    prepared, stream = await open_stream(context, request, prepare, arrival_time_s)
    if request.is_stream:
        return EventStream(
            stream, CompletionChunks(head, request, prepared, context.logprobs), context.async_engine.close
        )
    outputs = await collect_outputs(context, http_request, stream)
    return Response(whole_completion(head, request, outputs, context.logprobs).to_json(), media_type=JSON_TYPE)


def prepare_completion(context: ServerContext, request: CompletionRequest, answer_id: str) -> list[Prepared]:
    """Checks and tokenises every prompt; may run on any thread.

    Raises:
        ValueError: a value is refused.
        ApiError: 404 for another model's name.
    """
    context.check_request(request)
    params = request.sampling_params(context.defaults)
    priority = request.priority or 0
    return [
        context.engine.prepare(f"{answer_id}-{place}", prompt, params, priority=priority, cache_salt=request.cache_salt)
        for place, prompt in enumerate(request.prompt)
    ]


def whole_completion(
    head: AnswerHead, request: CompletionRequest, outputs: Sequence[RequestOutput], formatter: LogprobFormatter
) -> Completion:
    """The answer that is not a stream. Choices are ordered by prompt, then by sample."""
    choices = [_whole_choice(request, output, sample, formatter) for output in outputs for sample in output.outputs]
    for index, choice in enumerate(choices):
        choice.index = index
    usage = make_usage(sum(len(output.prompt_token_ids) for output in outputs), outputs)
    return Completion(**head.fields(), object="text_completion", choices=choices, usage=usage)


def _whole_choice(
    request: CompletionRequest, output: RequestOutput, sample: CompletionOutput, formatter: LogprobFormatter
) -> CompletionChoice:
    ids = (
        {"token_ids": sample.token_ids, "prompt_token_ids": output.prompt_token_ids} if request.return_token_ids else {}
    )
    return CompletionChoice(
        index=sample.index,
        text=sample.text,
        logprobs=None if request.logprobs is None else formatter.completion(sample.logprobs or [], 0),
        finish_reason=sample.finish_reason,
        stop_reason=sample.stop_reason,
        **ids,
    )


class CompletionChunks:
    """Writes the chunks of a completion stream."""

    def __init__(
        self, head: AnswerHead, request: CompletionRequest, prepared: Sequence[Prepared], formatter: LogprobFormatter
    ):
        self._head = head.fields()
        self._request = request
        self._prepared = prepared
        self._formatter = formatter
        self._places = by_request_id(prepared)
        self._offsets: dict[int, int] = {}  # choice -> where its next token's text starts
        self._outputs: list[RequestOutput] = []

    def feed(self, deltas: Sequence[CompletionDelta]) -> list[ResponseModel]:
        """A chunk for every sample that got something to show."""
        self._outputs += [delta.output for delta in deltas if delta.output is not None]
        return [self._chunk([self._choice(delta)]) for delta in merge_deltas(deltas) if self._is_shown(delta)]

    def finish(self) -> list[ResponseModel]:
        """The usage chunk, when it was asked for."""
        if not self._request.has_usage_chunk:
            return []
        usage = make_usage(count_prompt_tokens(self._prepared), self._outputs)
        return [Completion(**self._head, object="text_completion", choices=[], usage=usage)]

    def _is_shown(self, delta: CompletionDelta) -> bool:
        has_tokens = self._request.logprobs is not None or bool(self._request.return_token_ids)
        return bool(delta.text or delta.finish_reason or (has_tokens and delta.token_ids))

    def _chunk(self, choices: list[CompletionChoice]) -> Completion:
        usage: dict[str, Any] = {"usage": None} if self._request.has_usage_chunk else {}
        return Completion(**self._head, object="text_completion", choices=choices, **usage)

    def _choice(self, delta: CompletionDelta) -> CompletionChoice:
        place = self._places[delta.request_id]
        index = place * (self._request.n or 1) + delta.index
        ids = self._token_ids(place, delta, is_first=index not in self._offsets)
        return CompletionChoice(
            index=index,
            text=delta.text,
            logprobs=self._logprobs(index, delta),
            finish_reason=delta.finish_reason,
            stop_reason=delta.stop_reason,
            **ids,
        )

    def _logprobs(self, index: int, delta: CompletionDelta) -> CompletionLogprobs | None:
        offset = self._offsets.setdefault(index, 0)
        if self._request.logprobs is None:
            return None
        tokens = delta.logprobs or []
        self._offsets[index] = offset + self._formatter.count_characters(tokens)
        return self._formatter.completion(tokens, offset)

    def _token_ids(self, place: int, delta: CompletionDelta, *, is_first: bool) -> dict[str, list[int]]:
        if not self._request.return_token_ids:
            return {}
        ids = {"token_ids": delta.token_ids}
        return {**ids, "prompt_token_ids": self._prepared[place].prompt_token_ids} if is_first else ids
