"""What completions and chat completions share: the server's context, usage, merging deltas, collecting outputs."""

import dataclasses
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from fastapi import Request

from paxpage.engine.sampling_params import SamplingParams
from paxpage.outputs import CompletionDelta, RequestOutput
from paxpage.prompts import encode_text
from paxpage.server.async_engine import AsyncEngine, OutputStream, Prepared, RequestFailure, StepEngine
from paxpage.server.errors import ApiError, from_value_error
from paxpage.server.http import until_client_leaves
from paxpage.server.logprobs import LogprobFormatter
from paxpage.server.protocol import ChatCompletionRequest, CompletionRequest, GenerationRequest
from paxpage.server.responses import CachedTokens, Usage
from paxpage.server.tool_calls import REFUSES_TOOLS, ToolPolicy

REQUEST_ID_HEADER = "X-Request-Id"


@dataclasses.dataclass(frozen=True)
class ServerContext:
    """What every route may use.

    tokenizer: the model's, or None. logprobs: writes log-probabilities of its tokens.
    model_name: the model's name in answers; it may be asked for by other_names as well.
    defaults: sampling options of a request that names none.
    has_priorities: whether the scheduler looks at a request's priority.
    tool_policy: what becomes of calls of tools.
    """

    engine: StepEngine
    async_engine: AsyncEngine
    tokenizer: Any
    logprobs: LogprobFormatter
    model_name: str
    max_model_len: int
    max_logprobs: int
    defaults: SamplingParams
    has_priorities: bool
    chat_template: str | None
    created_s: int
    other_names: tuple[str, ...] = ()
    tool_policy: ToolPolicy = REFUSES_TOOLS

    @property
    def model_names(self) -> tuple[str, ...]:
        """Every name of the model."""
        return (self.model_name, *self.other_names)

    def check_model(self, name: str | None) -> None:
        """Raises ApiError 404 for another model's name."""
        if name is not None and name not in self.model_names:
            known = " or ".join(map(repr, self.model_names))
            raise ApiError(404, f"model is {name!r}; this server has {known}", "model")

    def check_request(self, request: CompletionRequest | ChatCompletionRequest) -> None:
        """Raises ApiError 404 for another model's name, ValueError for what this server does not offer."""
        self.check_model(request.model)
        request.check_limits(self.max_logprobs)
        if request.priority and not self.has_priorities:
            raise ValueError(f"priority is {request.priority}; allowed: 0 unless scheduling_policy is priority")


def sampling_defaults(generation: Any) -> SamplingParams:
    """Sampling options of a request that names none.

    generation: the checkpoint's own defaults (paxpage.models.generation.GenerationDefaults), or None for the API's.

    Raises:
        ValueError: the checkpoint asks for something out of range.
    """
    if generation is None:
        return SamplingParams()
    fields = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
    given = {field: getattr(generation, field) for field in fields if getattr(generation, field) is not None}
    return SamplingParams(**given)


@dataclasses.dataclass(frozen=True)
class AnswerHead:
    """What all chunks of one answer begin with. created is in seconds since 1970."""

    id: str
    created: int
    model: str

    @classmethod
    def new(cls, prefix: str, request: GenerationRequest, model_name: str, http_request: Request) -> "AnswerHead":
        """A head with the body's request_id, else the header's, else a new one, which the answer's header gets."""
        request_id = request.request_id or http_request.state.request_id
        http_request.state.request_id = request_id
        return cls(f"{prefix}-{request_id}", int(time.time()), model_name)

    def fields(self) -> dict[str, Any]:
        """The head as keyword arguments of a response."""
        return dataclasses.asdict(self)


async def open_stream(
    context: ServerContext,
    request: GenerationRequest,
    prepare: Callable[[], list[Prepared]],
    num_bytes: int,
    arrival_time_s: float,
) -> tuple[list[Prepared], OutputStream]:
    """Prepares on a worker thread and hands over to the engine. num_bytes: of the request's body.

    Raises:
        ApiError: 400 for a value that is refused; see AsyncEngine.open for the others.
    """
    try:
        prepared = await context.async_engine.prepare(prepare, num_bytes)
    except ValueError as error:
        raise refusal(error, request) from None
    return prepared, context.async_engine.open(prepared, arrival_time_s)


