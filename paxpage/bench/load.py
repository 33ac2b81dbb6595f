"""Sends requests when they are due, a limited number at once."""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any, NamedTuple

from paxpage.bench.client import Client, RequestResult

Body = dict[str, Any]


class Load(NamedTuple):
    """What is sent, when, and how many at once; due_s counts from the start, max_concurrency None: no limit."""

    endpoint: str
    bodies: Sequence[Body]
    due_s: Sequence[float]
    max_concurrency: int | None


class LoadResult(NamedTuple):
    """Every request's result in the order of the load, and the whole run's time."""

    results: list[RequestResult]
    duration_s: float
    client_cpu_s: float  # that this process computed meanwhile
    most_in_flight: int


class InFlight:
    """Counts the requests that are on their way, and lets no more than a limit of them be."""

    def __init__(self, limit: int | None) -> None:
        self.most = 0
        self._num = 0
        self._semaphore = asyncio.Semaphore(limit) if limit is not None else contextlib.nullcontext()

    @contextlib.asynccontextmanager
    async def one(self) -> AsyncIterator[None]:
        """Within it a request is counted; waits for its turn."""
        async with self._semaphore:
            self._num += 1
            self.most = max(self.most, self._num)
            try:
                yield
            finally:
                self._num -= 1


async def run_load(client: Client, load: Load, on_done: Callable[[], object]) -> LoadResult:
    """Runs a load to its end; on_done is called at the end of each request.

    A request that waits for its turn (max_concurrency) is not sent yet: its times begin when it is.
    """
    in_flight = InFlight(load.max_concurrency)

    async def send(body: Body) -> RequestResult:
        async with in_flight.one():
            result = await client.send(load.endpoint, body)
        on_done()
        return result

    start_s, start_cpu_s = time.perf_counter(), time.process_time()
    tasks = []
    async with asyncio.TaskGroup() as group:
        for body, due_s in zip(load.bodies, load.due_s, strict=True):
            await asyncio.sleep(max(0.0, start_s + due_s - time.perf_counter()))
            tasks.append(group.create_task(send(body)))
    duration_s = time.perf_counter() - start_s
    return LoadResult([t.result() for t in tasks], duration_s, time.process_time() - start_cpu_s, in_flight.most)
