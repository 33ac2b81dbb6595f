"""Counting, and what a scrape shows."""

import pytest
from prometheus_client.parser import text_string_to_metric_families

from paxpage.outputs import CompletionDelta, CompletionOutput, RequestMetrics, RequestOutput
from paxpage.server import metrics as metrics_module
from paxpage.server.metrics import Histogram, Metrics, StepStats, token_count_buckets

API_NAMES = {
    *("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc"),
    *("prefix_cache_queries", "prefix_cache_hits", "num_preemptions", "prompt_tokens", "generation_tokens"),
    *("request_success", "admission_rejections", "time_to_first_token_seconds", "inter_token_latency_seconds"),
    *("request_time_per_output_token_seconds", "e2e_request_latency_seconds", "request_queue_time_seconds"),
    *("request_prefill_time_seconds", "request_decode_time_seconds", "request_prompt_tokens"),
    *("request_generation_tokens", "iteration_tokens_total", "event_loop_lag_seconds"),
}


def scrape(metrics: Metrics) -> dict[tuple[str, str], float]:
    """(sample name, its le or finished_reason label) -> value, names without the prefix."""
    families = text_string_to_metric_families(metrics.render().decode())
    samples = [s for f in families for s in f.samples if s.name.startswith(metrics_module.PREFIX)]
    assert all(s.labels["model_name"] == "m" for s in samples)
    prefix = len(metrics_module.PREFIX)
    return {(s.name[prefix:], s.labels.get("le", s.labels.get("finished_reason", ""))): s.value for s in samples}


def delta(num_tokens: int, index: int = 0, output: RequestOutput | None = None) -> CompletionDelta:
    return CompletionDelta("r", index, "", [1] * num_tokens, None, None, None, output)


def finished(reason: str, lengths: list[int], times: RequestMetrics, num_cached: int = 0) -> RequestOutput:
    samples = [CompletionOutput(i, "", [1] * n, None, None, reason, None) for i, n in enumerate(lengths)]
    return RequestOutput("r", None, [1] * 20, samples, True, times, num_cached)


@pytest.fixture
def metrics() -> Metrics:
    return Metrics("m", 2048, has_prefix_cache=True)


def test_every_metric_of_the_api_is_there_from_the_start(metrics: Metrics) -> None:
    families = text_string_to_metric_families(metrics.render().decode())
    names = {f.name.removeprefix(metrics_module.PREFIX) for f in families if f.name.startswith(metrics_module.PREFIX)}
    assert names >= API_NAMES
    values = scrape(metrics)
    assert set(values.values()) == {0.0}
    assert {label for name, label in values if name == "request_success_total"} == {"stop", "length", "abort", "error"}
    assert ("generation_tokens_total", "") in values


def test_a_request_is_counted_as_it_goes_and_once_it_ends(metrics: Metrics) -> None:
    metrics.start_request("r", 100.0, 20)
    assert scrape(metrics)["prompt_tokens_total", ""] == 0
    metrics.record_deltas([delta(1)], 100.03)
    metrics.record_deltas([delta(1)], 100.05)
    values = scrape(metrics)
    assert (values["prompt_tokens_total", ""], values["generation_tokens_total", ""]) == (20, 2)
    assert values["time_to_first_token_seconds_bucket", "0.02"] == 0
    assert values["time_to_first_token_seconds_bucket", "0.04"] == 1
    assert values["inter_token_latency_seconds_sum", ""] == pytest.approx(0.02)
    times = RequestMetrics(100.0, 100.01, 100.03, 100.07, 0)
    metrics.record_deltas([delta(1, output=finished("stop", [3], times, 16))], 100.07)
    values = scrape(metrics)
    assert values["request_success_total", "stop"] == 1
    assert values["e2e_request_latency_seconds_sum", ""] == pytest.approx(0.07)
    assert values["request_queue_time_seconds_sum", ""] == pytest.approx(0.01)
    assert values["request_prefill_time_seconds_sum", ""] == pytest.approx(0.02)
    assert values["request_decode_time_seconds_sum", ""] == pytest.approx(0.04)
    assert values["request_time_per_output_token_seconds_sum", ""] == pytest.approx(0.02)
    assert values["request_prompt_tokens_sum", ""] == 20
    assert values["request_generation_tokens_sum", ""] == 3
    assert (values["prefix_cache_queries_total", ""], values["prefix_cache_hits_total", ""]) == (20, 16)
    assert metrics.unfinished_requests() == []


def test_samples_of_one_request_share_its_prompt(metrics: Metrics) -> None:
    metrics.start_request("r", 0.0, 20)
    metrics.record_deltas([delta(1), delta(1, index=1)], 0.5)
    values = scrape(metrics)
    assert (values["prompt_tokens_total", ""], values["generation_tokens_total", ""]) == (20, 2)
    assert values["time_to_first_token_seconds_count", ""] == 1
    assert values["inter_token_latency_seconds_count", ""] == 0


def test_a_request_that_never_ran_has_no_prefill_time(metrics: Metrics) -> None:
    metrics.start_request("r", 1.0, 20)
    metrics.record_deltas([delta(0, output=finished("abort", [0], RequestMetrics(1.0, None, None, 2.0, 0)))], 2.0)
    values = scrape(metrics)
    assert (values["request_success_total", "abort"], values["prompt_tokens_total", ""]) == (1, 0)
    assert values["request_prefill_time_seconds_count", ""] == 0


def test_unknown_requests_and_failures(metrics: Metrics) -> None:
    metrics.record_deltas([delta(1)], 0.0)
    assert scrape(metrics)["generation_tokens_total", ""] == 0
    metrics.start_request("r", 0.0, 20)
    metrics.record_failures(["r", "other"])
    assert scrape(metrics)["request_success_total", "error"] == 1


def test_gauges_steps_and_rejections(metrics: Metrics) -> None:
    metrics.stats = StepStats(3, 5, 0.25, 2)
    metrics.record_step(0)
    metrics.record_step(17)
    metrics.count_rejection()
    values = scrape(metrics)
    assert (values["num_requests_running", ""], values["num_requests_waiting", ""]) == (3, 5)
    assert (values["kv_cache_usage_perc", ""], values["num_preemptions_total", ""]) == (0.25, 2)
    assert (values["iteration_tokens_total_sum", ""], values["iteration_tokens_total_bucket", "16.0"]) == (17, 0)
    assert values["admission_rejections_total", ""] == 1


def test_histogram_buckets_include_their_bound() -> None:
    histogram = Histogram((1.0, 2.0))
    for value in (0.5, 1.0, 1.5, 9.0):
        histogram.observe(value)
    assert histogram.cumulative() == [("1.0", 2.0), ("2.0", 3.0), ("+Inf", 4.0)]
    assert histogram.total == 12.0


def test_token_count_buckets() -> None:
    assert token_count_buckets(120) == (1, 2, 5, 10, 20, 50, 100)
    assert token_count_buckets(1) == (1,)
