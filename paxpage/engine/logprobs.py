"""Log-probabilities as users get them, from what sampler.describe gives."""

import functools
import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from paxpage.outputs import Logprob, TokenLogprobs

# Logprob._make without a call of Python's own: a step of 256 rows may make 5,000.
make_logprob = functools.partial(tuple.__new__, Logprob)


class TokenTexts(dict[int, str | None]):
    """Each token's text by itself, decoded when it is first looked up; None without a tokenizer."""

    def __init__(self, tokenizer: Any) -> None:
        super().__init__()
        self._tokenizer = tokenizer

    def __missing__(self, token_id: int) -> str | None:
        decode = None if self._tokenizer is None else self._tokenizer.backend_tokenizer.decode
        text: str | None = None if decode is None else decode([token_id], False)
        self[token_id] = text
        return text


class Description(NamedTuple):
    """A row of sampler.describe's arrays in Python's own numbers."""

    logprob: float  # of the chosen token
    rank: int
    top_token_ids: list[int]
    top_logprobs: list[float]


def descriptions(arrays: Sequence[np.ndarray], rows: list[int] | slice, num_top: int) -> list[Description]:
    """Some rows of sampler.describe's arrays, with num_top of the most likely tokens; all made into numbers at once."""
    logprobs, ranks, top_token_ids, top_logprobs = arrays
    parts = (logprobs[rows], ranks[rows], top_token_ids[rows, :num_top], top_logprobs[rows, :num_top])
    return list(map(Description, *(part.tolist() for part in parts)))


def describe_on_host(logits: np.ndarray, token_id: int, num_top: int) -> Description:
    """What sampler.describe gives for one row of logits, with any number of the most likely tokens."""
    wide = logits.astype(np.float64) - logits.max()
    logprobs = wide - np.log(np.exp(wide).sum())
    order = np.argsort(-logprobs, kind="stable")[:num_top]
    rank = 1 + int((logprobs > logprobs[token_id]).sum())
    return Description(float(logprobs[token_id]), rank, order.tolist(), logprobs[order].tolist())


def token_logprobs(token_id: int, described: Description, num_top: int, texts: TokenTexts) -> TokenLogprobs:
    """The chosen token and the num_top most likely ones, of which it may be one: then its own rank stands."""
    chosen = make_logprob((described.logprob, described.rank, texts[token_id]))
    entries = {token_id: chosen}
    if num_top:
        top_ids = described.top_token_ids[:num_top]
        fields = zip(described.top_logprobs, itertools.count(1), map(texts.__getitem__, top_ids))
        entries.update(zip(top_ids, map(make_logprob, fields), strict=True))
        entries[token_id] = chosen
    return entries
