"""How one request is sampled: the user's options, checked on construction."""

import dataclasses
import math
from collections.abc import Mapping, Sequence

from paxpage.config import require, require_int
from paxpage.engine.structured_outputs import StructuredOutputsParams

MAX_N = 128
MAX_STOPS = 256
MAX_STOP_CHARS = 16_384  # of all stop strings together: they are looked for after every token
MAX_STOP_TOKEN_IDS = 64
MAX_BAD_WORDS = 1024  # as token ids: a text is two of them
ALL_LOGPROBS = -1
BANNING_BIAS = -100.0  # a logit_bias of so much is a ban
GREEDY_TEMPERATURE = 1e-5  # below this a temperature means greedy: dividing by it would overflow float32


def _require_number(field: str, value: object, minimum: float, maximum: float, allowed: str) -> None:
    require(isinstance(value, (int, float)) and not isinstance(value, bool), field, value, allowed)
    assert isinstance(value, (int, float))
    require(math.isfinite(value) and minimum <= value <= maximum, field, value, allowed)


def _require_ids(field: str, ids: object) -> None:
    require(isinstance(ids, Sequence) and not isinstance(ids, str), field, ids, "a list of token ids")
    assert isinstance(ids, Sequence)
    for token_id in ids:
        require_int(field, token_id, 0)


def _require_bias(bias: object) -> None:
    require(isinstance(bias, Mapping), "logit_bias", bias, "{token id: number from -100 to 100}")
    assert isinstance(bias, Mapping)
    for token_id, value in bias.items():
        require_int("logit_bias key", token_id, 0)
        _require_number(f"logit_bias of {token_id}", value, BANNING_BIAS, -BANNING_BIAS, "a number from -100 to 100")


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
    stop: strings that end the text (not included unless include_stop_str_in_output). At most 256, of 16,384 characters
        together.
    stop_token_ids: token ids that end the request. At most 64.
    ignore_eos: go on past the model's own end-of-sequence tokens.
    max_tokens: new tokens at most; None: all that the context allows.
    min_tokens: before so many, no end-of-sequence or stop token can be sampled and stop strings do not end the text.
    logprobs: None, or how many of the most likely tokens to report besides the chosen one; -1: all tokens there are.
    prompt_logprobs: the same for the prompt's own tokens, but never all.
    presence_penalty, frequency_penalty: taken from the logit of a token that the output has already: once, and as often
        as it has it. From -2 to 2, 0 is none.
    repetition_penalty: divides the logit of a token that prompt or output have already, or multiplies a negative one.
        From 1e-6 to 1e6, 1 is none.
    logit_bias: {token id: number from -100 to 100} to be added to logits; -100 bans the token altogether.
    allowed_token_ids: no other token can be sampled.
    bad_words: texts, or lists of token ids, that the output must not have: a text is banned as it is and with a space
        before it. Of several tokens the last cannot follow the others. Where nothing else is allowed, they may. At
        most 512 texts, or 1024 lists.
    structured_outputs: what the whole output must match (StructuredOutputsParams). It ends with the grammar, for which
        min_tokens and bans give way, and an end of sequence can come only where the grammar may end. Stop strings, stop
        tokens and max_tokens may cut it short. Log-probabilities are the model's own, of all tokens. Where no token is
        left, allowed_token_ids being against it, the request ends with finish_reason "error".
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
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] | None = None
    allowed_token_ids: Sequence[int] | None = None
    bad_words: Sequence[str | Sequence[int]] | None = None
    detokenize: bool = True
    skip_special_tokens: bool = True
    structured_outputs: StructuredOutputsParams | None = None

    def __post_init__(self) -> None:
        for field in ("ignore_eos", "include_stop_str_in_output", "detokenize", "skip_special_tokens"):
            require(isinstance(getattr(self, field), bool), field, getattr(self, field), "True or False")
        is_params = self.structured_outputs is None or isinstance(self.structured_outputs, StructuredOutputsParams)
        require(is_params, "structured_outputs", self.structured_outputs, "a StructuredOutputsParams, or None")
        self._check_distribution()
        self._check_lengths()
        self._check_stops()
        self._check_penalties()
        self._check_lists()

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
        for field, least in (("logprobs", ALL_LOGPROBS), ("prompt_logprobs", 0)):
            if getattr(self, field) is not None:
                require_int(field, getattr(self, field), least)

    def _check_stops(self) -> None:
        stops = self.stop_strings
        is_text = all(isinstance(s, str) and s for s in stops)
        require(is_text, "stop", self.stop, "a non-empty string or a list of non-empty strings")
        is_short = len(stops) <= MAX_STOPS and sum(map(len, stops)) <= MAX_STOP_CHARS
        allowed = f"at most {MAX_STOPS}, of {MAX_STOP_CHARS} characters together"
        require(is_short, "stop", f"{len(stops)} strings", allowed)
        require(self.detokenize or not stops, "stop", self.stop, "nothing when detokenize is False")
        ids = () if self.stop_token_ids is None else self.stop_token_ids
        _require_ids("stop_token_ids", ids)
        require(
            len(ids) <= MAX_STOP_TOKEN_IDS, "stop_token_ids", f"{len(ids)} ids", f"at most {MAX_STOP_TOKEN_IDS} ids"
        )

    def _check_penalties(self) -> None:
        for field in ("presence_penalty", "frequency_penalty"):
            _require_number(field, getattr(self, field), -2.0, 2.0, "a number from -2 to 2")
        _require_number("repetition_penalty", self.repetition_penalty, 1e-6, 1e6, "a number from 1e-6 to 1e6")

    def _check_lists(self) -> None:
        if self.logit_bias is not None:
            _require_bias(self.logit_bias)
        if self.allowed_token_ids is not None:
            _require_ids("allowed_token_ids", self.allowed_token_ids)
            require(len(self.allowed_token_ids) > 0, "allowed_token_ids", [], "at least one token id, or None")
        words = () if self.bad_words is None else self.bad_words
        is_list = isinstance(words, Sequence) and not isinstance(words, str)
        require(is_list, "bad_words", words, "a list of strings, or of lists of token ids")
        num_words = sum(2 if isinstance(word, str) else 1 for word in words)
        allowed = f"at most {MAX_BAD_WORDS // 2}, or {MAX_BAD_WORDS} lists of token ids"
        require(num_words <= MAX_BAD_WORDS, "bad_words", f"{len(words)} words", allowed)
        for word in words:
            require(isinstance(word, Sequence) and len(word) > 0, "bad_words", word, "a non-empty string or list")
            if not isinstance(word, str):
                _require_ids("bad_words", word)

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

    @property
    def has_penalties(self) -> bool:
        """Whether tokens that were there already count."""
        return (self.presence_penalty, self.frequency_penalty, self.repetition_penalty) != (0, 0, 1)

    @property
    def is_adjusted(self) -> bool:
        """Whether the logits are changed before a token is drawn from them."""
        has_lists = bool(self.logit_bias or self.bad_words) or self.allowed_token_ids is not None
        return self.has_penalties or has_lists

    def for_child(self, index: int) -> "SamplingParams":
        """The options of a request's sample number index."""
        if self.n == 1:
            return self
        seed = None if self.seed is None else _wrap_int64(self.seed + index)
        return dataclasses.replace(self, n=1, seed=seed, prompt_logprobs=self.prompt_logprobs if index == 0 else None)


def _wrap_int64(value: int) -> int:
    return (value + 2**63) % 2**64 - 2**63
