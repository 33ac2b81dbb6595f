"""The comparison itself: it follows transformers' own generation, and finds what differs."""

from typing import Any

import numpy as np
import pytest

from tests.helpers.checkpoints import TINY, make_model
from tests.helpers.oracle import GAPS, GreedyJudge, greedy_tokens, judge_by, logits_of

PROMPT = list(range(50, 70))


@pytest.fixture(scope="module")
def model() -> Any:
    return make_model(TINY)


def test_the_judge_agrees_with_transformers_generate(model: Any) -> None:
    judge = judge_by(model)
    judge.check(PROMPT, greedy_tokens(model, PROMPT, 32))
    assert judge.num_differences == 0


@pytest.mark.parametrize("index", [0, 17, 31])
def test_the_judge_finds_a_wrong_token(model: Any, index: int) -> None:
    token_ids = greedy_tokens(model, PROMPT, 32)
    token_ids[index] = (token_ids[index] + 1) % 512
    with pytest.raises(AssertionError, match=f"token {index} is "):
        judge_by(model).check(PROMPT, token_ids)


def _check(token_ids: list[int], logits: np.ndarray, gap: float, *, to_the_end: bool = False) -> int:
    """Judges token_ids, each chosen from its row of logits, after a prompt of one token; the number of differences."""
    judge = GreedyJudge(lambda _: np.pad(logits, ((0, 1), (0, 0))), gap, to_the_end=to_the_end)
    judge.check([0], token_ids)
    return judge.num_differences


def test_a_near_tie_ends_the_comparison() -> None:
    """The other of two close logits is let through once; what follows it is another text, near the best or not."""
    logits = np.zeros((3, 8), np.float32)
    logits[:, 4] = 1.0
    logits[1, 5] = 1.0 - GAPS["float32"] / 2
    assert _check([4, 5, 7], logits, GAPS["float32"]) == 1
    assert _check([4, 4, 4], logits, GAPS["float32"]) == 0
    assert _check([4, 5, 4], logits, GAPS["float32"], to_the_end=True) == 1
    with pytest.raises(AssertionError, match="token 2 is 7"):
        _check([4, 4, 7], logits, GAPS["float32"])
    with pytest.raises(AssertionError, match="token 2 is 7"):
        _check([4, 5, 7], logits, GAPS["float32"], to_the_end=True)
    with pytest.raises(AssertionError, match="token 1 is 5"):
        _check([4, 5, 4], logits, GAPS["float32"] / 4)


def test_a_token_far_from_two_close_logits_is_no_tie() -> None:
    """The gap is between the best logit and that of the token that was taken."""
    logits = np.array([[0.0, 1.0, 1.0, 0.5]], np.float32)
    with pytest.raises(AssertionError, match="token 0 is 3"):
        _check([3], logits, GAPS["bfloat16"])


def test_the_oracle_is_causal(model: Any) -> None:
    """So that one pass over prompt and output gives the logits of every step."""
    whole = logits_of(model, PROMPT)
    np.testing.assert_allclose(logits_of(model, PROMPT[:7]), whole[:7], rtol=0, atol=1e-5)
