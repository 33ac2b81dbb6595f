"""A server in a process of its own, over a real socket."""

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

ROOT = Path(__file__).parents[2]
START_TIMEOUT_S = 180.0
GAUGES = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")


def free_port() -> int:
    """A port nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def wait_until(is_true: Callable[[], Any], timeout_s: float = 10.0, *, every_s: float = 0.02) -> Any:
    """Waits for a condition and returns its value; fails after timeout_s."""
    end_s = time.monotonic() + timeout_s
    while not (value := is_true()):
        assert time.monotonic() < end_s, f"not within {timeout_s} s"
        time.sleep(every_s)
    return value


class ServerProcess:
    """`python -m paxpage.serve` (or another command) on a free port, with its output in a file."""

    def __init__(
        self,
        *flags: str,
        command: Sequence[str] = ("-m", "paxpage.serve"),
        env: dict[str, str] | None = None,
        port: int | None = None,
    ):
        self.port = port or free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self._log = tempfile.NamedTemporaryFile("w+", suffix=".log")  # noqa: SIM115 - lives as long as the process
        self.process = subprocess.Popen(
            [sys.executable, *command, f"--port={self.port}", *flags],
            stdout=self._log,
            stderr=subprocess.STDOUT,
            cwd=ROOT,
            env={**os.environ, **(env or {})},
            process_group=0,  # of its own, to see what it leaves behind
        )
        self.client = httpx.Client(base_url=self.url, timeout=60)

    def __enter__(self) -> "ServerProcess":
        return self

    def __exit__(self, *exception: object) -> None:
        self.client.close()
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        self._log.close()

    def wait_ready(self) -> "ServerProcess":
        """Waits until /health is 200."""
        wait_until(self._is_ready, START_TIMEOUT_S, every_s=0.1)
        return self

    def _is_ready(self) -> bool:
        assert self.process.poll() is None, f"the server ended: {self.log()[-2000:]}"
        try:
            return self.client.get("/health").status_code == 200
        except httpx.ConnectError:
            return False

    def log(self) -> str:
        """What the process printed so far."""
        return Path(self._log.name).read_text(encoding="utf-8")

    def stop(self, number: int = signal.SIGTERM, timeout_s: float = 15.0) -> int:
        """Sends a signal and waits until the process has ended, with all that it started; the exit code."""
        self.process.send_signal(number)
        exit_code = self.process.wait(timeout_s)
        with pytest.raises(ProcessLookupError):
            os.killpg(self.process.pid, 0)
        return exit_code

    def metrics(self) -> dict[str, float]:
        """Name without prefix -> value, summed over labels; histograms give _sum and _count."""
        values: dict[str, float] = {}
        for family in text_string_to_metric_families(self.client.get("/metrics").text):
            for sample in family.samples:
                if sample.name.startswith(("paxpage:", "process_open_fds")) and not sample.name.endswith("_bucket"):
                    name = sample.name.removeprefix("paxpage:")
                    values[name] = values.get(name, 0.0) + sample.value
        return values

    def is_idle(self) -> bool:
        """Whether nothing runs, waits or holds a block."""
        values = self.metrics()
        return not any(values[name] for name in GAUGES)

    def wait_idle(self, timeout_s: float = 10.0) -> None:
        """Waits until is_idle."""
        wait_until(self.is_idle, timeout_s)

    def check_alive(self) -> None:
        """/health is 200 and a short request is answered."""
        assert self.client.get("/health").status_code == 200
        start_s = time.monotonic()
        assert len(self.complete([50, 51, 52], max_tokens=5)["choices"][0]["token_ids"]) == 5
        assert time.monotonic() - start_s < 10

    def post(self, path: str, body: Any) -> httpx.Response:
        """Posts JSON to /v1/path."""
        return self.client.post(f"/v1/{path}", json=body)

    def complete(self, prompt: Any, **fields: Any) -> dict[str, Any]:
        """A completion that must succeed: greedy, end of sequence ignored, with its token ids."""
        body = {"prompt": prompt, "temperature": 0, "ignore_eos": True, "return_token_ids": True, **fields}
        response = self.post("completions", body)
        assert response.status_code == 200, response.text
        return response.json()

    def stream(self, path: str, body: dict[str, Any]) -> Iterator[Any]:
        """The events of a stream, as JSON but for the last."""
        with self.client.stream("POST", f"/v1/{path}", json={**body, "stream": True}) as response:
            assert response.status_code == 200, response.read()
            for line in response.iter_lines():
                if line:
                    data = line.removeprefix("data: ")
                    yield data if data == "[DONE]" else json.loads(data)


class AbandonedRequest:
    """A request on a bare socket, to be left at any moment."""

    def __init__(
        self,
        server: ServerProcess,
        path: str,
        body: bytes,
        *,
        num_bytes: int | None = None,
        receive_bytes: int | None = None,
    ):
        """num_bytes: of the request that are sent, all if None. receive_bytes: of the answer that the kernel keeps."""
        self.socket = socket.socket()
        if receive_bytes is not None:
            self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
        self.socket.connect(("127.0.0.1", server.port))
        lines = (
            f"POST /v1/{path} HTTP/1.1",
            "Host: x",
            "Content-Type: application/json",
            f"Content-Length: {len(body)}",
        )
        self.socket.sendall(("\r\n".join((*lines, "", "")).encode() + body)[:num_bytes])

    def read_until(self, text: bytes) -> bytes:
        """Reads until text has come."""
        received = b""
        while text not in received:
            piece = self.socket.recv(65536)
            assert piece, received
            received += piece
        return received

    def leave(self) -> None:
        """Closes the connection."""
        self.socket.close()
