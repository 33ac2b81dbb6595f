"""The engine: requests in, tokens and text out.

`step()` is the whole of it: the scheduler chooses who takes part, the model runner computes, the scheduler takes the
tokens in, and each request's new text goes out.
"""

import functools
import logging
import time
from array import array
from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np

from paxpage.config import EngineConfig, SchedulerConfig, require
from paxpage.engine.accounting import IdleMeter, SlotAccount
from paxpage.engine.batch import needs_masks
from paxpage.engine.block_pool import BlockPool
from paxpage.engine.detokenizer import Detokenizer, decode_after
from paxpage.engine.grammars import Grammar, GrammarCompiler
from paxpage.engine.kv_cache_manager import BlockReport, KVCacheManager
from paxpage.engine.logprobs import TokenTexts, describe_on_host, descriptions, token_logprobs
from paxpage.engine.model_runner import HostTokens, Launched, ModelRunner, Scored
from paxpage.engine.params_check import ParamLimits, check_params, with_bad_word_ids
from paxpage.engine.prefix_cache import PrefixCache, PromptHasher, root_digest
from paxpage.engine.request import FinishReason, PromptDigests, Request, RequestStatus
from paxpage.engine.sampling_params import ALL_LOGPROBS, SamplingParams
from paxpage.engine.scheduler import ScheduledBatch, Scheduler
from paxpage.models.checkpoint import check_same_params
from paxpage.models.generation import GenerationDefaults
from paxpage.models.registry import Params
from paxpage.outputs import (
    CompletionDelta,
    CompletionOutput,
    PromptLogprobs,
    RequestMetrics,
    RequestOutput,
    TokenLogprobs,
)
from paxpage.prompts import encode_text
from paxpage.text_bound import TextBound, text_bound

logger = logging.getLogger(__name__)

TokenIds = Sequence[int]
Prompt = str | TokenIds | dict[str, Any]  # the dict has one key, "prompt_token_ids" or "prompt"


class EngineDeadError(RuntimeError):
    """Steps keep failing; the engine takes no further work."""


class PreparedRequest(NamedTuple):
    """A request that has been checked and tokenised, ready for Engine.submit."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    params: SamplingParams
    max_tokens: int
    priority: int
    is_streamed: bool
    arrival_time_s: float
    digests: PromptDigests
    grammar: Grammar | None = None  # of structured outputs


class EngineStats(NamedTuple):
    """Numbers of this moment; those from num_preemptions on only grow."""

    num_running: int
    num_waiting: int
    kv_cache_usage: float  # share of usable blocks that are referenced, 0 to 1
    num_blocks_free: int
    num_blocks_usable: int
    num_blocks_cached: int  # in the prefix cache, free or not
    num_scheduled_tokens: int  # of the last step
    num_preemptions: int
    num_prefix_queries: int  # tokens of prompts looked up in the prefix cache
    num_prefix_hits: int  # of these, tokens that were found there and not computed again
    num_wasted_rows: int  # computed in vain: the request had ended by a token that was still in flight
    num_steps: int
    num_failed_steps: int


class Sample:
    """One of a request's n samples, and its text and log-probabilities so far."""

    def __init__(self, index: int, request: Request, group: "Group", detokenizer: Detokenizer | None) -> None:
        self.index = index
        self.request = request
        self.group = group
        self.detokenizer = detokenizer
        self.logprobs: list[TokenLogprobs] | None = None if request.params.logprobs is None else []
        self.text = ""
        self.first_token_time_s: float | None = None

    @property
    def finish_reason(self) -> str | None:
        """The reason in the API's words, None while unfinished."""
        reason = self.request.finish_reason
        return None if reason is None else reason.value

    def output(self) -> CompletionOutput:
        """The sample as the user sees it."""
        entries = self.logprobs
        cumulative = None if entries is None else sum(next(iter(entry.values())).logprob for entry in entries)
        request = self.request
        return CompletionOutput(
            self.index,
            self.text,
            request.output_token_ids,
            cumulative,
            entries,
            self.finish_reason,
            request.stop_reason,
        )


