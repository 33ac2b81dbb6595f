"""Case 35: padding rows attend to nothing and make no NaN. After huggingface/transformers#32390.

The kernels' part, and offsets past 2**31, are in tests/kernels.
"""

import dataclasses
import math
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from paxpage import LLM
from paxpage.engine.engine import EngineDeadError
from paxpage.engine.kv_cache import KVCache
from tests.helpers.engines import assert_idle, complete, greedy_params, steps_in_flight, tokens
from tests.helpers.shelf import UNCACHED, Limits, Shelf

PROMPTS = [[60 + (17 * i + 5 * j) % 300 for j in range(length)] for i, length in enumerate((1, 15, 16, 17, 33))]
PARAMS = greedy_params(20)


@pytest.fixture
def llm(shelf: Shelf) -> LLM:
    return shelf.tiny(UNCACHED)  # the tests change what blocks hold, which a prefix cache would not know


@pytest.fixture
def nan_check() -> Iterator[None]:
    """JAX raises FloatingPointError for a NaN in any output, the cache included."""
    with jax.debug_nans(True):
        yield


@pytest.mark.usefixtures("nan_check")
@pytest.mark.parametrize("num_in_flight", [0, 1])
@pytest.mark.parametrize("num_prompts", [3, 5])
def test_padded_steps_make_no_nan(shelf: Shelf, llm: LLM, num_prompts: int, num_in_flight: int) -> None:
    """3 prompts in a bucket of 4 rows, 5 in one of 8; a NaN would fail the step, and be counted."""
    judge = shelf.tiny_judge()
    llm.engine.runner.reset()
    before = llm.engine.stats().num_failed_steps
    with steps_in_flight(llm, num_in_flight):
        outputs = tokens(llm, PROMPTS[:num_prompts], PARAMS)
    assert llm.engine.stats().num_failed_steps == before
    for prompt, token_ids in zip(PROMPTS, outputs, strict=False):
        judge.check(prompt, token_ids)
    assert_idle(llm.engine)


@pytest.mark.usefixtures("nan_check")
def test_the_nan_check_sees_a_nan(shelf: Shelf) -> None:
    """With a weight that is NaN every step fails, and the engine with the second."""
    with shelf.fresh_tiny(Limits(max_num_seqs=1, max_num_batched_tokens=16, max_model_len=64)) as llm:
        params = llm.engine.runner.params
        with jax.debug_nans(False):
            nan = jnp.full_like(params["norm"]["weight"], np.nan)
        llm.engine.runner.set_params({**params, "norm": {"weight": nan}})
        with pytest.raises(EngineDeadError, match="nan"):
            tokens(llm, PROMPTS[:1], PARAMS)


@pytest.mark.parametrize("garbage", [math.nan, math.inf, 1e30])
def test_what_the_cache_held_before_has_no_effect(llm: LLM, garbage: float) -> None:
    """Every slot that a request does not own, null block included, may hold anything."""
    runner = llm.engine.runner
    runner.reset()
    params = dataclasses.replace(PARAMS, logprobs=1)
    clean = complete(llm, PROMPTS, params)
    runner.cache = KVCache(*(jnp.full_like(array, garbage) for array in runner.cache))
    dirty = complete(llm, PROMPTS, params)
    runner.reset()
    assert [output.token_ids for output in dirty] == [output.token_ids for output in clean]
    assert [output.logprobs for output in dirty] == [output.logprobs for output in clean]
