"""Case 39: nothing compiles after warm-up; a failed step is computed again. After sgl-project/sglang-jax#233."""

import itertools
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from paxpage import LLM, SamplingParams
from paxpage.engine.compilation import CompilationCounter
from paxpage.engine.engine import EngineDeadError
from tests.helpers.engines import assert_idle, greedy_params, ids, steps_in_flight, tokens
from tests.helpers.shelf import Limits, Shelf

SMALLEST = Limits(max_num_seqs=1, max_num_batched_tokens=16, max_model_len=64)
BUDGETS = (48, 317)  # tokens a step; 317 is no power of two
NUM_PROMPTS = 40


def _prompts() -> list[list[int]]:
    """Of length 1 to 200, drawn with a seed."""
    rng = np.random.default_rng(39)
    return [rng.integers(0, 512, size=length).tolist() for length in rng.integers(1, 201, size=NUM_PROMPTS)]


def _params(index: int, *, is_plain: bool) -> SamplingParams:
    max_tokens = 1 + (index * 7) % 40
    kinds: list[dict[str, Any]] = [
        {"temperature": 0.0},
        {"temperature": 0.9, "seed": index},
        {"temperature": 0.7, "top_k": 5, "top_p": 0.9, "min_p": 0.01},
        {"temperature": 0.0, "logprobs": 5},
        {"temperature": 1.0, "n": 2, "logprobs": 0},
        {"temperature": 0.0, "min_tokens": max_tokens, "stop_token_ids": [3, 4]},
        {"temperature": 0.0, "repetition_penalty": 1.2, "presence_penalty": 0.5, "logprobs": -1},
        {"temperature": 1.0, "n": 2, "logit_bias": {7: -100.0, 9: 3.0}, "bad_words": [[5], [6, 7]]},
        {"temperature": 0.0, "frequency_penalty": 0.5, "allowed_token_ids": list(range(40, 200))},
    ]
    options = kinds[0] if is_plain else kinds[index % len(kinds)]
    return SamplingParams(max_tokens=max_tokens, ignore_eos=True, **options)


def _generate_all(llm: LLM, *, is_plain: bool) -> None:
    """In batches of 1, 2, ... 7, 1, ..."""
    waiting = [(ids(prompt), _params(i, is_plain=is_plain)) for i, prompt in enumerate(_prompts())]
    sizes = itertools.cycle(range(1, 8))
    while waiting:
        size = next(sizes)
        batch, waiting = waiting[:size], waiting[size:]
        llm.generate([prompt for prompt, _ in batch], [params for _, params in batch], use_tqdm=False)
    assert_idle(llm.engine)


@pytest.fixture
def counter() -> Iterator[CompilationCounter]:
    counter = CompilationCounter()
    yield counter
    counter.close()


@pytest.fixture(params=BUDGETS)
def llm(request: pytest.FixtureRequest, shelf: Shelf) -> LLM:
    return shelf.tiny(Limits(max_num_batched_tokens=request.param, max_logprobs=-1))


@pytest.mark.parametrize("num_in_flight", [0, 1])
@pytest.mark.parametrize("is_plain", [True, False])
def test_nothing_compiles_after_warm_up(
    llm: LLM, counter: CompilationCounter, is_plain: bool, num_in_flight: int
) -> None:
    """Neither for plain requests nor for any option, in the first pass already."""
    with steps_in_flight(llm, num_in_flight):
        for _ in range(2):
            _generate_all(llm, is_plain=is_plain)
            assert counter.num_compilations == 0


def test_the_counter_sees_warm_up(shelf: Shelf, counter: CompilationCounter) -> None:
    """Two engines in one process, one after the other; the second compiles (or loads) its own steps."""
    for expected in range(1, 3):
        with shelf.fresh_tiny(SMALLEST) as llm:
            at_start = counter.num_compilations
            assert at_start >= expected
            shelf.tiny_judge().check(PROMPT, tokens(llm, [PROMPT], greedy_params(8))[0])
            assert counter.num_compilations == at_start


