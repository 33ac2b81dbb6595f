"""Guards against slow decay, for a machine without a GPU: host time, number of step shapes, compilations.

Kernels and temporaries of a compiled step: tests/gpu_code/test_deviceless.py.
"""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from paxpage import LLM, SamplingParams
from paxpage.engine.build import DEFAULT_LIMITS
from paxpage.engine.compilation import CompilationCounter
from paxpage.engine.model_runner import step_shapes
from tests.helpers.engines import greedy_params, ids, steps_in_flight
from tests.helpers.fixtures import shelf, unchecked_types
from tests.helpers.shelf import Shelf

__all__ = ["shelf", "unchecked_types"]

ROOT = Path(__file__).resolve().parents[1]
# Of the reference loop's time (tests/helpers/host_cost.py), 2026-11-30, two cores with other work; a change is a
# decision, not an accident.
USUAL = {"schedule": 1.7, "pack": 1.2, "update": 0.55}
ROOM = 3.0  # between two runs on a busy machine the ratios differ by a half
NUM_SHAPES = {"cpu": 5, "gpu": 20}  # each is half a second of a warm start, and seconds of a cold one


def host_cost(*arguments: str) -> dict[str, float]:
    """Each stage's time by the reference loop's."""
    command = [sys.executable, "-m", "tests.helpers.host_cost", *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True, timeout=120)
    return json.loads(done.stdout)


def too_slow(cost: dict[str, float]) -> list[str]:
    """Stages over their limit."""
    return [name for name, usual in USUAL.items() if cost[name] > ROOM * usual]


def test_the_host_takes_no_longer_than_it_did() -> None:
    cost = host_cost()
    if too_slow(cost):  # a moment in which the machine did something else
        cost = host_cost()
    assert too_slow(cost) == [], cost


@pytest.mark.parametrize("stage", list(USUAL))
def test_a_slow_down_is_noticed(stage: str) -> None:
    """The stage takes six times as long as it does."""
    assert stage in too_slow(host_cost(stage, "6"))


@pytest.mark.parametrize("platform", list(NUM_SHAPES))
def test_shapes_stay_few(platform: str) -> None:
    shapes = step_shapes(platform, *DEFAULT_LIMITS[platform], blocks_per_row=272)
    assert len(shapes) == len(set(shapes)) == NUM_SHAPES[platform], shapes


def num_compilations(llm: LLM) -> int:
    """While requests of many kinds and lengths run, one step after the other and a step ahead."""
    lengths = (1, 2, 5, 17, 24, 25, 60)
    sampled = SamplingParams(temperature=0.9, top_p=0.9, seed=3, n=2, max_tokens=6, logprobs=2, ignore_eos=True)
    each = [greedy_params(4), sampled, SamplingParams(temperature=1.0, min_p=0.1, max_tokens=5)]
    prompts = [ids(range(10 + length, 10 + 2 * length)) for length in lengths]
    counter = CompilationCounter()
    try:
        for is_ahead in (0, 1):
            with steps_in_flight(llm, is_ahead):
                for count in (1, 3, len(prompts)):
                    params = [each[index % len(each)] for index in range(count)]
                    llm.generate(prompts[:count] * 2, params * 2, use_tqdm=False)
        return counter.num_compilations
    finally:
        counter.close()


def test_nothing_compiles_after_the_warm_up(shelf: Shelf) -> None:
    assert num_compilations(shelf.tiny()) == 0


def test_a_compilation_is_noticed(shelf: Shelf, monkeypatch: pytest.MonkeyPatch) -> None:
    """A function of a step whose shape is the batch's own, not padded."""
    llm = shelf.tiny()
    launch: Callable = llm.engine.runner.launch

    def careless(batch, manager):  # type: ignore[no-untyped-def]
        jax.jit(lambda x: 3 * x + 17)(jnp.zeros(1000 + batch.num_tokens))
        return launch(batch, manager)

    monkeypatch.setattr(llm.engine.runner, "launch", careless)
    assert num_compilations(llm) > 0
