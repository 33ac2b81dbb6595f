"""Who takes part in a step, with how many tokens, and who has to go."""

import logging
import time

import pytest

from paxpage.engine.request import FinishReason, Request, RequestStatus
from paxpage.engine.sampling_params import SamplingParams
from paxpage.engine.scheduler import ScheduledBatch, Scheduler
from tests.unit.engine.host_side import (
    FakeModel,
    Sizes,
    assert_ended,
    assert_idle,
    drain,
    make_request,
    make_scheduler,
    outputs_alone,
    step,
    without_type_checks,
)


def parts(batch: ScheduledBatch) -> list[tuple[str, int, int, bool]]:
    return [(row.request.request_id, row.start, row.num_tokens, row.is_sampled) for row in batch.rows]


def add_all(scheduler: Scheduler, *requests: Request) -> None:
    for request in requests:
        scheduler.add(request)


def names(requests: list[Request]) -> list[str]:
    return [request.request_id for request in requests]


# Order and budget


def test_requests_are_served_in_order_of_arrival() -> None:
    scheduler = make_scheduler(Sizes(max_num_batched_tokens=64))
    add_all(scheduler, make_request("c", 5), make_request("a", 7), make_request("b", 9))
    assert parts(scheduler.schedule()) == [("c", 0, 5, True), ("a", 0, 7, True), ("b", 0, 9, True)]
    assert names(scheduler.running) == ["c", "a", "b"]


def test_a_prompt_is_computed_in_chunks_of_what_the_budget_leaves() -> None:
    scheduler = make_scheduler(Sizes(max_num_batched_tokens=32, max_num_seqs=4))
    model = FakeModel(scheduler.manager)
    add_all(scheduler, make_request("a", 3), make_request("b", 70))
    steps = [parts(step(scheduler, model)) for _ in range(3)]
    assert steps == [
        [("a", 0, 3, True), ("b", 0, 29, False)],
        [("a", 3, 1, True), ("b", 29, 31, False)],
        [("a", 4, 1, True), ("b", 60, 10, True)],
    ]


def test_usage_counts_slots() -> None:
    scheduler = make_scheduler(Sizes(block_size=4))
    model = FakeModel(scheduler.manager)
    first, second = make_request("first", 9), make_request("second", 4)
    add_all(scheduler, first, second)
    step(scheduler, model)
    assert scheduler.usage() == (16, 13)
    step(scheduler, model)
    assert scheduler.usage() == (20, 15)
    scheduler.finish(first, FinishReason.ABORT)
    assert scheduler.usage() == (8, 5)
    scheduler.finish(second, FinishReason.ABORT)
    assert scheduler.usage() == (0, 0)


def test_a_chunk_of_one_token_is_the_prompts_own() -> None:
    """A batch of one token a row may hold the middle of a prompt, not only its end."""
    scheduler = make_scheduler(Sizes(max_num_batched_tokens=2, max_num_seqs=2))
    model = FakeModel(scheduler.manager)
    add_all(scheduler, make_request("a", 3), make_request("b", 7))
    drain(scheduler, model)
    assert_idle(scheduler)


def test_decoding_takes_one_token_a_step() -> None:
    scheduler = make_scheduler()
    model = FakeModel(scheduler.manager)
    add_all(scheduler, make_request("a", 5, 3))
    assert [parts(step(scheduler, model)) for _ in range(3)] == [
        [("a", 0, 5, True)], [("a", 5, 1, True)], [("a", 6, 1, True)]
    ]  # fmt: skip
    assert not scheduler.has_unfinished_requests()


def test_a_row_whose_prompt_is_not_done_gets_no_token() -> None:
    scheduler = make_scheduler(Sizes(max_num_batched_tokens=16))
    request = make_request("a", 20)
    add_all(scheduler, request)
    assert scheduler.update(scheduler.schedule(), [9]) == []
    assert request.num_output_tokens == 0
    assert scheduler.update(scheduler.schedule(), [9]) == [(0, request)]
    assert request.output_token_ids == [9]


def test_update_names_each_requests_own_row() -> None:
    scheduler = make_scheduler(Sizes(max_num_batched_tokens=16))
    first, second, third = (make_request(name, size) for name, size in (("a", 4), ("b", 6), ("c", 30)))
    add_all(scheduler, first, second, third)
    assert scheduler.update(scheduler.schedule(), [7, 8, 9]) == [(0, first), (1, second)]
    assert (first.token_ids[-1], second.token_ids[-1]) == (7, 8)


def test_the_budget_is_used_up_and_kept() -> None:
    scheduler = make_scheduler(Sizes(num_usable=640, max_num_batched_tokens=48, max_num_seqs=8))
    model = FakeModel(scheduler.manager)
    add_all(scheduler, *(make_request(str(i), 10 + 13 * i, 3) for i in range(12)))
    totals = []
    while scheduler.waiting:
        totals.append(step(scheduler, model).num_tokens)
    assert max(totals) == 48 and totals.count(48) >= 10


def test_no_more_than_max_num_seqs_run() -> None:
    scheduler = make_scheduler(Sizes(max_num_seqs=3, max_num_batched_tokens=64))
    add_all(scheduler, *(make_request(str(i), 2) for i in range(5)))
    assert len(scheduler.schedule().rows) == 3
    assert names(scheduler.waiting) == ["3", "4"]


def test_a_long_prompt_leaves_a_token_to_each_request_behind_it() -> None:
    scheduler = make_scheduler(Sizes(max_num_seqs=3, max_num_batched_tokens=8, policy="priority"))
    model = FakeModel(scheduler.manager)
    add_all(scheduler, make_request("x", 2, 30, priority=1), make_request("y", 2, 30, priority=1))
    step(scheduler, model)
    add_all(scheduler, make_request("long", 40))
    assert parts(step(scheduler, model)) == [("x", 2, 1, True), ("y", 2, 1, True), ("long", 0, 6, False)]
    assert parts(step(scheduler, model)) == [("long", 6, 6, False), ("x", 3, 1, True), ("y", 3, 1, True)]


