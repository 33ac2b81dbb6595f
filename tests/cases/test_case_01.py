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


@pytest.mark.parametrize("num_in_flight", [0, 1])
def test_three_rounds_leave_nothing_behind(shelf: Shelf, num_in_flight: int) -> None:
    llm = shelf.tiny(LIMITS)
    totals = []
    with steps_in_flight(llm, num_in_flight):
        for _ in range(3):
            outputs = _round(llm)
            assert_idle(llm.engine)
            stats = llm.engine.stats()
            totals.append((stats.num_blocks_free, stats.num_blocks_usable))
            for i, output in enumerate(outputs):
                lengths = [len(sample.token_ids) for sample in output.outputs]
                assert lengths == [1 + i % 9] * (3 if i % 4 == 3 else 1)
                assert {sample.finish_reason for sample in output.outputs} == {"length"}
    assert totals == [(64, 64)] * 3


def test_the_rounds_crowd_the_engine(shelf: Shelf) -> None:
    """Otherwise they would show little: many run at once, many wait, and blocks change hands all the time."""
    engine = shelf.tiny(LIMITS).engine
    for i, prompt in enumerate(PROMPTS):
        engine.add_request(str(i), prompt, _params(i))
    num_running, num_waiting = 0, 0
    while engine.has_unfinished_requests():
        engine.step()
        num_running = max(num_running, engine.stats().num_running)
        num_waiting = max(num_waiting, engine.stats().num_waiting)
    assert num_running >= 10 and num_waiting >= 200
    assert_idle(engine)


@pytest.mark.xfail(raises=ValueError, strict=True, reason="issue 4: prefix caching")
def test_with_prefix_caching(shelf: Shelf) -> None:
    with LLM(str(shelf.tiny_folder), enable_prefix_caching=True, num_blocks=65, show_progress=False) as llm:
        _round(llm)
        assert_idle(llm.engine)
