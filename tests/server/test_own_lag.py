"""What a loop's own lag leaves out, and what it does not."""

import asyncio
import itertools
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from paxpage.server.loop_care import LAG_INTERVAL_S, watch_loop_lag
from tests.server.own_lag import Looks, LooksFile, OwnTime, read_looks

HOLD_S = 0.3
NUM_RIVALS = 3
COUNT_FOR_EVER = [sys.executable, "-S", "-c", "while True: pass"]


def compute_beside_rivals(core: int) -> tuple[float, float, float]:
    """Seconds, by the wall, by own time and of computing, that this thread computes for; all on one core."""
    os.sched_setaffinity(0, {core})
    rivals = [subprocess.Popen(COUNT_FOR_EVER) for _ in range(NUM_RIVALS)]
    try:
        time.sleep(0.1)
        with OwnTime() as own_time:
            clocks = (time.monotonic, own_time, time.thread_time)
            before = [clock() for clock in clocks]
            while time.thread_time() < before[2] + HOLD_S:
                pass
            wall_s, own_s, computing_s = (clock() - start for clock, start in zip(clocks, before, strict=True))
    finally:
        for rival in rivals:
            rival.kill()
            rival.wait()
    return wall_s, own_s, computing_s


def test_waiting_for_a_core_takes_no_own_time() -> None:
    core = min(os.sched_getaffinity(0))
    with ThreadPoolExecutor(1) as thread:  # which alone is bound to the core, and the processes that it starts
        wall_s, own_s, computing_s = thread.submit(compute_beside_rivals, core).result()
    assert wall_s > 2 * computing_s
    assert own_s == pytest.approx(computing_s, rel=0.2)


def sleep() -> None:
    time.sleep(HOLD_S)


def hold_the_lock() -> None:
    """Has another thread keep Python's lock for HOLD_S, in one call of C."""
    num_terms = 10**6
    start_s = time.thread_time()
    sum(itertools.repeat(1, num_terms))
    num_terms = int(num_terms * HOLD_S / (time.thread_time() - start_s))
    threading.Thread(target=sum, args=(itertools.repeat(1, num_terms),)).start()


@pytest.mark.parametrize("hold_up", [sleep, hold_the_lock])
def test_what_holds_up_the_loop_is_counted(tmp_path: Path, hold_up: Callable[[], None]) -> None:
    path = tmp_path / "looks"

    async def check() -> tuple[Looks, Looks]:
        with OwnTime() as own_time:
            watching = asyncio.create_task(watch_loop_lag(LooksFile(path).observe, own_time))
            await asyncio.sleep(5 * LAG_INTERVAL_S)
            before = read_looks(path)
            hold_up()
            await asyncio.sleep(5 * LAG_INTERVAL_S)
            watching.cancel()
            return before, read_looks(path).since(before)

    before, since = asyncio.run(check())
    assert before.num_looks > 0
    assert since.num_late >= 0.7 * (HOLD_S - 0.05) / LAG_INTERVAL_S
