"""What a small decode step leaves on the device is what packing the next batch would give, or is not taken."""

import random

import jax.numpy as jnp
import numpy as np
import pytest

from paxpage.engine import step
from paxpage.engine.batch import StepShape, pack, unpack
from paxpage.engine.onward import Onward
from paxpage.engine.scheduler import FinishReason, ScheduledBatch, Scheduler
from tests.unit.engine.host_side import FakeModel, Sizes, make_request, make_scheduler

ROW_BUCKETS = (1, 4, 8)


def shape_of(batch: ScheduledBatch, scheduler: Scheduler) -> StepShape:
    """The smallest decode shape for the batch, or some mixed one."""
    num_rows = next(n for n in ROW_BUCKETS if n >= len(batch.rows))
    num_tokens = num_rows if batch.is_decode else max(batch.num_tokens, num_rows + 1)
    return StepShape(num_tokens, num_rows, scheduler.manager.block_tables.shape[1])


def with_known_tokens(packed: np.ndarray, batch: ScheduledBatch, shape: StepShape) -> np.ndarray:
    """The tokens that the host knows in the place of the rows that have sampled them."""
    packed = np.array(packed)
    token_ids = unpack(packed, shape).token_ids
    for index, row in enumerate(batch.rows):
        if row.previous_index < 0:
            assert token_ids[index] == -1 - index
            token_ids[index] = row.request.token_ids[row.start]
    return packed


class Device:
    """Packs, or takes what the step before has left, and compares the two."""

    def __init__(self, scheduler: Scheduler) -> None:
        self.scheduler = scheduler
        self.onward = Onward()
        self.num_taken = 0
        self.num_packed = 0  # of decode steps

    def launch(self, batch: ScheduledBatch) -> None:
        manager, shape = self.scheduler.manager, shape_of(batch, self.scheduler)
        packed = pack(batch, shape, manager)
        taken = self.onward.take(batch, shape, manager)
        if taken is not None:
            self.num_taken += 1
            np.testing.assert_array_equal(with_known_tokens(np.asarray(taken), batch, shape), packed)
        self.num_packed += taken is None and batch.is_decode
        advanced = step.advance(jnp.asarray(packed), shape) if step.keeps_packed(shape) else None
        self.onward.keep(batch, shape, manager, advanced)


@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize("seed", range(6))
def test_what_is_taken_is_what_packing_gives(seed: int, is_async: bool) -> None:
    """Requests come, end, are aborted and preempted at random."""
    rng = random.Random(seed)
    sizes = Sizes(num_usable=rng.randint(8, 30), block_size=8, max_num_seqs=rng.randint(1, 8))
    scheduler = make_scheduler(sizes)
    model, device, in_flight = FakeModel(scheduler.manager), Device(scheduler), None
    requests = [make_request(str(n), rng.randint(1, 20), rng.randint(1, 40)) for n in range(20)]
    waiting = list(requests)
    while waiting or scheduler.has_unfinished_requests():
        while waiting and rng.random() < 0.2:
            scheduler.add(waiting.pop())
        if scheduler.running and rng.random() < 0.02:
            scheduler.finish(rng.choice(scheduler.running), FinishReason.ABORT)
        batch = scheduler.schedule()
        launched = None
        if batch.rows:
            device.launch(batch)
            launched = (batch, model.run(batch))
        arriving, in_flight = (in_flight, launched) if is_async else (launched, None)
        if arriving is not None:
            scheduler.update(*arriving)
    assert device.num_taken > 20 and device.num_packed > 20


def test_most_steps_of_one_request_take_it() -> None:
    """All but the first decode step and one for each new block."""
    scheduler = make_scheduler(Sizes(num_usable=30, block_size=16))
    model, device = FakeModel(scheduler.manager), Device(scheduler)
    scheduler.add(make_request("a", 16, 1 + 64))
    while scheduler.has_unfinished_requests():
        batch = scheduler.schedule()
        device.launch(batch)
        scheduler.update(batch, model.run(batch))
    assert (device.num_packed, device.num_taken) == (4, 60)


def test_it_is_taken_once_and_by_the_next_step_alone() -> None:
    scheduler = make_scheduler(Sizes(num_usable=30, block_size=16))
    model, device = FakeModel(scheduler.manager), Device(scheduler)
    scheduler.add(make_request("a", 2, 12))
    for _ in range(3):
        batch = scheduler.schedule()
        device.launch(batch)
        scheduler.update(batch, model.run(batch))
    batch = scheduler.schedule()
    shape = shape_of(batch, scheduler)
    assert device.onward.take(batch, shape, scheduler.manager) is not None
    assert device.onward.take(batch, shape, scheduler.manager) is None
    for other in (StepShape(4, 4, shape.blocks_per_row), shape):
        device.onward.keep(batch, other, scheduler.manager, jnp.zeros(other.num_ints, jnp.int32))
        assert device.onward.take(batch, shape, scheduler.manager) is None  # another shape, and the same tokens again


@pytest.mark.parametrize(
    ("shape", "is_kept"),
    [
        (StepShape(1, 1, 4), True),
        (StepShape(64, 64, 4), True),
        (StepShape(128, 128, 4), False),  # such a step takes the device long
        (StepShape(64, 64, 4, 8), False),  # who shares what may change
        (StepShape(64, 8, 4), False),
    ],
)
def test_only_small_decode_steps_leave_anything(shape: StepShape, is_kept: bool) -> None:
    assert step.keeps_packed(shape) == is_kept
