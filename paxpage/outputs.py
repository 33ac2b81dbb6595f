"""What a user gets back."""

import dataclasses
from typing import NamedTuple


class Logprob(NamedTuple):
    """One token's log-probability under the model's own distribution (before temperature and filters)."""

    logprob: float
    rank: int  # 1 is the most likely token
    decoded_token: str | None


TokenLogprobs = dict[int, Logprob]  # token id -> its log-probability; the chosen token comes first


PromptLogprobs = list[TokenLogprobs | None]  # one entry per prompt token; None for the first, which nothing precedes


@dataclasses.dataclass(frozen=True)
class CompletionOutput:
    """One sample of one request, so far or whole."""

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None
    logprobs: list[TokenLogprobs] | None
    finish_reason: str | None  # "stop" | "length" | "abort" | "error"; None while unfinished
    stop_reason: int | str | None  # the stop string or stop token id that ended it; of an "error" what it was


@dataclasses.dataclass(frozen=True)
class RequestMetrics:
    """Times of one request on time.monotonic's clock, in seconds, and its counts."""

    arrival_time_s: float
    first_scheduled_time_s: float | None
    first_token_time_s: float | None
    finished_time_s: float | None
    num_preemptions: int


@dataclasses.dataclass(frozen=True)
class RequestOutput:
    """All samples of one request."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    metrics: RequestMetrics
    num_cached_tokens: int = 0
    prompt_logprobs: PromptLogprobs | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class CompletionDelta:
    """What one step added to one sample.

    text holds only what can never be taken back: no half characters, no start of a possible stop string.
    logprobs has one entry per token of token_ids, or is None when they were not asked for.
    output is the whole request's result, given once, with the delta that finishes its last sample. prompt_logprobs are
    given once too, with the request's first delta, when they were asked for.
    """

    request_id: str
    index: int
    text: str
    token_ids: list[int]
    logprobs: list[TokenLogprobs] | None
    finish_reason: str | None
    stop_reason: int | str | None
    output: RequestOutput | None
    prompt_logprobs: PromptLogprobs | None = None