def test_one_row_and_one_token_at_a_time_gets_there() -> None:
    scheduler = make_scheduler(Sizes(max_num_seqs=1, max_num_batched_tokens=1))
    requests = [make_request(str(i), 5, 3) for i in range(3)]
    add_all(scheduler, *requests)
    assert drain(scheduler, FakeModel(scheduler.manager)) == 3 * (5 + 3 - 1)
    assert_ended(requests)


# Priority


def test_priority_then_arrival() -> None:
    scheduler = make_scheduler(Sizes(policy="priority"))
    priorities = {"a": 1, "b": 0, "c": -5, "d": 0}
    add_all(scheduler, *(make_request(name, 2, priority=priority) for name, priority in priorities.items()))
    assert names(scheduler.waiting) == ["c", "b", "d", "a"]
    assert names([row.request for row in scheduler.schedule().rows]) == ["c", "b", "d", "a"]


def test_first_come_first_served_knows_no_priority() -> None:
    scheduler = make_scheduler(Sizes(policy="fcfs"))
    add_all(scheduler, make_request("a", 2, priority=1), make_request("b", 2, priority=-9))
    assert names(scheduler.waiting) == ["a", "b"]


def test_the_least_urgent_is_preempted_first() -> None:
    scheduler = make_scheduler(Sizes(num_usable=5, block_size=4, policy="priority"))
    model = FakeModel(scheduler.manager)
    add_all(scheduler, make_request("late", 3, 9, priority=2))
    step(scheduler, model)
    add_all(scheduler, make_request("urgent", 3, 9))
    requests = [*scheduler.running, *scheduler.waiting]
    preempted = [names(step(scheduler, model).preempted) for _ in range(9)]
    assert ["late"] in preempted and ["urgent"] not in preempted
    drain(scheduler, model)
    assert_ended(requests)


# Blocks run out


def crowded() -> tuple[Scheduler, FakeModel, list[Request]]:
    """Three requests that together want more than the 6 blocks of 4 tokens that there are."""
    scheduler = make_scheduler(Sizes(num_usable=6, block_size=4, max_num_seqs=3, max_num_batched_tokens=16))
    requests = [make_request(name, 3, 12) for name in ("old", "middle", "new")]
    add_all(scheduler, *requests)
    return scheduler, FakeModel(scheduler.manager), requests


def run_to_preemption(scheduler: Scheduler, model: FakeModel) -> ScheduledBatch:
    for _ in range(50):
        batch = step(scheduler, model)
        if batch.preempted:
            return batch
    raise AssertionError("nobody was preempted")


def test_the_newest_goes_and_waits_at_the_head_of_the_queue() -> None:
    scheduler, model, requests = crowded()
    add_all(scheduler, make_request("waiting", 4, 1))
    new = requests[-1]
    batch = run_to_preemption(scheduler, model)
    assert names(batch.preempted) == ["new"]
    assert names(scheduler.waiting) == ["new", "waiting"]
    assert (new.status, new.row, new.num_computed_tokens, new.num_preemptions) == (RequestStatus.WAITING, -1, 0, 1)
    assert new.num_output_tokens > 0, "what it said is kept"
    assert scheduler.num_preemptions == 1
    assert names([row.request for row in batch.rows]) == ["old", "middle"]


def test_a_preempted_request_says_the_same() -> None:
    scheduler, model, requests = crowded()
    drain(scheduler, model)
    assert scheduler.num_preemptions > 0
    assert requests[0].num_preemptions == 0, "the oldest is never preempted"
    assert_ended(requests)
    assert_idle(scheduler)


def test_a_resumed_request_computes_its_output_again_too() -> None:
    scheduler, model, requests = crowded()
    run_to_preemption(scheduler, model)
    new, num_tokens = requests[-1], requests[-1].num_tokens
    row = next(row for row in (step(scheduler, model).rows[-1] for _ in range(50)) if row.request is new)
    assert (row.start, row.num_tokens, row.is_sampled) == (0, num_tokens, True)


def test_a_preemption_is_logged_with_the_requests_id(caplog: pytest.LogCaptureFixture) -> None:
    scheduler, model, requests = crowded()
    with caplog.at_level(logging.WARNING):
        run_to_preemption(scheduler, model)
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    expected = f"preempted request new (time 1 for it): {requests[-1].num_tokens} tokens will be computed again"
    assert record.getMessage().startswith(expected)
    assert "2 running" in record.getMessage()


def urgent_and_big(num_steps: int) -> tuple[Scheduler, FakeModel]:
    """Two requests, of which the second will have to go, after so many steps."""
    scheduler = make_scheduler(Sizes(num_usable=6, block_size=4, max_num_seqs=3, policy="priority"))
    model = FakeModel(scheduler.manager)
    add_all(scheduler, make_request("urgent", 3, 12), make_request("big", 9, 12, priority=1))
    for _ in range(num_steps):
        step(scheduler, model)
    return scheduler, model


def test_nobody_is_let_in_by_the_step_that_preempts() -> None:
    """Not even one that is more urgent and small enough for what the preempted one has given back."""
    num_steps = next(n for n in range(20) if step(*urgent_and_big(n)).preempted)
    scheduler, model = urgent_and_big(num_steps)
    add_all(scheduler, make_request("tiny", 1, 1, priority=-1))
    batch = step(scheduler, model)
    assert (names(batch.preempted), names([row.request for row in batch.rows])) == (["big"], ["urgent"])
    assert "tiny" in names([row.request for row in scheduler.schedule().rows])


