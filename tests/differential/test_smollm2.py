"""SmolLM2-135M, 30 layers of real weights, against transformers: 8 prompts of 64 greedy tokens."""

from collections.abc import Sequence

import pytest

from paxpage import LLM
from tests.helpers.engines import assert_idle, greedy_params, steps_in_flight, token_budget, tokens, tokens_alone
from tests.helpers.oracle import GreedyJudge
from tests.helpers.shelf import Shelf

NUM_TOKENS = 64
TEXTS = (
    "The capital of France is",
    "Once upon a time, in a land far away,",
    "def fibonacci(n):\n    ",
    "Water boils at 100 degrees Celsius at sea level, but on a mountain",
    "1, 2, 3, 5, 8, 13,",
    "Dear Sir or Madam,\n\nI am writing to",
    "The three most important things to remember when you bake bread at home for the first time are that the flour, "
    "the water and the yeast have to be weighed, that the dough has to rest, and",
    "Q: Why is the sky blue?\nA:",
)


@pytest.fixture(scope="module")
def llm(shelf: Shelf) -> LLM:
    return shelf.smol()


@pytest.fixture(scope="module")
def judge(shelf: Shelf) -> GreedyJudge:
    return shelf.smol_judge()


@pytest.fixture(scope="module")
def prompts(llm: LLM) -> list[list[int]]:
    return [llm.engine.tokenizer.encode(text) for text in TEXTS]


def _check(judge: GreedyJudge, prompts: Sequence[Sequence[int]], outputs: Sequence[Sequence[int]]) -> None:
    before = judge.num_differences
    for prompt, token_ids in zip(prompts, outputs, strict=True):
        assert len(token_ids) == NUM_TOKENS
        judge.check(prompt, token_ids)
    assert judge.num_differences - before <= 2, "too few comparisons reached their end to show anything"


def test_prompts_are_of_both_kinds(prompts: list[list[int]]) -> None:
    """Some fit one chunk of 16, some take several."""
    lengths = [len(prompt) for prompt in prompts]
    assert min(lengths) < 8 and max(lengths) > 32


@pytest.mark.parametrize("num_in_flight", [0, 1])
def test_eight_prompts_together(llm: LLM, judge: GreedyJudge, prompts: list[list[int]], num_in_flight: int) -> None:
    with steps_in_flight(llm, num_in_flight):
        _check(judge, prompts, tokens(llm, prompts, greedy_params(NUM_TOKENS)))
    assert_idle(llm.engine)


def test_in_chunks_of_16(llm: LLM, judge: GreedyJudge, prompts: list[list[int]]) -> None:
    with token_budget(llm, 16):
        _check(judge, prompts, tokens(llm, prompts, greedy_params(NUM_TOKENS)))


def test_a_long_prompt_alone(llm: LLM, judge: GreedyJudge, prompts: list[list[int]]) -> None:
    longest = max(prompts, key=len)
    _check(judge, [longest], [tokens_alone(llm, longest, greedy_params(NUM_TOKENS))])
