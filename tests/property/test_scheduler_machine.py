"""Random traffic through pool, manager and scheduler; what always holds is checked after every step.

PAXPAGE_PROPERTY_EXAMPLES=5000 runs so many examples, new ones each time (CI runs the same ones every time).
"""

import collections
import logging
import os
import random
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from paxpage.engine import kv_cache_manager, prefix_cache
from paxpage.engine.batch import StepInputs
from paxpage.engine.block_pool import NULL_BLOCK, BlockPool
from paxpage.engine.kv_cache_manager import KVCacheManager, Prefix
from paxpage.engine.prefix_cache import CachedBlock, Closest, PrefixCache, block_digests
from paxpage.engine.request import FinishReason, PromptDigests, Request, RequestStatus
from paxpage.engine.sampling_params import SamplingParams
from paxpage.engine.scheduler import ScheduledBatch, ScheduledRow, Scheduler
from tests.unit.engine.host_side import (
    FakeModel,
    Sizes,
    assert_idle,
    make_scheduler,
    outputs_alone,
    without_type_checks,
)

SALTS = (None, "a", "b")
EVENTS = ("abort", "abort all", "reset", "lose the cache", "switch")
MAX_LIVES = 24  # unfinished requests, more or less
EOS, STOP = 600, 601  # ordinary sampled tokens are below, prompts' tokens above
EXAMPLES = os.environ.get("PAXPAGE_PROPERTY_EXAMPLES")
SETTINGS = settings(
    max_examples=int(EXAMPLES or 120),
    stateful_step_count=40,
    derandomize=EXAMPLES is None,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)


@st.composite
def sizes(draw: st.DrawFn) -> Sizes:
    """Small pools, so that preemption is the rule."""
    block_size = draw(st.sampled_from([4, 2, 8, 1]))
    num_usable = draw(st.sampled_from([12, 16, 24, 8, 6, 4, 2] + [1] * (block_size > 1)))
    max_num_seqs = draw(st.sampled_from([4, 3, 6, 2, 1]))
    share_of_pool = draw(st.sampled_from([1.0, 0.5, 0.75, 0.25]))
    return Sizes(
        num_usable, block_size, max_num_seqs,
        max_num_batched_tokens=max_num_seqs + draw(st.integers(0, 20)),
        max_model_len=max(2, int(num_usable * block_size * share_of_pool) - draw(st.integers(0, 3))),
        policy=draw(st.sampled_from(["fcfs", "priority"])),
        has_prefix_cache=draw(st.sampled_from([True, True, False])),
        num_tokens_beside_decodes=draw(st.sampled_from([None, 4, 1, 9])),
    )  # fmt: skip


def rank(scheduler: Scheduler, request: Request) -> tuple[int, int]:
    """Lower is served first."""
    return (request.priority if scheduler.config.policy == "priority" else 0, request.sequence_number)


class Life:
    """What the machine remembers of a request beside what the request says itself."""

    def __init__(self, request: Request, salt: str | None) -> None:
        self.request = request
        self.salt = salt
        self.token_ids = list(request.token_ids)  # as the device knows them: those in flight included
        self.contexts: list[int] = []  # one for each token: its own, all before it, the salt and the cache's age
        self.age = 0  # how often the cache had been lost or reset when its first token was computed
        self.table: list[int] = []  # since it runs
        self.is_borrowed = False  # its last block
        self.admitted_at = 0  # step
        self.num_tokens_then = 0
        self.num_lost = 0  # preemptions by a lost cache
        self.num_steps = 0  # since it arrived

    def admitted(self, age: int, num_steps: int) -> None:
        self.age, self.admitted_at, self.num_tokens_then = age, num_steps, len(self.token_ids)
        self.contexts, self.table = [], []

    def update_contexts(self) -> None:
        for token_id in self.token_ids[len(self.contexts) :]:
            last = self.contexts[-1] if self.contexts else hash((SALTS.index(self.salt), self.age))
            self.contexts.append(hash((last, token_id)))


class SmallChunks(Scheduler):
    """Leaves budget to newcomers while prompts are being computed, so that they meet blocks that are still to come."""

    def _schedule_running(self, batch: ScheduledBatch, budget: int) -> int:
        kept = max(0, budget - len(self.running) - 2)
        return super()._schedule_running(batch, budget - kept) + kept


class Launched(NamedTuple):
    """A step that the device has, and what it will say."""

    batch: ScheduledBatch
    token_ids: list[int]


class Before(NamedTuple):
    """How things stood when a step was scheduled."""

    computed: dict[str, int]  # of running requests
    tables: dict[str, list[int]]
    waiting: list[Request]
    following: set[str]  # those that waited for their leader
    cached: dict[int, CachedBlock]