def test_no_step_stands_out(llm: LLM) -> None:
    """None takes over ten times the median of its shape (or, on a busy machine, a quarter of a second)."""
    engine = llm.engine
    for index, prompt in enumerate(_prompts()):
        engine.add_request(str(index), prompt, _params(index, is_plain=True))
    times_s: dict[bool, list[float]] = {True: [], False: []}
    while engine.has_unfinished_requests():
        start_s = time.monotonic()
        engine.step()
        is_decode = engine.stats().num_scheduled_tokens <= engine.scheduler.config.max_num_seqs
        times_s[is_decode].append(time.monotonic() - start_s)
    for group in times_s.values():
        assert len(group) > 10
        assert max(group) <= max(10 * float(np.median(group)), 0.25)


PROMPT = list(range(50, 70))


class FailingStep:
    """A compiled step that raises at its first calls, before or after it has consumed the cache."""

    def __init__(self, compiled: Any, num_failures: int, *, is_cache_consumed: bool) -> None:
        self.compiled = compiled
        self.num_failures = num_failures
        self.is_cache_consumed = is_cache_consumed

    def __call__(self, *arguments: Any) -> Any:
        if self.num_failures == 0:
            return self.compiled(*arguments)
        self.num_failures -= 1
        if self.is_cache_consumed:
            self.compiled(*arguments)
        raise RuntimeError("injected")


def _make_fail(llm: LLM, monkeypatch: pytest.MonkeyPatch, num_failures: int, *, is_cache_consumed: bool) -> None:
    """Replaces the compiled steps until the test ends: each fails so many times."""
    compiled = llm.engine.runner._compiled
    for shape in llm.engine.runner.shapes:
        failing = FailingStep(compiled[shape], num_failures, is_cache_consumed=is_cache_consumed)
        monkeypatch.setitem(compiled, shape, failing)


def _fail_decode(llm: LLM, monkeypatch: pytest.MonkeyPatch, *, is_cache_consumed: bool) -> None:
    """The first decode step fails."""
    compiled = llm.engine.runner._compiled
    shape = next(shape for shape in llm.engine.runner.shapes if shape.is_decode and shape.num_rows >= 3)
    monkeypatch.setitem(compiled, shape, FailingStep(compiled[shape], 1, is_cache_consumed=is_cache_consumed))


@pytest.mark.parametrize("num_in_flight", [0, 1])
@pytest.mark.parametrize("is_cache_consumed", [True, False])
def test_a_failed_step_is_computed_again(
    shelf: Shelf, monkeypatch: pytest.MonkeyPatch, is_cache_consumed: bool, num_in_flight: int
) -> None:
    """The donated cache is rebuilt; the requests in flight and those that come later get their tokens."""
    llm, judge = shelf.tiny(), shelf.tiny_judge()
    before = llm.engine.stats().num_failed_steps
    _fail_decode(llm, monkeypatch, is_cache_consumed=is_cache_consumed)
    prompts = [PROMPT, PROMPT[:7], list(range(100, 140))]
    with steps_in_flight(llm, num_in_flight):
        for _ in range(2):
            for prompt, token_ids in zip(prompts, tokens(llm, prompts, greedy_params(20)), strict=True):
                assert len(token_ids) == 20
                judge.check(prompt, token_ids)
            assert_idle(llm.engine)
    assert llm.engine.stats().num_failed_steps == before + 1


def test_an_engine_that_goes_on_failing_says_so(shelf: Shelf, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two failures in a row are its end: an error of its own, never one about a deleted array."""
    with shelf.fresh_tiny(SMALLEST) as llm:
        _make_fail(llm, monkeypatch, 10, is_cache_consumed=True)
        with pytest.raises(EngineDeadError, match="two steps in a row failed, the last with: injected"):
            tokens(llm, [PROMPT], greedy_params(5))
        assert_idle(llm.engine)
        monkeypatch.undo()
        later = "the engine is dead since two steps in a row failed, the last with: injected.*make another one"
        for _ in range(2):
            with pytest.raises(EngineDeadError, match=later):
                tokens(llm, [PROMPT], greedy_params(5))
            assert_idle(llm.engine)
