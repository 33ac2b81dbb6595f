"""Options that depend on the model: ids, bad words as texts, log-probabilities of all tokens."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from paxpage import LLM, SamplingParams
from paxpage.engine.params_check import ParamLimits, check_params, with_bad_word_ids
from paxpage.engine.sampling_params import MAX_STOP_TOKEN_IDS
from tests.helpers.engines import complete, ids, steps_in_flight
from tests.helpers.fixtures import shelf
from tests.helpers.oracle import logits_of
from tests.helpers.shelf import Limits, Shelf
from tests.server.tiny import make_tokenizer

__all__ = ["shelf"]

PROMPT = list(range(50, 70))
VOCAB_SIZE = 512
LIMITS = ParamLimits(VOCAB_SIZE, 20, (), None)


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return make_tokenizer()


@pytest.fixture(scope="module")
def text_llm(shelf: Shelf, tokenizer: Any) -> Iterator[LLM]:
    limits = {"max_model_len": 256, "max_num_seqs": 4, "max_num_batched_tokens": 64}
    with LLM(str(shelf.tiny_folder), tokenizer=tokenizer, **limits, show_progress=False) as llm:
        yield llm


BAD_OPTIONS: dict[str, tuple[dict[str, Any], str]] = {
    "too many logprobs": ({"logprobs": 21}, r"logprobs is 21; allowed: at most max_logprobs \(20\)"),
    "all logprobs": ({"logprobs": -1}, r"logprobs is -1; allowed: at most max_logprobs \(20\); -1 when"),
    "a stop id": ({"stop_token_ids": [512]}, r"stop_token_ids is 512; allowed: ids below the vocabulary size \(512\)"),
    "a bias": ({"logit_bias": {512: 1.0}}, r"logit_bias key is 512; allowed: ids below"),
    "an allowed id": ({"allowed_token_ids": [1, 512]}, r"allowed_token_ids is 512; allowed: ids below"),
    "all banned": ({"logit_bias": dict.fromkeys(range(512), -100)}, r"logit_bias is 'a ban of every token'"),
    "allowed and banned": (
        {"allowed_token_ids": [5, 6], "logit_bias": {5: -100, 6: -100}},
        r"allowed_token_ids is \[5, 6\]; allowed: one at least that logit_bias does not ban",
    ),
    "stop strings": ({"stop": "x"}, r"stop is 'x'; allowed: nothing: this model has no tokenizer"),
}


@pytest.mark.parametrize("mistake", BAD_OPTIONS)
def test_what_the_model_cannot_follow_is_refused(mistake: str) -> None:
    fields, message = BAD_OPTIONS[mistake]
    with pytest.raises(ValueError, match=rf"^{message}"):
        check_params(SamplingParams(**fields), LIMITS)


def test_what_the_model_can_follow() -> None:
    fields = {"logit_bias": {511: -100, 0: 1}, "allowed_token_ids": [511, 5], "stop_token_ids": [511]}
    check_params(SamplingParams(**fields, logprobs=20, prompt_logprobs=20), LIMITS)
    check_params(SamplingParams(logprobs=-1), LIMITS._replace(max_logprobs=-1))
    check_params(SamplingParams(logprobs=512), LIMITS._replace(max_logprobs=-1))


def test_too_many_ends_in_all() -> None:
    params = SamplingParams(stop_token_ids=[1] * MAX_STOP_TOKEN_IDS)
    check_params(params, LIMITS._replace(eos_token_ids=tuple(range(16))))
    with pytest.raises(ValueError, match=r"^stop_token_ids is .* with the EOS ids"):
        check_params(params, LIMITS._replace(eos_token_ids=tuple(range(17))))


def test_bad_words_that_cannot_be(tokenizer: Any) -> None:
    with pytest.raises(ValueError, match=r"^bad_words is 512; allowed: ids below"):
        check_params(SamplingParams(bad_words=["x", [5, 512]]), LIMITS)
    with pytest.raises(ValueError, match=r"^bad_words is 'x'; allowed: lists of token ids only"):
        with_bad_word_ids(SamplingParams(bad_words=["x"]), None)
    with pytest.raises(ValueError, match=r"^bad_words is not valid Unicode"):
        with_bad_word_ids(SamplingParams(bad_words=["\ud800"]), tokenizer)


def test_bad_words_are_spelled_with_a_space_and_without(tokenizer: Any) -> None:
    params = with_bad_word_ids(SamplingParams(bad_words=["kettle", " kettle", [1, 2]]), tokenizer)
    *texts, last = params.bad_words
    assert [tokenizer.decode(word) for word in texts] == ["kettle", " kettle"]
    assert last == (1, 2)
    most = SamplingParams(bad_words=[f"w{i}" for i in range(512)])
    assert len(with_bad_word_ids(most, tokenizer).bad_words) == 1024
    assert with_bad_word_ids(SamplingParams(), None) == SamplingParams()


@pytest.mark.parametrize("num_in_flight", [0, 1])
def test_bad_words_do_not_come(text_llm: LLM, num_in_flight: int) -> None:
    """Two words that a text has are banned, then two that the next one has."""
    prompt, bad = "The blue kettle stands", []
    params = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
    with steps_in_flight(text_llm, num_in_flight):
        for _ in range(3):
            (output,) = text_llm.generate(prompt, params, use_tqdm=False)
            token_ids = output.outputs[0].token_ids
            assert not any(word == token_ids[i : i + 2] for word in bad for i in range(23))
            bad += [token_ids[4:6], token_ids[9:11]]
            params = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True, bad_words=bad)
        text = output.outputs[0].text
        piece = next(word for word in text.split() if len(word) > 2 and word.isascii())
        params = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True, bad_words=[*bad, piece])
        (output,) = text_llm.generate(prompt, params, use_tqdm=False)
    for word in with_bad_word_ids(SamplingParams(bad_words=[piece]), text_llm.engine.tokenizer).bad_words:
        token_ids = output.outputs[0].token_ids
        assert not any(list(word) == token_ids[i : i + len(word)] for i in range(24))


@pytest.mark.parametrize("num_in_flight", [0, 1])
def test_log_probabilities_of_all_tokens(shelf: Shelf, num_in_flight: int) -> None:
    """Beside one that wants a few, and one that wants none; the model's own, whatever is penalised."""
    llm = shelf.tiny(Limits(max_logprobs=-1))
    options = {"max_tokens": 5, "ignore_eos": True, "repetition_penalty": 1.5}
    kinds = [SamplingParams(temperature=0.0, logprobs=num, **options) for num in (-1, 2, None, 30)]
    with steps_in_flight(llm, num_in_flight):
        everything, few, nothing, more = complete(llm, [PROMPT] * 4, kinds)
    logits = logits_of(shelf.tiny_oracle, [*PROMPT, *everything.token_ids])[len(PROMPT) - 1 : -1].astype(np.float64)
    expected = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
    assert nothing.logprobs is None and few.token_ids == everything.token_ids == more.token_ids
    for row, token_id, all_of, few_of, more_of in zip(
        expected, everything.token_ids, everything.logprobs, few.logprobs, more.logprobs, strict=True
    ):
        assert next(iter(all_of)) == token_id and set(all_of) == set(range(VOCAB_SIZE))
        np.testing.assert_allclose([all_of[i].logprob for i in range(VOCAB_SIZE)], row, atol=1e-3)
        assert sorted(entry.rank for entry in all_of.values()) == list(range(1, VOCAB_SIZE + 1))
        for some in (few_of, more_of):
            assert list(some) == list(all_of)[: len(some)]
            assert {i: e.rank for i, e in some.items()} == {i: all_of[i].rank for i in some}
            assert [e.logprob for e in some.values()] == pytest.approx([all_of[i].logprob for i in some], abs=1e-5)
        assert len(more_of) in (30, 31)


def test_a_ban_and_a_force_are_exact(shelf: Shelf) -> None:
    """Also at the vocabulary's edge, where an index that is off by one would wrap or be clamped."""
    llm = shelf.tiny()
    for token_id in (0, 7, 511):
        params = SamplingParams(max_tokens=6, ignore_eos=True, logit_bias={token_id: 100.0}, seed=1)
        assert set(complete(llm, [PROMPT], params)[0].token_ids) == {token_id}
    others = dict.fromkeys((i for i in range(VOCAB_SIZE) if i not in (3, 510)), -100.0)
    params = SamplingParams(temperature=1e6, max_tokens=40, ignore_eos=True, logit_bias=others, seed=1)
    assert set(complete(llm, [PROMPT], params)[0].token_ids) == {3, 510}


def test_an_end_that_alone_is_allowed_comes_before_min_tokens_too(shelf: Shelf) -> None:
    params = SamplingParams(max_tokens=9, min_tokens=3, allowed_token_ids=[5], stop_token_ids=[5])
    (output,) = shelf.tiny().generate(ids(PROMPT), params, use_tqdm=False)
    assert (output.outputs[0].token_ids, output.outputs[0].finish_reason) == ([5, 5, 5], "stop")