class Traffic(RuleBasedStateMachine):
    """Arrivals, steps, aborts, resets and lost caches in any order; steps scheduled after or before the last one's
    tokens, or the last two's; with and without a prefix cache and several samples of one prompt.
    """

    def __init__(self) -> None:
        super().__init__()
        self.lives: dict[str, Life] = {}
        self.in_flight: collections.deque[Launched] = collections.deque()
        self.num_steps = 0
        self.num_arrivals = 0
        self.num_events = 0
        self.age = 0
        self.sequences: list[list[int]] = []  # of the latest requests
        self.says_what_the_model_says = False
        self.seen: collections.Counter[str] = collections.Counter()  # what has happened

    @initialize(sizes=sizes(), is_async=st.booleans(), has_samples=st.booleans(), has_small_chunks=st.booleans())
    def start(self, sizes: Sizes, is_async: bool, has_samples: bool, has_small_chunks: bool) -> None:
        self.scheduler = make_scheduler(sizes)
        self.has_small_chunks = has_small_chunks and sizes.has_prefix_cache
        if self.has_small_chunks:
            self.scheduler = SmallChunks(self.scheduler.config, self.scheduler.manager)
        self.manager = self.scheduler.manager
        self.cache = self.manager.prefix_cache
        self.model = FakeModel(self.manager)
        self.contexts = np.zeros(self.model.slots.size, np.int64)  # of the tokens that slots hold
        self.ages = np.zeros(self.manager.pool.num_blocks, np.int64)  # of the requests that wrote blocks last
        self.is_async = is_async
        self.has_samples = has_samples
        self.is_plain = not (has_samples or sizes.has_prefix_cache)  # nobody waits for others' tokens

    def rng(self, seed: int) -> random.Random:
        """hypothesis is fond of the same seed again and again; two events are to differ all the same."""
        self.num_events += 1
        return random.Random((seed << 10) + self.num_events)

    # Rules

    @precondition(lambda self: len(self.lives) < MAX_LIVES)
    @rule(count=st.integers(1, 4), seed=st.integers(0, 2**16))
    def arrive(self, count: int, seed: int) -> None:
        rng = self.rng(seed)
        for _ in range(count):
            longest = max(2, self.scheduler.config.max_model_len // rng.choice([1, 1, 2, 4]))
            num_prompt = rng.randint(
                1, max(1, longest // rng.choice([1, 4, 8]) - 1)
            )  # short ones start and grow together
            max_tokens = rng.randint(1, max(1, (longest - num_prompt) // rng.choice([1, 1, 8])))
            min_tokens, is_endless = rng.randint(0, max_tokens), rng.random() < 0.5
            params = SamplingParams(
                max_tokens=max_tokens, min_tokens=min_tokens, ignore_eos=is_endless, stop_token_ids=[STOP]
            )
            for _ in range(rng.choice([1, 1, 1, 2, 3])):
                num_samples = rng.randint(1, 4) if self.has_samples else 1
                self.add(rng, self.prompt(rng, num_prompt), params, num_samples)

    def prompt(self, rng: random.Random, num_tokens: int) -> list[int]:
        """Tokens of its own, after a beginning that an earlier sequence has too, where such things may be shared."""
        first = 1000 * (self.num_arrivals + 1)
        own = [first + position for position in range(num_tokens)]  # no two tokens are equal
        if self.is_plain:
            return own
        if rng.random() < 0.3:
            own = [rng.choice([701, 701, 702])] * num_tokens  # many blocks are equal
        earlier, block_size = rng.choice([*self.sequences, *self.sequences[-1:] * 6, own]), self.manager.block_size
        num_shared = rng.choice([rng.randint(0, num_tokens), num_tokens])
        if rng.random() < 0.6:
            num_shared = round(num_shared / block_size) * block_size + rng.choice([0, 0, 0, 1, -1])
        return (earlier[: max(0, num_shared)] + own)[:num_tokens]

    def add(self, rng: random.Random, prompt: list[int], params: SamplingParams, num_samples: int) -> None:
        salt, priority = rng.choice([*SALTS, None, None]), rng.randint(-1, 1)
        root = prefix_cache.root_digest(salt)
        digests = list(block_digests(root, prompt, self.manager.block_size)) if rng.random() < 0.5 else []
        self.num_arrivals += 1
        samples = [
            Request(
                f"{self.num_arrivals}-{index}", prompt, params, max_tokens=params.max_tokens or 1,
                eos_token_ids=frozenset({EOS}), priority=priority, digests=PromptDigests(root, digests),
            )
            for index in range(num_samples)
        ]  # fmt: skip
        self.scheduler.add_samples(samples)
        self.lives |= {request.request_id: Life(request, salt) for request in samples}
        self.sequences = [*self.sequences, prompt][-12:]

    @rule(count=st.integers(1, 16), seed=st.integers(0, 2**16), share_of_ends=st.sampled_from([0.0, 0.02, 0.3]))
    def run(self, count: int, seed: int, share_of_ends: float) -> None:
        rng = self.rng(seed)
        for _ in range(count):
            if self.scheduler.has_unfinished_requests():
                self.step(rng, share_of_ends)
                self.what_always_holds()

    @precondition(lambda self: self.lives)
    @rule(number=st.integers(0, 99), event=st.sampled_from(EVENTS))
    def interrupt(self, number: int, event: str) -> None:
        """An abort of a request or of all samples of a prompt, forgotten blocks, a step that fails, the other mode."""
        if event == "reset":
            self.reset()
        elif event == "lose the cache":
            self.lose_the_cache()
        elif event == "switch":
            self.switch()
        else:
            self.abort(list(self.lives.values())[number % len(self.lives)], is_all=event == "abort all")

    @invariant()
    def what_always_holds(self) -> None:
        self.check_blocks()
        self.check_usage()
        self.check_tables()
        self.check_queues()
        self.check_cache()
        self.forget_the_finished()

    def teardown(self) -> None:
        """Without further arrivals everybody gets there, and everything comes back."""
        if sys.exc_info()[0] is not None or not hasattr(self, "scheduler"):
            return  # the fault that was found is the one to see
        work = sum(life.request.num_prompt_tokens + life.request.max_tokens + 1 for life in self.lives.values())
        limit, rng = self.num_steps + work * (len(self.lives) + 1), random.Random(0)
        while self.scheduler.has_unfinished_requests():
            assert self.num_steps < limit, "no end in sight"
            self.step(rng, 0.01)
            self.what_always_holds()
        assert_idle(self.scheduler)
        assert self.lives == {}

    # One step

    def step(self, rng: random.Random, share_of_ends: float) -> None:
        most = self.most_in_flight()
        while len(self.in_flight) > most:
            self.update(self.in_flight.popleft())
        batch, before = self.schedule()
        if batch.rows:
            self.in_flight.append(self.launch(batch, before, self.sampled(batch, rng, share_of_ends)))
            self.seen["steps ahead of two others"] += len(self.in_flight) > 2
        if rng.random() < 0.02:
            self.abort(rng.choice(list(self.lives.values())), is_all=rng.random() < 0.3)
        if self.in_flight and (not batch.rows or len(self.in_flight) > most):
            self.update(self.in_flight.popleft())

    def most_in_flight(self) -> int:
        """As the engine has it."""
        return self.is_async + (self.is_async and self.scheduler.can_run_ahead())

    def sampled(self, batch: ScheduledBatch, rng: random.Random, share_of_ends: float) -> list[int] | None:
        if self.says_what_the_model_says:
            return None
        return [rng.choice([EOS, STOP]) if rng.random() < share_of_ends else rng.randrange(EOS) for _ in batch.rows]

    def before(self) -> Before:
        scheduler = self.scheduler
        return Before(
            {request.request_id: request.num_computed_tokens for request in scheduler.running},
            {request.request_id: self.manager.block_ids(request) for request in scheduler.running},
            list(scheduler.waiting),
            {request.request_id for request in scheduler.waiting if request.leader in scheduler._leaders},
            dict(self.cache._blocks) if self.cache is not None else {},
        )

    def schedule(self) -> tuple[ScheduledBatch, Before]:
        before = self.before()
        batch = self.scheduler.schedule()
        running = [self.lives[name].request for name in before.computed]
        running = [request for request in running if request not in self.scheduler.ending]
        self.num_steps += 1
        for life in self.lives.values():
            life.num_steps += 1
        self.check_rows(batch, before)
        self.check_choice(batch, running, before)
        self.check_preempted(batch, running)
        for row in batch.rows:
            if row.request.request_id not in before.computed:
                age = self.life(batch.rows[row.fork_index]).age if row.fork_index >= 0 else self.age
                self.life(row).admitted(age, self.num_steps)
        self.check_usage()
        self.count(batch, before)
        return batch, before

    def life(self, row: ScheduledRow) -> Life:
        return self.lives[row.request.request_id]

    def count(self, batch: ScheduledBatch, before: Before) -> None:
        """That a run has seen what it is for."""
        forks = sum(row.fork_index >= 0 for row in batch.rows)
        admitted = [row for row in batch.rows if row.fork_index < 0 and row.request.request_id not in before.computed]
        beginnings = sum(row.start % self.manager.block_size > 0 for row in admitted)
        self.seen["forks"] += forks
        self.seen["forks of a partly filled block"] += forks * (self.manager._is_borrowed.count(True) > 0)
        self.seen["beginnings found"] += sum(row.start > 0 for row in admitted)
        self.seen["beginnings found that end within a block"] += beginnings
        self.seen["copies of a fork's last block"] += len(batch.copies) - beginnings
        self.seen["waits for a block"] += sum(request.awaited is not None for request in self.scheduler.waiting)
        self.seen["waits for a leader"] += sum(request.leader is not None for request in self.scheduler.waiting)
        self.seen["preemptions"] += len(batch.preempted)
        self.seen["blocks used for something else"] += len(
            before.cached.keys() - (self.cache._blocks if self.cache else {})
        )

    def launch(self, batch: ScheduledBatch, before: Before, sampled: list[int] | None) -> Launched:
        inputs = self.model.inputs(batch)
        self.check_slots(batch, inputs)
        self.check_writes(batch, before)
        sampled = self.model.run(batch, sampled)
        self.write_contexts(batch)
        self.check_contents(batch, inputs)
        for row, token_id in zip(batch.rows, sampled, strict=True):
            self.life(row).token_ids += [token_id] * row.is_sampled
        return Launched(batch, sampled)

    def write_contexts(self, batch: ScheduledBatch) -> None:
        """What keys and values depend on goes where they go."""
        blocks = self.contexts.reshape(-1, self.manager.block_size)
        for copies in [np.array(batch.copies)] if batch.copies else []:
            blocks[copies[:, 1]] = blocks[copies[:, 0]]
            self.ages[copies[:, 1]] = self.ages[copies[:, 0]]
        for row in batch.rows:
            life = self.life(row)
            life.update_contexts()
            positions = np.arange(row.start, row.start + row.num_tokens)
            block_ids = self.manager.block_tables[row.request.row, positions // self.manager.block_size]
            blocks[block_ids, positions % self.manager.block_size] = life.contexts[
                row.start : positions.size + row.start
            ]
            self.ages[block_ids] = life.age

    def update(self, launched: Launched) -> None:
        """A token comes to each row that reached its end, unless the request has ended since."""
        rows = launched.batch.rows
        takers = [
            i for i, row in enumerate(rows) if row.is_sampled and row.request.status is not RequestStatus.FINISHED
        ]
        before = [row.request.num_output_tokens for row in rows]
        updated = self.scheduler.update(launched.batch, launched.token_ids)
        assert [(index, request.request_id) for index, request in updated] == [
            (i, rows[i].request.request_id) for i in takers
        ]
        for index, row in enumerate(rows):
            assert row.request.num_output_tokens == before[index] + (index in takers)
            assert index not in takers or row.request.token_ids[-1] == launched.token_ids[index]

    def abort(self, life: Life, *, is_all: bool) -> None:
        prompt = life.request.request_id.split("-")[0]
        for name, other in self.lives.items():
            if other is life or (is_all and name.split("-")[0] == prompt):
                self.scheduler.finish(other.request, FinishReason.ABORT)

    def reset(self) -> None:
        """Nothing that was computed until now, or follows from it, may reach those that are admitted from now on."""
        self.manager.forget_cached()
        self.age += 1

    def switch(self) -> None:
        """Asynchronous instead of synchronous, or the other way round."""
        while self.in_flight:
            self.update(self.in_flight.popleft())
        self.is_async = not self.is_async

    def lose_the_cache(self) -> None:
        """The tokens in flight never come, and nobody's keys and values are there any more."""
        self.schedule()
        for life in self.lives.values():
            life.num_lost += life.request.status in (RequestStatus.RUNNING, RequestStatus.ENDING)
            life.token_ids = list(life.request.token_ids)
        self.scheduler.preempt_all()
        self.model.forget()
        self.contexts[:] = 0
        self.age += 1
        self.in_flight.clear()

    # What holds in a step

    def check_rows(self, batch: ScheduledBatch, before: Before) -> None:
        config, running = self.scheduler.config, self.scheduler.running
        assert batch.rows or self.scheduler.ending, "somebody can always run"
        assert len(batch.rows) <= config.max_num_seqs and batch.num_tokens <= config.max_num_batched_tokens
        assert sorted(row.request.request_id for row in batch.rows) == sorted(r.request_id for r in running)
        assert batch.num_tokens == sum(row.num_tokens for row in batch.rows)
        assert batch.has_forks == any(row.fork_index >= 0 for row in batch.rows)
        for row in batch.rows:
            end, num_tokens = row.start + row.num_tokens, len(self.life(row).token_ids)
            assert end == row.request.num_computed_tokens <= num_tokens
            assert row.is_sampled == (end == num_tokens)
            if row.fork_index >= 0:
                self.check_fork(batch, row, before)
            else:
                assert row.num_tokens >= 1, "the last token is always computed"
                assert self.cache is not None or row.start == before.computed.get(row.request.request_id, 0)
                assert row.start == before.computed.get(row.request.request_id, row.start)

    def check_fork(self, batch: ScheduledBatch, row: ScheduledRow, before: Before) -> None:
        """Its first token comes with its leader's, from the prompt that both have."""
        request, leader = row.request, batch.rows[row.fork_index]
        assert request.request_id in before.following and (row.num_tokens, row.previous_index) == (0, -1)
        assert row.start == request.num_prompt_tokens == leader.start + leader.num_tokens and leader.is_sampled
        assert request.token_ids == leader.request.token_ids
        assert self.manager.block_ids(request) == self.manager.block_ids(leader.request)

    def check_choice(self, batch: ScheduledBatch, running: list[Request], before: Before) -> None:
        """Who was let in: the first of the queue, as many as fit, and nobody while blocks are short."""
        scheduler, config = self.scheduler, self.scheduler.config
        admitted = [row.request for row in batch.rows if row.fork_index < 0 and row.request not in running]
        num_forks = sum(row.fork_index >= 0 for row in batch.rows)
        waiting = [request for request in before.waiting if not self.is_passed_over(request, before)]
        assert admitted == [request for request in waiting if request in admitted] == waiting[: len(admitted)]
        assert not (admitted and batch.preempted)
        if (admitted or num_forks) and len(scheduler.running) > 1:
            own = bool(admitted) + num_forks  # the block of a new one's own next token was not asked for
            assert self.num_free_after_promises() >= -own, "a block is left to each of the others"
        fewest = min(config.max_num_batched_tokens, config.num_tokens_beside_decodes or 2**31)
        if batch.num_tokens >= fewest or self.has_small_chunks:
            return
        num_kept = len(batch.preempted)  # a token for each of them, which nobody needs any more
        is_left = batch.num_tokens + num_kept < fewest
        assert not is_left or all(row.is_sampled for row in batch.rows), "a row has tokens to compute"
        left = [request for request in waiting if request.status is RequestStatus.WAITING]
        if left and not batch.preempted and len(scheduler.running) < config.max_num_seqs:
            missing = self.manager.num_blocks_taken(left[0], self.manager.find_prefix(left[0]))
            most = missing + len(batch.copies)  # whose sources were not free then
            assert most + 1 > self.num_free_after_promises(), "the first of the queue was left out"

    def is_passed_over(self, request: Request, before: Before) -> bool:
        """Whether the request waits for what another one computes, which is running: not for ever."""
        if request.awaited is not None and request.awaited in self.manager._coming:
            return True
        return request.request_id in before.following

    def num_free_after_promises(self) -> int:
        """Free blocks less those that the running requests' tokens need, and one more for each."""
        running = self.scheduler.running
        return self.manager.pool.num_free - sum(map(self.manager.num_missing_blocks, running)) - len(running)

    def check_preempted(self, batch: ScheduledBatch, running: list[Request]) -> None:
        """Only the last in rank go, never the first, and none that has had no chance to get on."""
        num_gone = len(batch.preempted)
        assert batch.preempted == running[len(running) - num_gone :][::-1]
        assert not running or num_gone < len(running), "the first can always run"
        for request in batch.preempted:
            life = self.lives[request.request_id]
            assert request.num_computed_tokens == 0 and request.row == -1
            has_got_on = len(life.token_ids) > life.num_tokens_then
            has_stayed = self.num_steps - life.admitted_at >= self.manager.block_size
            is_overtaken = self.scheduler.config.policy == "priority" or not self.is_plain
            assert is_overtaken or has_got_on or has_stayed

    def check_slots(self, batch: ScheduledBatch, inputs: StepInputs) -> None:
        slots = inputs.slot_mapping.tolist()
        assert not any(slots[batch.num_tokens :]), "padding goes to the null block"
        assert len(set(slots[: batch.num_tokens])) == batch.num_tokens
        for index, row in enumerate(batch.rows):
            start, end = inputs.query_start_loc[index : index + 2].tolist()
            own = set(self.manager.block_ids(row.request))
            assert {slot // self.manager.block_size for slot in slots[start:end]} <= own

    def check_writes(self, batch: ScheduledBatch, before: Before) -> None:
        """Nobody writes what was known before this step, or what another one's table held and holds."""
        writers: dict[int, str] = {}
        for block_id, position, request in self.writes(batch):
            name, cached = request.request_id, before.cached.get(block_id)
            assert writers.setdefault(block_id, name) == name
            is_known = cached is not None and self.cache is not None and self.cache._blocks.get(block_id) is cached
            assert not is_known, "a block of the prefix cache is written"
            for other in self.scheduler.running:
                is_reader = block_id in before.tables.get(other.request_id, ()) and other is not request
                if is_reader and block_id in self.manager.block_ids(other):
                    assert position >= before.computed[other.request_id], "another one's tokens are overwritten"
        targets = [copy.target for copy in batch.copies]
        assert len(set(targets)) == len(targets) and not set(targets) & {copy.source for copy in batch.copies}
        assert not {self.cache and self.cache._blocks.get(target) for target in targets} & set(before.cached.values())

    def writes(self, batch: ScheduledBatch) -> Iterator[tuple[int, int, Request]]:
        """Each block that the step writes tokens into, the first position of these, and the request."""
        block_size = self.manager.block_size
        for row in batch.rows:
            table, end = self.manager.block_ids(row.request), row.start + row.num_tokens
            for position in [row.start, *range((row.start // block_size + 1) * block_size, end, block_size)]:
                if position < end:
                    yield table[position // block_size], position, row.request

    def check_contents(self, batch: ScheduledBatch, inputs: StepInputs) -> None:
        """Each row reads its own tokens, all of them, in order, and keys and values that follow from them alone."""
        blocks = self.contexts.reshape(-1, self.manager.block_size)
        for index, row in enumerate(batch.rows):
            life, num_tokens = self.life(row), row.request.num_computed_tokens
            reader = index if row.fork_index < 0 else row.fork_index
            assert self.model.sequence(inputs, reader) == life.token_ids[:num_tokens]
            table = self.manager.block_tables[row.request.row, : self.manager.num_blocks_for(num_tokens)]
            assert blocks[table].ravel()[:num_tokens].tolist() == life.contexts[:num_tokens], "not its own"

    # What always holds

    def check_blocks(self) -> None:
        """Free and referenced make up the pool, and a block has as many references as tables name it."""
        pool = self.manager.pool
        pool.check()
        tables = [self.manager.block_ids(request) for request in self.scheduler.running]
        assert all(len(set(table)) == len(table) for table in tables)
        counts = collections.Counter(block_id for table in tables for block_id in table)
        assert [pool.ref_count(block_id) for block_id in range(pool.num_blocks)] == [
            counts[block_id] for block_id in range(pool.num_blocks)
        ]
        assert len(counts) == pool.num_usable - pool.num_free
        assert NULL_BLOCK not in counts
        assert not self.is_plain or set(counts.values()) <= {1}
        assert self.manager._copies == []

    def check_usage(self) -> None:
        """Slots allocated, and of these the ones that hold a token, each counted once."""
        block_size = self.manager.block_size
        held: dict[int, int] = {}
        for request in self.scheduler.running:
            for place, block_id in enumerate(self.manager.block_ids(request)):
                num_tokens = min(block_size, request.num_computed_tokens - place * block_size)
                held[block_id] = max(held.get(block_id, 0), num_tokens)
        usage = self.scheduler.usage()
        assert usage.allocated == len(held) * block_size
        # What an aborted leader wrote after the prompt counts until its followers' next step.
        num_unknown = self.manager._is_borrowed.count(True) * block_size
        assert sum(held.values()) <= usage.holding <= min(usage.allocated, sum(held.values()) + num_unknown)

    def check_tables(self) -> None:
        for life in self.lives.values():
            table = self.manager.block_ids(life.request)
            if life.request.status is RequestStatus.RUNNING:
                num_empty = len(table) * self.manager.block_size - life.request.num_computed_tokens
                assert 0 <= num_empty < self.manager.block_size
                num_kept = len(life.table) - (life.is_borrowed and table[: len(life.table)] != life.table)
                assert table[:num_kept] == life.table[:num_kept], "append-only, but for a borrowed last block"
                assert not self.manager.block_tables[life.request.row, len(table) :].any()
            life.table = table
            life.is_borrowed = bool(table) and self.manager._is_borrowed[life.request.row]
        used = {request.row for request in self.scheduler.running}
        unused = [row for row in range(self.scheduler.config.max_num_seqs) if row not in used]
        assert len(used) == len(self.scheduler.running) and not self.manager.block_tables[unused].any()

    def check_queues(self) -> None:
        scheduler = self.scheduler
        for queue, status in ((scheduler.running, RequestStatus.RUNNING), (scheduler.waiting, RequestStatus.WAITING)):
            ranks = [rank(scheduler, request) for request in queue]
            assert ranks == sorted(set(ranks))
            assert all(request.status is status for request in queue)
        assert all(request.status is RequestStatus.ENDING and request.row == -1 for request in scheduler.ending)
        queued = [*scheduler.running, *scheduler.waiting, *scheduler.ending]
        unfinished = [name for name, life in self.lives.items() if life.request.status is not RequestStatus.FINISHED]
        assert sorted(request.request_id for request in queued) == sorted(unfinished)
        assert all(request.row == -1 and request.num_computed_tokens == 0 for request in scheduler.waiting)
        assert all(leader in queued and leader.num_output_tokens == 0 for leader in scheduler._leaders)
        assert all(request.leader is None or request.leader in scheduler._leaders for request in queued)
        if scheduler.config.policy == "fcfs" and scheduler.running and scheduler.waiting and self.is_plain:
            assert rank(scheduler, scheduler.running[-1]) < rank(scheduler, scheduler.waiting[0]), "overtaken"

    def check_cache(self) -> None:
        """Known blocks hold what they are known for, and awaited ones are a running request's next."""
        if self.cache is None:
            return
        self.cache.check()
        blocks = self.model.slots.reshape(-1, self.manager.block_size)
        for block_id, cached in self.cache._blocks.items():
            assert block_id != NULL_BLOCK and blocks[block_id].tolist() == list(cached.token_ids)
            known_by = block_digests(cached.parent, cached.token_ids, self.manager.block_size)
            assert [cached.digest] == list(known_by)
            assert self.ages[block_id] == self.age, "known, though it follows from blocks that were forgotten"
        for digest, request in self.manager._coming.items():
            assert request.status is RequestStatus.RUNNING, "nobody will compute it"
            assert digest in request.block_digests[request.num_cached_blocks :]

    def forget_the_finished(self) -> None:
        finished = [life for life in self.lives.values() if life.request.status is RequestStatus.FINISHED]
        for life in finished:
            self.check_end(life)
            self.sequences = [*self.sequences, life.request.token_ids][-12:]
            del self.lives[life.request.request_id]

    def check_end(self, life: Life) -> None:
        request = life.request
        num_tokens, params = request.num_output_tokens, request.params
        assert request.token_ids == life.token_ids[: request.num_known_tokens]
        is_end = num_tokens > 0 and request.token_ids[-1] in request.eos_token_ids | {STOP}
        if request.finish_reason is FinishReason.LENGTH:
            assert num_tokens == request.max_tokens and not (is_end and num_tokens >= params.min_tokens)
        elif request.finish_reason is FinishReason.STOP:
            assert is_end and params.min_tokens <= num_tokens <= request.max_tokens
        else:
            assert request.finish_reason is FinishReason.ABORT and num_tokens < request.max_tokens
        assert request.row == -1 and request.followers == []
        if self.says_what_the_model_says:
            assert request.output_token_ids == outputs_alone(request)[:num_tokens]
        if self.scheduler.config.policy == "fcfs" and self.is_plain:
            most = num_tokens + life.num_steps // self.manager.block_size
            assert request.num_preemptions - life.num_lost <= most


@pytest.fixture(autouse=True)
def quiet(caplog: pytest.LogCaptureFixture) -> None:
    """Thousands of preemptions are not worth a line each."""
    caplog.set_level(logging.ERROR, "paxpage.engine.scheduler")


def test_random_traffic() -> None:
    with without_type_checks():
        run_state_machine_as_test(Traffic, settings=SETTINGS)


def traffic_of(num_steps: int, *, has_small_chunks: bool, share_of_arrivals: float = 0.3) -> Traffic:
    """So many steps of one scheduler, then all that is left; every token is the stand-in's own."""
    traffic = Traffic()
    traffic.says_what_the_model_says = True
    sizes = Sizes(48, 4, 8, max_num_batched_tokens=32, max_model_len=160, has_prefix_cache=True)
    traffic.start(sizes, is_async=True, has_samples=True, has_small_chunks=has_small_chunks)
    rng = random.Random(num_steps)
    while traffic.num_steps < num_steps:
        random_event(traffic, rng, share_of_arrivals)
    traffic.teardown()
    return traffic


def random_event(traffic: Traffic, rng: random.Random, share_of_arrivals: float) -> None:
    if len(traffic.lives) < MAX_LIVES and rng.random() < share_of_arrivals:
        traffic.arrive(rng.randint(1, 3), rng.randrange(2**16))
    if traffic.lives and rng.random() < 0.02:
        traffic.interrupt(rng.randrange(99), rng.choice(EVENTS))
    traffic.run(rng.randint(1, 4), rng.randrange(2**16), 0.02)


def test_ten_thousand_steps_of_one_scheduler() -> None:
    with without_type_checks():
        seen = traffic_of(10_000, has_small_chunks=False).seen
        seen += traffic_of(2_000, has_small_chunks=True).seen
        seen += traffic_of(2_000, has_small_chunks=False, share_of_arrivals=0.05).seen
    assert len(seen) == 10 and min(seen.values()) >= 30, seen


# The machine has to notice when something is wrong


def forgets_a_block(monkeypatch: pytest.MonkeyPatch) -> None:
    release = BlockPool.release
    monkeypatch.setattr(BlockPool, "release", lambda self, block_ids: release(self, list(block_ids)[1:]))


def hands_out_a_block_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    allocate = BlockPool.allocate

    def allocate_and_keep_one(self: BlockPool, num_blocks: int) -> list[int]:
        block_ids = allocate(self, num_blocks)
        self._free.update(dict.fromkeys(block_ids[3:4]))
        return block_ids

    monkeypatch.setattr(BlockPool, "allocate", allocate_and_keep_one)


def keeps_an_old_table(monkeypatch: pytest.MonkeyPatch) -> None:
    release = KVCacheManager.release

    def release_without_clearing(self: KVCacheManager, request: Request) -> None:
        row, table = request.row, self.block_tables[request.row].copy()
        release(self, request)
        self.block_tables[row] = table

    monkeypatch.setattr(KVCacheManager, "release", release_without_clearing)


def takes_a_block_too_many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(KVCacheManager, "num_blocks_for", lambda self, num_tokens: num_tokens // self.block_size + 1)


def preempts_the_oldest(monkeypatch: pytest.MonkeyPatch) -> None:
    def make_room(self: Scheduler, batch: ScheduledBatch, request: Request, num_tokens: int) -> bool:
        while not self.manager.allocate(request, request.num_computed_tokens + num_tokens):
            victim = self.running[0]
            self._preempt(victim)
            batch.preempted.append(victim)
            if victim is request:
                return False
        return True

    monkeypatch.setattr(Scheduler, "_make_room", make_room)


def runs_ahead_of_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Scheduler, "can_run_ahead", lambda self: True)


def queues_the_preempted_last(monkeypatch: pytest.MonkeyPatch) -> None:
    preempt = Scheduler._preempt

    def preempt_to_the_end(self: Scheduler, request: Request) -> None:
        preempt(self, request)
        self.waiting.remove(request)
        self.waiting.append(request)

    monkeypatch.setattr(Scheduler, "_preempt", preempt_to_the_end)


def keeps_computed_tokens_of_the_preempted(monkeypatch: pytest.MonkeyPatch) -> None:
    preempt = Scheduler._preempt

    def preempt_and_believe(self: Scheduler, request: Request) -> None:
        num_computed_tokens = request.num_computed_tokens
        preempt(self, request)
        request.num_computed_tokens = min(num_computed_tokens, 1)

    monkeypatch.setattr(Scheduler, "_preempt", preempt_and_believe)


def lets_in_without_reserve(monkeypatch: pytest.MonkeyPatch) -> None:
    def can_admit(self: Scheduler, request: Request, prefix: Prefix, promised: int) -> bool:
        return self.manager.num_blocks_taken(request, prefix) <= self.manager.pool.num_free

    monkeypatch.setattr(Scheduler, "_can_admit", can_admit)


def ignores_the_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    schedule_waiting = Scheduler._schedule_waiting

    def schedule_all_waiting(self: Scheduler, batch: ScheduledBatch, budget: int) -> int:
        return schedule_waiting(self, batch, budget + 1 if budget else 0)

    monkeypatch.setattr(Scheduler, "_schedule_waiting", schedule_all_waiting)


def writes_into_a_shared_block(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(KVCacheManager, "_has_other_readers", lambda self, row: False)


def finds_blocks_by_their_own_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    chained_digests = block_digests

    def own_digests(parent: bytes, token_ids: Sequence[int], block_size: int) -> Iterator[bytes]:
        for start in range(0, len(token_ids) - block_size + 1, block_size):
            yield from chained_digests(b"", token_ids[start : start + block_size], block_size)

    monkeypatch.setattr(kv_cache_manager, "block_digests", own_digests)
    monkeypatch.setattr(sys.modules[__name__], "block_digests", own_digests)


def ignores_salts(monkeypatch: pytest.MonkeyPatch) -> None:
    root_digest = prefix_cache.root_digest
    monkeypatch.setattr(prefix_cache, "root_digest", lambda salt: root_digest(None))


def shares_beginnings_whatever_came_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of blocks that are not found whole: only the first token and the length count."""

    def closest(
        self: PrefixCache, parent: bytes, token_ids: Sequence[int], before_step: int | None = None
    ) -> Closest | None:
        for block_id, block in self._blocks.items():
            num_tokens = prefix_cache.num_common(block.token_ids, token_ids)
            if num_tokens and block.step < (before_step or 0):
                return Closest(block_id, num_tokens)
        return None

    monkeypatch.setattr(PrefixCache, "closest", closest)


def copies_what_is_not_computed_yet(monkeypatch: pytest.MonkeyPatch) -> None:
    closest = PrefixCache.closest
    monkeypatch.setattr(
        PrefixCache, "closest", lambda self, parent, token_ids, before_step=None: closest(self, parent, token_ids)
    )


def forgets_to_forget_a_reused_block(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(KVCacheManager, "_allocate", lambda self, num_blocks: self.pool.allocate(num_blocks))
    insert = PrefixCache.insert

    def insert_over(self: PrefixCache, block_id: int, block: CachedBlock) -> None:
        if block_id not in self:
            insert(self, block_id, block)

    monkeypatch.setattr(PrefixCache, "insert", insert_over)


def forks_without_references(monkeypatch: pytest.MonkeyPatch) -> None:
    fork = KVCacheManager.fork

    def fork_alone(self: KVCacheManager, request: Request, leader: Request) -> None:
        with monkeypatch.context() as patch:
            patch.setattr(self.pool, "acquire", lambda block_ids: None)
            fork(self, request, leader)

    monkeypatch.setattr(KVCacheManager, "fork", fork_alone)


def finds_without_references(monkeypatch: pytest.MonkeyPatch) -> None:
    admit = KVCacheManager.admit

    def admit_alone(self: KVCacheManager, request: Request, prefix: Prefix) -> None:
        with monkeypatch.context() as patch:
            patch.setattr(self.pool, "acquire", lambda block_ids: None)
            admit(self, request, prefix)

    monkeypatch.setattr(KVCacheManager, "admit", admit_alone)


def keeps_the_sources_of_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    def take_copies(self: KVCacheManager) -> list[kv_cache_manager.BlockCopy]:
        copies, self._copies = self._copies, []
        return copies

    monkeypatch.setattr(KVCacheManager, "take_copies", take_copies)


def drops_a_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    take_copies = KVCacheManager.take_copies
    monkeypatch.setattr(KVCacheManager, "take_copies", lambda self: take_copies(self)[:-1])


def waits_for_what_nobody_computes(monkeypatch: pytest.MonkeyPatch) -> None:
    release = KVCacheManager.release

    def release_and_promise(self: KVCacheManager, request: Request) -> None:
        coming = dict(self._coming)
        release(self, request)
        self._coming.update(coming)

    monkeypatch.setattr(KVCacheManager, "release", release_and_promise)


def follows_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Scheduler, "_dismiss_followers", lambda self, leader: None)


def remembers_what_follows_from_forgotten_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    def forget_cached(self: KVCacheManager) -> None:
        if self.prefix_cache is not None:
            self.prefix_cache.clear()

    monkeypatch.setattr(KVCacheManager, "forget_cached", forget_cached)


@pytest.mark.parametrize(
    "fault",
    [
        forgets_a_block,
        hands_out_a_block_twice,
        keeps_an_old_table,
        takes_a_block_too_many,
        preempts_the_oldest,
        queues_the_preempted_last,
        keeps_computed_tokens_of_the_preempted,
        lets_in_without_reserve,
        ignores_the_budget,
    ],
)
def test_a_fault_is_noticed(monkeypatch: pytest.MonkeyPatch, fault: Callable[[pytest.MonkeyPatch], Any]) -> None:
    fault(monkeypatch)
    without_shrinking = settings(SETTINGS, phases=[Phase.generate], report_multiple_bugs=False, print_blob=False)
    with without_type_checks(), pytest.raises((AssertionError, IndexError)):
        run_state_machine_as_test(Traffic, settings=without_shrinking)


@pytest.mark.parametrize(
    "fault",
    [
        writes_into_a_shared_block,
        finds_blocks_by_their_own_tokens,
        ignores_salts,
        shares_beginnings_whatever_came_before,
        copies_what_is_not_computed_yet,
        forgets_to_forget_a_reused_block,
        forks_without_references,
        finds_without_references,
        keeps_the_sources_of_copies,
        drops_a_copy,
        waits_for_what_nobody_computes,
        follows_for_ever,
        remembers_what_follows_from_forgotten_blocks,
        runs_ahead_of_everything,
    ],
)
def test_a_fault_is_noticed_in_long_traffic(
    monkeypatch: pytest.MonkeyPatch, fault: Callable[[pytest.MonkeyPatch], Any]
) -> None:
    fault(monkeypatch)
    with without_type_checks(), pytest.raises((AssertionError, IndexError)):
        traffic_of(5_000, has_small_chunks=True)
