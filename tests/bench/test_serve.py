"""python -m paxpage.bench serve against a real server of ours, and against one that is not."""

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from paxpage.bench.arrivals import due_times
from tests.bench import other_server
from tests.bench.conftest import json_lines
from tests.server.process import ServerProcess, free_port

Loading = Callable[..., tuple[int, str, list[dict]]]  # exit code, stdout, and the lines that were saved
Bench = Callable[..., tuple[int, str, str]]
LABELS = [
    "Successful requests:",
    "Failed requests:",
    "Benchmark duration (s):",
    "Total input tokens:",
    "Total generated tokens:",
    "Request throughput (req/s):",
    "Output token throughput (tok/s):",
    "Total token throughput (tok/s):",
    *(f"{kind} {name} (ms):" for name in ("TTFT", "TPOT", "ITL") for kind in ("Mean", "Median", "P99")),
]
PNG = b"\x89PNG"


def shown(table: str) -> dict[str, float]:
    """Label -> figure, in the table's order."""
    pairs = re.findall(r"^(\S.*?:) +([\d.]+) *$", table, re.MULTILINE)
    return {label: float(value) for label, value in pairs}


@pytest.fixture
def load(server: ServerProcess, bench: Bench, tmp_path: Path) -> Loading:
    """Runs the command against the server; exit code, stdout, and the lines that were saved."""

    def run(*flags: str) -> tuple[int, str, list[dict]]:
        path = tmp_path / "results.jsonl"
        saving = ("--save-result", f"--result-filename={path}", "--disable-tqdm", "--vocab-size=512")
        exit_code, out, _ = bench("serve", f"--base-url={server.url}", *saving, *flags)
        return exit_code, out, json_lines(path.read_text())

    return run


def test_the_table_that_people_know(load: Loading) -> None:
    exit_code, out, (line,) = load("--num-prompts=10", "--input-len=20", "--output-len=6", "--ignore-eos")
    figures = shown(out)
    assert exit_code == 0 and list(figures) == LABELS
    assert [figures[label] for label in LABELS[:2]] == [10, 0]
    assert (figures["Total input tokens:"], figures["Total generated tokens:"]) == (200, 60)
    assert all(figures[label] > 0 for label in LABELS[2:])
    assert line["engine"] == "paxpage" and line["model_id"] == "TINY" and line["flags"]["num_prompts"] == 10
    assert (line["completed"], line["failed"], line["request_rate"]) == (10, 0, "inf")
    assert line["output_throughput"] == pytest.approx(60 / line["duration"])
    assert line["mean_e2el_ms"] >= line["mean_ttft_ms"] + 5 * line["mean_tpot_ms"] * 0.99


def test_several_rates_are_several_runs_and_a_plot(load: Loading, tmp_path: Path) -> None:
    exit_code, _, lines = load(
        "--num-prompts=8", "--input-len=8", "--output-len=4", "--request-rate=40,inf", "--ignore-eos"
    )
    assert exit_code == 0 and [line["request_rate"] for line in lines] == [40, "inf"]
    assert lines[0]["duration"] >= due_times(8, 40.0, 1.0, 0)[-1]
    assert (tmp_path / "results.png").read_bytes().startswith(PNG)


def test_no_more_in_flight_than_allowed(load: Loading) -> None:
    sizes = ("--num-prompts=12", "--input-len=8", "--output-len=8", "--ignore-eos")
    assert load(*sizes, "--max-concurrency=2")[2][0]["max_concurrent_requests"] == 2
    assert load(*sizes)[2][1]["max_concurrent_requests"] > 4


def test_chats_have_words_for_prompts(load: Loading) -> None:
    flags = ("--endpoint=/v1/chat/completions", "--dataset-name=sharegpt", "--num-prompts=4", "--max-concurrency=4")
    exit_code, _, (line,) = load(*flags)
    assert exit_code == 0 and line["completed"] == 4
    assert line["total_input_tokens"] > 4 * 10 and line["total_output_tokens"] >= 4


def test_shared_prefixes_are_found_in_the_cache(server: ServerProcess, load: Loading) -> None:
    before = server.metrics()["prefix_cache_hits_total"]
    flags = ("--dataset-name=shared-prefix", "--shared-prefix-len=64", "--input-len=4", "--output-len=2")
    exit_code, _, (line,) = load(*flags, "--num-prompts=6", "--num-warmups=0", "--ignore-eos")
    assert exit_code == 0 and line["total_input_tokens"] == 6 * 68
    assert server.metrics()["prefix_cache_hits_total"] - before >= 5 * 48


