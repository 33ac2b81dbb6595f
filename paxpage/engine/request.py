"""One sequence being generated, as the scheduler sees it."""

import enum
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol, runtime_checkable

from paxpage.engine.adjustments import Adjustments
from paxpage.engine.sampling_params import SamplingParams


class RequestStatus(enum.Enum):
    """Where a request is. A preempted one is waiting again; an ending one waits only for its last token to arrive."""

    WAITING = "waiting"
    RUNNING = "running"
    ENDING = "ending"
    FINISHED = "finished"


class PromptDigests(NamedTuple):
    """A prompt's full blocks, as prefix_cache.block_digests names them, and what stands before the first."""

    root: bytes
    blocks: Sequence[bytes]


NO_DIGESTS = PromptDigests(b"", ())
NEVER = 2**62  # more tokens than any request has


class FinishReason(enum.StrEnum):
    """Why a request ended, in the words of the OpenAI API."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


@runtime_checkable
class Grammar(Protocol):
    """What a request asks of its grammar (engine.grammars.GrammarState)."""

    finish_reason: FinishReason | None  # why the request ends; STOP at the grammar's end, ERROR when it cannot go on
    error: str | None

    def accept(self, token_id: int) -> bool:
        """Takes a token of text in. False: it is none of the output's, which has ended before it."""


