"""What benchmarks are made of: requests, arrivals, figures, matrix products in HLO."""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from paxpage.bench import workloads
from paxpage.bench.arrivals import due_times, parse_rates
from paxpage.bench.client import RequestResult
from paxpage.bench.datasets import BenchRequest, DatasetOptions, make_requests
from paxpage.bench.load import LoadResult
from paxpage.bench.plots import Roof
from paxpage.bench.products import products
from paxpage.bench.report import spread, summarise, table, to_fields
from paxpage.bench.traces import KernelEvent, kernel_table, product_floors, table_text


def options(**changes: Any) -> DatasetOptions:
    fields: dict[str, Any] = {
        "dataset_name": "random",
        "dataset_path": None,
        "num_prompts": 20,
        "input_len": 10,
        "output_len": 5,
        "random_range_ratio": 0.0,
        "shared_prefix_len": 8,
        "num_prefixes": 1,
        "vocab_size": 512,
        "prompt_format": "auto",
        "seed": 0,
    }
    return DatasetOptions(**(fields | changes))


def test_all_at_once_and_a_poisson_process() -> None:
    assert due_times(3, math.inf, 1.0, 0) == [0, 0, 0]
    gaps_s = np.diff(due_times(20_000, 8.0, 1.0, 0))
    assert gaps_s.mean() == pytest.approx(1 / 8, rel=0.03) and gaps_s.std() == pytest.approx(1 / 8, rel=0.03)


def test_burstiness_is_the_shape_of_the_gaps() -> None:
    for burstiness in (0.25, 4.0):
        gaps_s = np.diff(due_times(20_000, 8.0, burstiness, 0))
        assert gaps_s.mean() == pytest.approx(1 / 8, rel=0.05)
        assert gaps_s.std() * 8 == pytest.approx(burstiness**-0.5, rel=0.05)


def test_rates() -> None:
    assert parse_rates("8, 16,inf") == [8, 16, math.inf]
    for text in ("", "a", "-1", "0", "nan"):
        with pytest.raises(ValueError, match="request_rate"):
            parse_rates(text)


def test_random_lengths_are_exact_or_within_their_range() -> None:
    made = make_requests(options(), is_chat=False)
    assert {(len(r.prompt), r.max_tokens) for r in made} == {(10, 5)}
    assert all(100 <= token_id < 512 for r in made for token_id in r.prompt)
    ranged = make_requests(options(random_range_ratio=0.5, num_prompts=200), is_chat=False)
    assert {len(r.prompt) for r in ranged} == set(range(5, 16))
    assert {r.max_tokens for r in ranged} == set(range(3, 8))


def test_sharegpt_requests_are_the_workload_s() -> None:
    made = make_requests(options(dataset_name="sharegpt", vocab_size=128_256), is_chat=False)
    assert made == [BenchRequest(*request) for request in workloads.requests(20, 0, 128_256)]


def test_another_draw_has_the_same_lengths_and_other_prompts() -> None:
    for name in ("random", "sharegpt", "shared-prefix"):
        first, second = (make_requests(options(dataset_name=name), is_chat=False, draw=draw) for draw in (0, 1))
        assert [(len(r.prompt), r.max_tokens) for r in first] == [(len(r.prompt), r.max_tokens) for r in second]
        assert not {tuple(r.prompt) for r in first} & {tuple(r.prompt) for r in second}


def test_shared_prefixes() -> None:
    made = make_requests(options(dataset_name="shared-prefix", num_prefixes=2), is_chat=False)
    beginnings = [tuple(r.prompt[:8]) for r in made]
    assert len(set(beginnings)) == 2 and beginnings[0] == beginnings[2] != beginnings[1]
    assert {len(r.prompt) for r in made} == {18} and len({tuple(r.prompt[8:]) for r in made}) == 20


def test_text_has_as_many_words_as_tokens_were_asked_for() -> None:
    (request, *_) = make_requests(options(prompt_format="text"), is_chat=False)
    assert isinstance(request.prompt, str) and len(request.prompt.split()) == 10
    (chat, *_) = make_requests(options(), is_chat=True)
    assert chat.prompt == [{"role": "user", "content": request.prompt}]


def custom(folder: Path, *lines: Any, is_chat: bool = False, num_prompts: int = 10) -> list[BenchRequest]:
    path = folder / "prompts.jsonl"
    path.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines) + "\n\n")
    chosen = options(dataset_name="custom", dataset_path=str(path), num_prompts=num_prompts)
    return make_requests(chosen, is_chat=is_chat)


def test_custom_prompts(tmp_path: Path) -> None:
    lines = ({"prompt": "Hello", "output_tokens": 7}, {"prompt": [1, 2]}, {"prompt": "past the number"})
    assert custom(tmp_path, *lines, num_prompts=2) == [BenchRequest("Hello", 7), BenchRequest([1, 2], 5)]
    messages = [{"role": "system", "content": "Be brief."}]
    chats = custom(tmp_path, {"prompt": "Hello"}, {"messages": messages}, is_chat=True)
    assert [chat.prompt for chat in chats] == [[{"role": "user", "content": "Hello"}], messages]