def test_a_request_may_have_to_go_for_itself() -> None:
    """Its own next block is what is missing, and it is the newest."""
    scheduler = make_scheduler(Sizes(num_usable=5, block_size=4, max_num_seqs=2, max_num_batched_tokens=16))
    model = FakeModel(scheduler.manager)
    requests = [make_request("a", 4, 7), make_request("b", 4, 7)]
    add_all(scheduler, *requests)
    batch = run_to_preemption(scheduler, model)
    assert (names(batch.preempted), names([row.request for row in batch.rows])) == (["b"], ["a"])
    assert requests[1].num_tokens % 4 == 1, "it was b that needed another block"
    drain(scheduler, model)
    assert_ended(requests)


def test_a_finished_requests_blocks_serve_a_waiting_one_on_the_very_next_pass() -> None:
    scheduler = make_scheduler(Sizes(num_usable=4, block_size=4, max_num_seqs=4))
    model = FakeModel(scheduler.manager)
    first, second = make_request("first", 7, 2), make_request("second", 6, 2)
    add_all(scheduler, first, second)
    step(scheduler, model)
    blocks = scheduler.manager.block_ids(first)
    batch = scheduler.schedule()
    assert names([row.request for row in batch.rows]) == ["first"]
    assert len(blocks) == 2 and scheduler.manager.block_ids(second) == []
    scheduler.update(batch, model.run(batch))
    assert first.status is RequestStatus.FINISHED
    scheduler.schedule()
    assert scheduler.manager.block_ids(second) != []


def test_the_blocks_themselves_are_reused() -> None:
    scheduler = make_scheduler(Sizes(num_usable=2, block_size=4, max_num_seqs=2))
    model = FakeModel(scheduler.manager)
    first, second = make_request("first", 6, 1), make_request("second", 6, 1)
    add_all(scheduler, first, second)
    batch = scheduler.schedule()
    blocks = scheduler.manager.block_ids(first)
    scheduler.update(batch, model.run(batch))
    step_after = scheduler.schedule()
    assert parts(step_after) == [("second", 0, 6, True)]
    assert sorted(scheduler.manager.block_ids(second)) == sorted(blocks) == [1, 2]


def test_a_newcomer_leaves_a_block_to_each_that_runs() -> None:
    scheduler = make_scheduler(Sizes(num_usable=5, block_size=4, max_num_seqs=4))
    model = FakeModel(scheduler.manager)
    add_all(scheduler, make_request("a", 4, 8), make_request("b", 4, 8))
    step(scheduler, model)
    assert names(scheduler.running) == ["a", "b"]
    add_all(scheduler, make_request("c", 4, 8))
    assert names([row.request for row in scheduler.schedule().rows]) == ["a", "b"]


def test_a_half_computed_prompt_gets_its_blocks() -> None:
    scheduler = make_scheduler(Sizes(num_usable=6, block_size=4, max_num_seqs=4, max_num_batched_tokens=8))
    model = FakeModel(scheduler.manager)
    add_all(scheduler, make_request("long", 20, 4), make_request("next", 3, 4))
    assert parts(step(scheduler, model)) == [("long", 0, 8, False)]
    assert parts(step(scheduler, model)) == [("long", 8, 8, False)]
    assert parts(step(scheduler, model)) == [("long", 16, 4, True)]
    drain(scheduler, model)
    assert scheduler.num_preemptions == 0


# Steps in flight: scheduled before the last one's tokens are known


def test_a_decoding_request_goes_on_with_a_token_that_only_the_device_knows() -> None:
    scheduler = make_scheduler()
    model = FakeModel(scheduler.manager)
    add_all(scheduler, make_request("a", 3), make_request("b", 2))
    first = scheduler.schedule()
    tokens = model.run(first)
    second = scheduler.schedule()
    assert parts(second) == [("a", 3, 1, True), ("b", 2, 1, True)]
    assert [row.previous_index for row in second.rows] == [0, 1]
    assert model.inputs(second).token_ids[:2].tolist() == [-1, -2]
    scheduler.update(first, tokens)
    assert [request.num_tokens for request in scheduler.running] == [5, 4], "one known, one in flight"
    assert [request.num_known_tokens for request in scheduler.running] == [4, 3]


def test_an_end_by_length_frees_blocks_for_the_very_next_pass() -> None:
    scheduler = make_scheduler(Sizes(num_usable=2, block_size=4, max_num_seqs=2))
    model = FakeModel(scheduler.manager)
    first, second = make_request("first", 6, 1), make_request("second", 6, 1)
    add_all(scheduler, first, second)
    batch = scheduler.schedule()
    tokens = model.run(batch)
    assert parts(scheduler.schedule()) == [("second", 0, 6, True)]
    assert (first.status, first.row) == (RequestStatus.ENDING, -1)
    assert scheduler.update(batch, tokens) == [(0, first)]
    assert (first.status, first.output_token_ids) == (RequestStatus.FINISHED, outputs_alone(first))
    assert scheduler.num_wasted_rows == 0


def test_an_end_by_a_token_is_known_one_pass_late_and_that_row_is_counted() -> None:
    scheduler = make_scheduler()
    model = FakeModel(scheduler.manager)
    request = make_request("a", 6, 9, params=SamplingParams(stop_token_ids=[11]))
    add_all(scheduler, request)
    first = scheduler.schedule()
    tokens = model.run(first, [11])
    second = scheduler.schedule()
    assert parts(second) == [("a", 6, 1, True)]
    tokens_of_second = model.run(second, [5])
    scheduler.update(first, tokens)
    assert request.finish_reason is FinishReason.STOP
    assert scheduler.update(second, tokens_of_second) == []
    assert (request.output_token_ids, scheduler.num_wasted_rows) == ([11], 1)
    assert_idle(scheduler)


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
@pytest.mark.parametrize("num_usable", [10, 64])
def test_steps_in_flight_change_no_output(policy: str, num_usable: int) -> None:
    outputs = []
    for is_async in (False, True):
        scheduler = make_scheduler(Sizes(num_usable, max_num_batched_tokens=24, policy=policy))
        requests = [make_request(str(i), 3 + (17 * i) % 60, 1 + (11 * i) % 40, priority=i % 3) for i in range(30)]
        add_all(scheduler, *requests)
        drain(scheduler, FakeModel(scheduler.manager), is_async=is_async)
        assert_ended(requests)
        assert_idle(scheduler)
        assert (scheduler.num_preemptions > 0) == (num_usable == 10)
        outputs.append([request.output_token_ids for request in requests])
    assert outputs[0] == outputs[1]


