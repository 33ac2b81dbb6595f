"""Clients that leave, limits of the pool, and ends of the process (cases 7, 25 and 29)."""

import functools
import json
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.helpers.checkpoints import as_oracle
from tests.helpers.oracle import greedy_tokens
from tests.server.conftest import SMALL
from tests.server.process import AbandonedRequest, ServerProcess, wait_until
from tests.server.tiny import MAX_MODEL_LEN

LONG = {"prompt": [60, 61], "max_tokens": 4000, "temperature": 0, "ignore_eos": True}
LONG_CHAT = {**{k: LONG[k] for k in LONG if k != "prompt"}, "messages": [{"role": "user", "content": "x"}]}
BODIES = {"completions": LONG, "chat/completions": LONG_CHAT}
ABORTED = "its client left"
MUST_GROW = ("_total", "_count", "_sum")


def long_prompt(num_tokens: int, first: int) -> list[int]:
    """Token ids that take many steps of 48. With another first one no block of the prompt is the same."""
    return [first, *(5 + (7 * i) % 400 for i in range(1, num_tokens))]


def leave_after(server: ServerProcess, body: dict[str, Any], is_time: Any, path: str = "completions") -> None:
    """Sends a request and leaves as soon as is_time() is true."""
    request = AbandonedRequest(server, path, json.dumps(body).encode())
    wait_until(is_time)
    leave(server, request)


def leave(server: ServerProcess, request: AbandonedRequest) -> None:
    """Closes the connection; the server logs an abort within 3 s."""
    num_aborts = server.log().count(ABORTED)
    request.leave()
    wait_until(lambda: server.log().count(ABORTED) == num_aborts + 1, 3)


class MetricsWatch:
    """Scrapes all the while and keeps what was wrong: counters that fell, gauges below 0."""

    def __init__(self, server: ServerProcess):
        self.faults: list[str] = []
        self._url = server.url
        self._scrape = functools.partial(ServerProcess.metrics, server)
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> "MetricsWatch":
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._is_over.set()
        self._thread.join()

    def _run(self) -> None:
        last: dict[str, float] = {}
        while not self._is_over.wait(0.05):
            values = self._scrape()
            fallen = [k for k, v in values.items() if k.endswith(MUST_GROW) and v < last.get(k, 0)]
            self.faults += fallen + [k for k, v in values.items() if v < 0]
            last = values


# Case 25; killed after a second, on SMOL: test_default_model.py


def check_next_starts_at_once(server: ServerProcess) -> None:
    """A request answers, and by the server's own count it has not waited."""
    before = server.metrics()["request_queue_time_seconds_sum"]
    server.check_alive()
    assert server.metrics()["request_queue_time_seconds_sum"] - before < 0.5


@pytest.mark.parametrize("path", BODIES)
def test_a_whole_answer_whose_client_leaves(tiny: ServerProcess, path: str) -> None:
    for _ in range(4):
        leave_after(tiny, BODIES[path], lambda: tiny.metrics()["num_requests_running"], path)
        tiny.wait_idle(3)
    num_tokens = tiny.metrics()["generation_tokens_total"]
    time.sleep(0.2)
    assert tiny.metrics()["generation_tokens_total"] == num_tokens
    check_next_starts_at_once(tiny)


@pytest.mark.parametrize("path", BODIES)
def test_a_stream_whose_client_leaves_after_the_first_chunk(tiny: ServerProcess, path: str) -> None:
    request = AbandonedRequest(tiny, path, json.dumps({**BODIES[path], "stream": True}).encode())
    request.read_until(b"data: ")
    leave(tiny, request)
    tiny.wait_idle(3)


def test_a_client_that_leaves_while_waiting(tiny: ServerProcess) -> None:
    others = [AbandonedRequest(tiny, "completions", json.dumps(LONG).encode()) for _ in range(4)]
    wait_until(lambda: tiny.metrics()["num_requests_running"] == 4)
    leave_after(tiny, LONG, lambda: tiny.metrics()["num_requests_waiting"])
    wait_until(lambda: tiny.metrics()["num_requests_waiting"] == 0, 3)
    assert tiny.metrics()["num_requests_running"] == 4
    for other in others:
        other.leave()
    check_next_starts_at_once(tiny)
    tiny.wait_idle(3)


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_during_a_long_prefill(tiny: ServerProcess, stream: bool) -> None:
    before = tiny.metrics()
    body = {**LONG, "prompt": long_prompt(6000, first=60 + stream), "stream": stream}
    leave_after(tiny, body, lambda: prefilled_since(before, tiny.metrics()))
    tiny.wait_idle(3)
    after = tiny.metrics()
    assert 0 < prefilled_since(before, after) < 6000
    assert after["generation_tokens_total"] == before["generation_tokens_total"]
    assert after["request_success_total"] == before["request_success_total"] + 1


