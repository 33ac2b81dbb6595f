"""When steps are scheduled before the tokens of the last two have come, and that nobody can tell by the tokens."""

import dataclasses

import pytest

from paxpage import LLM, SamplingParams
from paxpage.engine.scheduler import FEW_ROWS
from tests.helpers.engines import assert_idle, greedy_params, ids, steps_in_flight, tokens
from tests.helpers.fixtures import shelf
from tests.helpers.shelf import Limits, Shelf

__all__ = ["shelf"]

GREEDY = greedy_params(20)
SEEDED = SamplingParams(temperature=0.8, seed=3, max_tokens=20, ignore_eos=True, logprobs=2)
PENALISED = dataclasses.replace(GREEDY, presence_penalty=0.5)
MANY = Limits(max_num_seqs=FEW_ROWS + 1)


def most_in_flight(llm: LLM, prompts: list[list[int]], params: SamplingParams, monkeypatch: pytest.MonkeyPatch) -> int:
    """Steps that are on their way at once, at the most, while the prompts are completed."""
    engine, seen = llm.engine, []
    run = type(engine).step
    monkeypatch.setattr(engine, "step", lambda: (run(engine), seen.append(len(engine._in_flight)))[0])
    outputs = llm.generate([ids(prompt) for prompt in prompts], params, use_tqdm=False)
    monkeypatch.undo()
    assert all(len(output.outputs[0].token_ids) == params.max_tokens for output in outputs)
    assert_idle(engine)
    return max(seen)


@pytest.mark.parametrize("params", [GREEDY, SEEDED], ids=["greedy", "seeded"])
@pytest.mark.parametrize("num_prompts", [1, FEW_ROWS])
def test_few_rows_run_ahead_offline(
    shelf: Shelf, monkeypatch: pytest.MonkeyPatch, num_prompts: int, params: SamplingParams
) -> None:
    llm, prompts = shelf.tiny(MANY), [[index, 5, 6] for index in range(num_prompts)]
    with steps_in_flight(llm, 1):
        assert most_in_flight(llm, prompts, params, monkeypatch) == 2
    with steps_in_flight(llm, 0):
        assert most_in_flight(llm, prompts, params, monkeypatch) == 0


def test_many_rows_and_what_the_host_has_a_part_in_do_not(shelf: Shelf, monkeypatch: pytest.MonkeyPatch) -> None:
    llm = shelf.tiny(MANY)
    with steps_in_flight(llm, 1):
        assert most_in_flight(llm, [[index, 5] for index in range(FEW_ROWS + 1)], GREEDY, monkeypatch) == 1
        assert most_in_flight(llm, [[1, 5]], PENALISED, monkeypatch) == 1


def test_a_server_does_not(shelf: Shelf, monkeypatch: pytest.MonkeyPatch) -> None:
    """A new request would wait for one step more."""
    llm = shelf.tiny(MANY)
    scheduler = llm.engine.scheduler
    of_a_server = dataclasses.replace(scheduler.config, num_tokens_beside_decodes=64)
    monkeypatch.setattr(scheduler, "config", of_a_server)
    with steps_in_flight(llm, 1), pytest.MonkeyPatch.context() as patch:
        assert most_in_flight(llm, [[1, 5]], GREEDY, patch) == 1


def test_nobody_is_preempted_ahead(shelf: Shelf, monkeypatch: pytest.MonkeyPatch) -> None:
    """Too few blocks for all: what is computed again gets the tokens that it gets alone."""
    llm = shelf.tiny(Limits(num_blocks=9, max_model_len=None))  # 8 usable blocks of 16 tokens
    prompts, params = [[index, 7, 8, 9] for index in range(4)], greedy_params(60)
    alone = [llm.generate([ids(prompt)], params, use_tqdm=False)[0].outputs[0].token_ids for prompt in prompts]
    before = llm.engine.stats().num_preemptions
    with steps_in_flight(llm, 1):
        outputs = llm.generate([ids(prompt) for prompt in prompts], params, use_tqdm=False)
    assert [output.outputs[0].token_ids for output in outputs] == alone
    assert llm.engine.stats().num_preemptions > before
    assert_idle(llm.engine)


def test_a_new_request_ends_it(shelf: Shelf) -> None:
    """Steps in flight are taken in down to the usual one before it is scheduled."""
    llm = shelf.tiny(MANY)
    engine = llm.engine
    with steps_in_flight(llm, 1):
        engine.add_request("a", ids([1, 5]), GREEDY)
        while len(engine._in_flight) < 2:
            engine.step()
        engine.add_request("b", ids([2, 5]), GREEDY)
        deltas = engine.step()
        assert len(engine._in_flight) == 1 and len(deltas) == 2
        while engine.has_unfinished_requests():
            engine.step()
    assert_idle(engine)


def test_a_full_block_of_one_that_ends_by_length_is_found(shelf: Shelf) -> None:
    """The host knows all its tokens but the last when its blocks go back."""
    llm = shelf.tiny(MANY)
    llm.reset_prefix_cache()
    with steps_in_flight(llm, 1):
        out = tokens(llm, [[5]], greedy_params(16))[0]
    assert [report.verdict for report in llm.explain_cache(ids([5, *out]))] == ["hit"]
