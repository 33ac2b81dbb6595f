"""The event loop's turns, its lag, and full collections at idle moments."""

import asyncio
import contextlib
import gc
import time
from collections.abc import Coroutine
from typing import Any

import pytest

from paxpage.server import loop_care
from paxpage.server.loop_care import LAG_INTERVAL_S, collect_garbage, watch_loop_lag
from paxpage.server.turns import Turns


@contextlib.asynccontextmanager
async def running(work: Coroutine[Any, Any, None]) -> Any:
    """Runs work beside the block, and cancels it at its end."""
    task = asyncio.create_task(work)
    try:
        yield
    finally:
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task


async def turns_of(turns: Turns, num_tasks: int, *, is_cancelled: Any = lambda number: False) -> list[list[int]]:
    """Which of num_tasks went on in each turn of the loop, turns in which none did left out."""
    gone_on: list[list[int]] = [[]]

    async def go_on(number: int) -> None:
        await turns.take()
        gone_on[-1].append(number)

    tasks = [asyncio.create_task(go_on(number)) for number in range(num_tasks)]
    while not all(task.done() for task in tasks):
        await asyncio.sleep(0)
        for number, task in enumerate(tasks):
            if is_cancelled(number):
                task.cancel()
        gone_on.append([])
    return [turn for turn in gone_on if turn]


def test_so_many_a_turn_in_order() -> None:
    assert asyncio.run(turns_of(Turns(3), 8)) == [[0, 1, 2], [3, 4, 5], [6, 7]]


def test_who_is_alone_does_not_wait() -> None:
    async def check() -> None:
        turns = Turns(1)
        for _ in range(3):
            start = asyncio.create_task(turns.take())
            await asyncio.sleep(0)
            assert start.done()
            await asyncio.sleep(0)

    asyncio.run(check())


def test_who_was_cancelled_takes_no_turn() -> None:
    turns = asyncio.run(turns_of(Turns(2), 8, is_cancelled=lambda number: number in (3, 4, 5)))
    assert turns == [[0, 1], [2, 6], [7]]


def test_a_loop_that_is_held_up_is_late_for_everything_due_meanwhile() -> None:
    lags: list[float] = []

    async def check() -> None:
        async with running(watch_loop_lag(lags.append)):
            await asyncio.sleep(2.5 * LAG_INTERVAL_S)
            before = len(lags)
            time.sleep(10 * LAG_INTERVAL_S)
            await asyncio.sleep(0.5 * LAG_INTERVAL_S)
            late = [lag for lag in lags[before:] if lag > LAG_INTERVAL_S]
            assert len(late) >= 9 and late[:9] == sorted(late[:9], reverse=True)
            assert late[0] >= 8 * LAG_INTERVAL_S

    asyncio.run(check())
    assert min(lags) >= 0


class Ring:
    """Garbage that only a full collection finds, once it is old."""

    num_left = 0

    def __init__(self) -> None:
        self.ring = self
        Ring.num_left += 1

    def __del__(self) -> None:
        Ring.num_left -= 1


@pytest.mark.parametrize("is_idle", [True, False])
def test_full_collections_wait_for_an_idle_moment(monkeypatch: pytest.MonkeyPatch, is_idle: bool) -> None:
    monkeypatch.setattr(loop_care, "IDLE_CHECK_S", 0.01)
    thresholds = gc.get_threshold()

    async def check() -> None:
        ring = Ring()
        gc.collect()  # now it is old
        del ring
        async with running(collect_garbage(lambda: is_idle)):
            await asyncio.sleep(0)
            assert gc.get_threshold() == (*thresholds[:2], loop_care.NEVER)
            gc.collect(1)
            await asyncio.sleep(0.1)
            assert Ring.num_left == (0 if is_idle else 1)
            monkeypatch.setattr(loop_care, "MAX_UNCOLLECTED_S", 0.0)
            gc.collect(1)
            await asyncio.sleep(0.1)
            assert Ring.num_left == 0

    asyncio.run(check())
    assert gc.get_threshold() == thresholds