def test_a_token_in_flight_reaches_a_request_that_was_preempted_meanwhile() -> None:
    scheduler, model, requests = crowded()
    in_flight = scheduler.schedule()
    tokens = model.run(in_flight)
    for _ in range(50):
        batch = scheduler.schedule()
        next_tokens = model.run(batch)
        num_known = requests[-1].num_known_tokens
        scheduler.update(in_flight, tokens)
        in_flight, tokens = batch, next_tokens
        if batch.preempted:
            break
    assert names(batch.preempted) == ["new"]
    assert (requests[-1].num_known_tokens, requests[-1].num_pending_tokens) == (num_known + 1, 0)
    scheduler.update(in_flight, tokens)
    drain(scheduler, model)
    assert_ended(requests)


def test_tokens_in_flight_are_lost_with_the_cache() -> None:
    scheduler = make_scheduler(Sizes(max_num_seqs=2))
    model = FakeModel(scheduler.manager)
    requests = [make_request("ends", 5, 1), make_request("goes on", 6, 5), make_request("waits", 7, 3)]
    add_all(scheduler, *requests)
    model.run(scheduler.schedule())
    scheduler.schedule()
    scheduler.preempt_all()
    model.forget()
    assert names(scheduler.waiting) == ["ends", "goes on", "waits"]
    assert [request.num_tokens for request in requests] == [5, 6, 7]
    drain(scheduler, model, is_async=True)
    assert_ended(requests)
    assert_idle(scheduler)


# Beginnings that are computed once


def caching(sizes: Sizes | None = None) -> tuple[Scheduler, FakeModel]:
    scheduler = make_scheduler((sizes or Sizes())._replace(has_prefix_cache=True))
    return scheduler, FakeModel(scheduler.manager)


def with_own_end(shared: int, index: int) -> list[int]:
    """A prompt of shared tokens and one to five of its own."""
    return [*range(1, shared + 1), *(100_000 + 10 * index + place for place in range(1 + index % 5))]


def total_scheduled(scheduler: Scheduler, model: FakeModel) -> int:
    """Tokens computed until nobody is left."""
    total = 0
    with without_type_checks():
        while scheduler.has_unfinished_requests():
            total += step(scheduler, model).num_tokens
    return total


def beside_decodes(num_decoding: int, num_prompts: int, short: int | None) -> list[int]:
    """Tokens of each step while num_prompts prompts of 5000 tokens are computed beside requests that decode."""
    sizes = Sizes(4000, max_num_seqs=64, max_num_batched_tokens=2048, num_tokens_beside_decodes=short)
    scheduler = make_scheduler(sizes)
    model = FakeModel(scheduler.manager)
    add_all(scheduler, *(make_request(f"decoding-{i}", 4, 1000) for i in range(num_decoding)))
    if num_decoding:
        step(scheduler, model)
    prompts = [make_request(f"prompt-{i}", 5000, 2) for i in range(num_prompts)]
    add_all(scheduler, *prompts)
    counts = []
    with without_type_checks():
        while any(request.num_output_tokens == 0 for request in prompts):
            counts.append(step(scheduler, model).num_tokens)
    assert min(counts) > num_decoding
    return counts


def test_a_long_prompt_is_computed_in_short_steps_beside_requests_that_decode() -> None:
    assert beside_decodes(40, 1, None)[:2] == [2048, 2048]
    assert set(beside_decodes(40, 1, 256)[:-1]) == {256}
    # Each running request, the one in mid-prompt among them, has a token, and the prompt half a step's beside.
    assert set(beside_decodes(40, 1, 64)[1:-1]) == {41 + 32}


def test_the_more_prompts_wait_for_each_request_that_decodes_the_longer_the_steps() -> None:
    assert beside_decodes(40, 5, 256)[0] == 2 * 256
    assert beside_decodes(40, 10, 256)[0] == 3 * 256
    assert beside_decodes(4, 4, 256)[0] == 2048
    assert beside_decodes(1, 1, 256)[0] == 2048
    assert beside_decodes(0, 3, 256)[0] == 2048, "nobody decodes"


@pytest.mark.parametrize("max_num_batched_tokens", [512, 8192])
@pytest.mark.parametrize("num_shared", [4000, 4007])
def test_64_arrivals_on_a_cold_cache_compute_what_they_share_once(max_num_batched_tokens: int, num_shared: int) -> None:
    scheduler, model = caching(Sizes(num_usable=500, max_num_seqs=64, max_num_batched_tokens=max_num_batched_tokens))
    requests = [make_request(str(i), with_own_end(num_shared, i), 3) for i in range(64)]
    add_all(scheduler, *requests)
    own = sum(request.num_prompt_tokens - num_shared for request in requests)
    part_of_a_block = num_shared % 16 * (64 - 1)
    fewest = num_shared + own + 2 * 64
    total = total_scheduled(scheduler, model)
    assert fewest <= total <= fewest + part_of_a_block
    assert part_of_a_block > 0 or scheduler.num_prefix_hits == 63 * 4000
    assert scheduler.num_prefix_queries == 64 * num_shared + own
    assert_ended(requests)
    assert_idle(scheduler)


