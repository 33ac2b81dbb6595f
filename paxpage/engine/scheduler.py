"""Iteration-level scheduling (Orca, OSDI 2022, sec. 4.1): who takes part in the next step, with how many tokens.

Requests are served in order of arrival (or of priority, then arrival). Each step, running requests come first, oldest
first; what is left of the token budget goes to waiting ones. When blocks run out, the newest running request is
preempted: its blocks go back and it is computed again later, from the head of the queue. The oldest can always run,
since a request that the whole pool could not hold is refused on arrival, so there is no livelock.

schedule() may be called again before update() has brought the last batch's tokens (asynchronous scheduling), and while
can_run_ahead() those of the one before: a decoding request then goes on with a token that only the device knows. Steps
run in order on the device, so blocks that are released while a step is in flight may be given to the next one.
"""

import bisect
import logging
import time
from collections.abc import Sequence
from typing import NamedTuple

from paxpage.config import SchedulerConfig
from paxpage.engine.kv_cache_manager import BlockCopy, KVCacheManager, Prefix
from paxpage.engine.request import FinishReason, Request, RequestStatus

logger = logging.getLogger(__name__)


FEW_ROWS = 8  # of a step so short that a late host keeps the device waiting; with some tens the device takes longer
BLOCKS_OF_A_ROW = 2  # that one more token may take: a new one, and a copy of one that others read
PATIENCE = 8  # requests that may wait for their next token so that one gets its prompt computed a chunk sooner


class SlotUsage(NamedTuple):
    """KV slots at one moment. wasted = allocated - holding."""

    allocated: int
    holding: int  # slots that hold a token once the steps in flight end


class ScheduledRow(NamedTuple):
    """One request's part in a step: its tokens start .. start + num_tokens - 1 are computed."""

    request: Request
    start: int
    num_tokens: int
    is_sampled: bool  # the row reaches the request's last token, so its logits give the next one
    previous_index: int  # row of the batch before whose sampled token is this row's only one; -1: the host knows all
    fork_index: int = -1  # row of this batch whose logits give this row's token too: it computes none of its own


_new_tuple = tuple.__new__  # what ScheduledRow(...) does after sorting its arguments, at half the time


class ScheduledBatch(NamedTuple):
    """What one step computes."""

    rows: list[ScheduledRow]
    preempted: list[Request]
    num_tokens: int = 0  # computed in this step
    copies: Sequence[BlockCopy] = ()  # to be made before anything is computed
    has_forks: bool = False
    has_scored: bool = False  # some running request's prompt is scored

    @property
    def is_decode(self) -> bool:
        """Whether every row has exactly one token, and none needs what only a mixed step gives."""
        return self.num_tokens == len(self.rows) and not (self.has_forks or self.has_scored)


