"""A step that fails once is made good; an engine that keeps failing says so and ends its process (case 39)."""

import threading
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.server.conftest import SMALL
from tests.server.process import ServerProcess, wait_until

COMMAND = ("-m", "tests.server.failing_server")
BODY = {"prompt": [60, 61, 62], "max_tokens": 200, "ignore_eos": True}


@pytest.mark.parametrize(("how", "flag"), [("launch", "--noasync_scheduling"), ("fetch", "--async_scheduling")])
def test_failing_steps(tiny_dir: Path, how: str, flag: str) -> None:
    """A step that cannot be launched; and one that runs out of the device's memory while the next is in flight."""
    command = (*COMMAND, how, "5", "50")
    with ServerProcess(f"--model={tiny_dir}", *SMALL, flag, command=command) as server:
        server.wait_ready()
        first = server.complete([60, 61, 62], max_tokens=16)["choices"][0]["token_ids"]
        assert "injected" in server.log() and ("failed: out of memory;" in server.log()) == (how == "fetch")
        assert server.complete([60, 61, 62], max_tokens=16)["choices"][0]["token_ids"] == first
        server.wait_idle()
        check_death(server)


def check_death(server: ServerProcess) -> None:
    """Every request is told, /health says so, the process ends."""
    whole: list[httpx.Response] = []
    asking = threading.Thread(target=lambda: whole.append(server.post("completions", BODY)))
    asking.start()
    *_, error, end = server.stream("completions", BODY)
    asking.join()
    assert (error["error"]["code"], end) == (500, "[DONE]")
    assert (whole[0].status_code, error_type(whole[0])) == (500, "InternalServerError")
    assert server.client.get("/health").status_code == 503
    late = server.post("completions", BODY)
    assert (late.status_code, error_type(late)) == (503, "ServiceUnavailableError")
    assert server.process.wait(15) == 1
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"{server.url}/health")


def test_a_program_that_cannot_be_compiled(tiny_dir: Path) -> None:
    """The server ends though no request asks for it, or for anything."""
    with ServerProcess(f"--model={tiny_dir}", *SMALL, command=("-m", "tests.server.failing_warm_up")) as server:
        server.wait_ready()
        wait_until(lambda: server.client.get("/health").status_code == 503, 60)
        assert server.process.wait(15) == 1
        assert "a program could not be compiled" in server.log() and "injected" in server.log()


def error_type(response: httpx.Response) -> Any:
    """The type of an error answer."""
    return response.json()["error"]["type"]
