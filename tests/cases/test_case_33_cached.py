"""Case 33 with prefix caching: the same prompts in the same company, on an empty cache and on one that has them."""

import itertools
from collections.abc import Iterator

import pytest

from paxpage import LLM, RequestOutput
from tests.cases.test_case_33 import PROMPTS
from tests.helpers.engines import Arrival, assert_idle, greedy_params, serve, steps_in_flight, tokens_alone
from tests.helpers.shelf import UNCACHED, Shelf

PARAMS = greedy_params(32)
INDICES = range(len(PROMPTS))
Round = dict[str, Arrival]  # by the index in PROMPTS, in order of arrival


def _at_once(indices: Iterator[int] | range | tuple[int, ...]) -> Round:
    return {str(index): Arrival(PROMPTS[index], PARAMS) for index in indices}


ARRANGEMENTS: dict[str, list[Round]] = {
    "alone": [_at_once((index,)) for index in INDICES],
    "together": [_at_once(INDICES)],
    "reversed": [_at_once(INDICES[::-1])],
    "pairs": [_at_once(pair) for pair in itertools.combinations(INDICES, 2)],
    "one step apart": [{str(index): Arrival(PROMPTS[index], PARAMS, at_step=index) for index in INDICES}],
}


@pytest.fixture(scope="module")
def expected(shelf: Shelf) -> list[list[int]]:
    """REF, which is transformers' greedy choice throughout: this prompt set meets no near-tie."""
    judge = shelf.tiny_judge()
    outputs = [tokens_alone(shelf.tiny(UNCACHED), prompt, PARAMS) for prompt in PROMPTS]
    for prompt, token_ids in zip(PROMPTS, outputs, strict=True):
        judge.check(prompt, token_ids)
    assert judge.num_differences == 0
    return outputs


def _serve(llm: LLM, rounds: list[Round], expected: list[list[int]]) -> dict[str, RequestOutput]:
    """The last output of each prompt, all having been compared."""
    outputs = {}
    for arrivals in rounds:
        served = serve(llm.engine, arrivals)
        assert served.keys() == arrivals.keys()
        for index, output in served.items():
            assert output.outputs[0].token_ids == expected[int(index)]
        outputs.update(served)
        assert_idle(llm.engine)
    return outputs


@pytest.mark.parametrize("num_in_flight", [0, 1])
@pytest.mark.parametrize("arrangement", ARRANGEMENTS)
def test_cold_and_cached(arrangement: str, num_in_flight: int, shelf: Shelf, expected: list[list[int]]) -> None:
    """The second time only the last token of each prompt is computed."""
    llm, rounds = shelf.tiny(), ARRANGEMENTS[arrangement]
    llm.reset_prefix_cache()
    with steps_in_flight(llm, num_in_flight):
        cold = _serve(llm, rounds, expected)
        cached = _serve(llm, rounds, expected)
    if arrangement != "pairs":  # in which each prompt comes six times
        assert [output.num_cached_tokens for output in cold.values()] == [0] * len(PROMPTS)
    assert {index: output.num_cached_tokens for index, output in cached.items()} == {
        str(index): len(PROMPTS[index]) - 1 for index in INDICES
    }


@pytest.mark.parametrize("num_in_flight", [0, 1])
def test_the_cache_of_one_arrangement_serves_the_others(
    num_in_flight: int, shelf: Shelf, expected: list[list[int]]
) -> None:
    llm = shelf.tiny()
    llm.reset_prefix_cache()
    with steps_in_flight(llm, num_in_flight):
        for rounds in ARRANGEMENTS.values():
            _serve(llm, rounds, expected)
