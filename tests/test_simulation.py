"""The scheduler alone, without a model, over a large workload: how much of the cache is reserved and holds nothing."""

import dataclasses
import hashlib
import logging

import numpy as np
import pytest

from paxpage.bench import workloads
from paxpage.config import SchedulerConfig
from paxpage.engine.accounting import SlotAccount
from paxpage.engine.batch import StepShape, pack
from paxpage.engine.block_pool import BlockPool
from paxpage.engine.kv_cache_manager import KVCacheManager
from paxpage.engine.request import Request
from paxpage.engine.sampling_params import SamplingParams
from paxpage.engine.scheduler import ScheduledBatch, Scheduler, SlotUsage
from tests.unit.engine.host_side import without_type_checks

NUM_REQUESTS = 512
BLOCK_SIZE = 16
MAX_NUM_SEQS = 256
MAX_MODEL_LEN = 4352
MAX_NUM_BATCHED_TOKENS = 8192
PLENTY = MAX_NUM_SEQS * MAX_MODEL_LEN // BLOCK_SIZE + 1
MOST_WASTE = 0.022


@dataclasses.dataclass
class Run:
    """What a whole run of the workload held, and what contiguous reservation would have held for the same steps."""

    paged: SlotAccount
    whole_context: SlotAccount  # max_model_len for each running request
    own_length: SlotAccount  # prompt and max_tokens for each running request
    requests: list[Request]
    most_empty_slots: int = 0  # of any request at any step
    most_rows: int = 0
    num_preemptions: int = 0


def workload_requests() -> list[Request]:
    params = SamplingParams(max_tokens=None, ignore_eos=True)
    drawn = workloads.requests(NUM_REQUESTS, 0, vocab_size=128_256)
    return [Request(str(i), prompt, params, max_tokens=num_output) for i, (prompt, num_output) in enumerate(drawn)]


def simulate(num_blocks: int, *, is_async: bool = False) -> Run:
    """All requests at once, each step's tokens made up. is_async: a step is scheduled before the last one's tokens."""
    manager = KVCacheManager(BlockPool(num_blocks), BLOCK_SIZE, MAX_NUM_SEQS, MAX_MODEL_LEN)
    scheduler = Scheduler(SchedulerConfig(MAX_NUM_SEQS, MAX_NUM_BATCHED_TOKENS, MAX_MODEL_LEN), manager)
    run = Run(SlotAccount(), SlotAccount(), SlotAccount(), workload_requests())
    for request in run.requests:
        scheduler.add(request)
    in_flight: ScheduledBatch | None = None
    with without_type_checks():
        while scheduler.has_unfinished_requests():
            batch = scheduler.schedule()
            account(run, scheduler)
            run.most_rows = max(run.most_rows, len(batch.rows))
            arriving, in_flight = (in_flight, batch) if is_async else (batch, None)
            if arriving is not None:
                scheduler.update(arriving, [7] * len(arriving.rows))
    run.num_preemptions = scheduler.num_preemptions
    manager.pool.check()
    assert scheduler.usage() == (0, 0)
    return run


def account(run: Run, scheduler: Scheduler) -> None:
    """One step: counted from the requests, and as the scheduler counts it."""
    manager, running = scheduler.manager, scheduler.running
    if not running:
        return  # the last tokens are on their way
    held = np.array([request.num_computed_tokens for request in running])
    allocated = np.array([manager.num_blocks_of_row[request.row] for request in running]) * BLOCK_SIZE
    assert scheduler.usage() == (allocated.sum(), held.sum())
    run.paged.add(scheduler.usage())
    run.most_empty_slots = max(run.most_empty_slots, int((allocated - held).max()))
    run.whole_context.add(SlotUsage(len(running) * MAX_MODEL_LEN, int(held.sum())))
    own_length = sum(request.num_prompt_tokens + request.max_tokens for request in running)
    run.own_length.add(SlotUsage(own_length, int(held.sum())))


@pytest.fixture(scope="module", params=["sync", "async"])
def run(request: pytest.FixtureRequest) -> Run:
    return simulate(PLENTY, is_async=request.param == "async")


def report(run: Run) -> str:
    accounts = {
        f"blocks of {BLOCK_SIZE}": run.paged,
        "prompt + max_tokens each": run.own_length,
        "max_model_len each": run.whole_context,
    }
    lines = [
        f"{name:26} {account.allocated / account.num_steps:12,.0f} slots a step {account.waste_fraction:8.2%} empty"
        for name, account in accounts.items()
    ]
    return "\n".join(lines)


