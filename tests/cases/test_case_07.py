"""Case 7: what can never fit is refused with the numbers, and holds nobody up. After vllm-project/vllm#39734."""

import time

import pytest

from paxpage import LLM
from tests.helpers.engines import Arrival, assert_idle, greedy_params, ids, serve, steps_in_flight, tokens
from tests.helpers.shelf import Limits, Shelf

USABLE_TOKENS = 128
LIMITS = Limits(max_num_batched_tokens=64, num_blocks=9, max_model_len=None)
IN_FLIGHT = pytest.mark.parametrize("num_in_flight", [0, 1])


@pytest.fixture
def llm(shelf: Shelf) -> LLM:
    """8 usable blocks; max_model_len is what they hold."""
    llm = shelf.tiny(LIMITS)
    assert llm.engine.max_model_len == USABLE_TOKENS
    return llm


def test_a_context_longer_than_the_pool_stops_the_start(shelf: Shelf) -> None:
    with pytest.raises(ValueError, match=r"max_model_len is 512; allowed: at most 128: 8 usable blocks of 16 tokens"):
        LLM(str(shelf.tiny_folder), num_blocks=9, max_model_len=512, show_progress=False)


def test_a_prompt_too_long_is_refused_and_the_next_request_runs(llm: LLM) -> None:
    start_s = time.monotonic()
    with pytest.raises(ValueError, match=r"prompt length is 300; allowed: at most 127 tokens \(max_model_len 128"):
        llm.engine.add_request("A", list(range(100, 400)), greedy_params(16))
    outputs = serve(llm.engine, {"B": Arrival(range(50, 60), greedy_params(5))})
    assert len(outputs["B"].outputs[0].token_ids) == 5
    assert time.monotonic() - start_s < 5
    assert_idle(llm.engine)


@pytest.mark.parametrize(("num_prompt", "max_tokens", "num_out"), [(100, 200, 28), (127, 2, 1), (126, 2, 2)])
def test_a_request_ends_where_the_context_does(llm: LLM, num_prompt: int, max_tokens: int, num_out: int) -> None:
    prompt = list(range(100, 100 + num_prompt))
    output = serve(llm.engine, {"C": Arrival(prompt, greedy_params(max_tokens))})["C"]
    assert len(output.outputs[0].token_ids) == num_out
    assert output.outputs[0].finish_reason == "length"
    assert output.metrics.num_preemptions == 0
    assert_idle(llm.engine)


def test_a_prompt_that_leaves_no_room_is_refused(llm: LLM) -> None:
    with pytest.raises(ValueError, match="prompt length is 128; allowed: at most 127"):
        llm.engine.add_request("D", list(range(100, 228)), greedy_params(1))
    assert_idle(llm.engine)


def test_two_that_fit_only_one_at_a_time_both_end(llm: LLM, shelf: Shelf) -> None:
    prompts = [list(range(100, 190)), list(range(200, 290))]
    judge = shelf.tiny_judge()
    before = llm.engine.stats().num_preemptions
    for prompt, token_ids in zip(prompts, tokens(llm, prompts, greedy_params(30)), strict=True):
        assert len(token_ids) == 30
        judge.check(prompt, token_ids)
    assert llm.engine.stats().num_preemptions - before <= 2
    assert_idle(llm.engine)


FILLERS = [[10 * i + j for j in range(16)] for i in range(8)]
LONG_PROMPT = list(range(300, 400))


def _fill(llm: LLM) -> None:
    """Eight finished, distinct requests of a block each: every usable block holds keys that may be wanted again."""
    llm.reset_prefix_cache()
    for num_before, prompt in enumerate(FILLERS):
        assert llm.engine.stats().num_blocks_cached == num_before
        assert len(tokens(llm, [prompt], greedy_params(1))[0]) == 1
    assert llm.engine.stats().num_blocks_cached == llm.engine.stats().num_blocks_usable == 8
    assert_idle(llm.engine)


@IN_FLIGHT
def test_cached_blocks_are_evicted_for_a_new_request(llm: LLM, shelf: Shelf, num_in_flight: int) -> None:
    """F wants all eight blocks, none of them free of cached keys. Afterwards they hold its own: 119 tokens, 7 full."""
    _fill(llm)
    with steps_in_flight(llm, num_in_flight):
        output = serve(llm.engine, {"F": Arrival(LONG_PROMPT, greedy_params(20))})["F"]
    assert (output.num_cached_tokens, output.metrics.num_preemptions) == (0, 0)
    assert len(output.outputs[0].token_ids) == 20
    shelf.tiny_judge().check(LONG_PROMPT, output.outputs[0].token_ids)
    assert llm.engine.stats().num_blocks_cached == 7
    assert [report.verdict for prompt in FILLERS for report in llm.explain_cache(ids(prompt))] == ["evicted"] * 8
    assert_idle(llm.engine)


def test_the_least_recently_used_go_first(llm: LLM) -> None:
    """Two of the eight are used again; a request of three blocks takes the oldest of the others."""
    _fill(llm)
    for index in (0, 1):
        tokens(
            llm, [[*FILLERS[index], 5]], greedy_params(1)
        )  # finds the block, and takes the oldest for its last token
    tokens(llm, [LONG_PROMPT[:40]], greedy_params(1))
    kept = [index for index, prompt in enumerate(FILLERS) if llm.explain_cache(ids(prompt))[0].verdict == "hit"]
    assert {0, 1} <= set(kept) and 2 not in kept
    assert_idle(llm.engine)


@IN_FLIGHT
def test_a_queue_moves_on_over_a_full_cache(llm: LLM, shelf: Shelf, num_in_flight: int) -> None:
    """Cached blocks count as free in admission too: short requests behind F, and F behind them, all end."""
    _fill(llm)
    prompts = [*FILLERS[:4], LONG_PROMPT, *FILLERS[4:], LONG_PROMPT]
    before, judge = llm.engine.stats().num_preemptions, shelf.tiny_judge()
    with steps_in_flight(llm, num_in_flight):
        for prompt, token_ids in zip(prompts, tokens(llm, prompts, greedy_params(20)), strict=True):
            assert len(token_ids) == 20
            judge.check(prompt, token_ids)
    assert llm.engine.stats().num_preemptions - before <= 10
    assert_idle(llm.engine)


@pytest.mark.parametrize(("num_prompt", "max_tokens"), [(100, 200), (127, 2), (112, 16), (113, 15)])
def test_a_request_of_the_pools_size_ends_when_repeated(
    llm: LLM, shelf: Shelf, num_prompt: int, max_tokens: int
) -> None:
    """C and E again with their own blocks in the cache: sharing and copying need no block more than the pool has."""
    prompt, judge = list(range(100, 100 + num_prompt)), shelf.tiny_judge()
    llm.reset_prefix_cache()
    num_cached = []
    for _ in range(3):
        output = serve(llm.engine, {"C": Arrival(prompt, greedy_params(max_tokens))})["C"]
        assert len(output.outputs[0].token_ids) == min(max_tokens, USABLE_TOKENS - num_prompt)
        assert output.metrics.num_preemptions == 0
        judge.check(prompt, output.outputs[0].token_ids)
        num_cached.append(output.num_cached_tokens)
        assert_idle(llm.engine)
    assert num_cached[0] == 0 and all((num_prompt - 1) // 16 * 16 <= n < num_prompt for n in num_cached[1:])
