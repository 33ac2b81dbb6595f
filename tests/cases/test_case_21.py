"""Case 21: no temperature overflows, and extremes leave neighbours alone. After NVIDIA/TensorRT-LLM#15715."""

import dataclasses
import math
from typing import Any

import numpy as np
import pytest

from paxpage import LLM, CompletionOutput, SamplingParams
from tests.helpers.engines import assert_idle, complete
from tests.helpers.oracle import GAPS, judge_by, logits_of, near_ties
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


def _params_of(**options: Any) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=64, ignore_eos=True, **options)


ADJUSTED = {
    "bias": _params_of(logit_bias={7: -100.0}),
    "presence 2": _params_of(presence_penalty=2.0),
    "presence -2": _params_of(presence_penalty=-2.0),
    "frequency": _params_of(frequency_penalty=1.5),
    "repetition 1e-3": _params_of(repetition_penalty=1e-3),
    "repetition 1e3": _params_of(repetition_penalty=1e3),
    "all": _params_of(repetition_penalty=1.2, presence_penalty=0.5, frequency_penalty=0.5, logit_bias={9: 4.0}),
}


def _penalised(logits: np.ndarray, output: list[int], params: SamplingParams) -> np.ndarray:
    """One step's logits after bias, repetition, frequency and presence penalty, in float64."""
    out = logits.astype(np.float64)
    for token_id, value in (params.logit_bias or {}).items():
        out[token_id] = -np.inf if value == -100 else out[token_id] + value
    for token_id in {*PROMPT, *output}:
        out[token_id] = (np.multiply if out[token_id] < 0 else np.divide)(out[token_id], params.repetition_penalty)
    for token_id in set(output):
        out[token_id] -= params.presence_penalty + params.frequency_penalty * output.count(token_id)
    return out


@pytest.mark.parametrize("name", ADJUSTED)
def test_penalised_greedy_steps_match_the_reference(shelf: Shelf, name: str) -> None:
    """Step by step: a token is the best of the reference's logits once those are penalised."""
    params = ADJUSTED[name]
    token_ids = complete(shelf.tiny(), [PROMPT], params)[0].token_ids
    logits = logits_of(shelf.tiny_oracle, [*PROMPT, *token_ids])[len(PROMPT) - 1 : -1]
    rows = [_penalised(row, token_ids[:index], params) for index, row in enumerate(logits)]
    # A penalty of 1e-3 makes errors of the logits a thousand times larger, as it does the logits.
    gap = GAPS["float32"] / min(params.repetition_penalty, 1)
    assert not list(near_ties(token_ids, np.array(rows), gap)) or gap > GAPS["float32"]
    assert len(token_ids) == 64


def test_the_penalties_change_what_comes(shelf: Shelf) -> None:
    outputs = complete(shelf.tiny(), [PROMPT] * 8, [_params_of(), *ADJUSTED.values()])
    assert len({tuple(output.token_ids) for output in outputs}) >= 6


def test_penalised_neighbours_equal_their_solo_runs(llm: LLM) -> None:
    """Beside every temperature and a drawn request whose bias bans a token, which never comes."""
    banning = dataclasses.replace(NEIGHBOUR, logit_bias={7: -100.0}, max_tokens=64)
    everybody = [*ADJUSTED.values(), banning]
    together = complete(llm, [PROMPT] * 8, everybody)
    for params, output in zip(everybody, together, strict=True):
        (alone,) = complete(llm, [PROMPT], params)
        assert alone.token_ids == output.token_ids
    assert 7 not in together[-1].token_ids and 7 not in together[0].token_ids
    assert_idle(llm.engine)


def test_a_repetition_penalty_of_zero_is_refused() -> None:
    with pytest.raises(ValueError, match="repetition_penalty is 0"):
        SamplingParams(repetition_penalty=0)
