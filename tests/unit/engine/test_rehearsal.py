"""Steps run on padding before the first request leave nothing behind but zeros and the null block."""

import numpy as np
import pytest

from paxpage import LLM, SamplingParams
from paxpage.engine import model_runner
from tests.helpers.engines import assert_idle, ids
from tests.helpers.fixtures import shelf
from tests.helpers.shelf import Shelf

__all__ = ["shelf"]

LIMITS = {"max_num_seqs": 2, "max_num_batched_tokens": 16, "num_blocks": 9, "max_model_len": 64}


def test_a_rehearsed_engine_answers_the_same(shelf: Shelf, monkeypatch: pytest.MonkeyPatch) -> None:
    answers, num_runs = [], []
    for num_rehearsals in (0, 2):
        monkeypatch.setitem(model_runner.REHEARSALS, "cpu", num_rehearsals)
        with LLM(str(shelf.tiny_folder), **LIMITS, show_progress=False) as llm:
            runner = llm.engine.runner
            assert runner.cache is not None
            used = [np.asarray(array).any(axis=(0, 2, 3, 4)) for array in runner.cache]
            num_runs.append([blocks.nonzero()[0].tolist() for blocks in used])
            params = SamplingParams(temperature=0.8, seed=5, max_tokens=6, ignore_eos=True, logprobs=1)
            outputs = llm.generate([ids(range(40)), ids([7])], params, use_tqdm=False)
            answers.append([(output.outputs[0].token_ids, output.outputs[0].logprobs) for output in outputs])
            assert_idle(llm.engine)
    assert answers[0] == answers[1]
    assert num_runs == [[[], []], [[0], [0]]]
