"""Penalties, biases, allowed tokens and bans: what the device makes of them, against numpy over whole vocabularies."""

import functools
from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from paxpage.engine import sampler
from paxpage.engine.adjustments import Adjustments, Ban
from paxpage.engine.batch import (
    needs_adjusting,
    needs_logits,
    needs_sampler,
    num_entries_of,
    pack_adjustments,
    pack_sampling,
)
from paxpage.engine.request import Request
from paxpage.engine.sampler import BANNED
from paxpage.engine.sampling_params import SamplingParams
from paxpage.engine.scheduler import ScheduledRow

VOCAB_SIZE = 1500
NUM_ROWS = 8
PROMPT = [3, 4, 3, 9]


class Case(NamedTuple):
    """A request somewhere on its way. pending: its last token, if the host does not know it yet."""

    options: dict[str, Any]
    output: Sequence[int] = ()
    pending: int | None = None
    prompt: Sequence[int] = tuple(PROMPT)

    @property
    def params(self) -> SamplingParams:
        return SamplingParams(**self.options)

    def row(self, index: int) -> ScheduledRow:
        """The row of a batch whose predecessor had the request in row NUM_ROWS - 1 - index."""
        request = Request(str(index), self.prompt, self.params, max_tokens=9999)
        for token_id in self.output:
            request.append(token_id)
        previous = -1 if self.pending is None else NUM_ROWS - 1 - index
        return ScheduledRow(request, len(request.token_ids), 1, is_sampled=True, previous_index=previous)


def expected_logits(logits: np.ndarray, case: Case) -> np.ndarray:
    """One row, the slow way, in the order that SamplingParams' docstring and vLLM have."""
    params, out = case.params, logits.astype(np.float64)
    output = list(case.output) + ([] if case.pending is None else [case.pending])
    for token_id, value in (params.logit_bias or {}).items():
        out[token_id] += value
    for token_id in {*case.prompt, *output}:
        out[token_id] *= 1 / params.repetition_penalty if out[token_id] > 0 else params.repetition_penalty
    for token_id, count in Counter(output).items():
        out[token_id] -= params.presence_penalty + params.frequency_penalty * count
    banned = {token_id for token_id, value in (params.logit_bias or {}).items() if value == -100}
    for *before, last in params.bad_words or ():
        if not before or output[-len(before) :] == before:
            banned.add(last)
    out[list(banned)] = BANNED
    if params.allowed_token_ids is not None:
        out[[i for i in range(VOCAB_SIZE) if i not in params.allowed_token_ids]] = -np.inf
    return out


@functools.cache
def compiled_adjust() -> Any:
    return jax.jit(sampler.adjust)


def adjusted_logits(logits: np.ndarray, cases: list[Case]) -> np.ndarray:
    """Over the road that the engine takes."""
    previous = np.full(NUM_ROWS + 3, 77, np.int32)
    for index, case in enumerate(cases):
        if case.pending is not None:
            previous[NUM_ROWS - 1 - index] = case.pending
    padded = np.zeros((NUM_ROWS, VOCAB_SIZE), np.float32)
    padded[: len(cases)] = logits
    adjusted = jnp.asarray(padded)
    for packed in pack_adjustments([case.row(index) for index, case in enumerate(cases)], NUM_ROWS):
        adjusted = compiled_adjust()(padded, adjusted, packed, previous)
    assert np.array_equal(adjusted[len(cases) :], padded[len(cases) :])
    return np.asarray(adjusted)[: len(cases)]


def random_logits(num_rows: int) -> np.ndarray:
    return np.random.default_rng(num_rows).normal(0, 4, (num_rows, VOCAB_SIZE)).astype(np.float32)


def check(cases: list[Case]) -> None:
    """All in one batch, and each alone to the same bits."""
    logits = random_logits(len(cases))
    together = adjusted_logits(logits, cases)
    for index, case in enumerate(cases):
        expected = expected_logits(logits[index], case)
        np.testing.assert_allclose(together[index], expected, rtol=1e-5, atol=1e-5)
        alone = adjusted_logits(logits[index : index + 1], [case])
        assert np.array_equal(alone[0], together[index])


PENALTIES = {"repetition_penalty": 1.7, "presence_penalty": 0.6, "frequency_penalty": 0.35}
OPTIONS: dict[str, dict[str, Any]] = {
    "repetition": {"repetition_penalty": 1.7},
    "reward": {"repetition_penalty": 0.4},
    "presence": {"presence_penalty": 1.2},
    "frequency": {"frequency_penalty": -0.7},
    "all penalties": PENALTIES,
    "bias": {"logit_bias": {3: 2.5, 1499: -7, 40: -100, 41: 100}},
    "bias and penalties": {**PENALTIES, "logit_bias": {3: 2.5, 9: -30, 55: -100, 7: 1}},
    "allowed": {"allowed_token_ids": [3, 7, 8, 7, 1499]},
    "allowed and all": {**PENALTIES, "allowed_token_ids": [3, 7, 8], "logit_bias": {3: 1, 5: 50, 8: -100}},
    "bad words": {"bad_words": ((5,), (7, 8), (9, 7, 11), (55, 8), (7, 7, 7))},
    "bad words and penalties": {**PENALTIES, "bad_words": ((7, 8), (8, 7), (3, 7), (7,))},
}
OUTPUTS = ([], [7], [9, 7], [8, 3, 8, 8, 7, 7], [55])
PENDINGS = (None, 3, 7, 8, 55, 1499)


