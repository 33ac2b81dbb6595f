"""Token ids to text, a few at a time, and the stop strings that end it."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

REPLACEMENT = "\ufffd"  # what decoding gives for the bytes of a character that is not whole yet
NUM_CONTEXT_TOKENS = 8  # earlier tokens decoded again with new ones, since a tokenizer treats a text's start apart
MAX_PENDING_TOKENS = 8  # a character has at most 4 bytes, so after so many tokens its bytes are simply wrong
MAX_PARTIAL_CHARS = 3  # but the last 3 of these wrong bytes may still begin a character

Decode = Callable[[Sequence[int]], str]


class TokenDecoder:
    """Incremental decoding: the pieces joined equal decoding all ids at once (after the context's own text).

    A piece never ends within a character. context is what stands before the first token (the prompt's last ids).
    """

    def __init__(self, decode: Decode, context: Sequence[int] = ()) -> None:
        self._decode = decode
        self._window = whole_context(decode, context)
        self._num_settled = len(self._window)  # tokens of the window whose text is all out
        self._checkpoint = 0  # a character border NUM_CONTEXT_TOKENS or more before the window's settled end
        self._num_sent_chars = len(self._decode(self._window).rstrip(REPLACEMENT)) if self._window else 0

    def push(self, token_ids: Sequence[int]) -> str:
        """The text that these tokens complete."""
        pieces = [self._push_one(token_id) for token_id in token_ids]
        return "".join(pieces)

    def flush(self) -> str:
        """What is left at the end, incomplete characters as U+FFFD."""
        text = self._decode(self._window)
        piece, self._num_sent_chars = text[self._num_sent_chars :], len(text)
        return piece

    def _push_one(self, token_id: int) -> str:
        self._window.append(token_id)
        text = self._decode(self._window)
        is_overdue = len(self._window) - self._num_settled > MAX_PENDING_TOKENS
        num_partial = len(text) - len(text.rstrip(REPLACEMENT))
        num_held = min(num_partial, MAX_PARTIAL_CHARS) if is_overdue else num_partial
        piece = text[self._num_sent_chars : len(text) - num_held]
        self._num_sent_chars = max(self._num_sent_chars, len(text) - num_held)
        if num_held == 0 or is_overdue:
            self._settle(num_held)
        return piece

    def _settle(self, num_held: int) -> None:
        """All text but the last num_held characters is out: forgets tokens that are not needed as context any more."""
        self._num_settled = len(self._window)
        if self._num_settled - self._checkpoint < NUM_CONTEXT_TOKENS:
            return
        window = self._window[self._checkpoint :]
        text = self._decode(window)
        if text:  # tokens without text (special ones, skipped) are no context
            self._window, self._num_sent_chars = window, len(text) - num_held
        self._checkpoint = self._num_settled = len(self._window)


def whole_context(decode: Decode, context: Sequence[int]) -> list[int]:
    """The last few ids of context, from a character border on."""
    for num_tokens in range(min(NUM_CONTEXT_TOKENS, len(context)), 0, -1):
        if not decode(context[-num_tokens:]).startswith(REPLACEMENT):
            return list(context[-num_tokens:])
    return []


class StopMatch(NamedTuple):
    """A stop string found in the text: text[start:end]."""

    start: int
    end: int
    stop: str


class StopChecker:
    """Holds text back while it may be the beginning of a stop string, and finds the one that ends first."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._held = ""

    def push(self, piece: str, *, is_searching: bool = True) -> tuple[str, StopMatch | None]:
        """Adds text; returns (what can be sent, the match with positions in held text + piece).

        On a match what can be sent ends where the stop string begins. is_searching False passes text through.
        """
        text = self._held + piece
        if not is_searching or not self._stops:
            self._held = ""
            return text, None
        match = find_stop(text, self._stops)
        if match is not None:
            self._held = ""
            return text[: match.start], match
        num_held = longest_partial_stop(text, self._stops)
        self._held = text[len(text) - num_held :]
        return text[: len(text) - num_held], None

    def flush(self) -> str:
        """The text held back, when no stop string can come any more."""
        held, self._held = self._held, ""
        return held


def find_stop(text: str, stops: Sequence[str]) -> StopMatch | None:
    """The stop string whose first occurrence ends earliest; the longest of those that end together."""
    starts = ((text.find(stop), stop) for stop in stops)
    matches = [StopMatch(start, start + len(stop), stop) for start, stop in starts if start >= 0]
    return min(matches, key=lambda match: (match.end, match.start), default=None)


def longest_partial_stop(text: str, stops: Sequence[str]) -> int:
    """Length of the longest end of text that begins some stop string."""
    longest = min(len(text), max(map(len, stops)) - 1)
    return next((n for n in range(longest, 0, -1) if any(stop.startswith(text[-n:]) for stop in stops)), 0)


class Detokenizer:
    """One request's text: decoding, then stop strings.

    push() returns only text that is final; text is all of it so far. After it, stop_match tells whether a stop string
    has ended the request.
    """

    def __init__(
        self, decode: Decode, context: Sequence[int], stops: Sequence[str], *, include_stop: bool, min_tokens: int
    ) -> None:
        self._decoder = TokenDecoder(decode, context)
        self._stops = StopChecker(stops)
        self._include_stop = include_stop
        self._min_tokens = min_tokens
        self._num_tokens = 0
        self._pieces: list[str] = []
        self.stop_match: StopMatch | None = None

    @property
    def text(self) -> str:
        """All text so far."""
        return "".join(self._pieces)

    def push(self, token_ids: Sequence[int]) -> str:
        """Takes tokens in; returns the new text. Nothing after a stop string."""
        self._num_tokens += len(token_ids)
        return self._send(self._decoder.push(token_ids))

    def flush(self) -> str:
        """The last text of a request that ended without a stop string (one may still come to light here)."""
        piece = self._send(self._decoder.flush())
        return piece if self.stop_match else piece + self._keep(self._stops.flush())

    def _send(self, piece: str) -> str:
        is_searching = self._num_tokens >= self._min_tokens
        sendable, self.stop_match = self._stops.push(piece, is_searching=is_searching)
        if self.stop_match is not None and self._include_stop:
            sendable += self.stop_match.stop
        return self._keep(sendable)

    def _keep(self, piece: str) -> str:
        if piece:
            self._pieces.append(piece)
        return piece


def decode_after(decode: Decode, context: Sequence[int], token_ids: Sequence[int]) -> str:
    """The text of token_ids after context, all at once: what a TokenDecoder's pieces join to."""
    window = whole_context(decode, context)
    num_sent_chars = len(decode(window).rstrip(REPLACEMENT)) if window else 0
    text = decode([*window, *token_ids])[num_sent_chars:]
    if REPLACEMENT in text:  # one wrong byte may spoil bytes before it that a TokenDecoder has long sent as text
        decoder = TokenDecoder(decode, context)
        text = decoder.push(token_ids) + decoder.flush()
    return text