@pytest.mark.parametrize("max_num_batched_tokens", [512, 8192])
def test_ten_requests_hold_the_blocks_of_a_long_prompt_once(max_num_batched_tokens: int) -> None:
    scheduler, model = caching(Sizes(num_usable=300, max_num_seqs=10, max_num_batched_tokens=max_num_batched_tokens))
    requests = [make_request(str(i), with_own_end(4000, i), 20) for i in range(10)]
    add_all(scheduler, *requests)
    with without_type_checks():
        while any(request.num_output_tokens == 0 for request in requests):
            step(scheduler, model)
        pool, tables = scheduler.manager.pool, [scheduler.manager.block_ids(request) for request in requests]
        assert all(table[:250] == tables[0][:250] for table in tables)
        assert {pool.ref_count(block_id) for block_id in tables[0][:250]} == {10}
        assert pool.num_usable - pool.num_free == 250 + sum(len(table) - 250 for table in tables)
        assert scheduler.usage().allocated == (pool.num_usable - pool.num_free) * 16
    drain(scheduler, model)
    assert_ended(requests)
    assert_idle(scheduler)


@pytest.mark.parametrize("num_prompt", [15, 16, 17, 31, 32, 33, 48])
def test_a_prompt_that_is_known_whole_leaves_its_last_token(num_prompt: int) -> None:
    """GeeeekExplorer/nano-vllm#114: found whole, nothing was left to compute, and that crashed."""
    scheduler, model = caching(Sizes(max_num_batched_tokens=256))
    prompt = list(range(50, 50 + num_prompt))
    first, *later = [make_request(str(i), prompt, 20) for i in range(3)]
    scheduler.add(first)
    drain(scheduler, model)
    assert first.num_cached_tokens == 0
    for request in later:
        scheduler.add(request)
        batch = step(scheduler, model)
        assert parts(batch) == [(request.request_id, num_prompt - 1, 1, True)]
        assert (request.num_cached_tokens, len(batch.copies)) == (num_prompt - 1, num_prompt % 16 != 1)
        drain(scheduler, model)
    copies = [make_request(f"copy {i}", prompt, 20) for i in range(8)]
    add_all(scheduler, *copies, make_request("longer", [*prompt, 5], 20))
    requests = [first, *later, *scheduler.waiting]
    assert step(scheduler, model).num_tokens == 9
    drain(scheduler, model)
    assert_ended(requests)
    assert_idle(scheduler)


def test_part_of_a_block_is_copied_and_only_the_rest_is_computed() -> None:
    scheduler, model = caching()
    first, second = make_request("first", 40, 9), make_request("second", [*range(1, 22), 99, 98], 9)
    scheduler.add(first)
    step(scheduler, model)
    blocks = scheduler.manager.block_ids(first)
    scheduler.add(second)
    batch = step(scheduler, model)
    assert parts(batch) == [("first", 40, 1, True), ("second", 21, 2, True)]
    assert [copy.source for copy in batch.copies] == blocks[1:2]
    assert [copy.target for copy in batch.copies] == scheduler.manager.block_ids(second)[1:]
    assert scheduler.manager.block_ids(second)[0] == blocks[0]
    assert (second.num_cached_tokens, scheduler.num_prefix_queries, scheduler.num_prefix_hits) == (21, 63, 21)
    drain(scheduler, model)
    assert_ended([first, second])
    assert_idle(scheduler)


def test_outputs_are_found_too() -> None:
    scheduler, model = caching()
    first = make_request("first", 20, 30)
    scheduler.add(first)
    drain(scheduler, model)
    second = make_request("second", [*first.token_ids[:48], 7])
    scheduler.add(second)
    assert parts(step(scheduler, model)) == [("second", 48, 1, True)]
    drain(scheduler, model)
    assert_ended([second])


def test_requests_with_different_salts_compute_everything() -> None:
    scheduler, model = caching(Sizes(max_num_batched_tokens=512))
    requests = [make_request(f"{salt} {i}", 40, salt=salt) for i in range(2) for salt in (None, "a", "b")]
    add_all(scheduler, *requests[:3])
    assert step(scheduler, model).num_tokens == 120
    drain(scheduler, model)
    add_all(scheduler, *requests[3:])
    assert step(scheduler, model).num_tokens == 3 * 8, "of blocks that were never full"
    drain(scheduler, model)
    assert [request.num_cached_tokens for request in requests] == [0, 0, 0, 32, 32, 32]
    assert_ended(requests)


def test_a_preempted_request_finds_its_own_blocks_again() -> None:
    scheduler, model = caching(Sizes(num_usable=6, block_size=4, max_num_seqs=3, max_num_batched_tokens=16))
    requests = [make_request(name, [first] * 3, 12) for first, name in enumerate(("old", "middle", "new"), 1)]
    add_all(scheduler, *requests)
    run_to_preemption(scheduler, model)
    drain(scheduler, model)
    assert scheduler.num_prefix_queries == 9, "counted once a request"
    assert_ended(requests)
    assert_idle(scheduler)


def test_cached_blocks_are_no_reason_to_wait() -> None:
    """vllm-project/vllm#39734, F: with every block in the prefix cache, a large request is let in by eviction."""
    scheduler, model = caching(Sizes(num_usable=8, max_num_batched_tokens=128))
    fillers = [make_request(f"filler {i}", [200 + i] * 16, 1) for i in range(8)]
    add_all(scheduler, *fillers)
    drain(scheduler, model)
    assert len(scheduler.manager.prefix_cache or ()) == 8
    large = make_request("F", 100, 20)
    scheduler.add(large)
    assert parts(step(scheduler, model)) == [("F", 0, 100, True)]
    drain(scheduler, model)
    assert_ended([*fillers, large])
    assert_idle(scheduler)


