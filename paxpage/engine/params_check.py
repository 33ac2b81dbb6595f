"""Sampling options against the model and the engine that they are meant for."""

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from paxpage.config import require
from paxpage.engine.batch import MAX_SUPPRESSED
from paxpage.engine.sampling_params import ALL_LOGPROBS, BANNING_BIAS, SamplingParams
from paxpage.prompts import encode_plain

SAMPLER_LOGPROBS = 20  # that the device gives where there is no limit; for more the host looks at the logits


class ParamLimits(NamedTuple):
    """What options are checked against. max_logprobs -1: as many as there are tokens."""

    vocab_size: int
    max_logprobs: int
    eos_token_ids: tuple[int, ...]
    tokenizer: Any  # or None


def check_params(params: SamplingParams, limits: ParamLimits) -> None:
    """Raises ValueError naming the option that this engine cannot follow, and what is allowed."""
    _check_logprobs(params, limits)
    _check_ids("stop_token_ids", params.stop_token_ids or (), limits)
    _check_ids("logit_bias key", params.logit_bias or (), limits)
    _check_ids("allowed_token_ids", params.allowed_token_ids or (), limits)
    for word in params.bad_words or ():
        _check_ids("bad_words", () if isinstance(word, str) else word, limits)
    num_ends = len(limits.eos_token_ids) + len(params.stop_token_ids or ())
    require(num_ends <= MAX_SUPPRESSED, "stop_token_ids", params.stop_token_ids, f"{MAX_SUPPRESSED} with the EOS ids")
    has_tokenizer = limits.tokenizer is not None
    require(has_tokenizer or not params.stop_strings, "stop", params.stop, "nothing: this model has no tokenizer")
    _check_choice(params, limits)


def _check_logprobs(params: SamplingParams, limits: ParamLimits) -> None:
    most = limits.vocab_size if limits.max_logprobs == ALL_LOGPROBS else limits.max_logprobs
    most_of_prompt = min(most, SAMPLER_LOGPROBS) if limits.max_logprobs == ALL_LOGPROBS else most
    for field, limit in (("logprobs", most), ("prompt_logprobs", most_of_prompt)):
        value = getattr(params, field)
        require((value or 0) <= limit, field, value, f"at most max_logprobs ({limit})")
    is_all = params.logprobs == ALL_LOGPROBS
    allowed = f"at most max_logprobs ({most}); -1 when max_logprobs is -1"
    require(not is_all or limits.max_logprobs == ALL_LOGPROBS, "logprobs", params.logprobs, allowed)


def _check_ids(field: str, token_ids: Iterable[int], limits: ParamLimits) -> None:
    for token_id in token_ids:
        allowed = f"ids below the vocabulary size ({limits.vocab_size})"
        require(token_id < limits.vocab_size, field, token_id, allowed)


def _check_choice(params: SamplingParams, limits: ParamLimits) -> None:
    """Something must be left that may come."""
    bias = params.logit_bias or {}
    banned = {token_id for token_id, value in bias.items() if value <= BANNING_BIAS}
    if params.allowed_token_ids is not None:
        is_possible = not banned.issuperset(params.allowed_token_ids)
        require(is_possible, "allowed_token_ids", params.allowed_token_ids, "one at least that logit_bias does not ban")
    is_possible = len(banned) < limits.vocab_size
    require(is_possible, "logit_bias", "a ban of every token", "one token at least that is not banned")


def with_bad_word_ids(params: SamplingParams, tokenizer: Any) -> SamplingParams:
    """The same params, bad words that are texts as token ids: the text as it stands, and as it stands after a space.

    Raises ValueError for a text when there is no tokenizer.
    """
    if all(not isinstance(word, str) for word in params.bad_words or ()):
        return params
    words: dict[tuple[int, ...], None] = {}
    for word in params.bad_words or ():
        words |= dict.fromkeys(_spellings(word, tokenizer))
    return dataclasses.replace(params, bad_words=list(words))


def _spellings(word: str | Sequence[int], tokenizer: Any) -> list[tuple[int, ...]]:
    if not isinstance(word, str):
        return [tuple(word)]
    require(tokenizer is not None, "bad_words", word, "lists of token ids only: this model has no tokenizer")
    spellings = [tuple(encode_plain(tokenizer, "bad_words", text)) for text in (word, " " + word.lstrip())]
    return [spelling for spelling in spellings if spelling]
