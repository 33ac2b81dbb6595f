"""Case 19: a seeded request keeps its seed whatever its neighbours do. After vllm-project/vllm#51226."""

from typing import Any

import pytest

from paxpage import LLM, SamplingParams
from tests.helpers.engines import Arrival, assert_idle, ids, serve, steps_in_flight
from tests.helpers.shelf import Limits, Shelf

PROMPT = list(range(50, 60))
OTHER_PROMPT = list(range(200, 217))
NUM_ROUNDS = 4


def _params(seed: int | None, *, n: int = 1, max_tokens: int = 16) -> SamplingParams:
    return SamplingParams(temperature=0.8, seed=seed, n=n, max_tokens=max_tokens, ignore_eos=True)


A = Arrival(PROMPT, _params(42))
UNSEEDED = Arrival(OTHER_PROMPT, _params(None))
COMPANY = {
    "unseeded": {"B": UNSEEDED},
    "seeded 7": {"B": Arrival(OTHER_PROMPT, _params(7))},
    "same prompt": {"B": Arrival(PROMPT, _params(None))},
    "seven unseeded": {f"B{i}": UNSEEDED for i in range(7)},
    "while others decode": {f"B{i}": Arrival(OTHER_PROMPT, _params(None, max_tokens=40)) for i in range(3)},
}


@pytest.fixture(scope="module")
def llm(shelf: Shelf) -> LLM:
    return shelf.tiny()


@pytest.fixture(scope="module")
def alone(llm: LLM) -> list[int]:
    return _tokens_of_a(llm, {"A": A})


def _tokens_of_a(llm: LLM, arrivals: dict[str, Arrival]) -> list[int]:
    token_ids = serve(llm.engine, arrivals)["A"].outputs[0].token_ids
    assert_idle(llm.engine)
    return token_ids


@pytest.mark.parametrize("num_in_flight", [0, 1])
@pytest.mark.parametrize("company", COMPANY)
def test_company_changes_nothing(llm: LLM, alone: list[int], company: str, num_in_flight: int) -> None:
    is_late = company == "while others decode"
    arrivals = {**COMPANY[company], "A": A._replace(at_step=10 if is_late else 0)}
    with steps_in_flight(llm, num_in_flight):
        for _ in range(NUM_ROUNDS):
            assert _tokens_of_a(llm, arrivals) == alone


def test_preemption_changes_nothing(shelf: Shelf, llm: LLM, alone: list[int]) -> None:
    """A is the newest, so the one to be preempted; it runs for longer, since admission keeps a block for each."""
    long_a = A._replace(params=_params(42, max_tokens=48))
    expected = _tokens_of_a(llm, {"A": long_a})
    assert expected[:16] == alone
    tight = shelf.tiny(Limits(max_num_batched_tokens=16, num_blocks=25, max_model_len=None))
    elders = {f"B{i}": Arrival([100 + i] * 40, _params(None, max_tokens=60)) for i in range(5)}
    for _ in range(NUM_ROUNDS):
        outputs = serve(tight.engine, {**elders, "A": long_a._replace(at_step=14)})
        assert outputs["A"].metrics.num_preemptions > 0, "the case shows nothing without preemption"
        assert outputs["A"].outputs[0].token_ids == expected
        assert_idle(tight.engine)


def test_without_a_seed_runs_differ(llm: LLM) -> None:
    runs = {tuple(serve(llm.engine, {"B": UNSEEDED})["B"].outputs[0].token_ids) for _ in range(NUM_ROUNDS)}
    assert len(runs) >= 2


def test_without_a_seed_neighbours_differ(llm: LLM) -> None:
    outputs = serve(llm.engine, {f"B{i}": UNSEEDED for i in range(4)})
    assert len({tuple(output.outputs[0].token_ids) for output in outputs.values()}) >= 2


@pytest.mark.parametrize("seed", [0, -1, 2**31, 2**32, 2**63 - 1, -(2**63)])
def test_every_int64_is_a_seed_of_its_own(llm: LLM, alone: list[int], seed: int) -> None:
    runs = [serve(llm.engine, {"A": Arrival(PROMPT, _params(seed))})["A"].outputs[0].token_ids for _ in range(2)]
    assert runs[0] == runs[1] != alone


def test_both_words_of_a_seed_count(llm: LLM) -> None:
    """Seeds that agree in their low or in their high 32 bits are different seeds."""
    seeds = (5, 5 + 2**32, 6 + 2**32)
    outputs = serve(llm.engine, {str(seed): Arrival(PROMPT, _params(seed)) for seed in seeds})
    assert len({tuple(output.outputs[0].token_ids) for output in outputs.values()}) == 3


@pytest.mark.parametrize("seed", [2**63, -(2**63) - 1, "7", 1.5, True])
def test_other_seeds_are_refused_by_name(seed: Any) -> None:
    with pytest.raises(ValueError, match=r"seed is .*; allowed: an integer"):
        _params(seed)


def test_three_choices_differ_and_repeat(llm: LLM, alone: list[int]) -> None:
    """Choice i has seed 42 + i, so the first is A alone."""
    sets = []
    for _ in range(2):
        (output,) = llm.generate([ids(PROMPT)], _params(42, n=3), use_tqdm=False)
        assert [sample.index for sample in output.outputs] == [0, 1, 2]
        sets.append([sample.token_ids for sample in output.outputs])
    assert sets[0] == sets[1]
    assert len({tuple(token_ids) for token_ids in sets[0]}) == 3
    assert sets[0][0] == alone