def test_the_workload_is_the_one_that_others_were_measured_with() -> None:
    num_prompt, num_output = workloads.lengths(NUM_REQUESTS, 0)
    assert (int(num_prompt.sum()), int(num_output.sum())) == (80_156, 158_607)
    digest = hashlib.sha256(np.stack([num_prompt, num_output]).astype("<i8").tobytes()).hexdigest()
    assert digest == "7833848e7599e1fa057d13afe44c10b9b69ff743da0e7493c5981878e38f09e6"


def test_prompts_are_drawn_from_ordinary_tokens() -> None:
    drawn = workloads.requests(NUM_REQUESTS, 0, vocab_size=128_256)
    num_prompt, num_output = workloads.lengths(NUM_REQUESTS, 0)
    assert [len(prompt) for prompt, _ in drawn] == num_prompt.tolist()
    assert [num for _, num in drawn] == num_output.tolist()
    token_ids = np.concatenate([prompt for prompt, _ in drawn]).astype("<i8")
    assert (token_ids.min(), token_ids.max() < 128_000) == (100, True)
    digest = hashlib.sha256(token_ids.tobytes()).hexdigest()
    assert digest == "10e726f4f22d5424c4f52421be58913f8c08d84a90f5c6257330e4e77773588f"


@pytest.mark.parametrize("law", [workloads.PROMPT_LAW, workloads.OUTPUT_LAW])
def test_lengths_have_the_means_of_the_paper(law: workloads.LengthLaw) -> None:
    lengths = np.concatenate([workloads.lengths(4096, seed) for seed in range(20)], axis=1)
    drawn = lengths[0 if law is workloads.PROMPT_LAW else 1]
    assert abs(drawn.mean() / law.mean - 1) < 0.015
    assert workloads.SHORTEST <= drawn.min() < 10 and drawn.max() == workloads.LONGEST


def test_every_request_gets_all_its_tokens(run: Run) -> None:
    _, num_output = workloads.lengths(NUM_REQUESTS, 0)
    assert [request.num_output_tokens for request in run.requests] == num_output.tolist()
    assert (run.most_rows, run.num_preemptions) == (MAX_NUM_SEQS, 0)


def test_hardly_a_slot_is_wasted(run: Run) -> None:
    print(report(run))  # pytest -rP shows it
    assert 0.005 < run.paged.waste_fraction <= MOST_WASTE


def test_no_request_ever_holds_a_block_of_empty_slots(run: Run) -> None:
    assert run.most_empty_slots == BLOCK_SIZE - 1


def test_contiguous_reservation_wastes_most_of_what_it_holds(run: Run) -> None:
    assert run.whole_context.waste_fraction > 0.9
    assert run.own_length.waste_fraction > 0.3
    assert run.whole_context.holding == run.own_length.holding == run.paged.holding


def test_in_a_small_cache_too(caplog: pytest.LogCaptureFixture) -> None:
    """Too few blocks for 256 requests at a time: some are preempted, none is lost and no more is wasted."""
    caplog.set_level(logging.ERROR, "paxpage.engine.scheduler")
    run = simulate(3000)
    assert run.num_preemptions > 0
    assert max(request.num_preemptions for request in run.requests) <= 10
    assert [request.num_output_tokens for request in run.requests] == workloads.lengths(NUM_REQUESTS, 0)[1].tolist()
    assert run.paged.waste_fraction <= MOST_WASTE and run.most_empty_slots < BLOCK_SIZE


def test_a_batch_of_256_rows_packs() -> None:
    """The widest decode step of the workload, as the device gets it."""
    manager = KVCacheManager(BlockPool(PLENTY), BLOCK_SIZE, MAX_NUM_SEQS, MAX_MODEL_LEN)
    scheduler = Scheduler(SchedulerConfig(MAX_NUM_SEQS, 65_536, MAX_MODEL_LEN), manager)
    for request in workload_requests():
        scheduler.add(request)
    scheduler.update(scheduler.schedule(), [7] * MAX_NUM_SEQS)
    batch = scheduler.schedule()
    shape = StepShape(MAX_NUM_SEQS, MAX_NUM_SEQS, MAX_MODEL_LEN // BLOCK_SIZE)
    assert batch.num_tokens == len(batch.rows) == MAX_NUM_SEQS
    assert pack(batch, shape, manager).size == shape.num_ints
