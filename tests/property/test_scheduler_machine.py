"""Random traffic through pool, manager and scheduler; what always holds is checked after every step.

PAXPAGE_PROPERTY_EXAMPLES=5000 runs so many examples, new ones each time (CI runs the same ones every time).
"""

import logging
import os
import random
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

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

from paxpage.engine.batch import StepInputs
from paxpage.engine.block_pool import NULL_BLOCK, BlockPool
from paxpage.engine.kv_cache_manager import KVCacheManager
from paxpage.engine.request import FinishReason, Request, RequestStatus
from paxpage.engine.sampling_params import SamplingParams
from paxpage.engine.scheduler import ScheduledBatch, Scheduler
from tests.unit.engine.host_side import FakeModel, Sizes, assert_idle, make_scheduler, without_type_checks

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
    num_usable = draw(st.integers(2 if block_size == 1 else 1, 16))
    max_num_seqs = draw(st.sampled_from([4, 3, 6, 2, 1]))
    return Sizes(
        num_usable, block_size, max_num_seqs,
        max_num_batched_tokens=max_num_seqs + draw(st.integers(0, 20)),
        max_model_len=max(2, num_usable * block_size - draw(st.integers(0, 40))),
        policy=draw(st.sampled_from(["fcfs", "priority"])),
    )  # fmt: skip


def rank(scheduler: Scheduler, request: Request) -> tuple[int, int]:
    """Lower is served first."""
    return (request.priority if scheduler.config.policy == "priority" else 0, request.sequence_number)


class Life:
    """What the machine remembers of a request beside what the request says itself."""

    def __init__(self, request: Request) -> None:
        self.request = request
        self.token_ids = list(request.token_ids)  # as the device knows them: those in flight included
        self.table: list[int] = []  # since it runs
        self.admitted_at = 0  # step
        self.num_tokens_then = 0
        self.num_lost = 0  # preemptions by a lost cache
        self.num_steps = 0  # since it arrived


class Launched(NamedTuple):
    """A step that the device has, and what it will say."""

    batch: ScheduledBatch
    token_ids: list[int]


