"""/v1/chat/completions."""

import functools
import time
from collections.abc import Sequence
from typing import Any

from fastapi import Request
from fastapi.responses import Response

from paxpage.outputs import CompletionDelta, CompletionOutput, RequestOutput, TokenLogprobs
from paxpage.prompts import render_chat
from paxpage.server.async_engine import Prepared
from paxpage.server.generation import (
    AnswerHead,
    ServerContext,
    collect_outputs,
    count_prompt_tokens,
    make_usage,
    merge_deltas,
    open_stream,
    truncated,
)
from paxpage.server.http import JSON_TYPE, EventStream, read_json_body
from paxpage.server.logprobs import LogprobFormatter
from paxpage.server.protocol import ChatCompletionRequest, parse_body
from paxpage.server.responses import (
    AssistantMessage,
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatCompletion,
    ChatLogprobs,
    Delta,
    ResponseModel,
)


async def create_chat_completion(context: ServerContext, http_request: Request) -> Response:
    """Answers a conversation."""
    body = await read_json_body(http_request)
    arrival_time_s = time.monotonic()
    request = parse_body(ChatCompletionRequest, body)
    head = AnswerHead.new("chatcmpl", request, context.model_name, http_request)
    prepare = functools.partial(prepare_chat, context, request, head.id)
    prepared, stream = await open_stream(context, request, prepare, arrival_time_s)
    if request.is_stream:
        return EventStream(stream, ChatChunks(head, request, prepared[0], context.logprobs), context.async_engine.close)
    outputs = await collect_outputs(context, http_request, stream)
    return Response(whole_chat(head, request, outputs[0], context.logprobs).to_json(), media_type=JSON_TYPE)


def prepare_chat(context: ServerContext, request: ChatCompletionRequest, answer_id: str) -> list[Prepared]:
    """Checks a conversation and renders it with the chat template; may run on any thread.

    Raises:
        ValueError: a value is refused, the model has no chat template, or the template refuses the conversation.
        ApiError: 404 for another model's name.
    """
    context.check_request(request)
    params = request.sampling_params(context.defaults)
    token_ids = render_chat(
        context.tokenizer,
        [message.for_template() for message in request.messages],
        add_generation_prompt=request.has_generation_prompt,
        continue_final_message=bool(request.continue_final_message),
        chat_template=context.chat_template,
        tools=request.tools_for_template,
    )
    prepare = functools.partial(context.engine.prepare, priority=request.priority or 0, cache_salt=request.cache_salt)
    return [prepare(answer_id, truncated(context, token_ids, request, params.max_tokens), params)]


def whole_chat(
    head: AnswerHead, request: ChatCompletionRequest, output: RequestOutput, formatter: LogprobFormatter
) -> ChatCompletion:
    """The answer that is not a stream."""
    more: dict[str, Any] = {"prompt_token_ids": output.prompt_token_ids} if request.return_token_ids else {}
    if request.prompt_logprobs is not None:
        more["prompt_logprobs"] = formatter.prompt(output.prompt_logprobs or [], request.prompt_logprobs)
    return ChatCompletion(
        **head.fields(),
        object="chat.completion",
        choices=[_whole_choice(request, sample, formatter) for sample in output.outputs],
        usage=make_usage(len(output.prompt_token_ids), [output]),
        **more,
    )


def _whole_choice(request: ChatCompletionRequest, sample: CompletionOutput, formatter: LogprobFormatter) -> ChatChoice:
    ids = {"token_ids": sample.token_ids} if request.return_token_ids else {}
    return ChatChoice(
        index=sample.index,
        message=AssistantMessage(role="assistant", content=sample.text),
        logprobs=_logprobs(request, sample.logprobs, formatter),
        finish_reason=sample.finish_reason,
        stop_reason=sample.stop_reason,
        **ids,
    )


def _logprobs(
    request: ChatCompletionRequest, tokens: Sequence[TokenLogprobs] | None, formatter: LogprobFormatter
) -> ChatLogprobs | None:
    return None if request.num_logprobs is None else formatter.chat(tokens or [], request.num_logprobs)


class ChatChunks:
    """Writes the chunks of a chat stream: per sample its role, what is added, and how it ended."""

    def __init__(
        self, head: AnswerHead, request: ChatCompletionRequest, prepared: Prepared, formatter: LogprobFormatter
    ):
        self._head = head.fields()
        self._request = request
        self._prepared = prepared
        self._formatter = formatter
        self._begun: set[int] = set()
        self._outputs: list[RequestOutput] = []

    def feed(self, deltas: Sequence[CompletionDelta]) -> list[ResponseModel]:
        """One to three chunks for every sample that got something to show."""
        self._outputs += [delta.output for delta in deltas if delta.output is not None]
        return [chunk for delta in merge_deltas(deltas) for chunk in self._chunks(delta)]

    def finish(self) -> list[ResponseModel]:
        """The usage chunk, when it was asked for."""
        if not self._request.has_usage_chunk:
            return []
        usage = make_usage(count_prompt_tokens([self._prepared]), self._outputs)
        return [ChatChunk(**self._head, object="chat.completion.chunk", choices=[], usage=usage)]

    def _chunks(self, delta: CompletionDelta) -> list[ResponseModel]:
        chunks = []
        if delta.index not in self._begun:
            chunks.append(self._role_chunk(delta.index))
        if delta.text or (delta.token_ids and (self._request.logprobs or self._request.return_token_ids)):
            chunks.append(self._content_chunk(delta))
        if delta.finish_reason is not None:
            chunks.append(self._finish_chunk(delta))
        return chunks

    def _role_chunk(self, index: int) -> ResponseModel:
        is_first = not self._begun
        self._begun.add(index)
        choice = ChatChunkChoice(
            index=index, delta=Delta(role="assistant", content=""), logprobs=None, finish_reason=None
        )
        has_ids = is_first and bool(self._request.return_token_ids)
        return self._chunk(choice, {"prompt_token_ids": self._prepared.prompt_token_ids} if has_ids else {})

    def _content_chunk(self, delta: CompletionDelta) -> ResponseModel:
        ids: dict[str, Any] = {"token_ids": delta.token_ids} if self._request.return_token_ids else {}
        choice = ChatChunkChoice(
            index=delta.index,
            delta=Delta(content=delta.text),
            logprobs=_logprobs(self._request, delta.logprobs, self._formatter),
            finish_reason=None,
            **ids,
        )
        return self._chunk(choice, {})

    def _finish_chunk(self, delta: CompletionDelta) -> ResponseModel:
        choice = ChatChunkChoice(
            index=delta.index,
            delta=Delta(),
            logprobs=None,
            finish_reason=delta.finish_reason,
            stop_reason=delta.stop_reason,
        )
        return self._chunk(choice, {})

    def _chunk(self, choice: ChatChunkChoice, extra: dict[str, Any]) -> ChatChunk:
        usage: dict[str, Any] = {"usage": None} if self._request.has_usage_chunk else {}
        return ChatChunk(**self._head, object="chat.completion.chunk", choices=[choice], **usage, **extra)
