"""Counts and times of one server, in Prometheus' text format. Names and buckets are vLLM's with our prefix.

The engine thread writes, a scrape reads: every number has one writer, and Python's reads of one number or one list
copy are whole, so there are no locks on the way of a step.
"""

import bisect
import dataclasses
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from paxpage.outputs import CompletionDelta, RequestOutput

PREFIX = "paxpage:"
FINISH_REASONS = ("stop", "length", "abort", "error")
TTFT_BUCKETS_S = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0),
)
INTER_TOKEN_BUCKETS_S = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0)
LATENCY_BUCKETS_S = (*(0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0),)
LOOP_LAG_BUCKETS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5)
STEP_TOKENS_BUCKETS = (1.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0, 512.0, 1024.0, 2048.0, 4096.0, 8192.0, 16384.0)


def token_count_buckets(maximum: int) -> tuple[float, ...]:
    """1, 2, 5, 10, 20, 50, ... up to maximum."""
    steps = (digit * 10**power for power in range(len(str(maximum))) for digit in (1, 2, 5))
    return tuple(float(step) for step in steps if step <= maximum)


class Histogram:
    """Counts of values by upper bound, and their sum."""

    def __init__(self, bounds: Sequence[float]):
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def observe(self, value: float | int) -> None:
        """Counts one value."""
        self.counts[bisect.bisect_left(self.bounds, value)] += 1
        self.total += value

    def cumulative(self) -> list[tuple[str, float]]:
        """(upper bound, number of values up to it) pairs, the last for +Inf."""
        pairs, count = [], 0
        for bound, own in zip([*self.bounds, float("inf")], self.counts.copy(), strict=True):
            count += own
            pairs.append((floatToGoString(bound), float(count)))
        return pairs


class StepStats(NamedTuple):
    """What a scrape needs to know of the engine."""

    num_running: int = 0
    num_waiting: int = 0
    kv_cache_usage: float = 0.0  # share of the blocks that hold tokens, 0 to 1
    num_preemptions: int = 0


@dataclasses.dataclass
class RequestProgress:
    """What is remembered of a request until it ends. Times are time.monotonic's, in seconds."""

    arrival_time_s: float
    num_prompt_tokens: int
    last_token_times_s: dict[int, float] = dataclasses.field(default_factory=dict)  # by sample


class Metrics:
    """All metrics of one server. Everything but count_rejection and event_loop_lag belongs to the engine thread.

    count_compilations: XLA compilations since the warm-up.
    """

    def __init__(
        self,
        model_name: str,
        max_model_len: int,
        *,
        has_prefix_cache: bool,
        count_compilations: Callable[[], int] = lambda: 0,
    ):
        self.model_name = model_name
        self.has_prefix_cache = has_prefix_cache
        self.count_compilations = count_compilations
        self.stats = StepStats()
        self.num_prompt_tokens = 0
        self.num_generation_tokens = 0
        self.num_prefix_cache_queries = 0
        self.num_prefix_cache_hits = 0
        self.num_admission_rejections = 0
        self.num_finished = dict.fromkeys(FINISH_REASONS, 0)
        self._make_histograms(token_count_buckets(max_model_len))
        self._progress: dict[str, RequestProgress] = {}
        self._registry = CollectorRegistry()
        self._registry.register(_ServerCollector(self))
        ProcessCollector(registry=self._registry)

    def _make_histograms(self, token_buckets: tuple[float, ...]) -> None:
        self.time_to_first_token = Histogram(TTFT_BUCKETS_S)
        self.inter_token_latency = Histogram(INTER_TOKEN_BUCKETS_S)
        self.time_per_output_token = Histogram(INTER_TOKEN_BUCKETS_S)
        self.e2e_latency = Histogram(LATENCY_BUCKETS_S)
        self.queue_time = Histogram(LATENCY_BUCKETS_S)
        self.prefill_time = Histogram(LATENCY_BUCKETS_S)
        self.decode_time = Histogram(LATENCY_BUCKETS_S)
        self.prompt_lengths = Histogram(token_buckets)
        self.generation_lengths = Histogram(token_buckets)
        self.iteration_tokens = Histogram(STEP_TOKENS_BUCKETS)
        self.event_loop_lag = Histogram(LOOP_LAG_BUCKETS_S)

    def render(self) -> bytes:
        """All metrics in Prometheus' text format."""
        return generate_latest(self._registry)

    def count_rejection(self) -> None:
        """A request was turned away because the queue is full."""
        self.num_admission_rejections += 1

    def start_request(self, request_id: str, arrival_time_s: float, num_prompt_tokens: int) -> None:
        """The engine took a request in."""
        self._progress[request_id] = RequestProgress(arrival_time_s, num_prompt_tokens)

    def record_step(self, num_scheduled_tokens: int) -> None:
        """One step ran over so many tokens."""
        if num_scheduled_tokens:
            self.iteration_tokens.observe(num_scheduled_tokens)

    def record_deltas(self, deltas: Iterable[CompletionDelta], now_s: float) -> None:
        """What a step, or an abort, gave back."""
        for delta in deltas:
            progress = self._progress.get(delta.request_id)
            if progress is None:
                continue
            if delta.token_ids:
                self._record_tokens(progress, delta.index, len(delta.token_ids), now_s)
            if delta.output is not None:
                self._record_finished(progress, delta.output)
                del self._progress[delta.request_id]

    def unfinished_requests(self) -> list[str]:
        """The ids of requests that were taken in and have not ended."""
        return list(self._progress)

    def record_failures(self, request_ids: Iterable[str]) -> None:
        """These requests ended without a result."""
        for request_id in request_ids:
            if self._progress.pop(request_id, None) is not None:
                self.num_finished["error"] += 1

    def _record_tokens(self, progress: RequestProgress, index: int, num_tokens: int, now_s: float) -> None:
        if not progress.last_token_times_s:
            self.time_to_first_token.observe(now_s - progress.arrival_time_s)
            self.num_prompt_tokens += progress.num_prompt_tokens
        last_s = progress.last_token_times_s.get(index)
        if last_s is not None:
            self.inter_token_latency.observe((now_s - last_s) / num_tokens)
        progress.last_token_times_s[index] = now_s
        self.num_generation_tokens += num_tokens

    def _record_finished(self, progress: RequestProgress, output: RequestOutput) -> None:
        reason = output.outputs[0].finish_reason or "error"
        self.num_finished[reason] = self.num_finished.get(reason, 0) + 1
        self.prompt_lengths.observe(progress.num_prompt_tokens)
        for sample in output.outputs:
            self.generation_lengths.observe(len(sample.token_ids))
        if self.has_prefix_cache:
            self.num_prefix_cache_queries += progress.num_prompt_tokens
            self.num_prefix_cache_hits += output.num_cached_tokens
        self._record_times(progress.arrival_time_s, output)

    def _record_times(self, arrival_time_s: float, output: RequestOutput) -> None:
        times = output.metrics
        if times.finished_time_s is None:
            return
        self.e2e_latency.observe(times.finished_time_s - arrival_time_s)
        if times.first_scheduled_time_s is None:
            return
        self.queue_time.observe(max(times.first_scheduled_time_s - arrival_time_s, 0.0))
        if times.first_token_time_s is None:
            return
        self.prefill_time.observe(times.first_token_time_s - times.first_scheduled_time_s)
        decode_s = times.finished_time_s - times.first_token_time_s
        self.decode_time.observe(decode_s)
        longest = max(len(sample.token_ids) for sample in output.outputs)
        if longest > 1:
            self.time_per_output_token.observe(decode_s / (longest - 1))


