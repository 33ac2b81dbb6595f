"""/v1/chat/completions."""

import dataclasses
import functools
import time
import uuid
from collections.abc import Callable, Sequence
from typing import Any

from fastapi import Request
from fastapi.responses import Response

from paxpage.engine.sampling_params import SamplingParams
from paxpage.engine.structured_outputs import StructuredOutputsParams
from paxpage.outputs import CompletionDelta, CompletionOutput, RequestOutput, TokenLogprobs
from paxpage.prompts import render_chat
from paxpage.server.async_engine import Prepared
from paxpage.server.forced_calls import forced_calls
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
    CalledFunction,
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatCompletion,
    ChatLogprobs,
    Delta,
    ResponseModel,
    ToolCallDelta,
    ToolCallItem,
)
from paxpage.server.tool_calls import Part, ToolCall, ToolCallParser, ToolPolicy, read_whole

ParserMaker = Callable[[], ToolCallParser]


async def create_chat_completion(context: ServerContext, http_request: Request) -> Response:
    """Answers a conversation."""
    body = await read_json_body(http_request)
    arrival_time_s = time.monotonic()
    request = parse_body(ChatCompletionRequest, body)
    head = AnswerHead.new("chatcmpl", request, context.model_name, http_request)
    prepare = functools.partial(prepare_chat, context, request, head.id)
    prepared, stream = await open_stream(context, request, prepare, len(body), arrival_time_s)
    make_parser = parser_maker(context, request)
    if request.is_stream:
        writer = ChatChunks(head, request, prepared[0], context.logprobs, make_parser)
        return EventStream(stream, writer, context.async_engine.close)
    outputs = await collect_outputs(context, http_request, stream)
    answer = whole_chat(head, request, outputs[0], context.logprobs, make_parser)
    return Response(answer.to_json(), media_type=JSON_TYPE)


def parser_maker(context: ServerContext, request: ChatCompletionRequest) -> ParserMaker | None:
    """What makes a parser for each sample; None when no calls are looked for."""
    call_format = context.tool_policy.call_format
    if call_format is None or not request.tool_names:
        return None
    return functools.partial(ToolCallParser, call_format, request.tool_names, request.max_calls)


def prepare_chat(context: ServerContext, request: ChatCompletionRequest, answer_id: str) -> list[Prepared]:
    """Checks a conversation and renders it with the chat template; may run on any thread.

    Raises:
        ValueError: a value is refused, the model has no chat template, or the template refuses the conversation.
        ApiError: 404 for another model's name.
    """
    context.check_request(request)
    params = params_for_tools(context, request, request.sampling_params(context.defaults))
    token_ids = render_chat(
        context.tokenizer,
        [message.for_template() for message in request.messages],
        add_generation_prompt=request.has_generation_prompt,
        continue_final_message=bool(request.continue_final_message),
        chat_template=context.chat_template,
        tools=request.tools_for_template,
        check_text=context.engine.check_text if request.truncate_prompt_tokens is None else None,
    )
    prepare = functools.partial(context.engine.prepare, priority=request.priority or 0, cache_salt=request.cache_salt)
    return [prepare(answer_id, truncated(context, token_ids, request, params.max_tokens), params)]


def params_for_tools(context: ServerContext, request: ChatCompletionRequest, params: SamplingParams) -> SamplingParams:
    """The sampling options of a request that may have tools.

    Raises:
        ValueError: the server cannot do what is asked with them.
    """
    if not request.tool_names:
        return params
    context.tool_policy.require_parser()
    if request.forces_call:
        params = dataclasses.replace(params, structured_outputs=grammar_of_calls(context.tool_policy, request))
    is_chosen = request.skip_special_tokens is not None and not request.forces_call  # which shows calls alone
    is_hidden = context.tool_policy.is_opening_special and not is_chosen
    return dataclasses.replace(params, skip_special_tokens=False) if is_hidden else params


def grammar_of_calls(policy: ToolPolicy, request: ChatCompletionRequest) -> StructuredOutputsParams:
    """What the answer to a request that forces a call must match. ValueError if it cannot be said."""
    call_format = policy.call_format
    if call_format is None:
        allowed = "none or auto, since this server parses no calls (tool_call_parser is none)"
        raise ValueError(f"tool_choice is {request.tool_choice!r}; allowed: {allowed}")
    name = request.tool_choice["function"]["name"] if request.names_call else None
    return forced_calls(request.tools or [], call_format, policy.marks, name=name, is_one=request.max_calls == 1)


def whole_chat(
    head: AnswerHead,
    request: ChatCompletionRequest,
    output: RequestOutput,
    formatter: LogprobFormatter,
    make_parser: ParserMaker | None = None,
) -> ChatCompletion:
    """The answer that is not a stream."""
    more: dict[str, Any] = {"prompt_token_ids": output.prompt_token_ids} if request.return_token_ids else {}
    if request.prompt_logprobs is not None:
        more["prompt_logprobs"] = formatter.prompt(output.prompt_logprobs or [], request.prompt_logprobs)
    return ChatCompletion(
        **head.fields(),
        object="chat.completion",
        choices=[_whole_choice(request, sample, formatter, make_parser) for sample in output.outputs],
        usage=make_usage(len(output.prompt_token_ids), [output]),
        **more,
    )


