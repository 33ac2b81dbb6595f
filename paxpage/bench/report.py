"""Figures of a load, and the table in which users of vLLM's benchmark know them."""

import collections
import dataclasses
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from paxpage.bench.client import RequestResult
from paxpage.bench.load import LoadResult

WIDTH, VALUE_WIDTH = 50, 10
BUSY_CLIENT = 0.8  # of a core; from there on tokens wait for the client to read them
MAX_REASONS = 10


class Spread(NamedTuple):
    """Mean, median and 99th percentile in ms; NaN where nothing was measured."""

    mean: float
    median: float
    p99: float


def spread(values_s: Iterable[float]) -> Spread:
    """Of seconds."""
    values_ms = 1e3 * np.array(list(values_s), np.float64)
    if not values_ms.size:
        return Spread(float("nan"), float("nan"), float("nan"))
    return Spread(float(values_ms.mean()), float(np.median(values_ms)), float(np.percentile(values_ms, 99)))


@dataclasses.dataclass(frozen=True)
class Summary:
    """One load's figures."""

    num_completed: int
    failures: dict[str, int]  # reason -> how many
    duration_s: float
    num_input_tokens: int
    num_output_tokens: int
    is_usage_missing: bool  # somewhere the server gave no counts: tokens are chunks there, prompts what was sent
    ttft: Spread  # sent to first token
    tpot: Spread  # time of all tokens but the first, by their number; a request each
    itl: Spread  # gaps between chunks, over all requests
    e2el: Spread  # sent to last token
    client_cpu_share: float
    most_in_flight: int

    @property
    def num_failed(self) -> int:
        """All failures together."""
        return sum(self.failures.values())

    @property
    def output_throughput(self) -> float:
        """Generated tokens a second."""
        return self.num_output_tokens / self.duration_s


def summarise(load: LoadResult, num_sent_tokens: Sequence[int]) -> Summary:
    """Of requests that succeeded; num_sent_tokens: of each prompt, for servers that do not count them (0: unknown)."""
    done = [(result, sent) for result, sent in zip(load.results, num_sent_tokens, strict=True) if not result.error]
    results = [result for result, _ in done]
    many = [result for result in results if num_tokens(result) > 1]
    return Summary(
        num_completed=len(done),
        failures=dict(collections.Counter(result.error for result in load.results if result.error).most_common()),
        duration_s=load.duration_s,
        num_input_tokens=sum(sent if r.num_prompt_tokens is None else r.num_prompt_tokens for r, sent in done),
        num_output_tokens=sum(num_tokens(result) for result in results),
        is_usage_missing=any(result.num_output_tokens is None for result in results),
        ttft=spread(result.chunk_times_s[0] - result.sent_s for result in results),
        tpot=spread((result.end_s - result.chunk_times_s[0]) / (num_tokens(result) - 1) for result in many),
        itl=spread(gap_s for result in results for gap_s in np.diff(result.chunk_times_s)),
        e2el=spread(result.end_s - result.sent_s for result in results),
        client_cpu_share=load.client_cpu_s / load.duration_s,
        most_in_flight=load.most_in_flight,
    )


def num_tokens(result: RequestResult) -> int:
    """Generated, by the server's count if there is one."""
    return len(result.chunk_times_s) if result.num_output_tokens is None else result.num_output_tokens


def table(summary: Summary) -> str:
    """What is printed."""
    num_in, num_out, duration_s = summary.num_input_tokens, summary.num_output_tokens, summary.duration_s
    lines = [
        " Serving Benchmark Result ".center(WIDTH, "="),
        _line("Successful requests:", summary.num_completed),
        _line("Failed requests:", summary.num_failed),
        _line("Benchmark duration (s):", duration_s),
        _line("Total input tokens:", num_in),
        _line("Total generated tokens:", num_out),
        _line("Request throughput (req/s):", summary.num_completed / duration_s),
        _line("Output token throughput (tok/s):", summary.output_throughput),
        _line("Total token throughput (tok/s):", (num_in + num_out) / duration_s),
        *_section("Time to First Token", "TTFT", summary.ttft),
        *_section("Time per Output Token (excl. 1st token)", "TPOT", summary.tpot),
        *_section("Inter-token Latency", "ITL", summary.itl),
        "=" * WIDTH,
        *_remarks(summary),
    ]
    return "\n".join(lines)


def _section(title: str, name: str, values: Spread) -> list[str]:
    head = title.center(WIDTH, "-")
    pairs = (("Mean", values.mean), ("Median", values.median), ("P99", values.p99))
    return [head, *(_line(f"{label} {name} (ms):", value) for label, value in pairs)]


def _line(label: str, value: int | float) -> str:
    text = str(value) if isinstance(value, int) else f"{value:.2f}"
    return f"{label:<{WIDTH - VALUE_WIDTH}} {text:<{VALUE_WIDTH}}"


def _remarks(summary: Summary) -> list[str]:
    """What a reader must know to trust the table."""
    remarks = [f"failed, {count} times: {reason}" for reason, count in list(summary.failures.items())[:MAX_REASONS]]
    if summary.is_usage_missing:
        remarks.append("the server counts no tokens: chunks were counted instead, and prompts as they were sent")
    if summary.client_cpu_share > BUSY_CLIENT:
        share = f"{100 * summary.client_cpu_share:.0f} %"
        remarks.append(f"this client was busy for {share} of the time: latencies are its own as much as the server's")
    return remarks


def to_fields(summary: Summary) -> dict[str, object]:
    """What is saved, by the names that vLLM's benchmark gives."""
    num_in, num_out, duration_s = summary.num_input_tokens, summary.num_output_tokens, summary.duration_s
    fields: dict[str, object] = {
        "duration": duration_s,
        "completed": summary.num_completed,
        "failed": summary.num_failed,
        "errors": summary.failures,
        "total_input_tokens": num_in,
        "total_output_tokens": num_out,
        "request_throughput": summary.num_completed / duration_s,
        "output_throughput": summary.output_throughput,
        "total_token_throughput": (num_in + num_out) / duration_s,
        "max_concurrent_requests": summary.most_in_flight,
        "client_cpu_share": round(summary.client_cpu_share, 3),
    }
    for name in ("ttft", "tpot", "itl", "e2el"):
        values: Spread = getattr(summary, name)
        is_known = not np.isnan(values.mean)  # NaN is no JSON
        fields |= {f"{label}_{name}_ms": value if is_known else None for label, value in values._asdict().items()}
    return fields
