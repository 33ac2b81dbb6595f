"""The event loop's punctuality: how late it is, measured, and garbage collected when nobody waits for it."""

import asyncio
import gc
import time
from collections.abc import Callable

LAG_INTERVAL_S = 0.02
IDLE_CHECK_S = 1.0
MAX_UNCOLLECTED_S = 30.0
NEVER = 2**31 - 1  # young collections between two of everything


async def watch_loop_lag(observe: Callable[[float], None], clock: Callable[[], float] = time.monotonic) -> None:
    """Reports every LAG_INTERVAL_S how many seconds late it wakes; never returns. clock: by which time, in seconds.

    A loop that was held up reports once for each time that was due meanwhile, so a long wait weighs as much as it would
    for requests that arrive evenly.
    """
    due_s = clock() + LAG_INTERVAL_S
    while True:
        await asyncio.sleep(due_s - clock())
        now_s = clock()
        observe(max(now_s - due_s, 0.0))
        due_s += LAG_INTERVAL_S
        while due_s <= now_s:
            observe(now_s - due_s)
            due_s += LAG_INTERVAL_S


async def collect_garbage(is_idle: Callable[[], bool]) -> None:
    """Takes full collections over from the interpreter, until it is cancelled.

    One looks at every object of every open request and stops all threads: a tenth of a second where there are a
    thousand. So they are made once nothing is open, or after MAX_UNCOLLECTED_S without such a moment. Young objects are
    collected as ever.
    """
    thresholds = gc.get_threshold()
    gc.set_threshold(*thresholds[:2], NEVER)
    loop = asyncio.get_running_loop()
    last_s = loop.time()
    try:
        while True:
            await asyncio.sleep(IDLE_CHECK_S)
            has_some = gc.get_count()[2] > 0
            if has_some and (is_idle() or loop.time() - last_s > MAX_UNCOLLECTED_S):
                gc.collect()
                last_s = loop.time()
    finally:
        gc.set_threshold(*thresholds)
