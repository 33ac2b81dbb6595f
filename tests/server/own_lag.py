"""The lag that an event loop has by its own doing, whatever else runs on its cores.

A thread that could run and has no core waits; Linux sums up for how long (run delay, /proc/thread-self/schedstat). That
is the machine's doing, so own time is time less it. All else counts: what the loop computes and sleeps, and how long it
waits for whoever has Python's lock, even where that one in turn waits for a core.
"""

import asyncio
import mmap
import os
import struct
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from paxpage.server import app
from paxpage.server.loop_care import watch_loop_lag

SCHEDSTAT = "/proc/thread-self/schedstat"  # nanoseconds on a core, nanoseconds of run delay, times on a core
LAYOUT = struct.Struct("2Q")  # of Looks
LATE_S = 0.05


class OwnTime:
    """A clock, in seconds, that stands still while the thread that made it waits for a core."""

    def __enter__(self) -> "OwnTime":
        self._file = open(SCHEDSTAT, "rb", buffering=0)
        return self

    def __exit__(self, *exception: object) -> None:
        self._file.close()

    def __call__(self) -> float:
        run_delay_ns = int(os.pread(self._file.fileno(), 100, 0).split()[1])
        return time.monotonic() - run_delay_ns / 1e9


class Looks(NamedTuple):
    """How many looks there were, and how many of them found the loop more than LATE_S late."""

    num_looks: int
    num_late: int

    def since(self, before: "Looks") -> "Looks":
        return Looks(self.num_looks - before.num_looks, self.num_late - before.num_late)


class LooksFile:
    """Looks in a file that another process reads; to write it, a thread need not give Python's lock away."""

    def __init__(self, path: Path):
        path.write_bytes(bytes(LAYOUT.size))
        with path.open("r+b") as file:
            self._map = mmap.mmap(file.fileno(), 0)
        self._looks = Looks(0, 0)

    def observe(self, lag_s: float) -> None:
        self._looks = Looks(self._looks.num_looks + 1, self._looks.num_late + (lag_s > LATE_S))
        LAYOUT.pack_into(self._map, 0, *self._looks)


def count_looks(path: Path) -> None:
    """Has the servers of this process look at their own lag too, and count the looks in this file."""

    async def watch_both(observe: Callable[[float], None]) -> None:
        with OwnTime() as own_time:
            await asyncio.gather(watch_loop_lag(observe), watch_loop_lag(LooksFile(path).observe, own_time))

    app.watch_loop_lag = watch_both


def read_looks(path: Path) -> Looks:
    return Looks(*LAYOUT.unpack(path.read_bytes()))
