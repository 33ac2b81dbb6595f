"""Runs the server with an engine whose steps fail: python -m tests.server.failing_server ONCE FOREVER [flags].

Step number ONCE raises, and all from step number FOREVER on, after the model runner was given the cache.
"""

import itertools
import sys
from typing import Any

import jax

from paxpage import serve
from paxpage.engine.model_runner import ModelRunner
from paxpage.server.signals import end_process


def fail_steps(once: int, forever: int) -> None:
    """Replaces the runner's step."""
    launch = ModelRunner.launch
    numbers = itertools.count()

    def launch_or_fail(self: ModelRunner, *arguments: Any) -> Any:
        launched = launch(self, *arguments)
        number = next(numbers)
        if number == once or number >= forever:
            for array in jax.tree.leaves(self.cache):
                array.delete()  # as after a donation
            raise RuntimeError("injected")
        return launched

    ModelRunner.launch = launch_or_fail  # type: ignore[method-assign]


if __name__ == "__main__":
    fail_steps(int(sys.argv[1]), int(sys.argv[2]))
    end_process(serve.main([sys.argv[0], *sys.argv[3:]]))
