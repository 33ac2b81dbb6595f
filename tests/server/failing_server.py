"""Runs the server with an engine whose steps fail: python -m tests.server.failing_server HOW ONCE FOREVER [flags].

Step number ONCE raises, and all from step number FOREVER on, after the model runner was given the cache. HOW: launch,
an error of our own when the step is launched; or fetch, the device's want of memory when its tokens are read.
"""

import itertools
import sys
from typing import Any

import jax

from paxpage import serve
from paxpage.engine.model_runner import ModelRunner
from paxpage.server.signals import end_process

ERRORS = {
    "launch": RuntimeError("injected"),
    "fetch": jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 7 bytes, as injected"),
}


def fail_steps(how: str, once: int, forever: int) -> None:
    """Replaces the runner's launch or fetch."""
    original = getattr(ModelRunner, how)
    numbers = itertools.count()

    def work_or_fail(self: ModelRunner, *arguments: Any) -> Any:
        result = original(self, *arguments)
        number = next(numbers)
        if number == once or number >= forever:
            for array in jax.tree.leaves(self.cache):
                array.delete()  # as after a donation
            raise ERRORS[how]
        return result

    setattr(ModelRunner, how, work_or_fail)


if __name__ == "__main__":
    fail_steps(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
    end_process(serve.main([sys.argv[0], *sys.argv[4:]]))
