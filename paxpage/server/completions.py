"""/v1/completions."""

import dataclasses
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
    truncated,
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
    head = AnswerHead.new("cmpl", request, context.model_name, http_request)
    prepare = functools.partial(prepare_completion, context, request, head.id)
    prepared, stream = await open_stream(context, request, prepare, len(body), arrival_time_s)
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
    prepare = functools.partial(context.engine.prepare, priority=request.priority or 0, cache_salt=request.cache_salt)
    prompts = [truncated(context, prompt, request, params.max_tokens) for prompt in request.prompt]
    return [prepare(f"{answer_id}-{place}", prompt, params) for place, prompt in enumerate(prompts)]


def whole_completion(
    head: AnswerHead, request: CompletionRequest, outputs: Sequence[RequestOutput], formatter: LogprobFormatter
) -> Completion:
    """The answer that is not a stream. Choices are ordered by prompt, then by sample."""
    if request.is_scoring:
        outputs = [_without_text(output) for output in outputs]
    choices = []
    for place, output in enumerate(outputs):
        text = echoed_text(request, place, output.prompt_token_ids, formatter)
        choices += [_whole_choice(request, output, sample, text, formatter) for sample in output.outputs]
    for index, choice in enumerate(choices):
        choice.index = index
    usage = make_usage(sum(len(output.prompt_token_ids) for output in outputs), outputs)
    return Completion(**head.fields(), object="text_completion", choices=choices, usage=usage)


def echoed_text(
    request: CompletionRequest, place: int, token_ids: Sequence[int], formatter: LogprobFormatter
) -> str | None:
    """What an answer to prompt number place begins with: the prompt's text, or that of its tokens; None for no echo.

    token_ids: the prompt's, as the engine has them.
    """
    if not request.is_echo:
        return None
    prompt = request.prompt[place]
    if isinstance(prompt, str) and request.truncate_prompt_tokens is None:
        return prompt
    return formatter.text(token_ids, skip_special_tokens=request.skip_special_tokens is not False)


def _without_text(output: RequestOutput) -> RequestOutput:
    """Of a request that only scores its prompt: the token that was sampled is not shown, and not counted."""
    kept: dict[str, Any] = {"text": "", "token_ids": [], "finish_reason": "length", "stop_reason": None}
    samples = [dataclasses.replace(s, logprobs=None if s.logprobs is None else [], **kept) for s in output.outputs]
    return dataclasses.replace(output, outputs=samples)


def _whole_choice(
    request: CompletionRequest,
    output: RequestOutput,
    sample: CompletionOutput,
    prompt_text: str | None,
    formatter: LogprobFormatter,
) -> CompletionChoice:
    more: dict[str, Any] = {}
    if request.return_token_ids:
        more = {"token_ids": sample.token_ids, "prompt_token_ids": output.prompt_token_ids}
    if request.prompt_logprobs is not None:
        more["prompt_logprobs"] = formatter.prompt(output.prompt_logprobs or [], request.prompt_logprobs)
    logprobs = None
    if request.logprobs is not None:
        logprobs = formatter.completion(sample.logprobs or [], len(prompt_text or ""))
        if prompt_text is not None:
            entries = output.prompt_logprobs or []
            logprobs = _joined(
                formatter.echo(output.prompt_token_ids, entries, prompt_text, request.logprobs), logprobs
            )
    return CompletionChoice(
        index=sample.index,
        text=(prompt_text or "") + sample.text,
        logprobs=logprobs,
        finish_reason=sample.finish_reason,
        stop_reason=sample.stop_reason,
        **more,
    )


def _joined(first: CompletionLogprobs, second: CompletionLogprobs) -> CompletionLogprobs:
    return CompletionLogprobs(
        text_offset=first.text_offset + second.text_offset,
        token_logprobs=first.token_logprobs + second.token_logprobs,
        tokens=first.tokens + second.tokens,
        top_logprobs=first.top_logprobs + second.top_logprobs,
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
        self._echoes: dict[int, CompletionLogprobs] = {}  # prompt -> its log-probabilities, for those that are echoed
        self._outputs: list[RequestOutput] = []

    def feed(self, deltas: Sequence[CompletionDelta]) -> list[ResponseModel]:
        """A chunk for every sample that got something to show."""
        deltas = [_without_new_text(delta) for delta in deltas] if self._request.is_scoring else deltas
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
        has_echo = self._request.is_echo and self._index(delta) not in self._offsets
        return bool(delta.text or delta.finish_reason or has_echo or (has_tokens and delta.token_ids))

    def _index(self, delta: CompletionDelta) -> int:
        return self._places[delta.request_id] * (self._request.n or 1) + delta.index

    def _chunk(self, choices: list[CompletionChoice]) -> Completion:
        usage: dict[str, Any] = {"usage": None} if self._request.has_usage_chunk else {}
        return Completion(**self._head, object="text_completion", choices=choices, **usage)

    def _choice(self, delta: CompletionDelta) -> CompletionChoice:
        place, index = self._places[delta.request_id], self._index(delta)
        is_first = index not in self._offsets
        ids: dict[str, Any] = self._token_ids(place, delta, is_first=is_first)
        echo = self._echo(place, delta) if is_first else None
        self._offsets.setdefault(index, len(echo or ""))
        return CompletionChoice(
            index=index,
            text=(echo or "") + delta.text,
            logprobs=self._logprobs(index, delta, self._echoes.get(place) if is_first else None),
            finish_reason=delta.finish_reason,
            stop_reason=delta.stop_reason,
            **ids,
        )

    def _echo(self, place: int, delta: CompletionDelta) -> str | None:
        """What the first chunk of a choice begins with. The prompt's log-probabilities come with the first delta."""
        token_ids = self._prepared[place].prompt_token_ids
        text = echoed_text(self._request, place, token_ids, self._formatter)
        if text is not None and delta.prompt_logprobs is not None and self._request.logprobs is not None:
            entries, num_top = delta.prompt_logprobs, self._request.logprobs
            self._echoes[place] = self._formatter.echo(token_ids, entries, text, num_top)
        return text

    def _logprobs(
        self, index: int, delta: CompletionDelta, echo: CompletionLogprobs | None
    ) -> CompletionLogprobs | None:
        if self._request.logprobs is None:
            return None
        offset, tokens = self._offsets[index], delta.logprobs or []
        self._offsets[index] = offset + self._formatter.count_characters(tokens)
        logprobs = self._formatter.completion(tokens, offset)
        return logprobs if echo is None else _joined(echo, logprobs)

    def _token_ids(self, place: int, delta: CompletionDelta, *, is_first: bool) -> dict[str, list[int]]:
        if not self._request.return_token_ids:
            return {}
        ids = {"token_ids": delta.token_ids}
        return {**ids, "prompt_token_ids": self._prepared[place].prompt_token_ids} if is_first else ids


def _without_new_text(delta: CompletionDelta) -> CompletionDelta:
    """_without_text for a part of a stream."""
    output = None if delta.output is None else _without_text(delta.output)
    reason = delta.finish_reason and "length"
    kept: dict[str, Any] = {"text": "", "token_ids": [], "finish_reason": reason, "stop_reason": None}
    return dataclasses.replace(delta, logprobs=None, output=output, **kept)
