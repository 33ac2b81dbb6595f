"""Case 5: prompts that end where a block does, found in the cache. After GeeeekExplorer/nano-vllm#114."""

import numpy as np
import pytest

from paxpage import LLM, RequestOutput
from tests.helpers.engines import (
    Arrival,
    assert_idle,
    cached_contents,
    greedy_params,
    ids,
    serve,
    steps_in_flight,
    token_budget,
    tokens_alone,
)
from tests.helpers.shelf import UNCACHED, Shelf

LENGTHS = (15, 16, 17, 31, 32, 33, 48)
PARAMS = greedy_params(20)
IN_FLIGHT = pytest.mark.parametrize("num_in_flight", [0, 1])
Expected = dict[tuple[int, ...], list[int]]


def _prompt(length: int) -> list[int]:
    return list(range(50, 50 + length))


def _extended(length: int) -> list[int]:
    return [*_prompt(length), 5]


@pytest.fixture
def llm(shelf: Shelf) -> LLM:
    llm = shelf.tiny()
    llm.reset_prefix_cache()
    return llm


@pytest.fixture(scope="module")
def alone(shelf: Shelf) -> Expected:
    """REF of every prompt here, which is transformers' too."""
    prompts = [make(length) for length in LENGTHS for make in (_prompt, _extended)]
    outputs = {tuple(prompt): tokens_alone(shelf.tiny(UNCACHED), prompt, PARAMS) for prompt in prompts}
    for prompt, token_ids in outputs.items():
        shelf.tiny_judge().check(prompt, token_ids)
    return outputs


def _generate(llm: LLM, prompts: list[list[int]], alone: Expected) -> list[RequestOutput]:
    outputs = llm.generate([ids(prompt) for prompt in prompts], PARAMS, use_tqdm=False)
    for prompt, output in zip(prompts, outputs, strict=True):
        assert output.outputs[0].token_ids == alone[tuple(prompt)]
    assert_idle(llm.engine)
    return outputs


def _num_cached(outputs: list[RequestOutput]) -> list[int]:
    return [output.num_cached_tokens for output in outputs]


@IN_FLIGHT
@pytest.mark.parametrize("length", LENGTHS)
def test_repeated_then_together_then_longer(llm: LLM, alone: Expected, length: int, num_in_flight: int) -> None:
    """A repeat computes its last token alone: whole blocks are shared, the beginning of the last one is copied."""
    prompt = _prompt(length)
    with steps_in_flight(llm, num_in_flight):
        in_sequence = [_num_cached(_generate(llm, [prompt], alone))[0] for _ in range(3)]
        assert in_sequence == [0, length - 1, length - 1]
        assert _num_cached(_generate(llm, [prompt] * 8, alone)) == [length - 1] * 8
        assert _num_cached(_generate(llm, [_extended(length)], alone)) == [length]


@IN_FLIGHT
@pytest.mark.parametrize("length", LENGTHS)
def test_together_on_an_empty_cache(llm: LLM, alone: Expected, length: int, num_in_flight: int) -> None:
    """Whole blocks are shared in the very step that computes them; a beginning of one is copied only later."""
    with steps_in_flight(llm, num_in_flight):
        num_cached = _num_cached(_generate(llm, [_prompt(length)] * 8, alone))
    assert num_cached == [0] + [(length - 1) // 16 * 16] * 7


@IN_FLIGHT
@pytest.mark.parametrize("length", LENGTHS)
def test_together_in_chunks(llm: LLM, alone: Expected, length: int, num_in_flight: int) -> None:
    """In steps of 16 tokens the others wait for blocks that the first one has not come to yet."""
    with steps_in_flight(llm, num_in_flight), token_budget(llm, 16):
        first, *others = _num_cached(_generate(llm, [_prompt(length)] * 8, alone))
    assert first == 0
    assert all((length - 1) // 16 * 16 <= num_cached < length for num_cached in others)


@IN_FLIGHT
def test_all_lengths_in_sequence_and_together(llm: LLM, alone: Expected, num_in_flight: int) -> None:
    """Each is the beginning of the next, so a prompt finds what shorter ones, and their answers, have left."""
    prompts = [make(length) for length in LENGTHS for make in (_prompt, _extended)]
    with steps_in_flight(llm, num_in_flight):
        for prompt in prompts:
            _generate(llm, [prompt], alone)
        assert _num_cached(_generate(llm, prompts, alone)) == [len(prompt) - 1 for prompt in prompts]
        llm.reset_prefix_cache()
        _generate(llm, prompts[::-1], alone)
        _generate(llm, prompts, alone)


@pytest.mark.parametrize("length", LENGTHS)
def test_what_others_hold_is_not_rewritten(llm: LLM, alone: Expected, length: int) -> None:
    """Bit by bit: repeats recompute the last position, of a block that is full and shared, in a block of their own."""
    _generate(llm, [_prompt(length)], alone)
    before = cached_contents(llm.engine)
    assert len(before) == (length + 19) // 16  # the last token's keys and values are never computed
    _generate(llm, [_prompt(length)] * 4 + [_extended(length)] * 4, alone)
    after = cached_contents(llm.engine)
    assert before.keys() <= after.keys(), "the pool is large enough to evict nothing"
    for digest, contents in before.items():
        np.testing.assert_array_equal(after[digest], contents)


@IN_FLIGHT
@pytest.mark.parametrize("length", LENGTHS)
def test_a_running_holder_is_not_disturbed(llm: LLM, alone: Expected, length: int, num_in_flight: int) -> None:
    """Copies arrive while the first one decodes, before and after its answer fills the prompt's last block."""
    arrivals = {str(step): Arrival(_prompt(length), PARAMS, at_step=step) for step in (0, 1, 2, 3, 9, 17, 18)}
    arrivals["longer"] = Arrival(_extended(length), PARAMS, at_step=5)
    with steps_in_flight(llm, num_in_flight):
        outputs = serve(llm.engine, arrivals)
    for request_id, output in outputs.items():
        assert output.outputs[0].token_ids == alone[tuple(arrivals[request_id].prompt)]
    assert_idle(llm.engine)
