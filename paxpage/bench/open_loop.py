"""Requests that arrive at an engine in this process, each when it is due."""

import statistics
import time
from collections.abc import Sequence

import numpy as np

from paxpage.bench.workloads import WorkloadRequest
from paxpage.engine.engine import Engine
from paxpage.engine.sampling_params import SamplingParams
from paxpage.outputs import CompletionDelta

LONGEST_NAP_S = 0.001


def greedy(num_tokens: int) -> SamplingParams:
    """Exactly so many tokens, without text."""
    return SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True, detokenize=False)


class Arrivals:
    """Requests submitted to a running engine when they are due, and when each one's tokens came."""

    def __init__(self, engine: Engine, work: Sequence[WorkloadRequest], due_s: Sequence[float]) -> None:
        self.engine = engine
        self.work = work
        self.due_s = due_s
        self.first_s: dict[int, float] = {}  # from when it was due
        self.last_s: dict[int, float] = {}
        self.gaps_s: list[float] = []
        self.normalised_s: list[float] = []

    def run(self) -> dict[str, float]:
        """Drives the engine until all have finished; milliseconds."""
        num_submitted, start_s = 0, time.perf_counter()
        while num_submitted < len(self.work) or self.engine.has_unfinished_requests():
            now_s = time.perf_counter() - start_s
            while num_submitted < len(self.work) and self.due_s[num_submitted] <= now_s:
                request = self.work[num_submitted]
                self.engine.add_request(str(num_submitted), request.prompt_token_ids, greedy(request.num_output_tokens))
                num_submitted += 1
            if self.engine.has_unfinished_requests():
                deltas = self.engine.step()
                self._take_in(deltas, time.perf_counter() - start_s)
            else:
                time.sleep(max(0.0, min(LONGEST_NAP_S, self.due_s[num_submitted] - now_s)))
        return self._summary(time.perf_counter() - start_s)

    def _take_in(self, deltas: list[CompletionDelta], now_s: float) -> None:
        for delta in deltas:
            index = int(delta.request_id)
            if index in self.last_s:
                self.gaps_s.append(now_s - self.last_s[index])
            else:
                self.first_s[index] = now_s - self.due_s[index]
            self.last_s[index] = now_s
            if delta.finish_reason is not None:
                self.normalised_s.append((now_s - self.due_s[index]) / self.work[index].num_output_tokens)

    def _summary(self, elapsed_s: float) -> dict[str, float]:
        num_tokens = sum(request.num_output_tokens for request in self.work)
        assert len(self.gaps_s) + len(self.first_s) == num_tokens, "a request gave another number of tokens"
        firsts_s = list(self.first_s.values())
        result = {"secs": elapsed_s}
        for name, values in (("ttft", firsts_s), ("itl", self.gaps_s)):
            result |= {f"{name}_ms_p{p}": 1e3 * float(np.percentile(values, p)) for p in (50, 99)}
        result["normalised_latency_ms_mean"] = 1e3 * statistics.mean(self.normalised_s)
        return {name: round(value, 2) for name, value in result.items()}