class Scheduler:
    """Sole owner of the queues; the only one to change a request's status and progress."""

    def __init__(self, config: SchedulerConfig, manager: KVCacheManager) -> None:
        self.config = config
        self.manager = manager
        self.waiting: list[Request] = []  # both lists are sorted by _rank
        self.running: list[Request] = []
        self.ending: list[Request] = []
        self.num_preemptions = 0
        self.num_prefix_queries = 0  # prompt tokens looked up in the prefix cache, and found there
        self.num_prefix_hits = 0
        self._num_held = 0  # tokens of running requests in the cache, shared ones once for each
        self._scored: set[Request] = set()  # running requests whose prompts' log-probabilities are not all known yet
        self._leaders: dict[Request, None] = {}  # requests whose first token others wait for, to fork from them
        self.num_wasted_rows = 0  # computed for a request that had ended, unknown to the host, one step before
        self._num_arrivals = 0
        self._num_mid_prompt = 0  # rows of the last step that did not reach their request's last token

    def add(self, request: Request) -> None:
        """Puts a new request in the queue. It must fit the pool when alone (see config.max_model_len)."""
        assert request.num_prompt_tokens + request.max_tokens <= self.config.max_model_len, request.request_id
        request.sequence_number = self._num_arrivals
        self._num_arrivals += 1
        bisect.insort(self.waiting, request, key=self._rank)

    def add_samples(self, requests: Sequence[Request]) -> None:
        """add() for several samples of one prompt: it is computed once, and they share its blocks."""
        leader, *followers = requests
        for request in requests:
            self.add(request)
        if followers:
            self._leaders[leader] = None
            leader.followers = followers
            for request in followers:
                request.leader = leader

    def has_unfinished_requests(self) -> bool:
        """Whether any request still lacks a token."""
        return bool(self.waiting or self.running or self.ending)

    def schedule(self) -> ScheduledBatch:
        """Chooses the next step, allocates its blocks, and counts its tokens as computed."""
        self._release_ending()
        self.manager.next_step()
        batch = ScheduledBatch([], [])
        most_tokens, self._num_mid_prompt = self._most_tokens(), 0
        budget = self._schedule_running(batch, most_tokens)
        if not batch.preempted:
            budget = self._schedule_waiting(batch, budget)
        num_tokens = most_tokens - budget
        self._num_held += num_tokens
        num_rows = len(batch.rows)
        for leader in list(self._leaders):
            self._fork_followers(batch, leader)
        has_forks = len(batch.rows) > num_rows
        return batch._replace(
            num_tokens=num_tokens,
            copies=self.manager.take_copies(),
            has_forks=has_forks,
            has_scored=bool(self._scored),
        )

    def can_run_ahead(self) -> bool:
        """Whether a step may be scheduled before the tokens of the last two have come: few rows decode, and all go on.

        Nobody is preempted then, or ends by length: of a request that is computed again, or whose blocks others may
        find, the host knows all tokens but the last. Nor does the host have a part in what anybody's next token may be.
        """
        running = self.running
        is_quiet = not (self.waiting or self._leaders or self._scored or self._num_mid_prompt)
        return (
            is_quiet
            and 0 < len(running) <= FEW_ROWS
            and BLOCKS_OF_A_ROW * len(running) <= self.manager.pool.num_free
            and all(request.goes_on_alone for request in running)
        )

    def usage(self) -> SlotUsage:
        """Slots allocated and slots holding a token, over all requests."""
        manager, pool = self.manager, self.manager.pool
        allocated = (pool.num_usable - pool.num_free) * manager.block_size
        # Only the end of a table has empty slots, and nobody shares those.
        return SlotUsage(allocated, allocated - (manager.num_slots - self._num_held))

    def update(self, batch: ScheduledBatch, token_ids: Sequence[int]) -> list[tuple[int, Request]]:
        """Takes in one sampled token per row. Returns (index of the row, request) for those that got one.

        A request that ends by it is finished at once, so that its blocks serve the very next schedule().
        """
        updated = []
        for index, row in enumerate(batch.rows):
            request = row.request
            if request.status is RequestStatus.FINISHED:
                self.num_wasted_rows += 1
            elif row.is_sampled:
                reason = request.append(token_ids[index])
                if reason is not None:
                    self.finish(request, reason)
                updated.append((index, request))
        return updated

    def end_scoring(self, request: Request) -> None:
        """The log-probabilities of the request's whole prompt are known."""
        request.is_scored = False
        self._scored.discard(request)

    def finish(self, request: Request, reason: FinishReason) -> None:
        """Ends a request, wherever it is; its blocks are free at once. A finished one only gets the new reason."""
        self._remove(request)
        self._dismiss_followers(request)
        request.status = RequestStatus.FINISHED
        request.finish_reason = reason

    def preempt_all(self) -> None:
        """Sets every unfinished request back to the queue, for when the cache and the tokens in flight are lost."""
        for request in self.running[::-1] + self.ending[::-1]:
            self._preempt(request)
        for request in self.waiting:
            request.forget_pending()
        self.manager.forget_cached()
        self.manager.take_copies()

    def _rank(self, request: Request) -> tuple[int, int]:
        return (request.priority if self.config.policy == "priority" else 0, request.sequence_number)

    def _release_ending(self) -> None:
        """Requests that will end by length with the step in flight give their blocks to the one being scheduled."""
        for request in [request for request in self.running if request.num_tokens >= request.max_num_tokens]:
            self._remove(request)
            request.status = RequestStatus.ENDING
            self.ending.append(request)

    def _most_tokens(self) -> int:
        """How many tokens the next step may compute.

        A step with many prompt tokens makes every decoding request wait for its next token. So beside those it is kept
        short, but the more requests have their prompts still before them for each one that is decoding, the longer it
        may be: throughput is then to more requests' good.
        """
        most, short = self.config.max_num_batched_tokens, self.config.num_tokens_beside_decodes
        num_before = len(self.waiting) + self._num_mid_prompt
        num_decoding = len(self.running) - self._num_mid_prompt
        if short is None or num_before == 0 or num_decoding <= 0:
            return most
        short = max(short, len(self.running) + (short + 1) // 2)
        return min(most, short * (1 + PATIENCE * num_before // num_decoding))

    def _schedule_running(self, batch: ScheduledBatch, budget: int) -> int:
        """Rows for running requests, oldest first; returns what is left of the token budget."""
        running, position = self.running, 0
        num_slots_of_row = self.manager.num_slots_of_row
        while position < len(running):
            request = running[position]
            position += 1
            start = request.num_computed_tokens
            num_tokens = request.num_tokens - start
            if num_tokens > 1:
                # Each request behind this one keeps a token, so that a long prefill never stops others' decoding.
                num_tokens = min(num_tokens, budget - (len(running) - position))
            if start + num_tokens <= num_slots_of_row[request.row] or self._make_room(batch, request, num_tokens):
                self._take(batch, request, num_tokens)
                budget -= num_tokens
        return budget

    def _make_room(self, batch: ScheduledBatch, request: Request, num_tokens: int) -> bool:
        """Allocates for the row, preempting from the newest; False if the request itself had to go."""
        while not self.manager.allocate(request, request.num_computed_tokens + num_tokens):
            victim = self.running[-1]
            self._preempt(victim)
            batch.preempted.append(victim)
            if victim is request:
                return False
        return True

    def _schedule_waiting(self, batch: ScheduledBatch, budget: int) -> int:
        """Rows for waiting requests, first come first served, but those that wait for others' blocks are passed over.

        Returns what is left of the token budget.
        """
        promised = self._num_promised_blocks() if self.waiting else 0
        position = 0
        while position < len(self.waiting) and budget > 0 and len(self.running) < self.config.max_num_seqs:
            request = self.waiting[position]
            prefix = None if request.leader in self._leaders else self.manager.find_prefix(request)
            if prefix is None or prefix.awaited is not None:
                request.awaited = prefix.awaited if prefix else None
                position += 1
                continue
            if not self._can_admit(request, prefix, promised):
                break
            del self.waiting[position]
            self._admit(request, prefix)
            num_tokens = min(request.num_uncomputed_tokens, budget)
            is_allocated = self.manager.allocate(request, request.num_computed_tokens + num_tokens)
            assert is_allocated, "admission checked the pool"
            self._take(batch, request, num_tokens)
            budget -= num_tokens
            promised += self.manager.num_missing_blocks(request)
        return budget

    def _can_admit(self, request: Request, prefix: Prefix, promised: int) -> bool:
        """Whether all its present tokens fit beside what running requests still need, and one more block for each.

        Without that reserve a request would be admitted only to be preempted a few steps later.
        """
        if not self.running:
            return True
        reserve = len(self.running) + 1
        return self.manager.num_blocks_taken(request, prefix) + promised + reserve <= self.manager.pool.num_free

    def _num_promised_blocks(self) -> int:
        """Blocks that running requests still lack for the tokens they have; only those in mid-prompt lack any."""
        return sum(self.manager.num_missing_blocks(request) for request in self.running)

    def _admit(self, request: Request, prefix: Prefix) -> None:
        self.manager.admit(request, prefix)
        if request.num_cached_tokens is None:
            request.num_cached_tokens = request.num_computed_tokens
            self.num_prefix_queries += request.num_prompt_tokens
            self.num_prefix_hits += request.num_computed_tokens
        self._run(request)

    def _run(self, request: Request) -> None:
        if request.first_scheduled_time_s is None:
            request.first_scheduled_time_s = time.monotonic()
        request.awaited = None
        request.status = RequestStatus.RUNNING
        if request.is_scored:
            self._scored.add(request)
        self._num_held += request.num_computed_tokens
        bisect.insort(self.running, request, key=self._rank)

    def _fork_followers(self, batch: ScheduledBatch, leader: Request) -> None:
        """When leader's first token is sampled in this step, so are its followers', from the same logits.

        Those for whom there is no room compute the prompt later, or find it in the prefix cache.
        """
        index = leader.batch_index
        row = batch.rows[index] if 0 <= index < len(batch.rows) else None
        if row is None or row.request is not leader or not row.is_sampled:
            return
        promised = self._num_promised_blocks()
        for request in leader.followers:
            is_waiting = request.status is RequestStatus.WAITING
            has_row = len(self.running) < self.config.max_num_seqs
            if is_waiting and has_row and self.manager.pool.num_free > len(self.running) + promised:
                self._fork(batch, request, row, index)
        self._dismiss_followers(leader)

    def _fork(self, batch: ScheduledBatch, request: Request, row: ScheduledRow, index: int) -> None:
        self._leave_queue(request)
        self.manager.fork(request, row.request)
        if request.num_cached_tokens is None:
            request.num_cached_tokens = request.num_computed_tokens
        self._run(request)
        request.batch_index = len(batch.rows)
        request.num_tokens += 1
        fork = (request, request.num_computed_tokens, 0, True, -1, index)
        batch.rows.append(ScheduledRow(*fork))

    def _dismiss_followers(self, leader: Request) -> None:
        """They are requests like any other from now on."""
        if self._leaders.pop(leader, leader) is None:
            for request in leader.followers:
                request.leader = None
            leader.followers = []

    def _take(self, batch: ScheduledBatch, request: Request, num_tokens: int) -> None:
        start, rows, num_known = request.num_computed_tokens, batch.rows, len(request.token_ids)
        end = request.num_computed_tokens = start + num_tokens
        previous_index = -1
        if end > num_known:
            assert num_tokens == 1 and start >= num_known, request.request_id
            previous_index = request.batch_index
        is_sampled = end == request.num_tokens
        request.batch_index = len(rows)
        request.num_tokens += is_sampled
        self._num_mid_prompt += not is_sampled
        rows.append(_new_tuple(ScheduledRow, (request, start, num_tokens, is_sampled, previous_index, -1)))
        # A block is known by its tokens: the last one of them may still be on its way from the device.
        if end >= request.next_block_end and num_known >= request.next_block_end:
            self.manager.cache_blocks(request)

    def _preempt(self, request: Request) -> None:
        self._remove(request)
        request.status = RequestStatus.WAITING
        request.num_computed_tokens = 0
        request.num_preemptions += 1
        self.num_preemptions += 1
        bisect.insort(self.waiting, request, key=self._rank)
        logger.warning(
            "preempted request %s (time %d for it): %d tokens will be computed again; %d running, %d blocks free",
            request.request_id, request.num_preemptions, request.num_tokens, len(self.running),
            self.manager.pool.num_free,
        )  # fmt: skip

    def _leave_queue(self, request: Request) -> None:
        index = bisect.bisect_left(self.waiting, self._rank(request), key=self._rank)
        assert self.waiting[index] is request, request.request_id
        del self.waiting[index]

    def _remove(self, request: Request) -> None:
        if request.status is RequestStatus.RUNNING:
            self.running.remove(request)
            self._scored.discard(request)
            self._num_held -= request.num_computed_tokens
            self.manager.release(request)
        elif request.status is RequestStatus.WAITING:
            self._leave_queue(request)
        elif request.status is RequestStatus.ENDING:
            self.ending.remove(request)
