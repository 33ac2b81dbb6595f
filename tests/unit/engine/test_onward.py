"""What a small decode step leaves on the device is what packing the next batch would give, or is not taken."""

import random

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from paxpage.engine import step
from paxpage.engine.batch import StepShape, pack, unpack
from paxpage.engine.kv_cache_manager import KVCacheManager
from paxpage.engine.onward import Onward
from paxpage.engine.scheduler import FinishReason, ScheduledBatch
from tests.helpers.engines import assert_idle, greedy_params, steps_in_flight, tokens
from tests.helpers.fixtures import shelf
from tests.helpers.shelf import Limits, Shelf
from tests.property.test_scheduler_machine import traffic_of
from tests.unit.engine.host_side import FakeModel, Sizes, make_request, make_scheduler, without_type_checks

__all__ = ["shelf"]

ROW_BUCKETS = (1, 4, 8, 16)
PROMPTS = [[50 + (13 * i + 7 * j) % 400 for j in range(length)] for i, length in enumerate((12, 40, 9, 33))]
advance = jax.jit(step.advance, static_argnames="shape")


def shape_of(batch: ScheduledBatch, manager: KVCacheManager) -> StepShape:
    """The smallest decode shape for the batch, or some mixed one; wider than the tables."""
    num_rows = next(n for n in ROW_BUCKETS if n >= len(batch.rows))
    num_tokens = num_rows if batch.is_decode else max(batch.num_tokens, num_rows + 1)
    return StepShape(num_tokens, num_rows, manager.block_tables.shape[1] + 1)


def with_tokens(packed: np.ndarray, shape: StepShape, sampled: np.ndarray) -> np.ndarray:
    """With the tokens themselves in the place of those that the step before has sampled."""
    packed = np.array(packed)
    token_ids = unpack(packed, shape).token_ids
    is_unknown = token_ids < 0
    token_ids[is_unknown] = sampled[-1 - token_ids[is_unknown]]
    return packed


class Device:
    """Packs, or takes what the step before has left, and compares the two."""

    def __init__(self, manager: KVCacheManager) -> None:
        self.manager = manager
        self.onward = Onward()
        self.num_taken = 0
        self.num_packed = 0  # of decode steps

    def launch(self, batch: ScheduledBatch, sampled: np.ndarray) -> None:
        """sampled: the tokens of the step before."""
        manager, shape = self.manager, shape_of(batch, self.manager)
        packed = pack(batch, shape, manager)
        taken = self.onward.take(batch, shape, manager)
        if taken is None:
            self.num_packed += batch.is_decode
            taken = jnp.asarray(packed)
        else:
            self.num_taken += 1
            np.testing.assert_array_equal(
                with_tokens(np.asarray(taken), shape, sampled), with_tokens(packed, shape, sampled)
            )
        self.onward.keep(batch, shape, manager, advance(taken, shape=shape) if step.keeps_packed(shape) else None)


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    """Launches every step of the one FakeModel that is made."""
    device, init, run, forget = Device.__new__(Device), FakeModel.__init__, FakeModel.run, FakeModel.forget

    def run_on_device(model: FakeModel, batch: ScheduledBatch, *args: object) -> list[int]:
        device.launch(batch, model.sampled)
        return run(model, batch, *args)

    def forget_on_device(model: FakeModel) -> None:
        device.onward = Onward()
        forget(model)

    def init_on_device(model: FakeModel, manager: KVCacheManager) -> None:
        init(model, manager)
        device.__init__(manager)

    for name, method in (("__init__", init_on_device), ("run", run_on_device), ("forget", forget_on_device)):
        monkeypatch.setattr(FakeModel, name, method)
    return device