class Traffic(RuleBasedStateMachine):
    """Arrivals, steps, aborts and lost caches in any order; steps scheduled after or before the last one's tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.lives: dict[str, Life] = {}
        self.in_flight: Launched | None = None
        self.num_steps = 0
        self.num_arrivals = 0

    @initialize(sizes=sizes(), is_async=st.booleans())
    def start(self, sizes: Sizes, is_async: bool) -> None:
        self.scheduler = make_scheduler(sizes)
        self.manager = self.scheduler.manager
        self.model = FakeModel(self.manager)
        self.is_async = is_async

    # Rules

    @rule(count=st.integers(1, 4), seed=st.integers(0, 2**16))
    def arrive(self, count: int, seed: int) -> None:
        rng = random.Random(seed)
        for _ in range(count):
            longest = max(2, self.scheduler.config.max_model_len // rng.choice([1, 1, 2, 4]))
            num_prompt = rng.randint(
                1, max(1, longest // rng.choice([1, 4, 8]) - 1)
            )  # short ones start and grow together
            max_tokens = rng.randint(1, longest - num_prompt)
            min_tokens, is_endless = rng.randint(0, max_tokens), rng.random() < 0.5
            params = SamplingParams(
                max_tokens=max_tokens, min_tokens=min_tokens, ignore_eos=is_endless, stop_token_ids=[STOP]
            )
            for _ in range(rng.choice([1, 1, 1, 2, 3])):  # samples of one prompt
                self.add(num_prompt, params, max_tokens, rng.randint(-1, 1))

    def add(self, num_prompt: int, params: SamplingParams, max_tokens: int, priority: int) -> None:
        self.num_arrivals += 1
        prompt = [1000 * self.num_arrivals + position for position in range(num_prompt)]  # no two tokens are equal
        request = Request(
            str(self.num_arrivals), prompt, params,
            max_tokens=max_tokens, eos_token_ids=frozenset({EOS}), priority=priority,
        )  # fmt: skip
        self.scheduler.add(request)
        self.lives[request.request_id] = Life(request)

    @rule(count=st.integers(1, 16), seed=st.integers(0, 2**16), share_of_ends=st.sampled_from([0.0, 0.02, 0.3]))
    def run(self, count: int, seed: int, share_of_ends: float) -> None:
        rng = random.Random(seed)
        for _ in range(count):
            if self.scheduler.has_unfinished_requests():
                self.step(rng, share_of_ends)
                self.what_always_holds()

    @precondition(lambda self: self.lives)
    @rule(number=st.integers(0, 99), loses_the_cache=st.booleans())
    def interrupt(self, number: int, loses_the_cache: bool) -> None:
        """An abort, or a step that fails."""
        if loses_the_cache:
            self.lose_the_cache()
        else:
            self.abort(list(self.lives.values())[number % len(self.lives)])

    @invariant()
    def what_always_holds(self) -> None:
        self.check_blocks()
        self.check_tables()
        self.check_queues()
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
        batch = self.schedule()
        sampled = [rng.choice([EOS, STOP]) if rng.random() < share_of_ends else rng.randrange(EOS) for _ in batch.rows]
        launched = self.launch(batch, sampled) if batch.rows else None
        arriving, self.in_flight = (self.in_flight, launched) if self.is_async else (launched, None)
        if rng.random() < 0.01:
            self.abort(rng.choice(list(self.lives.values())))
        if arriving is not None:
            self.update(arriving)

    def schedule(self) -> ScheduledBatch:
        computed = {request.request_id: request.num_computed_tokens for request in self.scheduler.running}
        waiting = list(self.scheduler.waiting)
        batch = self.scheduler.schedule()
        running = [
            self.lives[name].request for name in computed if self.lives[name].request not in self.scheduler.ending
        ]
        self.num_steps += 1
        for life in self.lives.values():
            life.num_steps += 1
        self.check_rows(batch, computed)
        self.check_choice(batch, running, waiting)
        self.check_preempted(batch, running)
        for row in batch.rows:
            if row.request.request_id not in computed:
                life = self.lives[row.request.request_id]
                life.admitted_at, life.num_tokens_then = self.num_steps, len(life.token_ids)
        return batch

    def launch(self, batch: ScheduledBatch, sampled: list[int]) -> Launched:
        inputs = self.model.inputs(batch)
        self.check_slots(batch, inputs)
        self.model.run(batch, sampled)
        self.check_contents(batch, inputs)
        for row, token_id in zip(batch.rows, sampled, strict=True):
            self.lives[row.request.request_id].token_ids += [token_id] * row.is_sampled
        return Launched(batch, sampled)

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

    def abort(self, life: Life) -> None:
        self.scheduler.finish(life.request, FinishReason.ABORT)

    def lose_the_cache(self) -> None:
        """The tokens in flight never come, and nobody's keys and values are there any more."""
        self.schedule()
        for life in self.lives.values():
            life.num_lost += life.request.status in (RequestStatus.RUNNING, RequestStatus.ENDING)
            life.token_ids = list(life.request.token_ids)
        self.scheduler.preempt_all()
        self.model.forget()
        self.in_flight = None

    # What holds in a step

    def check_rows(self, batch: ScheduledBatch, computed: dict[str, int]) -> None:
        config, running = self.scheduler.config, self.scheduler.running
        assert batch.rows or self.scheduler.ending, "somebody can always run"
        assert len(batch.rows) <= config.max_num_seqs and batch.num_tokens <= config.max_num_batched_tokens
        assert sorted(row.request.request_id for row in batch.rows) == sorted(r.request_id for r in running)
        for row in batch.rows:
            request, end = row.request, row.start + row.num_tokens
            num_tokens = len(self.lives[request.request_id].token_ids)
            assert row.num_tokens >= 1 and row.start == computed.get(request.request_id, 0)
            assert end == request.num_computed_tokens <= num_tokens
            assert row.is_sampled == (end == num_tokens)

    def check_choice(self, batch: ScheduledBatch, running: list[Request], waiting: list[Request]) -> None:
        """Who was let in: the first of the queue, as many as fit, and nobody while blocks are short."""
        scheduler, config = self.scheduler, self.scheduler.config
        admitted = [row.request for row in batch.rows if row.request not in running]
        assert admitted == waiting[: len(admitted)]
        assert not (admitted and batch.preempted)
        if admitted and len(scheduler.running) > 1:
            own = 1  # the block of the newest's own next token was not asked for
            assert self.num_free_after_promises() >= -own, "a block is left to each of the others"
        if batch.num_tokens == config.max_num_batched_tokens:
            return
        assert all(row.is_sampled for row in batch.rows), "budget is left, and a row has tokens to compute"
        if scheduler.waiting and not batch.preempted and len(scheduler.running) < config.max_num_seqs:
            missing = self.manager.num_missing_blocks(scheduler.waiting[0])
            assert missing + 1 > self.num_free_after_promises(), "the first of the queue was left out"

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
            assert self.scheduler.config.policy == "priority" or has_got_on or has_stayed

    def check_slots(self, batch: ScheduledBatch, inputs: StepInputs) -> None:
        slots = inputs.slot_mapping.tolist()
        assert not any(slots[batch.num_tokens :]), "padding goes to the null block"
        assert len(set(slots[: batch.num_tokens])) == batch.num_tokens
        for index, row in enumerate(batch.rows):
            start, end = inputs.query_start_loc[index : index + 2].tolist()
            own = set(self.manager.block_ids(row.request))
            assert {slot // self.manager.block_size for slot in slots[start:end]} <= own

    def check_contents(self, batch: ScheduledBatch, inputs: StepInputs) -> None:
        """Each row reads its own tokens, all of them, in order."""
        for index, row in enumerate(batch.rows):
            own = self.lives[row.request.request_id].token_ids
            assert self.model.sequence(inputs, index) == own[: row.request.num_computed_tokens]

    # What always holds

    def check_blocks(self) -> None:
        pool = self.manager.pool
        pool.check()
        tables = [self.manager.block_ids(request) for request in self.scheduler.running]
        owned = [block_id for table in tables for block_id in table]
        assert len(set(owned)) == len(owned) == pool.num_usable - pool.num_free
        assert NULL_BLOCK not in owned
        assert all(pool.ref_count(block_id) == 1 for block_id in owned)
        held = sum(request.num_computed_tokens for request in self.scheduler.running)
        assert self.scheduler.usage() == (len(owned) * self.manager.block_size, held)

    def check_tables(self) -> None:
        for life in self.lives.values():
            table = self.manager.block_ids(life.request)
            if life.request.status is RequestStatus.RUNNING:
                num_empty = len(table) * self.manager.block_size - life.request.num_computed_tokens
                assert 0 <= num_empty < self.manager.block_size
                assert table[: len(life.table)] == life.table or life.admitted_at == self.num_steps, "append-only"
                assert not self.manager.block_tables[life.request.row, len(table) :].any()
            life.table = table
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
        if scheduler.config.policy == "fcfs" and scheduler.running and scheduler.waiting:
            assert rank(scheduler, scheduler.running[-1]) < rank(scheduler, scheduler.waiting[0]), "overtaken"

    def forget_the_finished(self) -> None:
        finished = [life for life in self.lives.values() if life.request.status is RequestStatus.FINISHED]
        for life in finished:
            self.check_end(life)
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
        assert request.row == -1
        if self.scheduler.config.policy == "fcfs":
            most = num_tokens + life.num_steps // self.manager.block_size
            assert request.num_preemptions - life.num_lost <= most


@pytest.fixture(autouse=True)
def quiet(caplog: pytest.LogCaptureFixture) -> None:
    """Thousands of preemptions are not worth a line each."""
    caplog.set_level(logging.ERROR, "paxpage.engine.scheduler")


def test_random_traffic() -> None:
    with without_type_checks():
        run_state_machine_as_test(Traffic, settings=SETTINGS)


# The machine has to notice when something is wrong


def forgets_a_block(monkeypatch: pytest.MonkeyPatch) -> None:
    release = BlockPool.release
    monkeypatch.setattr(BlockPool, "release", lambda self, block_ids: release(self, list(block_ids)[1:]))


def hands_out_a_block_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    allocate = BlockPool.allocate

    def allocate_and_keep_one(self: BlockPool, num_blocks: int) -> list[int]:
        block_ids = allocate(self, num_blocks)
        self._free.extend(block_ids[3:4])
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
    def can_admit(self: Scheduler, request: Request, promised: int) -> bool:
        return self.manager.num_missing_blocks(request) <= self.manager.pool.num_free

    monkeypatch.setattr(Scheduler, "_can_admit", can_admit)


def ignores_the_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    schedule_waiting = Scheduler._schedule_waiting

    def schedule_all_waiting(self: Scheduler, batch: ScheduledBatch, budget: int) -> int:
        return schedule_waiting(self, batch, budget + 1 if budget else 0)

    monkeypatch.setattr(Scheduler, "_schedule_waiting", schedule_all_waiting)


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