class Request:
    """A sequence of tokens and how far the cache has caught up with it.

    There is no prefill phase: num_computed_tokens (tokens whose keys and values are in the cache, or will be when the
    steps in flight end) catches up with num_tokens, and a step that reaches it samples the next token. Preemption
    sets it back to 0. num_tokens runs ahead of token_ids by the tokens that steps in flight have sampled and the host
    does not know yet. Only the scheduler mutates a request.

    max_tokens is the resolved limit of new tokens (the context length included), seed the resolved 64-bit seed,
    eos_token_ids the model's own ends of sequence, digests those of the prompt for the prefix cache (made when they are
    wanted, if not given). The params' bad words are token ids.
    """

    __slots__ = (
        *("request_id", "token_ids", "num_prompt_tokens", "params", "max_tokens", "seed", "eos_token_ids"),
        *("stop_token_ids", "priority", "first_scheduled_time_s", "sequence_number", "row", "status"),
        *("num_tokens", "max_num_tokens", "num_computed_tokens", "batch_index", "num_preemptions", "finish_reason"),
        *("stop_reason", "packed_params", "needs_sampler", "min_tokens", "root_digest", "block_digests"),
        *("num_cached_blocks", "next_block_end", "num_cached_tokens", "awaited", "leader", "followers"),
        *("is_scored", "num_readonly_tokens", "adjustments", "grammar", "has_end_token", "num_dropped"),
    )

    def __init__(
        self,
        request_id: str,
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
        *,
        max_tokens: int,
        seed: int = 0,
        eos_token_ids: frozenset[int] = frozenset(),
        priority: int = 0,
        digests: PromptDigests = NO_DIGESTS,
    ) -> None:
        self.request_id = request_id
        self.token_ids = list(prompt_token_ids)  # the prompt, then the output
        self.num_prompt_tokens = len(self.token_ids)
        self.num_tokens = self.num_prompt_tokens  # prompt and output, those in flight included
        self.max_num_tokens = self.num_prompt_tokens + max_tokens
        self.params = params
        self.max_tokens = max_tokens
        self.seed = seed
        self.eos_token_ids = frozenset() if params.ignore_eos else eos_token_ids
        self.stop_token_ids = frozenset(params.stop_token_ids or ())
        self.priority = priority
        self.first_scheduled_time_s: float | None = None
        self.sequence_number = -1  # order of arrival, set when the scheduler takes it in
        self.row = -1  # its row of the block tables while running
        self.status = RequestStatus.WAITING
        self.num_computed_tokens = 0
        self.batch_index = -1  # its row in the last batch that it was part of
        self.min_tokens = params.min_tokens
        # Whether a step's most likely token is not all that the request wants.
        self.adjustments = Adjustments(params, self.token_ids, self.num_prompt_tokens) if params.is_adjusted else None
        self.grammar: Grammar | None = None  # of structured outputs: this request's own, set right after this
        self.has_end_token = False  # the last token has ended the request and is none of its text
        self.num_dropped = 0  # 1: its grammar had ended, or failed, before the last token that was sampled
        is_plain = params.is_greedy and self.adjustments is None and params.structured_outputs is None
        self.needs_sampler = not is_plain or params.logprobs is not None or params.min_tokens > 0
        self.packed_params: Any = None  # the batch builder's, made once
        self.num_preemptions = 0
        self.finish_reason: FinishReason | None = None
        self.stop_reason: int | str | None = None
        self._set_up_sharing(digests)

    def _set_up_sharing(self, digests: PromptDigests) -> None:
        """What the KV cache manager and the scheduler keep of it to share its blocks."""
        self.root_digest, self.block_digests = digests.root, list(digests.blocks)
        self.num_cached_blocks = 0  # first blocks that are in the prefix cache
        self.next_block_end = NEVER  # num_computed_tokens from which on there is another block to cache
        self.num_cached_tokens: int | None = None  # not computed when first admitted; None before
        self.awaited: bytes | None = None  # a block that another request is about to compute, and this one waits for
        # Whether log-probabilities of the prompt are still wanted. All its tokens are then computed, but where the
        # cache has their keys and values those are read, shared and not written again.
        self.is_scored = self.params.prompt_logprobs is not None and self.num_prompt_tokens > 1
        self.num_readonly_tokens = 0
        # Samples of one prompt: the first leads, and the others follow until it has computed the prompt.
        self.leader: Request | None = None
        self.followers: list[Request] = []

    @property
    def num_known_tokens(self) -> int:
        """Prompt and output tokens that the host knows."""
        return len(self.token_ids)

    @property
    def num_output_tokens(self) -> int:
        """Output tokens that the host knows."""
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def num_uncomputed_tokens(self) -> int:
        """Tokens whose keys and values are not in the cache yet; 1 while decoding."""
        return self.num_tokens - self.num_computed_tokens

    @property
    def num_pending_tokens(self) -> int:
        """Tokens sampled by steps in flight, which the host does not know yet."""
        return self.num_tokens - len(self.token_ids)

    @property
    def goes_on_alone(self) -> bool:
        """Whether, as far as is known, steps in flight do not end it, and its next token takes only the device."""
        return self.num_tokens < self.max_num_tokens and self.adjustments is None and self.grammar is None

    def forget_pending(self) -> None:
        """The steps in flight are lost, and their tokens with them."""
        self.num_tokens = len(self.token_ids)

    @property
    def output_token_ids(self) -> list[int]:
        """A copy of the output tokens so far."""
        return self.token_ids[self.num_prompt_tokens :]

    def append(self, token_id: int) -> FinishReason | None:
        """Takes a sampled token in; returns why the request ends with it, or None. Sets stop_reason."""
        if self.grammar is not None:
            return self._append_by_grammar(self.grammar, token_id)
        self.token_ids.append(token_id)
        num_known = len(self.token_ids)
        if num_known > self.num_tokens:
            self.num_tokens = num_known
        if num_known - self.num_prompt_tokens >= self.min_tokens:
            if token_id in self.eos_token_ids:
                return self._end_with_token(None)
            if token_id in self.stop_token_ids:
                return self._end_with_token(token_id)
        return FinishReason.LENGTH if num_known >= self.max_num_tokens else None

    def _append_by_grammar(self, grammar: Grammar, token_id: int) -> FinishReason | None:
        """append, but an end of sequence ends at once (it came where nothing else could), and so does the grammar."""
        is_eos = token_id in self.eos_token_ids
        is_stop = token_id in self.stop_token_ids and self.num_output_tokens + 1 >= self.min_tokens
        if grammar.finish_reason is None and (is_eos or is_stop):
            self._push(token_id)
            return self._end_with_token(None if is_eos else token_id)
        if not grammar.accept(token_id):
            self.num_dropped, self.stop_reason = 1, grammar.error
            return grammar.finish_reason
        self._push(token_id)
        is_cut = len(self.token_ids) >= self.max_num_tokens
        return grammar.finish_reason or (FinishReason.LENGTH if is_cut else None)

    def _push(self, token_id: int) -> None:
        self.token_ids.append(token_id)
        self.num_tokens = max(self.num_tokens, len(self.token_ids))

    def _end_with_token(self, stop_token_id: int | None) -> FinishReason:
        self.has_end_token = True
        if stop_token_id is not None:
            self.stop_reason = stop_token_id
        return FinishReason.STOP
