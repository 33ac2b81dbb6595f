"""Each family through the whole engine, LLM to sampler, against transformers' greedy tokens."""

import pytest

from paxpage import LLM
from tests.differential.conftest import Family
from tests.differential.models import PROMPTS, SERVED
from tests.helpers.engines import assert_idle, greedy_params, steps_in_flight, token_budget, tokens, tokens_alone
from tests.helpers.oracle import judge_by

NUM_TOKENS = 33
LIMITS = {"max_model_len": 128, "max_num_seqs": 4, "max_num_batched_tokens": 64, "num_blocks": 33}


@pytest.mark.parametrize("family", SERVED, indirect=True, ids=lambda checkpoint: checkpoint.name)
def test_the_engine_generates_what_transformers_generates(family: Family) -> None:
    """Alone, together, chunked, and scheduled a step ahead: always transformers' own tokens. (TINY: tests/cases.)"""
    params = greedy_params(NUM_TOKENS)
    judge = judge_by(family.oracle)
    with LLM(str(family.folder), **LIMITS, show_progress=False) as llm:
        alone = [tokens_alone(llm, prompt, params) for prompt in PROMPTS]
        together = tokens(llm, PROMPTS, params)
        with token_budget(llm, 16):
            chunked = tokens(llm, PROMPTS, params)
            with steps_in_flight(llm, 1):
                ahead = tokens(llm, PROMPTS, params)
        assert_idle(llm.engine)
    for outputs in (alone, together, chunked, ahead):
        for prompt, token_ids in zip(PROMPTS, outputs, strict=True):
            assert len(token_ids) == NUM_TOKENS
            judge.check(prompt, token_ids)