def test_nothing_computed_before_a_reset_is_used_after_it() -> None:
    scheduler, model = caching(Sizes(max_num_batched_tokens=32))
    before, after, last = (make_request(name, size, 20) for name, size in (("before", 64), ("after", 33), ("last", 64)))
    scheduler.add(before)
    step(scheduler, model)
    scheduler.manager.forget_cached()
    drain(scheduler, model)
    for request in (after, last):
        scheduler.add(request)
        drain(scheduler, model)
    assert (after.num_cached_tokens, last.num_cached_tokens) == (0, 33), "the second half of before's was known, once"
    assert_ended([before, after, last])
    assert_idle(scheduler)


def test_what_a_scored_prompt_only_read_is_written_when_it_is_computed_anew() -> None:
    """Its scores are known, its blocks are lost, and another prompt is scored in the step that computes it again."""
    scheduler = make_scheduler(Sizes(max_num_batched_tokens=200, has_prefix_cache=True))
    model, params = FakeModel(scheduler.manager), SamplingParams(prompt_logprobs=0)
    first, scored = make_request("first", 40, max_tokens=1), make_request("scored", 40, params=params)
    for request in (first, scored):
        scheduler.add(request)
        step(scheduler, model)
    assert scored.num_readonly_tokens == 32
    scheduler.end_scoring(scored)
    scheduler.preempt_all()
    model.forget()
    other = make_request("other", [9] * 20, params=params)
    scheduler.add(other)
    assert step(scheduler, model).has_scored
    scheduler.end_scoring(other)
    drain(scheduler, model)
    assert_ended([first, scored, other])


# Samples of one prompt


def samples(prompt: int, number: int, max_tokens: int = 6) -> list[Request]:
    return [make_request(f"sample {i}", prompt, max_tokens) for i in range(number)]


def with_samples(
    requests: list[Request], sizes: Sizes | None = None, *, has_prefix_cache: bool = False
) -> tuple[Scheduler, FakeModel]:
    scheduler = make_scheduler((sizes or Sizes())._replace(has_prefix_cache=has_prefix_cache))
    scheduler.add_samples(requests)
    return scheduler, FakeModel(scheduler.manager)


both = pytest.mark.parametrize("has_prefix_cache", [False, True])


@both
@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize(("num_prompt", "num_copies"), [(20, 3), (31, 3), (1, 3), (32, 0), (16, 0)])
def test_a_prompt_is_computed_once_for_all_its_samples(
    num_prompt: int, num_copies: int, is_async: bool, has_prefix_cache: bool
) -> None:
    requests = samples(num_prompt, 4)
    scheduler, model = with_samples(requests, has_prefix_cache=has_prefix_cache)
    first = scheduler.schedule()
    assert parts(first) == [
        ("sample 0", 0, num_prompt, True),
        *((f"sample {i}", num_prompt, 0, True) for i in (1, 2, 3)),
    ]
    assert [row.fork_index for row in first.rows] == [-1, 0, 0, 0]
    assert (first.num_tokens, first.has_forks, first.is_decode, list(first.copies)) == (num_prompt, True, False, [])
    blocks = scheduler.manager.block_ids(requests[0])
    assert [scheduler.manager.block_ids(request) for request in requests] == [blocks] * 4
    assert {scheduler.manager.pool.ref_count(block_id) for block_id in blocks} == {4}
    assert scheduler.usage() == (len(blocks) * 16, num_prompt)
    tokens = model.run(first)
    scheduler.update(first, tokens)
    second = scheduler.schedule()
    assert (second.num_tokens, second.is_decode, len(second.copies)) == (4, True, num_copies)
    assert scheduler.manager.block_ids(requests[0])[: len(blocks)] == blocks, "the first writer keeps the block"
    assert {copy.source for copy in second.copies} <= {blocks[-1]}
    assert len({scheduler.manager.block_ids(request)[-1] for request in requests}) == 4
    scheduler.update(second, model.run(second))
    drain(scheduler, model, is_async=is_async)
    assert_ended(requests)
    assert_idle(scheduler)


def test_samples_go_on_with_a_token_that_only_the_device_knows() -> None:
    requests = samples(20, 3)
    scheduler, model = with_samples(requests)
    first = scheduler.schedule()
    tokens = model.run(first, [5, 6, 7])
    second = scheduler.schedule()
    assert [row.previous_index for row in second.rows] == [0, 1, 2]
    model.run(second)
    scheduler.update(first, tokens)
    assert [request.output_token_ids for request in requests] == [[5], [6], [7]]
    tables = [scheduler.manager.block_ids(request) for request in requests]
    assert [model.slots[table[1] * 16 + 4] for table in tables] == [5, 6, 7]


def test_one_copy_for_two_samples_and_none_once_the_leader_is_gone() -> None:
    for is_aborted in (False, True):
        requests = samples(20, 2)
        scheduler, model = with_samples(requests)
        step(scheduler, model)
        if is_aborted:
            scheduler.finish(requests[0], FinishReason.ABORT)
        assert len(step(scheduler, model).copies) == (not is_aborted)
        drain(scheduler, model)
        assert_ended(requests[is_aborted:])
        assert_idle(scheduler)


@both
def test_samples_wait_while_their_prompt_is_computed_in_chunks(has_prefix_cache: bool) -> None:
    requests = samples(40, 3)
    scheduler, model = with_samples(requests, Sizes(max_num_batched_tokens=16), has_prefix_cache=has_prefix_cache)
    steps = [parts(step(scheduler, model)) for _ in range(3)]
    assert steps[:2] == [[("sample 0", 0, 16, False)], [("sample 0", 16, 16, False)]]
    assert steps[2] == [("sample 0", 32, 8, True), ("sample 1", 40, 0, True), ("sample 2", 40, 0, True)]
    drain(scheduler, model)
    assert_ended(requests)


