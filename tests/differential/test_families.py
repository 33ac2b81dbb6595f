"""Every family and head layout against transformers: each layer's output, logits, and greedy tokens.

Float32 on both sides, with transformers' eager attention. The paged side runs through the engine's own scheduler, batch
builder and cache: three requests of different lengths together, prefilled whole or in chunks of 16, then decoded.
test_engine.py has the rest of the engine.
"""

import numpy as np
import pytest

from paxpage.models.loading import LoadOptions, load_model
from tests.differential.conftest import Family
from tests.differential.models import PROMPTS
from tests.helpers.oracle import forward_pass, greedy_tokens, judge_by
from tests.helpers.paged_run import PagedRun, Trace

TOLERANCE = 1e-4
NUM_TOKENS = 33
BUDGETS = {"whole": 64, "chunks of 16": 16}


@pytest.fixture(scope="module")
def paged_run(family: Family) -> PagedRun:
    loaded = load_model(str(family.folder), LoadOptions(show_progress=False))
    return PagedRun(loaded.config, loaded.params, num_blocks=32)


@pytest.fixture(scope="module", params=BUDGETS)
def traces(request: pytest.FixtureRequest, paged_run: PagedRun) -> list[Trace]:
    """All of PROMPTS in one batch."""
    return paged_run.run(PROMPTS, NUM_TOKENS, BUDGETS[request.param])


def test_activations_and_logits(family: Family, traces: list[Trace]) -> None:
    """The residual stream at every position after every layer, the last norm, and the logits."""
    for trace in traces:
        expected = forward_pass(family.oracle, trace.token_ids[:-1])
        assert trace.residuals.shape == expected.residuals.shape
        for depth, (ours, theirs) in enumerate(zip(trace.residuals, expected.residuals, strict=True)):
            np.testing.assert_allclose(ours, theirs, rtol=0, atol=TOLERANCE, err_msg=f"after layer {depth}")
        np.testing.assert_allclose(trace.hidden, expected.hidden, rtol=0, atol=TOLERANCE)
        np.testing.assert_allclose(trace.logits, expected.logits, rtol=0, atol=TOLERANCE)


def test_greedy_tokens_step_by_step(family: Family, traces: list[Trace]) -> None:
    judge = judge_by(family.oracle)
    for prompt, trace in zip(PROMPTS, traces, strict=True):
        assert len(trace.token_ids) == len(prompt) + NUM_TOKENS
        judge.check(prompt, trace.token_ids[len(prompt) :])


def test_the_checkpoint_can_show_faults(family: Family) -> None:
    """Its greedy runs are no loops, and a prompt's first token has a say in them."""
    prompt = PROMPTS[-1]
    token_ids = greedy_tokens(family.oracle, prompt, 32)
    assert len(set(token_ids)) >= 5
    assert greedy_tokens(family.oracle, [prompt[0] + 1, *prompt[1:]], 32) != token_ids