def refusal(error: ValueError, request: GenerationRequest) -> ApiError:
    """A 400 that names the fields as the client does."""
    refused = from_value_error(error, type(request).model_fields)
    if refused.param == "structured_outputs":
        refused.param = request.constraint_field
    if refused.message.startswith("prompt "):
        refused.param = request.prompt_field
    if refused.param == "tools":  # the grammar was not the client's
        refused.message = refused.message.replace("structured_outputs.grammar", "tools")
    return refused


async def collect_outputs(context: ServerContext, http_request: Request, stream: OutputStream) -> list[RequestOutput]:
    """Waits for all outputs of a stream, in the order of its prompts, and closes it.

    Raises:
        ApiError: a request failed, or the server stopped before the first token.
        ClientLeftError: the client left; its requests were aborted.
    """
    try:
        outputs = await until_client_leaves(http_request.receive, _collect(stream))
    finally:
        context.async_engine.close(stream)
    samples = [sample for output in outputs for sample in output.outputs]
    if all(sample.finish_reason == "abort" and not sample.token_ids for sample in samples):
        raise ApiError(503, "the server stopped before this request began", retry_after_s=1)
    return outputs


async def _collect(stream: OutputStream) -> list[RequestOutput]:
    outputs = {}
    while not stream.is_finished:
        for event in await stream.next_events():
            if isinstance(event, RequestFailure):
                raise event.error
            if event.output is not None:
                outputs[event.request_id] = event.output
    return [outputs[request_id] for request_id in stream.request_ids]


def make_usage(num_prompt_tokens: int, outputs: Iterable[RequestOutput]) -> Usage:
    """Usage of finished requests whose prompts have num_prompt_tokens in all."""
    outputs = list(outputs)
    num_tokens = sum(len(sample.token_ids) for output in outputs for sample in output.outputs)
    return Usage(
        prompt_tokens=num_prompt_tokens,
        completion_tokens=num_tokens,
        total_tokens=num_prompt_tokens + num_tokens,
        prompt_tokens_details=CachedTokens(cached_tokens=sum(output.num_cached_tokens for output in outputs)),
    )


def truncated(
    context: ServerContext, prompt: str | list[int], request: GenerationRequest, max_tokens: int | None
) -> str | list[int]:
    """The prompt, or its last tokens as the request's truncate_prompt_tokens says; -1 leaves room for max_tokens."""
    limit = request.truncate_prompt_tokens
    if limit is None or (isinstance(prompt, str) and context.tokenizer is None):
        return prompt
    if limit == -1:
        limit = max(context.max_model_len - max(max_tokens or 1, 1), 1)
    token_ids = encode_text(context.tokenizer, prompt) if isinstance(prompt, str) else prompt
    return token_ids[-limit:]


def count_prompt_tokens(prepared: Sequence[Prepared]) -> int:
    """Tokens of all prompts of one HTTP request."""
    return sum(len(item.prompt_token_ids) for item in prepared)


def merge_deltas(deltas: Iterable[CompletionDelta]) -> list[CompletionDelta]:
    """Joins what several steps added to one sample, for a reader that was slower than the engine."""
    merged: dict[tuple[str, int], CompletionDelta] = {}
    for delta in deltas:
        key = (delta.request_id, delta.index)
        merged[key] = _join(merged[key], delta) if key in merged else delta
    return list(merged.values())


def _join(first: CompletionDelta, second: CompletionDelta) -> CompletionDelta:
    has_logprobs = (first.logprobs, second.logprobs) != (None, None)  # a last one without a token has none
    logprobs = [*(first.logprobs or []), *(second.logprobs or [])] if has_logprobs else None
    return dataclasses.replace(
        second,
        text=first.text + second.text,
        token_ids=[*first.token_ids, *second.token_ids],
        logprobs=logprobs,
        prompt_logprobs=first.prompt_logprobs,
    )


def by_request_id(prepared: Sequence[Prepared]) -> Mapping[str, int]:
    """The place of each prompt in its HTTP request."""
    return {item.request_id: place for place, item in enumerate(prepared)}
