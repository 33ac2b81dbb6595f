"""Runs the server with a program that cannot be compiled: python -m tests.server.failing_warm_up [flags]."""

import sys
import time
from typing import Any

from paxpage import serve
from paxpage.engine.model_runner import ModelRunner
from paxpage.server.signals import end_process


def fail_behind_the_start() -> None:
    """Replaces what compiles one of the programs that a server does not wait for."""

    def fail(self: ModelRunner, shape: Any) -> Any:
        time.sleep(2)  # until the server is ready
        raise RuntimeError("injected")

    ModelRunner._compile_score = fail  # type: ignore[method-assign]


if __name__ == "__main__":
    fail_behind_the_start()
    end_process(serve.main(sys.argv))
