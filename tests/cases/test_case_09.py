"""Case 9: preempted and computed again in chunks of any size, requests keep their tokens.

After sgl-project/sglang-jax#1010.
"""

import time
from collections.abc import Sequence

import pytest

from paxpage import LLM, SamplingParams
from tests.helpers.engines import assert_idle, greedy_params, ids, steps_in_flight, tokens_alone
from tests.helpers.shelf import UNCACHED, Limits, Shelf

PROMPTS = [[50 + (37 * i + 11 * j) % 400 for j in range(20 + 10 * i)] for i in range(8)]
MAX_TOKENS = 64
GREEDY = [greedy_params(MAX_TOKENS)] * 8
SAMPLED = [SamplingParams(temperature=0.8, seed=i, max_tokens=MAX_TOKENS, ignore_eos=True) for i in range(8)]


def _limits(budget: int, has_prefix_cache: bool) -> Limits:
    """24 usable blocks hold 384 tokens; the requests together come to 952."""
    return Limits(max_num_batched_tokens=budget, num_blocks=25, max_model_len=None, has_prefix_cache=has_prefix_cache)


@pytest.fixture(scope="module")
def greedy_alone(shelf: Shelf) -> list[list[int]]:
    """REF, which is transformers' own."""
    outputs = [tokens_alone(shelf.tiny(UNCACHED), *pair) for pair in zip(PROMPTS, GREEDY, strict=True)]
    for prompt, token_ids in zip(PROMPTS, outputs, strict=True):
        shelf.tiny_judge().check(prompt, token_ids)
    return outputs


@pytest.fixture(scope="module")
def sampled_alone(shelf: Shelf) -> list[list[int]]:
    return [tokens_alone(shelf.tiny(UNCACHED), *pair) for pair in zip(PROMPTS, SAMPLED, strict=True)]


def _run(llm: LLM, params: Sequence[SamplingParams]) -> list[list[int]]:
    """All eight at once; fails unless somebody was preempted, and nobody too often."""
    before, start_s = llm.engine.stats().num_preemptions, time.monotonic()
    outputs = llm.generate([ids(prompt) for prompt in PROMPTS], params, use_tqdm=False)
    assert llm.engine.stats().num_preemptions > before, "the case shows nothing without preemption"
    assert max(output.metrics.num_preemptions for output in outputs) <= 10
    assert time.monotonic() - start_s < 60
    assert_idle(llm.engine)
    return [output.outputs[0].token_ids for output in outputs]


@pytest.mark.parametrize("num_in_flight", [0, 1])
@pytest.mark.parametrize("budget", [16, 32, 48, 512])
@pytest.mark.parametrize("has_prefix_cache", [False, True])
def test_preemption_changes_nothing(
    shelf: Shelf,
    has_prefix_cache: bool,
    budget: int,
    num_in_flight: int,
    greedy_alone: list[list[int]],
    sampled_alone: list[list[int]],
) -> None:
    """Greedy and sampled as with plenty of blocks and nobody else; also when the cache is full of a run before."""
    llm = shelf.tiny(_limits(budget, has_prefix_cache))
    llm.reset_prefix_cache()
    with steps_in_flight(llm, num_in_flight):
        assert _run(llm, GREEDY) == greedy_alone
        assert _run(llm, SAMPLED) == sampled_alone
        assert _run(llm, GREEDY) == greedy_alone


@pytest.mark.parametrize("num_in_flight", [0, 1])
def test_what_was_computed_before_a_preemption_is_found_again(
    shelf: Shelf, num_in_flight: int, greedy_alone: list[list[int]]
) -> None:
    """A preempted request comes back to those of its blocks that nobody has taken, and computes less than before."""
    computed = {}
    for has_prefix_cache in (False, True):
        llm = shelf.tiny(_limits(48, has_prefix_cache))
        llm.reset_prefix_cache()
        with steps_in_flight(llm, num_in_flight):
            for i, prompt in enumerate(PROMPTS):
                llm.engine.add_request(str(i), prompt, GREEDY[i])
            outputs, num_computed, num_preempted = {}, 0, llm.engine.stats().num_preemptions
            while llm.engine.has_unfinished_requests():
                num_steps = llm.engine.stats().num_steps
                outputs.update({d.request_id: d.output for d in llm.engine.step() if d.output is not None})
                stats = llm.engine.stats()
                num_computed += stats.num_scheduled_tokens if stats.num_steps > num_steps else 0
        assert stats.num_preemptions > num_preempted
        assert [outputs[str(i)].outputs[0].token_ids for i in range(8)] == greedy_alone
        computed[has_prefix_cache] = num_computed
        assert_idle(llm.engine)
    assert computed[True] < computed[False]
