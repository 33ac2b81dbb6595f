"""Case 19: a seeded request keeps its seed whatever its neighbours do. After vllm-project/vllm#51226."""

from typing import Any

import pytest

from paxpage import LLM, SamplingParams
from tests.helpers.engines import Arrival, assert_idle, ids, serve, steps_in_flight, tokens_alone
from tests.helpers.shelf import UNCACHED, Limits, Shelf

PROMPT = list(range(50, 60))
OTHER_PROMPT = list(range(200, 217))
NUM_ROUNDS = 4
IN_FLIGHT = pytest.mark.parametrize("num_in_flight", [0, 1])
TIGHT = Limits(max_num_batched_tokens=16, num_blocks=25, max_model_len=None)


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
ELDERS = {f"B{i}": Arrival([100 + i] * 40, _params(None, max_tokens=60)) for i in range(5)}  # fill a tight pool


@pytest.fixture(scope="module")
def llm(shelf: Shelf) -> LLM:
    return shelf.tiny()


@pytest.fixture(scope="module")
def alone(shelf: Shelf) -> list[int]:
    """REF of A, without prefix caching; the other runs are with it."""
    return tokens_alone(shelf.tiny(UNCACHED), PROMPT, _params(42))


def _tokens_of_a(llm: LLM, arrivals: dict[str, Arrival]) -> list[int]:
    token_ids = serve(llm.engine, arrivals)["A"].outputs[0].token_ids
    assert_idle(llm.engine)
    return token_ids


@IN_FLIGHT
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
    tight = shelf.tiny(TIGHT)
    for _ in range(NUM_ROUNDS):
        outputs = serve(tight.engine, {**ELDERS, "A": long_a._replace(at_step=14)})
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


def _choices(llm: LLM, prompt: list[int], params: SamplingParams) -> list[list[int]]:
    (output,) = llm.generate([ids(prompt)], params, use_tqdm=False)
    assert_idle(llm.engine)
    return [sample.token_ids for sample in output.outputs]


@IN_FLIGHT
@pytest.mark.parametrize("length", [1, 10, 16, 40])
def test_three_choices_are_three_requests(shelf: Shelf, llm: LLM, length: int, num_in_flight: int) -> None:
    """Cold and cached, forked with prefix caching and without: always the tokens of seeds 42, 43 and 44 alone."""
    prompt = list(range(50, 50 + length))
    expected = [tokens_alone(shelf.tiny(UNCACHED), prompt, _params(42 + index)) for index in range(3)]
    llm.reset_prefix_cache()
    for each in (llm, llm, shelf.tiny(UNCACHED)):
        with steps_in_flight(each, num_in_flight):
            assert _choices(each, prompt, _params(42, n=3)) == expected


@IN_FLIGHT
def test_three_choices_in_company(shelf: Shelf, llm: LLM, num_in_flight: int) -> None:
    """Of other choices of the same prompt, seeded and not; more than there are rows, so some fork and others wait."""
    expected = _choices(shelf.tiny(UNCACHED), PROMPT, _params(42, n=3))
    arrivals = {
        "B": Arrival(OTHER_PROMPT, _params(None, n=3)),
        "C": Arrival(PROMPT, _params(None, n=3)),
        "A": Arrival(PROMPT, _params(42, n=3)),
        "D": Arrival(PROMPT, _params(7, n=2), at_step=2),
    }
    with steps_in_flight(llm, num_in_flight):
        for _ in range(NUM_ROUNDS):
            output = serve(llm.engine, arrivals)["A"]
            assert [sample.token_ids for sample in output.outputs] == expected
            assert_idle(llm.engine)


@IN_FLIGHT
def test_three_choices_preempted(shelf: Shelf, num_in_flight: int) -> None:
    params = _params(42, n=3, max_tokens=48)
    expected = _choices(shelf.tiny(UNCACHED), PROMPT, params)
    tight = shelf.tiny(TIGHT)
    with steps_in_flight(tight, num_in_flight):
        for _ in range(NUM_ROUNDS):
            output = serve(tight.engine, {**ELDERS, "A": Arrival(PROMPT, params, at_step=14)})["A"]
            assert output.metrics.num_preemptions > 0, "the case shows nothing without preemption"
            assert [sample.token_ids for sample in output.outputs] == expected
            assert_idle(tight.engine)


@pytest.mark.parametrize("has_prefix_cache", [True, False])
def test_three_choices_share_the_prompts_blocks(shelf: Shelf, has_prefix_cache: bool) -> None:
    """40 tokens are computed once, into three blocks; the last, half full, is copied by those who come to write in it.

    The first choice goes on in the block itself, so three choices of 41 tokens have five blocks and not nine.
    """
    llm = shelf.tiny(UNCACHED._replace(has_prefix_cache=has_prefix_cache))
    llm.reset_prefix_cache()
    engine, num_usable = llm.engine, llm.engine.stats().num_blocks_usable
    engine.add_request("A", list(range(50, 90)), _params(42, n=3))
    with steps_in_flight(llm, 0):
        engine.step()
        first, second, third = engine.block_ids("A")
        assert first == second == third and len(first) == 3
        assert engine.stats().num_scheduled_tokens == 40
        assert engine.stats().num_blocks_free == num_usable - 3
        engine.step()
        after = engine.block_ids("A")
        assert after[0] == first
        assert [table[:2] for table in after] == [first[:2]] * 3
        assert len({table[2] for table in after}) == 3
        assert engine.stats().num_scheduled_tokens == 3
        assert engine.stats().num_blocks_free == num_usable - 5
        while engine.has_unfinished_requests():
            engine.step()
    assert_idle(engine)


@pytest.mark.parametrize("has_prefix_cache", [True, False])
def test_three_choices_of_whole_blocks_copy_nothing(shelf: Shelf, has_prefix_cache: bool) -> None:
    llm = shelf.tiny(UNCACHED._replace(has_prefix_cache=has_prefix_cache))
    llm.reset_prefix_cache()
    engine, num_usable = llm.engine, llm.engine.stats().num_blocks_usable
    engine.add_request("A", list(range(50, 82)), _params(42, n=3))
    with steps_in_flight(llm, 0):
        engine.step()
        assert engine.stats().num_blocks_free == num_usable - 2
        engine.step()
        first, second, third = engine.block_ids("A")
        assert first[:2] == second[:2] == third[:2]
        assert len({first[2], second[2], third[2]}) == 3
        assert engine.stats().num_blocks_free == num_usable - 5
    engine.abort(["A"])
    assert_idle(engine)
