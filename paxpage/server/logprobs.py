"""Log-probabilities in the two shapes that the API has."""

from collections.abc import Sequence

from paxpage.outputs import Logprob, TokenLogprobs
from paxpage.outputs import PromptLogprobs as PromptEntries
from paxpage.server.responses import (
    ChatLogprobs,
    CompletionLogprobs,
    PromptLogprob,
    PromptLogprobs,
    TokenLogprob,
    TopLogprob,
)
from paxpage.server.token_bytes import TokenBytes, count_characters, spell

MIN_LOGPROB = -9999.0  # JSON has no -inf


class LogprobFormatter:
    """Writes log-probabilities of one tokenizer's tokens."""

    def __init__(self, token_bytes: TokenBytes):
        self._token_bytes = token_bytes

    def completion(self, tokens: Sequence[TokenLogprobs], first_offset: int) -> CompletionLogprobs:
        """The shape of /v1/completions.

        tokens: one dict a token, the chosen token first.
        first_offset: where the first token's text starts, in characters of the choice's text. Offsets add up the
            characters that begin in the tokens before.
        A part of a character is spelled "bytes:\\xe4". Two candidates with one text share an entry: the chosen or
        the likelier one keeps it.
        """
        offsets = [first_offset]
        for entries in tokens:
            offsets.append(offsets[-1] + count_characters(self._bytes(*_chosen(entries))))
        return CompletionLogprobs(
            text_offset=offsets[:-1],
            token_logprobs=[_value(_chosen(entries)[1]) for entries in tokens],
            tokens=[spell(self._bytes(*_chosen(entries))) for entries in tokens],
            top_logprobs=[self._by_text(entries) for entries in tokens],
        )

    def echo(self, token_ids: Sequence[int], entries: PromptEntries, text: str, num_top: int) -> CompletionLogprobs:
        """The shape of /v1/completions for a prompt that the answer's text begins with.

        text: the prompt as it is echoed. Its tokens are placed from its end, so that what was generated follows on;
        those that are no part of it, as a BOS that was added, are at its beginning. num_top: how many of the most
        likely tokens to show. Null stands for the first, and for all that were not scored before the request was ended.
        """
        pairs = zip(token_ids, entries, strict=True)
        tokens = [self._unscored(each) if entry is None else _likeliest(entry, num_top) for each, entry in pairs]
        shown = self.completion(tokens, len(text) - self.count_characters(tokens))
        shown.text_offset = [max(offset, 0) for offset in shown.text_offset]
        for place in (place for place, entry in enumerate(entries) if entry is None):
            shown.token_logprobs[place] = shown.top_logprobs[place] = None
        return shown

    def _unscored(self, token_id: int) -> TokenLogprobs:
        return {token_id: Logprob(0.0, 1, self._token_bytes.text(token_id))}

    def prompt(self, entries: PromptEntries, num_top: int) -> PromptLogprobs:
        """A prompt's log-probabilities by token id: each token with its num_top likeliest candidates."""
        return [None if each is None else _by_id(_likeliest(each, num_top)) for each in entries]

    def text(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        """The text of token ids; none without a tokenizer."""
        return self._token_bytes.text(*token_ids, skip_special_tokens=skip_special_tokens)

    def count_characters(self, tokens: Sequence[TokenLogprobs]) -> int:
        """How much these tokens move the offset of the next."""
        return sum(count_characters(self._bytes(*_chosen(entries))) for entries in tokens)

    def chat(self, tokens: Sequence[TokenLogprobs], num_top: int) -> ChatLogprobs:
        """The shape of /v1/chat/completions: each token with its num_top likeliest candidates, likeliest first."""
        return ChatLogprobs(content=[self._token_logprob(entries, num_top) for entries in tokens])

    def _by_text(self, entries: TokenLogprobs) -> dict[str, float]:
        by_text: dict[str, float] = {}
        for token_id, entry in entries.items():
            by_text.setdefault(spell(self._bytes(token_id, entry)), _value(entry))
        return by_text

    def _token_logprob(self, entries: TokenLogprobs, num_top: int) -> TokenLogprob:
        likeliest = sorted(entries.items(), key=lambda item: item[1].rank)[:num_top]
        top = [self._candidate(*item) for item in likeliest]
        return TokenLogprob(**self._candidate(*_chosen(entries)).model_dump(), top_logprobs=top)

    def _candidate(self, token_id: int, entry: Logprob) -> TopLogprob:
        data = self._bytes(token_id, entry)
        return TopLogprob(token=data.decode(errors="replace"), logprob=_value(entry), bytes=list(data))

    def _bytes(self, token_id: int, entry: Logprob) -> bytes:
        return self._token_bytes.of(token_id, entry.decoded_token or "")


def _likeliest(entries: TokenLogprobs, num_top: int) -> TokenLogprobs:
    """The first entry, which is the token that stands there, and those of rank num_top or better."""
    chosen = next(iter(entries), None)
    return {token_id: entry for token_id, entry in entries.items() if token_id == chosen or entry.rank <= num_top}


def _by_id(entries: TokenLogprobs) -> dict[str, PromptLogprob]:
    return {
        str(token_id): PromptLogprob(logprob=_value(entry), rank=entry.rank, decoded_token=entry.decoded_token)
        for token_id, entry in entries.items()
    }


def _chosen(entries: TokenLogprobs) -> tuple[int, Logprob]:
    return next(iter(entries.items()))


def _value(entry: Logprob) -> float:
    return max(entry.logprob, MIN_LOGPROB)