def _whole_choice(
    request: ChatCompletionRequest,
    sample: CompletionOutput,
    formatter: LogprobFormatter,
    make_parser: ParserMaker | None,
) -> ChatChoice:
    ids = {"token_ids": sample.token_ids} if request.return_token_ids else {}
    content, calls = (sample.text, []) if make_parser is None else read_whole(make_parser(), sample.text)
    items = {"tool_calls": [_call_item(call) for call in calls]} if calls else {}
    return ChatChoice(
        index=sample.index,
        message=AssistantMessage(role="assistant", content=content, **items),
        logprobs=_logprobs(request, sample.logprobs, formatter),
        finish_reason=_finish_reason(request, sample.finish_reason, has_calls=bool(calls)),
        stop_reason=sample.stop_reason,
        **ids,
    )


def _call_item(call: ToolCall) -> ToolCallItem:
    function = CalledFunction(name=call.name, arguments=call.arguments)
    return ToolCallItem(id=_new_call_id(), type="function", function=function)


def _new_call_id() -> str:
    return f"call_{uuid.uuid4().hex}"


def _finish_reason(request: ChatCompletionRequest, reason: str | None, *, has_calls: bool) -> str | None:
    """An answer with calls that came to its own end waits for their results; one that was cut says so.

    Where the client named the function, OpenAI's API says "stop".
    """
    return "tool_calls" if has_calls and reason == "stop" and not request.names_call else reason


def _logprobs(
    request: ChatCompletionRequest, tokens: Sequence[TokenLogprobs] | None, formatter: LogprobFormatter
) -> ChatLogprobs | None:
    return None if request.num_logprobs is None else formatter.chat(tokens or [], request.num_logprobs)


class ChatChunks:
    """Writes the chunks of a chat stream: per sample its role, what is added, and how it ended."""

    def __init__(
        self,
        head: AnswerHead,
        request: ChatCompletionRequest,
        prepared: Prepared,
        formatter: LogprobFormatter,
        make_parser: ParserMaker | None = None,
    ):
        self._head = head.fields()
        self._request = request
        self._prepared = prepared
        self._formatter = formatter
        self._make_parser = make_parser
        self._begun: set[int] = set()
        self._parsers: dict[int, ToolCallParser] = {}
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
        chunks += self._content_chunks(delta)
        if delta.finish_reason is not None:
            chunks.append(self._finish_chunk(delta))
        return chunks

    def _content_chunks(self, delta: CompletionDelta) -> list[ResponseModel]:
        """What is added, the first chunk with what is said of all the tokens."""
        added = self._added(delta)
        if not added and delta.token_ids and (self._request.logprobs or self._request.return_token_ids):
            added = [Delta(content="")]
        return [self._content_chunk(delta, item, is_first=place == 0) for place, item in enumerate(added)]

    def _added(self, delta: CompletionDelta) -> list[Delta]:
        if self._make_parser is None:
            return [Delta(content=delta.text)] if delta.text else []
        parser = self._parsers.setdefault(delta.index, self._make_parser())
        num_before = parser.num_calls
        parts = parser.feed(delta.text)
        if delta.finish_reason is not None:
            parts += parser.finish()
        return _deltas(parts, num_before)

    def _role_chunk(self, index: int) -> ResponseModel:
        is_first = not self._begun
        self._begun.add(index)
        choice = ChatChunkChoice(
            index=index, delta=Delta(role="assistant", content=""), logprobs=None, finish_reason=None
        )
        has_ids = is_first and bool(self._request.return_token_ids)
        return self._chunk(choice, {"prompt_token_ids": self._prepared.prompt_token_ids} if has_ids else {})

    def _content_chunk(self, delta: CompletionDelta, added: Delta, *, is_first: bool) -> ResponseModel:
        has_ids = is_first and bool(self._request.return_token_ids)
        ids: dict[str, Any] = {"token_ids": delta.token_ids} if has_ids else {}
        choice = ChatChunkChoice(
            index=delta.index,
            delta=added,
            logprobs=_logprobs(self._request, delta.logprobs, self._formatter) if is_first else None,
            finish_reason=None,
            **ids,
        )
        return self._chunk(choice, {})

    def _finish_chunk(self, delta: CompletionDelta) -> ResponseModel:
        parser = self._parsers.get(delta.index)
        has_calls = parser is not None and parser.num_calls > 0
        choice = ChatChunkChoice(
            index=delta.index,
            delta=Delta(),
            logprobs=None,
            finish_reason=_finish_reason(self._request, delta.finish_reason, has_calls=has_calls),
            stop_reason=delta.stop_reason,
        )
        return self._chunk(choice, {})

    def _chunk(self, choice: ChatChunkChoice, extra: dict[str, Any]) -> ChatChunk:
        usage: dict[str, Any] = {"usage": None} if self._request.has_usage_chunk else {}
        return ChatChunk(**self._head, object="chat.completion.chunk", choices=[choice], **usage, **extra)


def _deltas(parts: Sequence[Part], num_calls: int) -> list[Delta]:
    """Text as it is, and of each call first its name, then its arguments. num_calls: how many came before."""
    deltas = []
    for part in parts:
        if isinstance(part, str):
            deltas.append(Delta(content=part))
            continue
        named = CalledFunction(name=part.name, arguments="")
        first = ToolCallDelta(index=num_calls, id=_new_call_id(), type="function", function=named)
        rest = ToolCallDelta(index=num_calls, function=CalledFunction(arguments=part.arguments))
        deltas += [Delta(tool_calls=[first]), Delta(tool_calls=[rest])]
        num_calls += 1
    return deltas
