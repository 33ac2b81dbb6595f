"""Case 9: preempted and computed again in chunks of any size, requests keep their tokens.

After sgl-project/sglang-jax#1010.
"""

import time
from collections.abc import Sequence

import pytest

from paxpage import LLM, SamplingParams
from tests.helpers.engines import assert_idle, greedy_params, ids, steps_in_flight, tokens_alone
from tests.helpers.shelf import Limits, Shelf

PROMPTS = [[50 + (37 * i + 11 * j) % 400 for j in range(20 + 10 * i)] for i in range(8)]
MAX_TOKENS = 64
GREEDY = [greedy_params(MAX_TOKENS)] * 8
SAMPLED = [SamplingParams(temperature=0.8, seed=i, max_tokens=MAX_TOKENS, ignore_eos=True) for i in range(8)]


def _limits(budget: int) -> Limits:
    """24 usable blocks hold 384 tokens; the requests together come to 952."""
    return Limits(max_num_batched_tokens=budget, num_blocks=25, max_model_len=None)


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
def test_preemption_changes_nothing(shelf: Shelf, budget: int, num_in_flight: int) -> None:
    """Greedy as transformers has it, and sampled as with plenty of blocks and nobody else."""
    llm, judge = shelf.tiny(_limits(budget)), shelf.tiny_judge()
    with steps_in_flight(llm, num_in_flight):
        for prompt, token_ids in zip(PROMPTS, _run(llm, GREEDY), strict=True):
            assert len(token_ids) == MAX_TOKENS
            judge.check(prompt, token_ids)
        sampled = _run(llm, SAMPLED)
    assert sampled == [tokens_alone(shelf.tiny(), *pair) for pair in zip(PROMPTS, SAMPLED, strict=True)]


@pytest.mark.xfail(raises=ValueError, strict=True, reason="issue 4: prefix caching")
def test_with_prefix_caching(shelf: Shelf) -> None:
    with LLM(str(shelf.tiny_folder), enable_prefix_caching=True, num_blocks=25, show_progress=False) as llm:
        _run(llm, GREEDY)
