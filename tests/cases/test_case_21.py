"""Case 21: no temperature overflows, and extremes leave neighbours alone. After NVIDIA/TensorRT-LLM#15715."""

import math
from typing import Any

import pytest

from paxpage import LLM, CompletionOutput, SamplingParams
from tests.helpers.engines import assert_idle, complete
from tests.helpers.oracle import judge_by
from tests.helpers.shelf import ROOMY, Shelf

PROMPT = list(range(50, 70))
TEMPERATURES = (0.0, 1e-12, 1e-8, 1e-4, 1e-2)
NEIGHBOUR = SamplingParams(temperature=1.0, seed=3, max_tokens=16, ignore_eos=True, logprobs=2)


def _params(temperature: float) -> SamplingParams:
    return SamplingParams(temperature=temperature, seed=11, max_tokens=16, ignore_eos=True, logprobs=2)


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def llm(request: pytest.FixtureRequest, shelf: Shelf) -> LLM:
    return shelf.tiny(ROOMY._replace(dtype=request.param))


@pytest.fixture(scope="module")
def batch(llm: LLM) -> list[CompletionOutput]:
    """Every temperature and the neighbour in one batch."""
    return complete(llm, [PROMPT] * 6, [*map(_params, TEMPERATURES), NEIGHBOUR])


def test_tiny_temperatures_are_greedy(batch: list[CompletionOutput]) -> None:
    greedy = batch[0].token_ids
    assert len(set(greedy)) >= 3  # no run of one token, token 0 least of all
    assert batch[1].token_ids == batch[2].token_ids == greedy


def test_small_temperatures_stay_close_to_greedy(shelf: Shelf, llm: LLM, batch: list[CompletionOutput]) -> None:
    """At 1e-4 only a token within a hundredth of the best can be drawn (within 0.25 for bfloat16's own rounding)."""
    gap = 0.01 if str(llm.engine.runner.cache.k.dtype) == "float32" else 0.25
    judge_by(shelf.tiny_oracle, gap).check(PROMPT, batch[3].token_ids)


def test_nothing_is_nan(batch: list[CompletionOutput]) -> None:
    for output in batch:
        assert len(output.token_ids) == 16
        values = [entry.logprob for entries in output.logprobs for entry in entries.values()]
        assert all(math.isfinite(value) and value <= 0 for value in values)


def test_neighbours_equal_their_solo_runs(llm: LLM, batch: list[CompletionOutput]) -> None:
    for params, output in zip([*map(_params, TEMPERATURES), NEIGHBOUR], batch, strict=True):
        (alone,) = complete(llm, [PROMPT], params)
        assert alone.token_ids == output.token_ids
    assert_idle(llm.engine)


@pytest.mark.parametrize("temperature", [-0.1, math.nan, math.inf, "hot", 1e9])
def test_bad_temperatures_are_refused_by_name(temperature: Any) -> None:
    with pytest.raises(ValueError, match=r"temperature is .*; allowed: a finite number from 0 to 1e6"):
        SamplingParams(temperature=temperature)


@pytest.mark.xfail(raises=TypeError, strict=True, reason="issue 8: logit_bias")
def test_a_banned_token_never_comes(shelf: Shelf) -> None:
    params = SamplingParams(temperature=1.0, max_tokens=16, ignore_eos=True, logit_bias={7: -100.0})
    assert 7 not in complete(shelf.tiny(), [PROMPT], params)[0].token_ids


@pytest.mark.parametrize(("field", "value"), [("presence_penalty", -2.0), ("presence_penalty", 2.0)])
@pytest.mark.xfail(raises=TypeError, strict=True, reason="issue 8: penalties")
def test_presence_penalty(shelf: Shelf, field: str, value: float) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True, **{field: value})
    assert len(complete(shelf.tiny(), [PROMPT], params)[0].token_ids) == 16


@pytest.mark.parametrize("value", [1e-3, 1e3])
@pytest.mark.xfail(raises=TypeError, strict=True, reason="issue 8: penalties")
def test_repetition_penalty(shelf: Shelf, value: float) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True, repetition_penalty=value)
    assert len(complete(shelf.tiny(), [PROMPT], params)[0].token_ids) == 16


@pytest.mark.xfail(raises=TypeError, strict=True, reason="issue 8: penalties")
def test_a_repetition_penalty_of_zero_is_refused() -> None:
    with pytest.raises(ValueError, match="repetition_penalty is 0"):
        SamplingParams(repetition_penalty=0)
