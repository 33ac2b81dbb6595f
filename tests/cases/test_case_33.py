"""Case 33: a request's tokens are the same in any company. After sgl-project/sglang-jax#20.

Prefix caching is off, so that every arrangement computes its prompts; test_case_33_cached.py has it on.
"""

import itertools
from collections.abc import Callable, Iterator

import pytest

from paxpage import LLM
from tests.helpers.engines import Arrival, assert_idle, greedy_params, serve, steps_in_flight, tokens, tokens_alone
from tests.helpers.oracle import GreedyJudge
from tests.helpers.shelf import UNCACHED, Limits, Shelf

LENGTHS = (1, 15, 16, 17, 33, 64, 65)
PROMPTS = [[50 + (13 * i + 7 * j) % 400 for j in range(length)] for i, length in enumerate(LENGTHS)]
NUM_TOKENS = 32
Outputs = Iterator[tuple[int, list[int]]]  # (index in PROMPTS, token ids)


def _alone(llm: LLM) -> Outputs:
    for index, prompt in enumerate(PROMPTS):
        yield index, tokens_alone(llm, prompt, greedy_params(NUM_TOKENS))


def _together(llm: LLM) -> Outputs:
    yield from enumerate(tokens(llm, PROMPTS, greedy_params(NUM_TOKENS)))


def _reversed(llm: LLM) -> Outputs:
    indices = range(len(PROMPTS))[::-1]
    yield from zip(indices, tokens(llm, PROMPTS[::-1], greedy_params(NUM_TOKENS)), strict=True)


def _pairs(llm: LLM) -> Outputs:
    for pair in itertools.combinations(range(len(PROMPTS)), 2):
        prompts = [PROMPTS[index] for index in pair]
        yield from zip(pair, tokens(llm, prompts, greedy_params(NUM_TOKENS)), strict=True)


def _one_step_apart(llm: LLM) -> Outputs:
    params = greedy_params(NUM_TOKENS)
    arrivals = {str(index): Arrival(prompt, params, at_step=index) for index, prompt in enumerate(PROMPTS)}
    for request_id, output in serve(llm.engine, arrivals).items():
        yield int(request_id), output.outputs[0].token_ids


ARRANGEMENTS = [_alone, _together, _reversed, _pairs, _one_step_apart]


def _check(arrangement: Callable[[LLM], Outputs], llm: LLM, judge: GreedyJudge) -> list[tuple[int, list[int]]]:
    """Every output against transformers in float32, by the judge's gap."""
    outputs = list(arrangement(llm))
    assert {index for index, _ in outputs} == set(range(len(PROMPTS)))
    for index, token_ids in outputs:
        assert len(token_ids) == NUM_TOKENS
        judge.check(PROMPTS[index], token_ids)
    assert_idle(llm.engine)
    return outputs


@pytest.fixture(scope="module")
def expected(shelf: Shelf) -> dict[int, list[int]]:
    return dict(_alone(shelf.tiny(UNCACHED)))


@pytest.mark.parametrize("num_in_flight", [0, 1])
@pytest.mark.parametrize("arrangement", ARRANGEMENTS)
def test_tiny_in_float32(
    arrangement: Callable[[LLM], Outputs], num_in_flight: int, shelf: Shelf, expected: dict[int, list[int]]
) -> None:
    """Equal to transformers, and so to one another; this prompt set meets no near-tie."""
    llm, judge = shelf.tiny(UNCACHED), shelf.tiny_judge()
    with steps_in_flight(llm, num_in_flight):
        outputs = _check(arrangement, llm, judge)
    assert judge.num_differences == 0
    assert all(token_ids == expected[index] for index, token_ids in outputs)


@pytest.fixture(scope="module")
def smol_judge(shelf: Shelf) -> GreedyJudge:
    return shelf.smol_judge("bfloat16", to_the_end=True)


@pytest.mark.parametrize("arrangement", ARRANGEMENTS)
def test_smol_in_bfloat16(arrangement: Callable[[LLM], Outputs], shelf: Shelf, smol_judge: GreedyJudge) -> None:
    """Against the float32 reference, every token within 0.25 of its best, also after a first difference.

    Some prompts meet a near-tie within three tokens: up to there the comparison would show little.
    """
    llm = shelf.smol(Limits(7, 64, max_model_len=128, dtype="bfloat16", has_prefix_cache=False))
    _check(arrangement, llm, smol_judge)
