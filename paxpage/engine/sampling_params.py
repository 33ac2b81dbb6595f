"""How one request is sampled: the user's options, checked on construction."""

import dataclasses
import math
from collections.abc import Sequence

from paxpage.config import require, require_int

MAX_N = 128
MAX_STOP_TOKEN_IDS = 64
GREEDY_TEMPERATURE = 1e-5  # below this a temperature means greedy: dividing by it would overflow float32


def _require_number(field: str, value: object, minimum: float, maximum: float, allowed: str) -> None:
    require(isinstance(value, (int, float)) and not isinstance(value, bool), field, value, allowed)
    assert isinstance(value, (int, float))
    require(math.isfinite(value) and minimum <= value <= maximum, field, value, allowed)


def _as_tuple(value: str | Sequence[str] | None) -> tuple[str, ...]:
    if value is None:
        return ()
    return (value,) if isinstance(value, str) else tuple(value)


@dataclasses.dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """Sampling options of one request. The names and defaults are vLLM's.

    n: samples per prompt. Sample i of a seeded request uses seed + i.
    temperature: 0 (or anything under 1e-5) is greedy; at most 1e6.
    top_p, top_k, min_p: keep the most likely tokens; top_k 0 or -1 keeps all. Ties with the last kept one stay.
    seed: any int64. The same seed gives the same tokens whatever else is in the batch.
    stop: strings that end the text (not included unless include_stop_str_in_output).
    stop_token_ids: token ids that end the request. At most 64.
    ignore_eos: go on past the model's own end-of-sequence tokens.
    max_tokens: new tokens at most; None: all that the context allows.
    min_tokens: before so many, no end-of-sequence or stop token can be sampled and stop strings do not end the text.
    logprobs: None, or how many of the most likely tokens to report besides the chosen one.
    prompt_logprobs: the same for the prompt's own tokens.
    """

    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    stop: str | Sequence[str] | None = None
    stop_token_ids: Sequence[int] | None = None
    ignore_eos: bool = False
    max_tokens: int | None = 16
    min_tokens: int = 0
    include_stop_str_in_output: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    detokenize: bool = True
    skip_special_tokens: bool = True

    def __post_init__(self) -> None:
        for field in ("ignore_eos", "include_stop_str_in_output", "detokenize", "skip_special_tokens"):
            require(isinstance(getattr(self, field), bool), field, getattr(self, field), "True or False")
        self._check_distribution()
        self._check_lengths()
        self._check_stops()

    def _check_distribution(self) -> None:
        require_int("n", self.n, 1, MAX_N)
        _require_number("temperature", self.temperature, 0.0, 1e6, "a finite number from 0 to 1e6")
        _require_number("top_p", self.top_p, 0.0, 1.0, "a number in (0, 1]")
        require(self.top_p > 0, "top_p", self.top_p, "a number in (0, 1]")
        _require_number("min_p", self.min_p, 0.0, 1.0, "a number in [0, 1]")
        require_int("top_k", self.top_k, -1, 2**31 - 1)
        if self.seed is not None:
            require_int("seed", self.seed, -(2**63), 2**63 - 1)

    def _check_lengths(self) -> None:
        if self.max_tokens is not None:
            require_int("max_tokens", self.max_tokens, 1)
        require_int("min_tokens", self.min_tokens, 0)
        if self.max_tokens is not None:
            require(
                self.min_tokens <= self.max_tokens,
                "min_tokens",
                self.min_tokens,
                f"at most max_tokens ({self.max_tokens})",
            )
        for field in ("logprobs", "prompt_logprobs"):
            if getattr(self, field) is not None:
                require_int(field, getattr(self, field), 0)

    def _check_stops(self) -> None:
        stops = self.stop_strings
        is_text = all(isinstance(s, str) and s for s in stops)
        require(is_text, "stop", self.stop, "a non-empty string or a list of non-empty strings")
        require(self.detokenize or not stops, "stop", self.stop, "nothing when detokenize is False")
        ids = () if self.stop_token_ids is None else self.stop_token_ids
        require(isinstance(ids, Sequence) and not isinstance(ids, str), "stop_token_ids", ids, "a list of token ids")
        require(
            len(ids) <= MAX_STOP_TOKEN_IDS, "stop_token_ids", f"{len(ids)} ids", f"at most {MAX_STOP_TOKEN_IDS} ids"
        )
        for token_id in ids:
            require_int("stop_token_ids", token_id, 0)

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """The stop strings as a tuple, empty when there are none."""
        is_list = self.stop is None or isinstance(self.stop, (str, list, tuple))
        require(is_list, "stop", self.stop, "a string or a list of strings")
        return _as_tuple(self.stop)

    @property
    def is_greedy(self) -> bool:
        """Whether the most likely token is always taken."""
        return self.temperature < GREEDY_TEMPERATURE

    def for_child(self, index: int) -> "SamplingParams":
        """The options of sample number index of an n > 1 request."""
        seed = None if self.seed is None else _wrap_int64(self.seed + index)
        return dataclasses.replace(self, n=1, seed=seed, prompt_logprobs=self.prompt_logprobs if index == 0 else None)


def _wrap_int64(value: int) -> int:
    return (value + 2**63) % 2**64 - 2**63