@pytest.mark.parametrize(
    "line",
    [
        "no json",
        "[1, 2]",
        {},
        {"prompt": 5},
        {"prompt": "a", "messages": []},
        {"prompt": "a", "max": 3},
        {"prompt": "a", "output_tokens": 0},
        {"messages": [{"role": "user", "content": "a"}]},
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, line: Any) -> None:
    with pytest.raises(ValueError, match=r"^prompts\.jsonl:2"):
        custom(tmp_path, {"prompt": "fine"}, line)


def result(times_s: list[float], *, num_tokens: int | None = None, error: str | None = None) -> RequestResult:
    return RequestResult(10.0, 10.0 + (times_s or [1.0])[-1], [10.0 + t for t in times_s], 4, num_tokens, error)


def test_figures_of_a_load() -> None:
    """Two answers: three tokens at 100, 150, 250 ms; two chunks of two tokens each at 200 and 500 ms. One failure."""
    results = [result([0.1, 0.15, 0.25], num_tokens=3), result([0.2, 0.5], num_tokens=4), result([], error="why")]
    summary = summarise(LoadResult(results, 2.0, 1.0, 3), [4, 4, 4])
    assert (summary.num_completed, summary.failures, summary.num_failed) == (2, {"why": 1}, 1)
    assert (summary.num_input_tokens, summary.num_output_tokens, summary.output_throughput) == (8, 7, 3.5)
    assert summary.ttft == pytest.approx((150, 150, 199))
    assert summary.tpot.mean == pytest.approx((75 + 100) / 2)
    assert summary.itl[:2] == pytest.approx((150, 100))
    assert summary.e2el.mean == pytest.approx(375)
    fields = to_fields(summary)
    assert fields["median_itl_ms"] == pytest.approx(100) and fields["p99_ttft_ms"] == pytest.approx(199)
    assert "failed, 1 times: why" in table(summary) and "client was busy" not in table(summary)


def test_a_busy_client_says_so() -> None:
    assert "this client was busy for 90 %" in table(summarise(LoadResult([result([0.1])], 2.0, 1.8, 1), [4]))


def test_nothing_measured_is_null_in_json() -> None:
    assert math.isnan(spread([]).mean)
    fields = to_fields(summarise(LoadResult([result([], error="x")], 1.0, 0.0, 1), [4]))
    assert fields["mean_ttft_ms"] is None and "NaN" not in json.dumps(fields)


HLO = """HloModule m, is_scheduled=true

%fused (param_0: f32[64,512], param_1: f32[256,512]) -> f32[64,256] {
  %param_0 = f32[64,512]{1,0} parameter(0)
  %param_1 = f32[256,512]{1,0} parameter(1)
  ROOT %dot.1 = f32[64,256]{1,0} dot(%param_0, %param_1), lhs_contracting_dims={1}, rhs_contracting_dims={1}
}

ENTRY %main (x: f32[64,512], w: f32[256,512]) -> f32[64,256] {
  %x = f32[64,512]{1,0} parameter(0)
  %w = f32[256,512]{1,0} parameter(1)
  %v = bf16[256,128]{1,0} parameter(2)
  %gemm_fusion.7 = f32[64,256]{1,0} fusion(%x, %w), kind=kCustom, calls=%fused
  %narrow = bf16[64,256]{1,0} convert(%gemm_fusion.7)
  %cublas.2 = (bf16[64,128]{1,0}, s8[4096]{0}) custom-call(%narrow, %v), custom_call_target="__cublas$gemm", \
backend_config={"gemm_backend_config":{"dot_dimension_numbers":{"lhs_contracting_dimensions":["1"]}}}
  ROOT %other = f32[64,256]{1,0} custom-call(%x), custom_call_target="topk"
}
"""
ROOF = Roof(bytes_per_s=1e6, flops_per_s=1e9)


def test_matrix_products_and_their_floors() -> None:
    inner, fusion, library = products(HLO)
    assert (inner.name, fusion.name, fusion.is_library) == ("dot.1", "gemm_fusion.7", False)
    assert fusion.num_bytes == 4 * (64 * 512 + 256 * 512 + 64 * 256) and fusion.num_flops == 2 * 64 * 512 * 256
    assert (library.name, library.is_library) == ("cublas.2", True)
    assert library.num_bytes == 2 * (64 * 256 + 256 * 128 + 64 * 128) and library.num_flops == 2 * 64 * 256 * 128
    assert library.floor_s(ROOF) == pytest.approx(library.num_bytes / 1e6)
    assert library.floor_s(Roof(1e12, 1e3)) == pytest.approx(library.num_flops / 1e3)


def events(*names: str) -> list[KernelEvent]:
    return [KernelEvent(name, "", 1e3 * index, 2000.0) for index, name in enumerate(names)]


def test_kernels_find_their_products() -> None:
    """By the fusion's name; a library's kernel by its turn, unless there are more or fewer of them than calls."""
    _, fusion, library = products(HLO)
    step = ("gemm_fusion_7", "nvjet_tst_64x8", "splitKreduce_kernel<cublasLt>", "loop_add")
    floors = product_floors(events(*step, *step), 2, products(HLO), ROOF)
    assert floors == [fusion.floor_s(ROOF), library.floor_s(ROOF), None, None] * 2
    assert product_floors(events(*step, "nvjet_more"), 1, products(HLO), ROOF)[1] is None
    by_op = [KernelEvent("anything", "cublas.2", 0.0, 1.0)]
    assert product_floors(by_op, 1, products(HLO), ROOF) == [library.floor_s(ROOF)]


def test_the_kernel_table() -> None:
    found = events("a", "b", "b", "a", "b", "b")
    rows = kernel_table(found, 2, [1e-6, 1e-6, None, 1e-6, 1e-6, 1e-6])
    assert [tuple(row) for row in rows] == [("b", 4.0, 2.0, None), ("a", 2.0, 1.0, pytest.approx(1.0))]
    lines = table_text(rows, 1).splitlines()
    assert lines[1].split() == ["4.0", "-", "2.0", "b"] and lines[2].split() == ["2.0", "1", "more"]
    assert lines[3].split() == ["6.0", "3.0", "all"]