def test_others_do_not_wait_with_them() -> None:
    requests = samples(10, 3)
    scheduler, model = with_samples(requests)
    scheduler.add(make_request("other", 5))
    batch = step(scheduler, model)
    assert parts(batch)[:2] == [("sample 0", 0, 10, True), ("other", 0, 5, True)]
    assert [row.fork_index for row in batch.rows] == [-1, -1, 0, 0]
    drain(scheduler, model)
    assert_ended(requests)


@both
def test_samples_for_which_there_is_no_row_come_later(has_prefix_cache: bool) -> None:
    requests = samples(36, 4)
    scheduler, model = with_samples(requests, Sizes(max_num_seqs=2), has_prefix_cache=has_prefix_cache)
    assert names([row.request for row in step(scheduler, model).rows]) == ["sample 0", "sample 1"]
    assert names(scheduler.waiting) == ["sample 2", "sample 3"] and requests[2].leader is None
    while requests[2].num_cached_tokens is None:
        step(scheduler, model)
    assert requests[2].num_cached_tokens == (32 if has_prefix_cache else 0)
    drain(scheduler, model)
    assert_ended(requests)
    assert_idle(scheduler)


@both
def test_samples_for_which_there_are_no_blocks_come_later(has_prefix_cache: bool) -> None:
    requests = samples(10, 4)
    scheduler, model = with_samples(requests, Sizes(num_usable=5, block_size=4), has_prefix_cache=has_prefix_cache)
    assert names([row.request for row in step(scheduler, model).rows]) == ["sample 0", "sample 1"]
    drain(scheduler, model)
    assert_ended(requests)
    assert_idle(scheduler)


@both
@pytest.mark.parametrize("num_steps", [0, 1])
def test_a_leader_that_is_aborted_before_its_first_token_leaves_ordinary_requests(
    num_steps: int, has_prefix_cache: bool
) -> None:
    requests = samples(40, 3)
    scheduler, model = with_samples(requests, Sizes(max_num_batched_tokens=16), has_prefix_cache=has_prefix_cache)
    for _ in range(num_steps):
        step(scheduler, model)
    scheduler.finish(requests[0], FinishReason.ABORT)
    start = 16 if has_prefix_cache and num_steps else 0
    assert parts(step(scheduler, model)) == [("sample 1", start, 16, False)]
    drain(scheduler, model)
    assert_ended(requests[1:])
    assert_idle(scheduler)


def test_a_sample_that_is_aborted_while_it_waits_is_not_forked() -> None:
    requests = samples(10, 3)
    scheduler, model = with_samples(requests)
    scheduler.finish(requests[1], FinishReason.ABORT)
    assert names([row.request for row in step(scheduler, model).rows]) == ["sample 0", "sample 2"]
    drain(scheduler, model)
    assert_ended([requests[0], requests[2]])
    assert_idle(scheduler)


@both
def test_samples_of_a_step_that_failed_start_again(has_prefix_cache: bool) -> None:
    requests = samples(20, 3)
    scheduler, model = with_samples(requests, has_prefix_cache=has_prefix_cache)
    scheduler.schedule()
    scheduler.preempt_all()
    model.forget()
    assert names(scheduler.waiting) == names(requests)
    assert [request.num_tokens for request in requests] == [20, 20, 20]
    drain(scheduler, model, is_async=True)
    assert_ended(requests)
    assert_idle(scheduler)


@both
def test_samples_that_end_with_their_first_token(has_prefix_cache: bool) -> None:
    for is_async in (False, True):
        requests = samples(20, 3, max_tokens=1)
        scheduler, model = with_samples(requests, has_prefix_cache=has_prefix_cache)
        drain(scheduler, model, is_async=is_async)
        assert_ended(requests)
        assert_idle(scheduler)


# Refusal, ends


def test_a_request_longer_than_the_context_is_never_taken_in() -> None:
    scheduler = make_scheduler(Sizes(max_model_len=20))
    with pytest.raises(AssertionError, match="too long"):
        scheduler.add(make_request("too long", 17, 4))
    scheduler.add(make_request("just fits", 16, 4))
    assert names(scheduler.waiting) == ["just fits"]


def test_a_token_that_ends_a_request_frees_its_blocks_at_once() -> None:
    scheduler = make_scheduler()
    request = make_request("a", 5, 9, params=SamplingParams(stop_token_ids=[11]))
    add_all(scheduler, request)
    scheduler.update(scheduler.schedule(), [11])
    assert (request.finish_reason, request.stop_reason) == (FinishReason.STOP, 11)
    assert_idle(scheduler)


@pytest.mark.parametrize("is_running", [False, True])
def test_an_abort_ends_a_request_wherever_it_is(is_running: bool) -> None:
    scheduler = make_scheduler(Sizes(max_num_batched_tokens=16))
    request = make_request("a", 30, 9)
    add_all(scheduler, request)
    if is_running:
        scheduler.schedule()
        assert request.status is RequestStatus.RUNNING
    scheduler.finish(request, FinishReason.ABORT)
    assert (request.status, request.finish_reason) == (RequestStatus.FINISHED, FinishReason.ABORT)
    assert_idle(scheduler)


def test_an_abort_while_a_step_is_in_flight() -> None:
    scheduler = make_scheduler()
    gone, stays = make_request("gone", 5), make_request("stays", 6)
    add_all(scheduler, gone, stays)
    batch = scheduler.schedule()
    scheduler.finish(gone, FinishReason.ABORT)
    assert scheduler.update(batch, [7, 8]) == [(1, stays)]
    assert (gone.num_output_tokens, stays.output_token_ids) == (0, [8])


def test_a_finished_request_only_gets_a_new_reason() -> None:
    scheduler = make_scheduler()
    request = make_request("a", 5, 1)
    add_all(scheduler, request)
    scheduler.update(scheduler.schedule(), [7])
    assert request.finish_reason is FinishReason.LENGTH
    scheduler.finish(request, FinishReason.STOP)
    assert request.finish_reason is FinishReason.STOP
    assert_idle(scheduler)


