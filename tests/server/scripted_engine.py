"""An engine without a model: token i of sample s is the letter at i + s of the alphabet. For tests of the server."""

import dataclasses
import threading
import time
from collections.abc import Iterable
from typing import Any, NamedTuple

from paxpage.engine.sampling_params import SamplingParams
from paxpage.outputs import (
    CompletionDelta,
    CompletionOutput,
    Logprob,
    RequestMetrics,
    RequestOutput,
    TokenLogprobs,
)

ALPHABET = "abcdefghijklmnopqrstuvwxyz"
MAX_PROMPT = 50


class ScriptedPrepared(NamedTuple):
    """A checked request."""

    request_id: str
    prompt_token_ids: list[int]
    params: SamplingParams


class ScriptedStats(NamedTuple):
    """The counts that the server reads."""

    num_running: int
    num_waiting: int
    kv_cache_usage: float
    num_preemptions: int
    num_scheduled_tokens: int


@dataclasses.dataclass
class ScriptedRequest:
    """A request and how far it is."""

    prepared: ScriptedPrepared
    arrival_time_s: float
    num_tokens: int = 0


class ScriptedEngine:
    """Gives every request one token a step. fail_at_step: that step raises. hold: steps wait while it is clear."""

    def __init__(self, *, step_s: float = 0.0, fail_at_step: int | None = None):
        self.requests: dict[str, ScriptedRequest] = {}
        self.aborted: list[str] = []
        self.is_closed = False
        self.num_steps = 0
        self.hold = threading.Event()
        self.hold.set()
        self.is_holding = False  # whether a step waits for hold
        self._step_s = step_s
        self._fail_at_step = fail_at_step

    def prepare(
        self,
        request_id: str,
        prompt: Any,
        params: SamplingParams,
        *,
        priority: int = 0,
        cache_salt: str | None = None,
    ) -> ScriptedPrepared:
        ids = [ord(c) for c in prompt] if isinstance(prompt, str) else list(prompt)
        if not 0 < len(ids) <= MAX_PROMPT:
            raise ValueError(f"prompt length is {len(ids)}; allowed: 1 to {MAX_PROMPT}")
        return ScriptedPrepared(request_id, ids, params)

    def check_text(self, text: str) -> None:
        pass

    def submit(self, prepared: ScriptedPrepared) -> None:
        self.requests[prepared.request_id] = ScriptedRequest(prepared, time.monotonic())

    def abort(self, request_ids: Iterable[str]) -> list[CompletionDelta]:
        known = [request_id for request_id in request_ids if request_id in self.requests]
        self.aborted += known
        return [delta for request_id in known for delta in self._deltas(self.requests.pop(request_id), "abort")]

    def step(self) -> list[CompletionDelta]:
        self.is_holding = not self.hold.is_set()
        self.hold.wait()
        self.is_holding = False
        time.sleep(self._step_s)
        self.num_steps += 1
        if self.num_steps == self._fail_at_step:
            raise RuntimeError("the script says so")
        deltas = []
        for request in list(self.requests.values()):
            request.num_tokens += 1
            is_last = request.num_tokens == (request.prepared.params.max_tokens or len(ALPHABET))
            deltas += self._deltas(request, "length" if is_last else None)
            if is_last:
                del self.requests[request.prepared.request_id]
        return deltas

    def has_unfinished_requests(self) -> bool:
        return bool(self.requests)

    def stats(self) -> ScriptedStats:
        num_running = len(self.requests)
        return ScriptedStats(num_running, 0, num_running / 10, 0, num_running)

    def explain_cache(self, prepared: ScriptedPrepared) -> list[Any]:
        return []

    def close(self) -> None:
        self.is_closed = True

    def _deltas(self, request: ScriptedRequest, reason: str | None) -> list[CompletionDelta]:
        n = request.prepared.params.n
        num_new = 0 if reason == "abort" else 1
        outputs = [self._output(request, index, reason) for index in range(n)]
        whole = self._whole(request, outputs) if reason else None
        return [
            CompletionDelta(
                request.prepared.request_id,
                index,
                outputs[index].text[-num_new:] if num_new else "",
                outputs[index].token_ids[-num_new:] if num_new else [],
                outputs[index].logprobs[-num_new:] if outputs[index].logprobs and num_new else None,
                reason,
                None,
                whole if index == n - 1 else None,
            )
            for index in range(n)
        ]

    def _output(self, request: ScriptedRequest, index: int, reason: str | None) -> CompletionOutput:
        ids = [(i + index) % len(ALPHABET) for i in range(request.num_tokens)]
        text = "".join(ALPHABET[i] for i in ids)
        num_top = request.prepared.params.logprobs
        logprobs = None if num_top is None else [_logprobs(i, num_top) for i in ids]
        return CompletionOutput(index, text, ids, None, logprobs, reason, None)

    def _whole(self, request: ScriptedRequest, outputs: list[CompletionOutput]) -> RequestOutput:
        now_s = time.monotonic()
        metrics = RequestMetrics(request.arrival_time_s, request.arrival_time_s, now_s, now_s, 0)
        prepared = request.prepared
        return RequestOutput(prepared.request_id, None, prepared.prompt_token_ids, outputs, True, metrics, 3)


def _logprobs(token_id: int, num_top: int) -> TokenLogprobs:
    """The chosen token is the second likeliest; rank r has the letter r - 2 places on."""
    entries = {token_id: Logprob(-1.5, 2, ALPHABET[token_id])}
    for rank in range(1, num_top + 1):
        other = (token_id + rank - 2) % len(ALPHABET)
        entries.setdefault(other, Logprob(-0.5 - (rank - 1), rank, ALPHABET[other]))
    return entries