@pytest.mark.parametrize("name", OPTIONS)
def test_options_against_the_reference(name: str) -> None:
    for pending in PENDINGS:
        check([Case(OPTIONS[name], output, pending) for output in OUTPUTS])


def test_all_options_in_one_batch() -> None:
    names = list(OPTIONS)
    for start in range(len(names)):
        some = [names[(start + i) % len(names)] for i in range(6)]
        cases = [Case(OPTIONS[name], OUTPUTS[i % 5], PENDINGS[(start + i) % 6]) for i, name in enumerate(some)]
        check([*cases, Case({}), Case({"temperature": 0.0}, [7], 9)])


def test_a_token_in_flight_is_as_good_as_a_known_one() -> None:
    """To the bit: what the host does not know yet changes no token."""
    logits = random_logits(1)
    for options in OPTIONS.values():
        for *output, last in ([7], [9, 7], [7, 8], [8, 7, 7, 7], [55]):
            known, in_flight = Case(options, [*output, last]), Case(options, output, last)
            assert np.array_equal(adjusted_logits(logits, [known]), adjusted_logits(logits, [in_flight]))


def test_more_entries_than_one_call_takes() -> None:
    size = num_entries_of(NUM_ROWS)
    source = np.random.default_rng(0)
    cases = [
        Case({**PENALTIES, "bad_words": ((4, 5), (5, 6))}, source.integers(0, VOCAB_SIZE, 900).tolist(), 5)
        for _ in range(3)
    ]
    cases.append(Case({"allowed_token_ids": list(range(0, VOCAB_SIZE, 2)), "logit_bias": {8: -100, 10: 3}}, [8], 6))
    assert len(pack_adjustments([case.row(index) for index, case in enumerate(cases)], NUM_ROWS)) > 1
    assert size < 3 * 500
    check(cases)


def test_a_batch_that_is_not_adjusted_is_left_alone() -> None:
    rows = [Case({"temperature": 0.0}).row(0), Case(PENALTIES).row(1)._replace(is_sampled=False)]
    assert not needs_adjusting(rows) and not needs_sampler(rows)
    assert needs_adjusting([Case({**PENALTIES, "temperature": 0.0}).row(0)])
    assert needs_sampler([Case({"temperature": 0.0, "logit_bias": {1: 1}}).row(0)])


@pytest.mark.parametrize("options", [{"allowed_token_ids": [5]}, {"logit_bias": {5: 100.0}}])
def test_where_all_is_banned_what_is_allowed_may_come(options: dict[str, Any]) -> None:
    """A bad word, or an end before min_tokens, that is the only token left: no NaN, and never token 0."""
    case = Case({**options, "bad_words": ((5,), *((i,) for i in range(20, 60)))})
    adjusted = adjusted_logits(random_logits(1), [case])
    packed = pack_sampling([Case({"min_tokens": 1, "stop_token_ids": [5]}).row(0)] * 4, 4)
    draw = jax.jit(functools.partial(sampler.sample, num_top=None))
    drawn = set(draw(*[np.repeat(adjusted, 4, axis=0)] * 2, packed).token_ids.tolist())
    if "allowed_token_ids" in options:
        assert drawn == {5}
    else:
        assert all(adjusted[0, token_id] > BANNED for token_id in drawn)


def test_entries_follow_the_requests_tokens() -> None:
    token_ids = [3, 4, 3]
    adjustments = Adjustments(SamplingParams(repetition_penalty=2), token_ids, 3)
    assert adjustments.entries().tolist() == [[3, 4], [0, 0], [1, 1]]
    token_ids += [4, 6, 6]
    assert adjustments.entries().tolist() == [[3, 4, 6], [0, 0, 0], [1, 3, 4]]
    assert adjustments.entries().tolist() == [[3, 4, 6], [0, 0, 0], [1, 3, 4]]


def test_the_prompt_counts_for_the_repetition_penalty_alone() -> None:
    for options in ({"presence_penalty": 1.0}, {"frequency_penalty": 1.0}, {"logit_bias": {}, "bad_words": [[1]]}):
        assert Adjustments(SamplingParams(**options), [3, 4], 2).entries().shape == (3, 0)


def test_a_table_of_very_many_tokens() -> None:
    token_ids = list(range(5000)) * 2
    entries = Adjustments(SamplingParams(frequency_penalty=1), token_ids, 0).entries()
    assert entries.tolist() == [list(range(5000)), [0] * 5000, [4] * 5000]


def test_bans() -> None:
    params = SamplingParams(logit_bias={2: -100, 3: -99.9}, bad_words=((5,), (7, 8), (9, 7, 11)))
    token_ids = [9, 7]  # the prompt does not count
    adjustments = Adjustments(params, token_ids, 2)
    always = [Ban(2), Ban(5)]
    assert adjustments.bans(has_pending=False) == always
    assert adjustments.bans(has_pending=True) == [*always, Ban(8, after=7)]
    token_ids += [9]
    assert adjustments.bans(has_pending=True) == [*always, Ban(8, after=7), Ban(11, after=7)]
    token_ids += [7]
    assert adjustments.bans(has_pending=False) == [*always, Ban(8), Ban(11)]


@pytest.mark.parametrize(("logprobs", "expected"), [(None, False), (0, False), (20, False), (21, True), (-1, True)])
def test_who_needs_whole_logits(logprobs: int | None, expected: bool) -> None:
    row = Case({"logprobs": logprobs}).row(0)
    assert needs_logits([row], 20) == expected
    assert not needs_logits([row._replace(is_sampled=False)], 20)