def prefilled_since(before: dict[str, float], now: dict[str, float]) -> float:
    """Tokens that steps computed between two scrapes."""
    return now["iteration_tokens_total_sum"] - before["iteration_tokens_total_sum"]


@pytest.mark.parametrize(
    ("fields", "num_running", "num_waiting"),
    [({"n": 3}, 3, 0), ({"prompt": [[60], [61], [62], [63]]}, 4, 0), ({"prompt": [[60], [61]], "n": 3}, 4, 2)],
)
@pytest.mark.parametrize("stream", [False, True])
def test_several_samples_or_prompts_end_together(
    tiny: ServerProcess, fields: dict[str, Any], num_running: int, num_waiting: int, stream: bool
) -> None:
    def have_begun() -> bool:
        values = tiny.metrics()
        return (values["num_requests_running"], values["num_requests_waiting"]) == (num_running, num_waiting)

    leave_after(tiny, {**LONG, **fields, "stream": stream}, have_begun)
    tiny.wait_idle(3)
    check_next_starts_at_once(tiny)


# Case 29


def test_a_stream_closed_during_another_s_prefill(tiny: ServerProcess, tiny_dir: Path) -> None:
    from transformers import LlamaForCausalLM

    reference = as_oracle(LlamaForCausalLM.from_pretrained(tiny_dir))
    reference.set_attn_implementation("sdpa")  # eager attention would take gigabytes for 7,000 tokens
    with MetricsWatch(tiny) as watch:
        for round_number in range(10):
            prompt = long_prompt(7000, first=70 + round_number)
            assert tokens_beside_a_closed_stream(tiny, prompt) == greedy_tokens(reference, prompt, 2)
    assert watch.faults == []
    tiny.check_alive()


def tokens_beside_a_closed_stream(server: ServerProcess, prompt: list[int]) -> list[int]:
    """The answer to a prompt during whose prefill another's stream is closed, and its abort counted."""
    stream = AbandonedRequest(server, "completions", json.dumps({**LONG, "stream": True}).encode())
    stream.read_until(b"data: ")
    before = server.metrics()
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(server.complete, prompt, max_tokens=2)
        wait_until(lambda: server.metrics()["num_requests_running"] == 2)
        stream.leave()
        aborted = wait_until(lambda: scrape_after_an_end(server, before))
        assert aborted["prompt_tokens_total"] == before["prompt_tokens_total"]
        return answer.result()["choices"][0]["token_ids"]


def scrape_after_an_end(server: ServerProcess, before: dict[str, float]) -> dict[str, float] | None:
    """The metrics, once a request has ended since before."""
    values = server.metrics()
    return values if values["request_success_total"] > before["request_success_total"] else None


@pytest.fixture
def own(tiny_dir: Path) -> Iterator[ServerProcess]:
    """A server to end. It has an API key, so that its guard is seen in a real process too."""
    sizes = ("--max_num_seqs=8", "--max_num_batched_tokens=48")
    with ServerProcess(f"--model={tiny_dir}", *sizes, env={"PAXPAGE_API_KEY": "secret"}) as server:
        server.client.headers["Authorization"] = "Bearer secret"
        yield server


def test_sigterm_when_idle(own: ServerProcess) -> None:
    own.wait_ready()
    assert httpx.get(f"{own.url}/v1/models").status_code == 401
    assert own.stop() == 0
    assert "Traceback" not in own.log()
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"{own.url}/health")


def test_sigterm_finishes_what_is_short_and_aborts_the_rest_with_an_event(own: ServerProcess) -> None:
    own.wait_ready()
    ends: list[list[Any]] = []
    answers: list[httpx.Response] = []

    def read() -> None:
        ends.append(list(own.stream("completions", {**LONG, "max_tokens": 8000}))[-2:])

    def ask() -> None:
        answers.append(own.post("completions", {**LONG, "max_tokens": 8000}))

    threads = [threading.Thread(target=read) for _ in range(7)]
    for thread in threads:
        thread.start()
    wait_until(lambda: own.metrics()["num_requests_running"] == 7)
    short = own.stream("completions", {**LONG, "max_tokens": 100})
    next(short)
    threads += [threading.Thread(target=ask) for _ in range(51)]  # one may get the place of the short one
    with MetricsWatch(own) as watch:
        for thread in threads[7:]:
            thread.start()
        wait_until(lambda: own.metrics()["num_requests_waiting"] >= 50)
        assert own.metrics()["num_requests_running"] == 8
    assert own.stop() == 0
    for thread in threads:
        thread.join()
    events = list(short)
    assert (events[-2]["choices"][0]["finish_reason"], events[-1]) == ("length", "[DONE]")
    assert len(ends) == 7 and all(end[-1] == "[DONE]" for end in ends)
    assert {end[0]["choices"][0]["finish_reason"] for end in ends} == {"abort"}
    assert watch.faults == []
    assert len(answers) == 51 and sum(answer.status_code == 503 for answer in answers) >= 50
    for answer in answers:
        assert answer.status_code == 503 or answer.json()["choices"][0]["finish_reason"] == "abort"
    assert "Traceback" not in own.log()


