"""Case 7: what can never fit is refused with the numbers, and holds nobody up. After vllm-project/vllm#39734."""

import time

import pytest

from paxpage import LLM
from tests.helpers.engines import Arrival, assert_idle, greedy_params, serve, tokens, tokens_alone
from tests.helpers.shelf import Limits, Shelf

USABLE_TOKENS = 128
LIMITS = Limits(max_num_batched_tokens=64, num_blocks=9, max_model_len=None)


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


def test_a_request_is_admitted_after_others_filled_the_pool(llm: LLM, shelf: Shelf) -> None:
    """Eight finished requests have used every block; with prefix caching these would still hold their keys."""
    for i in range(8):
        tokens_alone(llm, [10 * i + j for j in range(16)], greedy_params(1))
    prompt = list(range(300, 400))
    shelf.tiny_judge().check(prompt, tokens_alone(llm, prompt, greedy_params(20)))
    assert_idle(llm.engine)


@pytest.mark.xfail(raises=ValueError, strict=True, reason="issue 4: prefix caching")
def test_cached_blocks_are_evicted_for_a_new_request(shelf: Shelf) -> None:
    with LLM(str(shelf.tiny_folder), enable_prefix_caching=True, num_blocks=9, show_progress=False) as llm:
        for i in range(8):
            tokens(llm, [[10 * i + j for j in range(16)]], greedy_params(1))
        assert len(tokens(llm, [list(range(300, 400))], greedy_params(20))[0]) == 20