def test_after_a_lost_cache_everybody_starts_again_in_the_same_order() -> None:
    scheduler = make_scheduler(Sizes(max_num_seqs=3))
    model = FakeModel(scheduler.manager)
    requests = [make_request(str(i), 5 + i, 6) for i in range(5)]
    add_all(scheduler, *requests)
    step(scheduler, model)
    scheduler.schedule()
    scheduler.preempt_all()
    model.forget()
    assert names(scheduler.waiting) == ["0", "1", "2", "3", "4"] and not scheduler.running
    assert scheduler.manager.pool.num_free == scheduler.manager.pool.num_usable
    drain(scheduler, model)
    assert_ended(requests)
    assert_idle(scheduler)


# Cases drawn from public bug reports


@both
def test_nothing_is_lost_in_three_rounds_of_256_requests(has_prefix_cache: bool) -> None:
    """sgl-project/sglang#11970: a few cache slots never came back under many parallel requests."""
    sizes = Sizes(num_usable=64, max_num_seqs=16, max_num_batched_tokens=64, has_prefix_cache=has_prefix_cache)
    scheduler = make_scheduler(sizes)
    model = FakeModel(scheduler.manager)
    totals = []
    for _ in range(3):
        groups = [
            [
                make_request(f"{i}-{sample}", [1 + i % 7] * (3 + (5 * i) % 60), 1 + i % 9)
                for sample in range(1 if i % 4 else 3)
            ]
            for i in range(256)
        ]
        before = scheduler.num_preemptions
        for group in groups:
            scheduler.add_samples(group)
        totals.append((drain(scheduler, model), scheduler.num_preemptions - before))
        assert_ended([request for group in groups for request in group])
        assert_idle(scheduler)
    assert totals[1] == totals[2] and (has_prefix_cache or totals[0] == totals[1])


def test_requests_as_large_as_the_pool_end_and_do_not_stop_others() -> None:
    """vllm-project/vllm#39734: a request larger than the cache blocked the queue for ever."""
    scheduler = make_scheduler(Sizes(num_usable=8, max_model_len=128, max_num_batched_tokens=64))
    model = FakeModel(scheduler.manager)
    with pytest.raises(AssertionError):
        scheduler.add(make_request("A", 300, 1))
    requests = [
        make_request("B", 10, 5),
        make_request("C", 100, 28),
        make_request("D", 127, 1),
        make_request("E", 126, 2),
    ]
    requests += [make_request(f"filler {i}", 16, 1) for i in range(8)] + [make_request("F", 100, 20)]
    add_all(scheduler, *requests)
    drain(scheduler, model, max_steps=300)
    assert_ended(requests)
    assert max(request.num_preemptions for request in requests) <= 2
    assert_idle(scheduler)


@both
@pytest.mark.parametrize("max_num_batched_tokens", [16, 32, 48, 512])
def test_frequent_preemption_changes_no_output(max_num_batched_tokens: int, has_prefix_cache: bool) -> None:
    """sgl-project/sglang-jax#1010 and vllm-project/vllm#25538: wrong after preemption; preempted in a loop."""
    sizes = Sizes(num_usable=24, max_num_seqs=8, max_num_batched_tokens=max_num_batched_tokens)
    scheduler = make_scheduler(sizes._replace(has_prefix_cache=has_prefix_cache))
    model = FakeModel(scheduler.manager)
    prompts = [[50 + (37 * i + 11 * j) % 400 for j in range(20 + 10 * i)] for i in range(8)]
    requests = [make_request(str(i), prompt, 64) for i, prompt in enumerate(prompts)]
    add_all(scheduler, *requests)
    drain(scheduler, model)
    assert scheduler.num_preemptions > 0
    assert max(request.num_preemptions for request in requests) <= 10
    assert_ended(requests)
    assert_idle(scheduler)


@pytest.mark.parametrize("lengths", [(1, 15, 16, 17, 33, 64, 65), (65, 64, 33, 17, 16, 15, 1)])
@pytest.mark.parametrize("gap", [0, 1, 5])
def test_company_changes_no_output(lengths: tuple[int, ...], gap: int) -> None:
    """sgl-project/sglang-jax#20: the second and later requests of a batch read wrong places."""
    scheduler = make_scheduler(Sizes(max_num_batched_tokens=48))
    model = FakeModel(scheduler.manager)
    requests = [
        make_request(str(i), [50 + (13 * i + 7 * j) % 400 for j in range(n)], 32) for i, n in enumerate(lengths)
    ]
    for request in requests:
        scheduler.add(request)
        for _ in range(gap):
            step(scheduler, model)
    drain(scheduler, model)
    assert_ended(requests)


def test_the_stand_in_would_show_a_wrong_slot() -> None:
    scheduler = make_scheduler()
    model = FakeModel(scheduler.manager)
    request = make_request("a", 20, 6)
    add_all(scheduler, request)
    step(scheduler, model)
    block_id = scheduler.manager.block_ids(request)[0]
    model.slots[block_id * 16 + 3] += 1
    drain(scheduler, model)
    assert request.output_token_ids[1:] != outputs_alone(request)[1:]


def test_a_long_queue_is_left_without_being_searched_from_its_front() -> None:
    """As when a client with many prompts goes: the engine's thread would do nothing else for minutes."""
    with without_type_checks():
        scheduler = make_scheduler(Sizes())
        requests = [make_request(str(number), 3) for number in range(30_000)]
        add_all(scheduler, *requests)
        start_s = time.monotonic()
        for request in requests[::-1]:
            scheduler.finish(request, FinishReason.ABORT)
        assert time.monotonic() - start_s < 3
    assert not scheduler.has_unfinished_requests()