@pytest.mark.parametrize(("timeout_s", "max_tokens", "reason"), [(1, 8000, "abort"), (120, 2500, "length")])
def test_the_flag_says_how_long_what_runs_may_go_on(
    tiny_dir: Path, timeout_s: int, max_tokens: int, reason: str
) -> None:
    """2,500 tokens take longer than what is given without the flag, and 8,000 much longer than a second."""
    with ServerProcess(f"--model={tiny_dir}", *SMALL, f"--shutdown_timeout={timeout_s}") as server:
        server.wait_ready()
        stream = server.stream("completions", {**LONG, "max_tokens": max_tokens})
        next(stream)
        start_s = time.monotonic()
        server.process.send_signal(signal.SIGTERM)
        *_, last, done = stream
        assert (last["choices"][0]["finish_reason"], done) == (reason, "[DONE]")
        assert server.process.wait(15) == 0
        if reason == "abort":
            assert timeout_s <= time.monotonic() - start_s < 4


@pytest.mark.parametrize("first", [signal.SIGTERM, signal.SIGINT])
def test_a_second_signal_ends_at_once(own: ServerProcess, first: signal.Signals) -> None:
    own.wait_ready()
    stream = own.stream("completions", {**LONG, "max_tokens": 8000})
    next(stream)
    own.process.send_signal(first)
    time.sleep(0.5)
    assert own.process.poll() is None
    start_s = time.monotonic()
    assert own.stop() == 128 + signal.SIGTERM
    assert time.monotonic() - start_s < 2
    with pytest.raises(httpx.RemoteProtocolError):
        list(stream)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signals_during_the_start_up(own: ServerProcess, number: signal.Signals) -> None:
    time.sleep(2 if number == signal.SIGTERM else 0.5)
    start_s = time.monotonic()
    assert own.stop(number) == 128 + number
    assert time.monotonic() - start_s < 5
    assert "Traceback" not in own.log()


# Case 7


def test_a_context_longer_than_the_pool_is_refused_at_the_start(tiny_dir: Path) -> None:
    with ServerProcess(f"--model={tiny_dir}", "--num_blocks=9", "--max_model_len=512", *SMALL) as server:
        assert server.process.wait(60) == 2
        last = server.log().strip().splitlines()[-1]
        assert "512" in last and "128" in last and "Traceback" not in server.log()


def test_requests_at_the_limit_of_a_small_pool(tiny_dir: Path) -> None:
    with ServerProcess(f"--model={tiny_dir}", "--num_blocks=9", *SMALL) as server:
        server.wait_ready()
        assert server.client.get("/v1/models").json()["data"][0]["max_model_len"] == 128 < MAX_MODEL_LEN
        refused = server.post("completions", {"prompt": [5] * 300})
        assert refused.status_code == 400
        assert "300" in refused.json()["error"]["message"] and "127" in refused.json()["error"]["message"]
        assert server.complete([7] * 10, max_tokens=5)["usage"]["completion_tokens"] == 5
        answer = server.complete([5 + i for i in range(100)], max_tokens=200)
        assert (answer["choices"][0]["finish_reason"], answer["usage"]["completion_tokens"]) == ("length", 28)
        assert server.post("completions", {"prompt": [5] * 128, "max_tokens": 1}).status_code == 400
        answer = server.complete([5] * 127, max_tokens=2)
        assert (answer["choices"][0]["finish_reason"], answer["usage"]["completion_tokens"]) == ("length", 1)
        for i in range(8):
            server.complete([20 + i] * 16, max_tokens=1)
        assert server.complete([9] * 100, max_tokens=20)["usage"]["completion_tokens"] == 20
        assert server.metrics()["num_preemptions_total"] < 10
        server.wait_idle()