@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize("num_beside", [0, 1, 56])
def test_whatever_comes(device: Device, num_beside: int, is_async: bool) -> None:
    """Requests come, end, are aborted and preempted at random; with room in a step for few prompt tokens or many."""
    num_taken = num_packed = num_preemptions = 0
    for seed in range(6):
        rng = random.Random(seed)
        max_num_seqs = rng.randint(2, 8)
        scheduler = make_scheduler(Sizes(rng.randint(8, 14), 8, max_num_seqs, max_num_seqs + num_beside))
        model, in_flight = FakeModel(scheduler.manager), None
        waiting = [make_request(str(n), rng.randint(1, 20), rng.randint(1, 40)) for n in range(20)]
        while waiting or scheduler.has_unfinished_requests():
            while waiting and rng.random() < 0.4:
                scheduler.add(waiting.pop())
            if scheduler.running and rng.random() < 0.02:
                scheduler.finish(rng.choice(scheduler.running), FinishReason.ABORT)
            batch = scheduler.schedule()
            launched = (batch, model.run(batch)) if batch.rows else None
            arriving, in_flight = (in_flight, launched) if is_async else (launched, None)
            if arriving is not None:
                scheduler.update(*arriving)
        num_taken, num_packed = num_taken + device.num_taken, num_packed + device.num_packed
        num_preemptions += scheduler.num_preemptions
    assert num_taken > 100 and num_packed > 100 and num_preemptions > 0


@pytest.mark.parametrize("has_small_chunks", [False, True])
def test_in_the_scheduler_machines_traffic(device: Device, has_small_chunks: bool) -> None:
    """Forks, beginnings that are found, copies on write, lost caches and steps ahead of two others too."""
    with without_type_checks():
        seen = traffic_of(1_500, has_small_chunks=has_small_chunks, share_of_arrivals=0.1).seen
    assert seen["copies of a fork's last block"] and seen["steps ahead of two others"] and seen["preemptions"], seen
    assert device.num_taken > 100 and device.num_packed > 100


def test_most_steps_of_one_request_take_it(device: Device) -> None:
    """All but the first decode step and one for each new block."""
    scheduler = make_scheduler(Sizes(num_usable=30, block_size=16))
    model = FakeModel(scheduler.manager)
    scheduler.add(make_request("a", 16, 1 + 64))
    while scheduler.has_unfinished_requests():
        batch = scheduler.schedule()
        scheduler.update(batch, model.run(batch))
    assert (device.num_packed, device.num_taken) == (4, 60)


def test_it_is_taken_once_and_by_the_next_step_alone(device: Device) -> None:
    scheduler = make_scheduler(Sizes(num_usable=30, block_size=16))
    model, manager = FakeModel(scheduler.manager), scheduler.manager
    scheduler.add(make_request("a", 2, 12))
    for _ in range(3):
        batch = scheduler.schedule()
        scheduler.update(batch, model.run(batch))
    batch = scheduler.schedule()
    shape = shape_of(batch, manager)
    assert device.onward.take(batch, shape, manager) is not None
    assert device.onward.take(batch, shape, manager) is None
    for other in (StepShape(4, 4, shape.blocks_per_row), shape):
        device.onward.keep(batch, other, manager, jnp.zeros(other.num_ints, jnp.int32))
        assert device.onward.take(batch, shape, manager) is None  # another shape, and the same tokens again


@pytest.mark.parametrize("num_in_flight", [0, 1])
@pytest.mark.parametrize("num_seqs", [1, 4])
def test_prompts_that_come_a_token_at_a_time(shelf: Shelf, num_seqs: int, num_in_flight: int) -> None:
    """Their steps are decode steps by their shape; what they leave is not the prompt's next token."""
    alone = [tokens(shelf.tiny(), [prompt], greedy_params(20))[0] for prompt in PROMPTS]
    limits = Limits(max_num_seqs=num_seqs, max_num_batched_tokens=num_seqs)
    with shelf.fresh_tiny(limits) as llm, steps_in_flight(llm, num_in_flight):
        for _ in range(2):  # the second time from the prefix cache
            assert tokens(llm, PROMPTS, greedy_params(20)) == alone
            assert_idle(llm.engine)


def test_a_runner_takes_it(shelf: Shelf, monkeypatch: pytest.MonkeyPatch) -> None:
    """All but a few steps of one request; it lies where it was packed first, and is gone when the LLM is closed."""
    found, take = [], Onward.take
    monkeypatch.setattr(Onward, "take", lambda self, *args: (found.append(take(self, *args)), found[-1])[1])
    with shelf.fresh_tiny(Limits(max_num_seqs=1, max_model_len=64)) as llm:
        runner = llm.engine.runner
        tokens(llm, [PROMPTS[0]], greedy_params(1 + 20))
        assert [packed is not None for packed in found].count(True) == 18
        assert runner._onward._left is not None
    assert runner._onward._left is None


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
