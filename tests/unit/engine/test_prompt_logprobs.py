"""Log-probabilities of the prompt's own tokens, which share cached blocks like any other request."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from paxpage import LLM, RequestOutput, SamplingParams
from tests.helpers.checkpoints import TINY, write_checkpoint
from tests.helpers.engines import ids, steps_in_flight

PROMPT = [50 + (7 * j) % 400 for j in range(100)]
SCORED = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True, prompt_logprobs=3)
PLAIN = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[LLM, np.ndarray]]:
    """TINY in chunks of 48 tokens, and transformers' log-probabilities after each token of PROMPT."""
    import torch

    folder: Path = tmp_path_factory.mktemp("scored") / "TINY"
    oracle = write_checkpoint(folder, TINY)
    with torch.no_grad():
        logits = oracle(torch.tensor([PROMPT])).logits[0].float()
    limits = {"max_num_seqs": 4, "max_num_batched_tokens": 48, "num_blocks": 65, "max_model_len": 256}
    with LLM(str(folder), dtype="float32", show_progress=False, **limits) as llm:
        yield llm, torch.log_softmax(logits, -1).numpy()


def generate(llm: LLM, prompt: list[int], params: SamplingParams) -> RequestOutput:
    (output,) = llm.generate(ids(prompt), params, use_tqdm=False)
    return output


def check(output: RequestOutput, expected: np.ndarray, num_top: int) -> None:
    entries = output.prompt_logprobs
    assert entries is not None and len(entries) == len(PROMPT) and entries[0] is None
    for position, entry in enumerate(entries[1:], start=1):
        assert entry is not None
        row, token_id = expected[position - 1], PROMPT[position]
        assert next(iter(entry)) == token_id
        assert entry[token_id].logprob == pytest.approx(row[token_id], abs=1e-4)
        assert entry[token_id].rank == 1 + int((row > row[token_id]).sum())
        best = np.argsort(-row, kind="stable")[:num_top].tolist()
        assert set(entry) == {token_id, *best}
        assert [entry[each].logprob for each in best] == pytest.approx(row[best].tolist(), abs=1e-4)


@pytest.mark.parametrize("num_in_flight", [0, 1])
def test_values_are_transformers_cold_and_cached(tiny: tuple[LLM, np.ndarray], num_in_flight: int) -> None:
    llm, expected = tiny
    llm.reset_prefix_cache()
    with steps_in_flight(llm, num_in_flight):
        for _ in range(2):
            check(generate(llm, PROMPT, SCORED), expected, 3)
        assert generate(llm, PROMPT, PLAIN).num_cached_tokens == 96


def test_blocks_are_shared_with_whoever_runs_and_not_written(tiny: tuple[LLM, np.ndarray]) -> None:
    """A plain request runs on; a scored one of the same prompt reads its six blocks and takes one of its own."""
    llm, expected = tiny
    llm.reset_prefix_cache()
    engine = llm.engine
    engine.add_request("plain", PROMPT, SamplingParams(temperature=0, max_tokens=40, ignore_eos=True))
    while len(engine.block_ids("plain")[0]) < 7:
        engine.step()
    shared = engine.block_ids("plain")[0][:6]
    cache = engine.runner.cache
    assert cache is not None
    before = np.asarray(cache.k[:, np.array(shared)])
    engine.add_request("scored", PROMPT, SCORED)
    outputs = {}
    while engine.has_unfinished_requests():
        outputs |= {delta.request_id: delta.output for delta in engine.step() if delta.output is not None}
        if "scored" in engine.unfinished_request_ids():
            assert engine.block_ids("scored")[0][:6] == shared
    cache = engine.runner.cache
    assert cache is not None
    np.testing.assert_array_equal(np.asarray(cache.k[:, np.array(shared)]), before)
    check(outputs["scored"], expected, 3)
    llm.reset_prefix_cache()
    alone = generate(llm, PROMPT, SamplingParams(temperature=0, max_tokens=40, ignore_eos=True))
    assert outputs["plain"].outputs[0].token_ids == alone.outputs[0].token_ids


def test_samples_have_the_prompts_values_once(tiny: tuple[LLM, np.ndarray]) -> None:
    llm, expected = tiny
    params = SamplingParams(temperature=1, seed=1, n=3, max_tokens=3, ignore_eos=True, prompt_logprobs=0)
    output = generate(llm, PROMPT, params)
    check(output, expected, 0)
    assert len(output.outputs) == 3


def test_one_token_has_nothing_before_it(tiny: tuple[LLM, np.ndarray]) -> None:
    assert generate(tiny[0], [7], SCORED).prompt_logprobs == [None]
    assert generate(tiny[0], [7], PLAIN).prompt_logprobs is None


@pytest.mark.parametrize("value", [-1, 21, 1000])
def test_bad_values_are_refused_by_name(tiny: tuple[LLM, np.ndarray], value: int) -> None:
    with pytest.raises(ValueError, match="prompt_logprobs is"):
        generate(tiny[0], [7], SamplingParams(prompt_logprobs=value))