class Group:
    """A user's request: n samples."""

    def __init__(self, prepared: PreparedRequest) -> None:
        self.prepared = prepared
        self.samples: list[Sample] = []
        self.num_unfinished = prepared.params.n
        is_scored = prepared.params.prompt_logprobs is not None
        self.prompt_logprobs: PromptLogprobs | None = [None] * len(prepared.prompt_token_ids) if is_scored else None
        self._has_given_prompt = False

    def take_prompt_logprobs(self) -> PromptLogprobs | None:
        """The prompt's log-probabilities for the first who asks."""
        is_first, self._has_given_prompt = not self._has_given_prompt, True
        return self.prompt_logprobs if is_first else None

    def output(self, now_s: float) -> RequestOutput:
        """Everything so far."""
        prepared = self.prepared
        firsts = [s.first_token_time_s for s in self.samples if s.first_token_time_s is not None]
        scheduled = [s.request.first_scheduled_time_s for s in self.samples if s.request.first_scheduled_time_s]
        metrics = RequestMetrics(
            arrival_time_s=prepared.arrival_time_s,
            first_scheduled_time_s=min(scheduled, default=None),
            first_token_time_s=min(firsts, default=None),
            finished_time_s=now_s,
            num_preemptions=sum(s.request.num_preemptions for s in self.samples),
        )
        outputs = [sample.output() for sample in self.samples]
        is_finished = self.num_unfinished == 0
        num_cached_tokens = self.samples[0].request.num_cached_tokens or 0
        return RequestOutput(
            prepared.request_id,
            prepared.prompt,
            prepared.prompt_token_ids,
            outputs,
            is_finished,
            metrics,
            num_cached_tokens,
            self.prompt_logprobs,
        )


