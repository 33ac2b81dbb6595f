"""Case 1: under many parallel requests every cache slot comes back. After sgl-project/sglang#11970."""

import pytest

from paxpage import LLM, RequestOutput, SamplingParams
from tests.helpers.engines import assert_idle, ids, steps_in_flight
from tests.helpers.shelf import Limits, Shelf

LIMITS = Limits(max_num_seqs=16, max_num_batched_tokens=64, num_blocks=65)
NUM_REQUESTS = 256
PROMPTS = [[1 + i % 7] * (3 + (5 * i) % 60) for i in range(NUM_REQUESTS)]


def _params(i: int) -> SamplingParams:
    is_sampled = i % 4 == 3
    return SamplingParams(
        temperature=1.0 if is_sampled else 0.0, n=3 if is_sampled else 1, max_tokens=1 + i % 9, ignore_eos=True
    )


def _round(llm: LLM) -> list[RequestOutput]:
    return llm.generate([ids(prompt) for prompt in PROMPTS], [_params(i) for i in range(NUM_REQUESTS)], use_tqdm=False)


def _check(outputs: list[RequestOutput], shelf: Shelf) -> None:
    """Exactly max_tokens tokens for every choice; greedy ones are transformers'."""
    judge = shelf.tiny_judge()
    for i, output in enumerate(outputs):
        lengths = [len(sample.token_ids) for sample in output.outputs]
        assert lengths == [1 + i % 9] * (3 if i % 4 == 3 else 1)
        assert {sample.finish_reason for sample in output.outputs} == {"length"}
        assert 0 <= output.num_cached_tokens < len(PROMPTS[i])
        if i % 4 != 3:
            judge.check(PROMPTS[i], output.outputs[0].token_ids)


@pytest.mark.parametrize("num_in_flight", [0, 1])
@pytest.mark.parametrize("has_prefix_cache", [True, False])
def test_three_rounds_leave_nothing_behind(shelf: Shelf, has_prefix_cache: bool, num_in_flight: int) -> None:
    llm = shelf.tiny(LIMITS._replace(has_prefix_cache=has_prefix_cache))
    llm.reset_prefix_cache()
    totals, num_hits = [], llm.engine.stats().num_prefix_hits
    with steps_in_flight(llm, num_in_flight):
        for _ in range(3):
            outputs = _round(llm)
            assert_idle(llm.engine)
            stats = llm.engine.stats()
            totals.append((stats.num_blocks_free, stats.num_blocks_usable))
            num_cached = sum(output.num_cached_tokens for output in outputs)
            assert (num_cached > 0) == has_prefix_cache
            # A choice that does not fork from the first looks for itself, and is counted then.
            assert stats.num_prefix_hits - num_hits >= num_cached
            num_hits = stats.num_prefix_hits
            _check(outputs, shelf)
    assert totals == [(64, 64)] * 3
    llm.reset_prefix_cache()
    assert llm.engine.stats().num_blocks_cached == 0
    assert_idle(llm.engine)


def test_the_rounds_crowd_the_engine(shelf: Shelf) -> None:
    """Otherwise they would show little: many run and wait at once, share blocks, and evict others' cached ones."""
    engine = shelf.tiny(LIMITS).engine
    engine.reset_prefix_cache()
    for i, prompt in enumerate(PROMPTS):
        engine.add_request(str(i), prompt, _params(i))
    num_running, num_waiting, num_shared, num_cached = 0, 0, 0, 0
    while engine.has_unfinished_requests():
        engine.step()
        stats, pool = engine.stats(), engine._manager.pool
        pool.check()
        num_running, num_waiting = max(num_running, stats.num_running), max(num_waiting, stats.num_waiting)
        num_shared = max(num_shared, sum(pool.ref_count(block_id) > 1 for block_id in range(pool.num_blocks)))
        num_cached = max(num_cached, stats.num_blocks_cached)
    assert num_running >= 10 and num_waiting >= 200
    assert num_shared >= 3 and num_cached >= 20
    assert_idle(engine)