def test_failures_are_counted_by_reason_and_in_the_exit_code(load: Loading, tmp_path: Path) -> None:
    prompts = [[150] * 5, [150] * 9000, [150] * 9000, [5000]]
    dataset = tmp_path / "prompts.jsonl"
    dataset.write_text("\n".join(json.dumps({"prompt": ids, "output_tokens": 3}) for ids in prompts))
    exit_code, out, (line,) = load("--dataset-name=custom", f"--dataset-path={dataset}", "--ignore-eos")
    assert exit_code == 1 and (line["completed"], line["failed"]) == (1, 3)
    assert sorted(line["errors"].values()) == [1, 2]
    assert all(reason.startswith("HTTP 400: ") for reason in line["errors"])
    assert "failed, 2 times: HTTP 400: prompt length is 9000" in out
    assert line["total_output_tokens"] == 3


def test_the_first_request_s_failure_ends_everything(server: ServerProcess, bench: Bench) -> None:
    exit_code, out, err = bench("serve", f"--base-url={server.url}", "--input-len=9000", "--vocab-size=512")
    assert exit_code == 1 and out == ""
    assert err.count("\n") == 1 and "the first request failed: HTTP 400" in err


def test_no_server_is_one_line(bench: Bench) -> None:
    exit_code, out, err = bench("serve", f"--base-url=http://127.0.0.1:{free_port()}")
    assert exit_code == 1 and out == "" and err.count("\n") == 1 and "/v1/models: ConnectError" in err


@pytest.fixture
def other(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The address of a server of another make, its key in the environment."""
    monkeypatch.delenv("PAXPAGE_API_KEY", raising=False)
    monkeypatch.setenv("OPENAI_API_KEY", other_server.KEY)
    with other_server.other_server() as url:
        yield url


def run_other(bench: Bench, url: str, kinds: list[int], folder: Path) -> tuple[int, str, dict]:
    """One request of each kind."""
    dataset, results = folder / "d.jsonl", folder / "r.jsonl"
    dataset.write_text("\n".join(json.dumps({"prompt": [kind, 1, 2]}) for kind in kinds))
    files = (f"--dataset-path={dataset}", f"--result-filename={results}", "--save-result")
    exit_code, out, _ = bench("serve", f"--base-url={url}/v1", "--dataset-name=custom", *files, "--num-warmups=0")
    return exit_code, out, json_lines(results.read_text())[-1]


def test_a_server_of_another_make(bench: Bench, other: str, tmp_path: Path) -> None:
    exit_code, out, line = run_other(bench, other, [other_server.WITH_USAGE], tmp_path)
    assert exit_code == 0 and (line["engine"], line["version"], line["model_id"]) == ("somebody", "9.9", "other")
    assert (line["total_input_tokens"], line["total_output_tokens"]) == (7, 5)
    assert "counts no tokens" not in out


def test_without_usage_chunks_are_counted_and_that_is_said(bench: Bench, other: str, tmp_path: Path) -> None:
    exit_code, out, line = run_other(bench, other, [other_server.WITHOUT_USAGE], tmp_path)
    assert exit_code == 0 and "the server counts no tokens" in out
    assert (line["total_input_tokens"], line["total_output_tokens"]) == (3, 3)


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        (other_server.CUT_SHORT, "the stream ended without [DONE]"),
        (other_server.MID_STREAM_ERROR, "error in mid-stream: out of luck"),
        (other_server.NO_TOKENS, "the stream held no token"),
        (other_server.NO_JSON, "an event of the stream is no JSON object: b'what?'"),
        (other_server.REFUSED, "HTTP 429: the queue is full"),
        (other_server.NOT_FOUND, "HTTP 404: <html>"),
    ],
)
def test_every_way_to_fail(bench: Bench, other: str, tmp_path: Path, kind: int, reason: str) -> None:
    exit_code, out, line = run_other(bench, other, [other_server.WITH_USAGE, kind], tmp_path)
    assert exit_code == 1 and line["errors"] == {reason: 1} and line["completed"] == 1
    assert f"failed, 1 times: {reason}" in out


def test_a_wrong_key_is_one_line(bench: Bench, other: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PAXPAGE_API_KEY", "wrong")  # ours comes first
    exit_code, _, err = bench("serve", f"--base-url={other}")
    assert exit_code == 1 and "HTTP 401: no key" in err and "wrong" not in err
