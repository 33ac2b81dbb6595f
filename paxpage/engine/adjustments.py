"""What a request's options do to the logits of its next token: penalties, biases, bans, a list of allowed tokens.

Nothing of it lives on the device. Each step brings along what the host knows, as a sparse list of tokens, and the
device adds the one token that it alone knows yet (engine.sampler.adjust). So there is no state to lose, copy or rebuild
when a request is preempted, forked or computed again; and it takes memory only while somebody uses it.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from paxpage.engine.sampling_params import BANNING_BIAS, SamplingParams

BANNED_ALWAYS = -1  # Ban.after of a token that must not come whatever stands before it


class Ban(NamedTuple):
    """A token that must not come next: always, or if the token in flight is after."""

    token_id: int
    after: int = BANNED_ALWAYS


class Adjustments:
    """One request's adjustments, kept up to date as its tokens arrive.

    token_ids: the request's own list, prompt and output, to which only ever tokens are added. The params' bad words are
    lists of token ids; they are looked for in the output alone, as penalties for presence and frequency are.
    """

    def __init__(self, params: SamplingParams, token_ids: list[int], num_prompt_tokens: int) -> None:
        self.is_restricted = params.allowed_token_ids is not None
        penalties = (params.repetition_penalty, params.presence_penalty, params.frequency_penalty, 0)
        self.options = np.array(penalties, np.float32).view(np.int32)  # as batch.AdjustedRows has them
        self.options[3] = self.is_restricted
        self._token_ids = token_ids
        self._num_prompt_tokens = num_prompt_tokens
        bias = params.logit_bias or {}
        banned = sorted(token_id for token_id, value in bias.items() if value <= BANNING_BIAS)
        words = [_token_ids_of(word) for word in params.bad_words or ()]
        self._always_banned = [*map(Ban, banned), *(Ban(word[0]) for word in words if len(word) == 1)]
        self._bad_sequences = [word for word in words if len(word) > 1]
        self._longest = max(map(len, self._bad_sequences), default=0)
        self._table = TokenTable()
        for token_id in sorted(set(params.allowed_token_ids or ())):
            self._table.add(token_id, 0.0, 0)
        for token_id, value in bias.items():
            self._add(token_id, bias=value)
        if params.repetition_penalty != 1:
            for token_id in sorted(set(token_ids[:num_prompt_tokens])):
                self._add(token_id, count=1)
        self._num_counted = num_prompt_tokens if params.has_penalties else None

    def entries(self) -> np.ndarray:
        """int32 [3, num]: token id, bits of the float32 bias, and 2 * times in the output + whether in the prompt.

        One column for each token whose logit may change or, in a restricted request, that may come at all.
        """
        if self._num_counted is not None:
            for token_id in self._token_ids[self._num_counted :]:
                self._add(token_id, count=2)
            self._num_counted = len(self._token_ids)
        return self._table.columns

    def bans(self, *, has_pending: bool) -> list[Ban]:
        """Tokens that must not come next. has_pending: the last token is on its way from the device still."""
        output = self._token_ids[max(self._num_prompt_tokens, len(self._token_ids) - self._longest) :]
        bans = list(self._always_banned)
        for *before, last_before, token_id in self._bad_sequences:
            if has_pending and _ends_with(output, before):
                bans.append(Ban(token_id, after=last_before))
            elif not has_pending and _ends_with(output, [*before, last_before]):
                bans.append(Ban(token_id))
        return bans

    def _add(self, token_id: int, *, bias: float = 0.0, count: int = 0) -> None:
        if not self.is_restricted or token_id in self._table:
            self._table.add(token_id, bias, count)


def _token_ids_of(word: str | Sequence[int]) -> list[int]:
    assert not isinstance(word, str), "the engine has made token ids of texts"
    return list(word)


def _ends_with(token_ids: list[int], end: list[int]) -> bool:
    return not end or token_ids[-len(end) :] == end


class TokenTable:
    """Tokens in order of their coming, with a bias and a count each."""

    def __init__(self) -> None:
        self._columns = np.zeros((3, 64), np.int32)
        self._places: dict[int, int] = {}

    def __contains__(self, token_id: int) -> bool:
        return token_id in self._places

    def add(self, token_id: int, bias: float, count: int) -> None:
        """Adds to the token's bias and count; a new one has 0 of both."""
        place = self._places.setdefault(token_id, len(self._places))
        if place == self._columns.shape[1]:
            self._columns = np.concatenate([self._columns, 0 * self._columns], axis=1)
        self._columns[0, place] = token_id
        self._columns[1].view(np.float32)[place] += bias
        self._columns[2, place] += count

    @property
    def columns(self) -> np.ndarray:
        """int32 [3, num_tokens]: token ids, bits of the biases, counts. Valid until a token is added."""
        return self._columns[:, : len(self._places)]