class _ServerCollector(Collector):
    """Turns a Metrics into Prometheus' families at each scrape."""

    def __init__(self, metrics: Metrics):
        self._metrics = metrics

    def collect(self) -> Iterator[Metric]:
        """Every family, gauges first."""
        yield from self._gauges()
        yield from self._counters()
        yield self._finished()
        yield from self._histograms()

    def _gauges(self) -> Iterator[Metric]:
        stats = self._metrics.stats
        for name, text, value in (
            ("num_requests_running", "Samples in the running batch.", stats.num_running),
            ("num_requests_waiting", "Samples waiting to run.", stats.num_waiting),
            ("kv_cache_usage_perc", "Share of the KV cache's blocks in use, 0 to 1.", stats.kv_cache_usage),
        ):
            family = GaugeMetricFamily(PREFIX + name, text, labels=["model_name"])
            family.add_metric([self._metrics.model_name], value)
            yield family

    def _counters(self) -> Iterator[Metric]:
        m = self._metrics
        for name, text, value in (
            ("prefix_cache_queries", "Prompt tokens looked up in the prefix cache.", m.num_prefix_cache_queries),
            ("prefix_cache_hits", "Prompt tokens found in the prefix cache.", m.num_prefix_cache_hits),
            ("num_preemptions", "Requests preempted when blocks ran out.", m.stats.num_preemptions),
            ("prompt_tokens", "Prompt tokens processed.", m.num_prompt_tokens),
            ("generation_tokens", "Tokens generated.", m.num_generation_tokens),
            ("admission_rejections", "Requests turned away because the queue was full.", m.num_admission_rejections),
            ("compilations_after_warmup", "XLA compilations since the start; should stay 0.", m.count_compilations()),
        ):
            family = CounterMetricFamily(PREFIX + name, text, labels=["model_name"])
            family.add_metric([m.model_name], value)
            yield family

    def _finished(self) -> Metric:
        text = "Requests that ended, by the first sample's finish reason."
        family = CounterMetricFamily(PREFIX + "request_success", text, labels=["model_name", "finished_reason"])
        for reason, count in self._metrics.num_finished.copy().items():
            family.add_metric([self._metrics.model_name, reason], count)
        return family

    def _histograms(self) -> Iterator[Metric]:
        m = self._metrics
        for name, text, histogram in (
            ("time_to_first_token_seconds", "From arrival to the first token.", m.time_to_first_token),
            ("inter_token_latency_seconds", "Between two tokens of a sample.", m.inter_token_latency),
            ("request_time_per_output_token_seconds", "Mean of a request after its first.", m.time_per_output_token),
            ("e2e_request_latency_seconds", "From arrival to the end.", m.e2e_latency),
            ("request_queue_time_seconds", "From arrival to the first step.", m.queue_time),
            ("request_prefill_time_seconds", "From the first step to the first token.", m.prefill_time),
            ("request_decode_time_seconds", "From the first token to the end.", m.decode_time),
            ("request_prompt_tokens", "Prompt tokens of a request.", m.prompt_lengths),
            ("request_generation_tokens", "Tokens generated for a sample.", m.generation_lengths),
            ("iteration_tokens_total", "Tokens of a step.", m.iteration_tokens),
            ("event_loop_lag_seconds", "How late the server's event loop was, 50 times a second.", m.event_loop_lag),
        ):
            family = HistogramMetricFamily(PREFIX + name, text, labels=["model_name"])
            family.add_metric([m.model_name], histogram.cumulative(), sum_value=histogram.total)
            yield family
