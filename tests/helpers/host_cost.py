"""What the host does in a decode step, timed beside a reference loop of the same run. A process of its own.

    python -m tests.helpers.host_cost [STAGE FACTOR]

Prints one JSON line: each stage's microseconds a step by those of the reference loop, which is a fixed amount of the
same kind of work (Python objects, a dict, small numpy arrays). With STAGE and FACTOR that stage takes FACTOR times as
long as it does: the slow-down that the guard must notice. Run apart from pytest, whose type checks would be timed.
"""

import json
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from paxpage.config import SchedulerConfig
from paxpage.engine.batch import StepShape, pack
from paxpage.engine.block_pool import BlockPool
from paxpage.engine.kv_cache_manager import KVCacheManager
from paxpage.engine.prefix_cache import PrefixCache, root_digest
from paxpage.engine.request import PromptDigests, Request
from paxpage.engine.sampling_params import SamplingParams
from paxpage.engine.scheduler import Scheduler

NUM_ROWS, BLOCK_SIZE, MAX_MODEL_LEN, NUM_BLOCKS = 256, 16, 4352, 20_000
NUM_PROMPT_TOKENS, NUM_STEPS, NUM_WARM_STEPS = 200, 120, 20
STAGES = ("schedule", "pack", "update")


class Item(NamedTuple):
    """Something like a scheduled row."""

    index: int
    start: int
    num_tokens: int


def reference_loop() -> int:
    """One pass over as many rows as the scheduler has."""
    counts: dict[int, int] = {}
    items = []
    for index in range(NUM_ROWS):
        items.append(Item(index, index % 7, 1))
        counts[index] = counts.get(index, 0) + items[-1].start
    starts = np.array([item.start for item in items], np.int32)
    table = np.zeros((NUM_ROWS, 64), np.int32)
    table[np.arange(NUM_ROWS), starts] = np.cumsum(starts)
    return int(table.sum()) + len(counts)


def make_scheduler() -> Scheduler:
    """NUM_ROWS requests of NUM_PROMPT_TOKENS tokens, all waiting."""
    manager = KVCacheManager(BlockPool(NUM_BLOCKS), BLOCK_SIZE, NUM_ROWS, MAX_MODEL_LEN, PrefixCache(NUM_BLOCKS))
    scheduler = Scheduler(SchedulerConfig(NUM_ROWS, 8192, MAX_MODEL_LEN), manager)
    params = SamplingParams(temperature=0, max_tokens=None, ignore_eos=True)
    digests = PromptDigests(root_digest(None), ())
    for index in range(NUM_ROWS):
        prompt = list(range(100 + index, 100 + index + NUM_PROMPT_TOKENS))
        scheduler.add(Request(str(index), prompt, params, max_tokens=4 * NUM_STEPS, digests=digests))
    return scheduler


def slowed(function: Callable[..., Any], factor: float) -> Callable[..., Any]:
    """The function, taking factor times as long."""

    def call(*arguments: Any) -> Any:
        start_s = time.perf_counter()
        result = function(*arguments)
        end_s = start_s + factor * (time.perf_counter() - start_s)
        while time.perf_counter() < end_s:
            pass
        return result

    return call


def measure(factors: dict[str, float]) -> dict[str, list[float]]:
    """Seconds of each stage and of the reference loop, side by side in every step of NUM_ROWS decoding rows."""
    scheduler = make_scheduler()
    shape = StepShape(NUM_ROWS, NUM_ROWS, MAX_MODEL_LEN // BLOCK_SIZE)
    stages = {
        "schedule": scheduler.schedule,
        "pack": lambda batch: pack(batch, shape, scheduler.manager),
        "update": lambda batch: scheduler.update(batch, [5] * NUM_ROWS),
    }
    stages = {name: slowed(stage, factors.get(name, 1.0)) for name, stage in stages.items()}
    while scheduler.waiting:
        batch = scheduler.schedule()
        scheduler.update(batch, [5] * len(batch.rows))
    times: dict[str, list[float]] = {name: [] for name in (*STAGES, "reference")}
    for _ in range(NUM_STEPS):
        batch = timed(stages["schedule"], times["schedule"])
        assert batch.is_decode and len(batch.rows) == NUM_ROWS
        timed(stages["pack"], times["pack"], batch)
        timed(stages["update"], times["update"], batch)
        timed(reference_loop, times["reference"])
    return times


def timed(function: Callable[..., Any], times: list[float], *arguments: Any) -> Any:
    """Calls, and notes how long it took."""
    start_s = time.perf_counter()
    result = function(*arguments)
    times.append(time.perf_counter() - start_s)
    return result


def ratios(times: dict[str, list[float]]) -> dict[str, float]:
    """Of medians, which a busy moment does not move."""
    medians = {name: statistics.median(values[NUM_WARM_STEPS:]) for name, values in times.items()}
    return {name: medians[name] / medians["reference"] for name in STAGES}


def main() -> None:
    """Command line."""
    factors = {sys.argv[1]: float(sys.argv[2])} if len(sys.argv) > 1 else {}
    print(json.dumps(ratios(measure(factors))))


if __name__ == "__main__":
    main()