class Engine:
    """Continuous batching over one model. One thread drives it; only prepare() may be called from others."""

    def __init__(
        self,
        runner: ModelRunner,
        config: EngineConfig,
        limits: SchedulerConfig,
        *,
        tokenizer: Any,
        generation: GenerationDefaults,
        vocab_size: int,
        model_name: str,
        is_async: bool,
    ) -> None:
        self.config = config
        self.tokenizer = tokenizer
        self.generation = generation
        self.model_name = model_name
        self.max_model_len = limits.max_model_len
        self.vocab_size = vocab_size
        self._token_texts = TokenTexts(tokenizer)
        self._param_limits = ParamLimits(vocab_size, config.max_logprobs, generation.eos_token_ids, tokenizer)
        self.runner = runner
        self.grammars = GrammarCompiler(tokenizer, vocab_size)
        self._num_structured = 0  # unfinished samples with a grammar
        pool = BlockPool(runner.num_blocks)
        cache = PrefixCache(max_evicted=runner.num_blocks) if config.enable_prefix_caching else None
        self._manager = KVCacheManager(pool, config.block_size, limits.max_num_seqs, limits.max_model_len, cache)
        self.scheduler = Scheduler(limits, self._manager)
        self.slots = SlotAccount()
        self.idle_meter = IdleMeter()
        self._groups: dict[str, Group] = {}
        self._samples: dict[Request, Sample] = {}  # its id may be another group's too
        self._seeds = np.random.default_rng(config.seed)
        self._num_scheduled_tokens = 0
        self._hasher = PromptHasher(config.block_size)
        self._num_failed_steps = 0
        self._is_recovering = False
        self._cause_of_death = ""  # in words: an exception would keep what its frames hold
        self._in_flight: deque[tuple[ScheduledBatch, Launched]] = deque()
        self._max_in_flight = 1 if is_async else 0

    # Taking requests in

    def prepare(
        self,
        request_id: str,
        prompt: Prompt,
        params: SamplingParams,
        *,
        priority: int = 0,
        is_streamed: bool = True,
        cache_salt: str | None = None,
    ) -> PreparedRequest:
        """Tokenises and checks a request without side effects; any thread may call it.

        prompt: text, token ids, or {"prompt_token_ids": [...]}, which may have a "cache_salt" too. is_streamed False:
        deltas come only at the end, and the prompt is hashed when it is scheduled, beside the device's work, and not
        here by the caller's thread. cache_salt: only requests with the same one share blocks.
        Raises ValueError naming what is wrong and what is allowed.
        """
        arrival_time_s = time.monotonic()
        text, token_ids = self._tokenise(prompt)
        if isinstance(prompt, dict) and cache_salt is None:
            cache_salt = prompt.get("cache_salt")
        self._check_prompt(token_ids)
        check_params(params, self._param_limits)
        params = with_bad_word_ids(params, self.tokenizer)
        remaining = self.max_model_len - len(token_ids)
        max_tokens = remaining if params.max_tokens is None else min(params.max_tokens, remaining)
        digests = self._digests(token_ids, cache_salt, is_streamed)
        structured = params.structured_outputs
        grammar = None if structured is None else self.grammars.compile(structured)
        return PreparedRequest(
            request_id, text, token_ids, params, max_tokens, priority, is_streamed, arrival_time_s, digests, grammar
        )

    def check_text(self, text: str) -> None:
        """Raises ValueError for a text that is too long for the model whatever its tokens are; any thread may call it.

        It takes no time, as tokenising does. A text that passes may be found too long when its tokens are counted.
        """
        most, allowed = self._longest_prompt
        if len(text) <= most or self._text_bound is None:
            return
        fewest = self._text_bound.fewest_tokens(text)
        if fewest > most:
            raise ValueError(f"prompt length is at least {fewest}; allowed: {allowed}")

    def submit(self, prepared: PreparedRequest) -> None:
        """Queues a prepared request. ValueError if its id is in use."""
        is_new = prepared.request_id not in self._groups
        require(is_new, "request_id", prepared.request_id, "an id that no unfinished request has")
        group = self._groups[prepared.request_id] = Group(prepared)
        for index in range(prepared.params.n):
            sample = self._make_sample(group, index)
            self._num_structured += sample.request.grammar is not None
            group.samples.append(sample)
            self._samples[sample.request] = sample
        self.scheduler.add_samples([sample.request for sample in group.samples])

    def add_request(self, request_id: str, prompt: Prompt, params: SamplingParams, *, priority: int = 0) -> None:
        """prepare() and submit() in one."""
        self.submit(self.prepare(request_id, prompt, params, priority=priority))

    def abort(self, request_ids: Iterable[str]) -> list[CompletionDelta]:
        """Ends requests at once; their blocks are free for the next step. Unknown ids are passed over."""
        groups = [self._groups[request_id] for request_id in request_ids if request_id in self._groups]
        samples = [s for g in groups for s in g.samples if s.request.status is not RequestStatus.FINISHED]
        for sample in samples:
            self.scheduler.finish(sample.request, FinishReason.ABORT)
            logger.info(
                "aborted request %s after %d tokens", sample.request.request_id, sample.request.num_output_tokens
            )
        return [self._delta(sample, "", 0) for sample in samples]

    # Working

    def step(self) -> list[CompletionDelta]:
        """One pass of the scheduler and one forward pass; what that, or the pass before, added to each sample.

        Synchronously, the tokens are those of this pass. Asynchronously this pass is started first and the tokens of
        the one before are taken in while it runs; offline, where nobody waits for a first token, those of the one
        before that while the scheduler can run ahead. If a forward pass raises, the cache is rebuilt and all running
        requests are computed again by later steps; if the next one fails too, EngineDeadError. So it is when a program
        that was left to be compiled behind the first requests could not be.
        """
        self._require_alive()
        deltas: list[CompletionDelta] = []
        try:
            most = self._most_in_flight()
            while len(self._in_flight) > most:
                deltas += self._collect()
            is_launched = self._launch(deltas)
            if not is_launched or len(self._in_flight) > most:
                deltas += self._collect()
        except Exception as error:
            self._recover(error)
        return deltas

    def wait_until_warm(self) -> None:
        """Waits until everything is compiled; nothing is any more afterwards. Raises why something could not be.

        No request needs this: a step that lacks a program waits for that one.
        """
        self.runner.warmed_up.result()

    def has_unfinished_requests(self) -> bool:
        """Whether step() has anything to do."""
        return self.scheduler.has_unfinished_requests()

    def stats(self) -> EngineStats:
        """Queues, cache and counters of this moment."""
        pool = self._manager.pool
        return EngineStats(
            num_running=len(self.scheduler.running),
            num_waiting=len(self.scheduler.waiting),
            kv_cache_usage=1 - pool.num_free / pool.num_usable,
            num_blocks_free=pool.num_free,
            num_blocks_usable=pool.num_usable,
            num_blocks_cached=len(self._manager.prefix_cache or ()),
            num_scheduled_tokens=self._num_scheduled_tokens,
            num_preemptions=self.scheduler.num_preemptions,
            num_prefix_queries=self.scheduler.num_prefix_queries,
            num_prefix_hits=self.scheduler.num_prefix_hits,
            num_wasted_rows=self.scheduler.num_wasted_rows,
            num_steps=self.slots.num_steps,
            num_failed_steps=self._num_failed_steps,
        )

    def unfinished_request_ids(self) -> list[str]:
        """Of all requests that wait or run, in order of arrival."""
        return list(self._groups)

    def block_ids(self, request_id: str) -> list[list[int]]:
        """The block table of each of a request's samples; empty lists while they wait."""
        return [self._manager.block_ids(sample.request) for sample in self._groups[request_id].samples]

    def set_params(self, params: Params) -> None:
        """Goes on with params of the same names, shapes and dtypes, not copied; the prefix cache is reset.

        ValueError for others, and while any request is unfinished, whose keys and values the old ones computed.
        """
        num_unfinished = len(self._groups)
        require(num_unfinished == 0, "number of unfinished requests", num_unfinished, "0, to change the params")
        check_same_params(self.runner.params, params)
        self.runner.set_params(params)
        self.reset_prefix_cache()

    def reset_prefix_cache(self) -> None:
        """Forgets what blocks hold; running requests keep theirs, and what waits or comes computes its own."""
        self._manager.forget_cached()

    def explain_cache(self, prepared: PreparedRequest) -> list[BlockReport]:
        """For each full block of a prompt: whether the prefix cache has it now, or why not."""
        return list(self._manager.explain(prepared.prompt_token_ids, prepared.digests.root))

    def close(self) -> None:
        """Aborts everything and gives the device memory back to JAX's pool in this process."""
        self._in_flight.clear()
        self.abort(list(self._groups))
        self._manager.pool.check()
        self.grammars.close()
        self.runner.close()

    # Details of prepare and submit

    def _tokenise(self, prompt: Prompt) -> tuple[str | None, list[int]]:
        content = _prompt_content(prompt)
        if isinstance(content, str):
            require(self.tokenizer is not None, "prompt", content[:40], "token ids only: this model has no tokenizer")
            self.check_text(content)
            return content, encode_text(self.tokenizer, content)
        return None, list(content)

    @functools.cached_property
    def _text_bound(self) -> TextBound | None:
        return None if self.tokenizer is None else text_bound(self.tokenizer)

    @property
    def _longest_prompt(self) -> tuple[int, str]:
        """In tokens, and in words."""
        most = self.max_model_len - 1
        return most, f"at most {most} tokens (max_model_len {self.max_model_len}, less one to generate)"

    def _digests(self, token_ids: list[int], salt: Any, is_hashed_now: bool) -> PromptDigests:
        require(salt is None or isinstance(salt, str), "cache_salt", salt, "a string, or None")
        root = root_digest(salt)
        is_wanted = is_hashed_now and self.config.enable_prefix_caching
        return PromptDigests(root, self._hasher.digests(root, token_ids) if is_wanted else ())

    def _check_prompt(self, token_ids: list[int]) -> None:
        require(len(token_ids) > 0, "prompt", token_ids, "at least one token")
        if not _are_ids(token_ids, self.vocab_size):
            wrong = next(token_id for token_id in token_ids if not _are_ids([token_id], self.vocab_size))
            require(False, "prompt token id", wrong, f"integers from 0 to {self.vocab_size - 1}")
        most, allowed = self._longest_prompt
        require(len(token_ids) <= most, "prompt length", len(token_ids), allowed)

    def _make_sample(self, group: Group, index: int) -> Sample:
        prepared = group.prepared
        params = prepared.params.for_child(index)
        request = Request(
            prepared.request_id if prepared.params.n == 1 else f"{prepared.request_id}-{index}",
            prepared.prompt_token_ids,
            params,
            max_tokens=prepared.max_tokens,
            seed=int(self._seeds.integers(2**63)) if params.seed is None else params.seed,
            eos_token_ids=frozenset(self.generation.eos_token_ids),
            priority=prepared.priority,
            digests=prepared.digests,
        )
        request.grammar = None if prepared.grammar is None else prepared.grammar.start(request)
        return Sample(index, request, group, self._make_detokenizer(prepared))

    def _make_detokenizer(self, prepared: PreparedRequest) -> Detokenizer | None:
        params = prepared.params
        is_incremental = prepared.is_streamed or params.stop_strings
        if self.tokenizer is None or not params.detokenize or not is_incremental:
            return None
        decode = self._decode_with(params)
        return Detokenizer(
            decode,
            prepared.prompt_token_ids,
            params.stop_strings,
            include_stop=params.include_stop_str_in_output,
            min_tokens=params.min_tokens,
        )

    def _decode_with(self, params: SamplingParams) -> Any:
        backend = self.tokenizer.backend_tokenizer
        return lambda token_ids: backend.decode(token_ids, skip_special_tokens=params.skip_special_tokens)

    # Details of step

    def _require_alive(self) -> None:
        if self._cause_of_death:
            why = f"the engine is dead since {self._cause_of_death}; nothing runs on it any more: make another one"
            raise EngineDeadError(why)
        error = self.runner.failure()
        if error is not None:
            raise EngineDeadError(f"a program could not be compiled: {error}") from error

    def _most_in_flight(self) -> int:
        """Steps whose tokens may be still to come when step() returns."""
        is_offline = self.scheduler.config.num_tokens_beside_decodes is None
        is_ahead = self._max_in_flight > 0 and is_offline and self.scheduler.can_run_ahead()
        return self._max_in_flight + is_ahead

    def _launch(self, deltas: list[CompletionDelta]) -> bool:
        """Schedules and starts a step; False if there is nothing to compute before tokens in flight arrive.

        What came of steps in flight that had to be taken in for it is added to deltas.
        """
        batch = self.scheduler.schedule()
        if not batch.rows:
            return False
        self._num_scheduled_tokens = batch.num_tokens
        self.slots.add(self.scheduler.usage())
        was_busy = self._in_flight[-1][1].is_running() if self._in_flight else None
        if self._num_structured and needs_masks(batch.rows):
            started = self.runner.start(batch, self._manager)
            self.idle_meter.launched(was_busy)
            # Masks depend on all tokens before: those in flight are taken in while the forward pass runs.
            deltas += self._collect()
            assert not self._in_flight, "a mask would be a token behind"
            masks = self.grammars.masks(batch.rows, started.output.logits.shape[0])
            launched = self.runner.draw(started, masks)
        else:
            launched = self.runner.launch(batch, self._manager)
            self.idle_meter.launched(was_busy)
        self._in_flight.append((batch, launched))
        return True

    def _collect(self) -> list[CompletionDelta]:
        """Takes in the tokens of the oldest step in flight."""
        if not self._in_flight:
            return []
        batch, launched = self._in_flight.popleft()
        newest = self._in_flight[-1][1] if self._in_flight else launched
        self.idle_meter.saw(newest.is_running())
        tokens = self.runner.fetch(launched)
        self._is_recovering = False
        for scored in tokens.scored:
            self._take_scores(scored)
        updated = self.scheduler.update(batch, tokens.token_ids)
        self._take_logprobs(updated, tokens)
        deltas = [self._deliver(request) for _, request in updated]
        return [delta for delta in deltas if delta is not None]

    def _recover(self, error: Exception) -> None:
        """The donated cache may be gone: a new one, and every running request from its first token."""
        self._num_failed_steps += 1
        if self._is_recovering:
            self._cause_of_death = f"two steps in a row failed, the last with: {error}"
            raise EngineDeadError(self._cause_of_death) from error
        why = ": out of memory" if is_out_of_memory(error) else ""
        logger.exception("a step failed%s; %d running requests are computed again", why, len(self.scheduler.running))
        self._is_recovering = True
        self._in_flight.clear()
        self.scheduler.preempt_all()
        self.runner.reset()

    def _deliver(self, request: Request) -> CompletionDelta | None:
        """Takes a request's new token into its sample; the delta, unless nobody wants it yet."""
        sample = self._samples[request]
        if request.num_dropped:
            return self._delta(sample, "" if sample.detokenizer is None else sample.detokenizer.flush(), 0)
        if sample.first_token_time_s is None:
            sample.first_token_time_s = time.monotonic()
        piece = self._push_text(sample)
        if not (sample.group.prepared.is_streamed or request.finish_reason):
            return None
        return self._delta(sample, piece, 1)

    def _push_text(self, sample: Sample) -> str:
        """The text that the sample's last token completes; ends the request if that holds a stop string."""
        request, detokenizer = sample.request, sample.detokenizer
        if detokenizer is None:
            return ""
        is_hidden = request.has_end_token and not request.params.include_stop_str_in_output
        piece = "" if is_hidden else detokenizer.push(request.token_ids[-1:])
        if detokenizer.stop_match is None and request.finish_reason is not None:
            piece += detokenizer.flush()
        if detokenizer.stop_match is not None:
            request.stop_reason = detokenizer.stop_match.stop
            self.scheduler.finish(request, FinishReason.STOP)
        return piece

    def _take_scores(self, scored: Scored) -> None:
        """Log-probabilities of some of a prompt's tokens; those of an aborted request are of no use."""
        chunk = scored.chunk
        sample = self._samples.get(chunk.request)
        num_top = chunk.request.params.prompt_logprobs
        entries = sample.group.prompt_logprobs if sample is not None else None
        if entries is None or num_top is None:
            return
        described = descriptions(scored.values, slice(len(chunk.targets)), num_top)
        for place, (token_id, description) in enumerate(zip(chunk.targets, described, strict=True), chunk.start + 1):
            entries[place] = token_logprobs(token_id, description, num_top, self._token_texts)
        if None not in entries[1:]:
            self.scheduler.end_scoring(chunk.request)

    def _take_logprobs(self, updated: list[tuple[int, Request]], tokens: HostTokens) -> None:
        """Log-probabilities of the new tokens, for the samples that want them."""
        if tokens.described is None:
            return
        wanted = [(i, r) for i, r in updated if r.params.logprobs is not None and not r.num_dropped]
        if not wanted:
            return
        nums_top = [self._num_top(request.params) for _, request in wanted]
        num_there = tokens.described[-1].shape[1]
        described = descriptions(tokens.described, [i for i, _ in wanted], min(max(nums_top), num_there))
        for (i, request), num_top, description in zip(wanted, nums_top, described, strict=True):
            entries, token_id = self._samples[request].logprobs, request.token_ids[-1]
            assert entries is not None, "a sample has them from its start"
            if num_top > num_there:
                assert tokens.logits is not None, "more log-probabilities were asked for than the sampler gives"
                description = describe_on_host(tokens.logits[i], token_id, num_top)
            entries.append(token_logprobs(token_id, description, num_top, self._token_texts))

    def _num_top(self, params: SamplingParams) -> int:
        return self.vocab_size if params.logprobs == ALL_LOGPROBS else params.logprobs or 0

    def _delta(self, sample: Sample, piece: str, num_new: int) -> CompletionDelta:
        """What goes out for a sample; closes it, and its group, when it has finished."""
        request, group = sample.request, sample.group
        output = None
        if request.finish_reason is not None:
            piece += self._close_sample(sample)
            if group.num_unfinished == 0:
                output = group.output(time.monotonic())
                group.samples.clear()  # each holds its group: only the garbage collector would find such a ring
        logprobs = sample.logprobs[-num_new:] if sample.logprobs is not None and num_new else None
        new_ids = request.token_ids[-num_new:] if num_new else []
        reason = sample.finish_reason
        head = (group.prepared.request_id, sample.index, piece, new_ids, logprobs, reason, request.stop_reason)
        return CompletionDelta(*head, output, group.take_prompt_logprobs())

    def _close_sample(self, sample: Sample) -> str:
        """Completes the sample's text, forgets it; returns text that was still held back by an abort."""
        group, request = sample.group, sample.request
        del self._samples[request]
        group.num_unfinished -= 1
        self._num_structured -= request.grammar is not None
        if group.num_unfinished == 0:
            del self._groups[group.prepared.request_id]
        if sample.detokenizer is None:
            sample.text = self._whole_text(sample)
            return ""
        held = sample.detokenizer.flush() if request.finish_reason is FinishReason.ABORT else ""
        sample.text = sample.detokenizer.text
        return held

    def _whole_text(self, sample: Sample) -> str:
        request, params = sample.request, sample.request.params
        if self.tokenizer is None or not params.detokenize:
            return ""
        is_hidden = request.has_end_token and not params.include_stop_str_in_output
        output_ids = request.output_token_ids[: -1 if is_hidden else None]
        return decode_after(self._decode_with(params), sample.group.prepared.prompt_token_ids, output_ids)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether a program, or an allocation, failed for want of device memory."""
    return "RESOURCE_EXHAUSTED" in str(error)


def _prompt_content(prompt: Prompt) -> str | TokenIds:
    allowed = 'text, token ids, {"prompt": text} or {"prompt_token_ids": ids}, the last two with a "cache_salt" or not'
    if isinstance(prompt, dict):
        is_known = set(prompt) - {"cache_salt"} in ({"prompt"}, {"prompt_token_ids"})
        require(is_known, "prompt", sorted(prompt), allowed)
        prompt = prompt["prompt"] if "prompt" in prompt else prompt["prompt_token_ids"]
    require(isinstance(prompt, (str, list, tuple)), "prompt", prompt, allowed)
    assert isinstance(prompt, (str, list, tuple))
    return prompt


def _are_ids(token_ids: Sequence[Any], vocab_size: int) -> bool:
    """Whether all are token ids. Nothing is done for each of them in Python: 0.2 to 0.3 ms for 4,000."""
    if not all(issubclass(kind, (int, np.integer)) and kind is not bool for kind in set(map(type, token_ids))):
        return False
    try:
        return bool(np.frombuffer(array("I", token_ids), np.uint32).max() < vocab_size)
    except OverflowError:  # negative, or larger than any vocabulary
        return False
