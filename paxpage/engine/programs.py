"""Compiled programs by key: those that are compiled before the first request, and those that follow behind it."""

import logging
import os
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future, wait
from typing import Any

import jax
from tqdm import tqdm

logger = logging.getLogger(__name__)

Jobs = dict[Any, Callable[[], jax.stages.Compiled]]

# Of programs that nobody waits for, and at most half of all threads: whoever traces takes Python's lock, and whoever
# compiles a core, from the requests that are served.
THREADS_BEHIND = 2


class Job:
    """Compiles once, in whichever thread comes first."""

    def __init__(self, key: Any, compile_it: Callable[[], jax.stages.Compiled]) -> None:
        self.key = key
        self.future: Future[jax.stages.Compiled] = Future()
        self._compile = compile_it
        self._taken = threading.Lock()

    def run(self) -> None:
        """Compiles, unless another thread has begun to. What that raises is the future's."""
        if not self._taken.acquire(blocking=False):
            return
        try:
            self.future.set_result(self._compile())
        except Exception as error:
            self.future.set_exception(error)
        except BaseException:  # Ctrl-C says nothing about the program: whoever wants it next tries again
            self._taken.release()
            raise


class Programs(dict[Any, jax.stages.Compiled]):
    """A dict of programs, filled by threads.

    Looking up one that is not there yet waits for it; if no thread has begun it, the caller's compiles it at once. So
    nothing is compiled twice, and nobody waits for what he does not need. ended: done once the last are compiled or
    close() was called; its exception is why one could not be. Threads end with their work, and soon after the main one.
    """

    def __init__(self, threads_per_core: int = 1) -> None:
        super().__init__()
        self._num_threads = threads_per_core * (os.cpu_count() or 1)
        self.ended: Future[None] = Future()
        self._jobs: dict[Any, Job] = {}  # of those that are not in the dict
        self._queue: queue.SimpleQueue[Job] = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._num_left = 1  # compilations, and the call of compile_behind
        self._has_ended = False
        self._lock = threading.Lock()  # of the two

    def begin(self, jobs: Jobs) -> None:
        """Has these compiled ahead of compile(), which waits for them too; does not wait."""
        self._submit(jobs, self._num_threads)

    def wait(self) -> None:
        """Until everything that was submitted is compiled, or could not be."""
        wait([job.future for job in list(self._jobs.values())])

    def compile(self, jobs: Jobs, *, show_progress: bool, go_on: Callable[[], None] = lambda: None) -> None:
        """Compiles several at a time (XLA does it outside Python's lock) and waits for all, with a bar on stderr.

        go_on is called before the wait for each. Raises what that, or compiling one of them, raised; then no other is
        begun.
        """
        begun = list(self._jobs.values())
        missing = {key: jobs[key] for key in jobs if key not in self._jobs}
        submitted = begun + self._submit(missing, self._num_threads)
        try:
            for job in tqdm(submitted, desc="compiling", unit="step", disable=not show_progress):
                go_on()
                self._take(job)
        except BaseException:
            self.close()
            raise

    def compile_behind(self, jobs: Jobs) -> None:
        """Has the last ones compiled, in this order; does not wait."""
        self._submit(jobs, max(1, min(THREADS_BEHIND, self._num_threads // 2)))
        self._count_down()

    def _submit(self, jobs: Jobs, num_threads: int) -> list[Job]:
        submitted = [Job(key, compile_it) for key, compile_it in jobs.items()]
        self._jobs.update((job.key, job) for job in submitted)
        with self._lock:
            self._num_left += len(submitted)
        for job in submitted:
            job.future.add_done_callback(self._count)
            self._queue.put(job)
        for _ in range(min(len(submitted), num_threads)):
            self._threads.append(threading.Thread(target=self._work, name="compile"))
            self._threads[-1].start()
        return submitted

    def error(self) -> BaseException | None:
        """Why one of them could not be compiled; None while all could. Does not wait."""
        return self.ended.exception() if self.ended.done() else None

    def has(self, key: Any) -> bool:
        """Whether looking it up would not wait."""
        job = self._jobs.get(key)
        return key in self or (job is not None and job.future.done())

    def close(self) -> None:
        """Forgets all programs; threads stop after what they are at, for which join() waits."""
        self._end(None)
        self._jobs.clear()
        self.clear()

    def join(self) -> None:
        """Waits for the threads to end."""
        for thread in self._threads:
            thread.join()

    def __missing__(self, key: Any) -> jax.stages.Compiled:
        job = self._jobs[key]
        job.run()
        return self._take(job)

    def _take(self, job: Job) -> jax.stages.Compiled:
        program = self[job.key] = job.future.result()
        self._jobs.pop(job.key, None)
        return program

    def _work(self) -> None:
        # Work that nobody waits for keeps no process from ending.
        while not self._has_ended and threading.main_thread().is_alive():
            try:
                job = self._queue.get_nowait()
            except queue.Empty:
                return
            job.run()

    def _count(self, future: Future[jax.stages.Compiled]) -> None:
        error = future.exception()
        if error is None:
            self._count_down()
        elif not self._has_ended:
            logger.error("a program could not be compiled", exc_info=error)
            self._end(error)

    def _count_down(self) -> None:
        with self._lock:
            self._num_left -= 1
            is_last = self._num_left == 0
        if is_last:
            self._end(None)

    def _end(self, error: BaseException | None) -> None:
        with self._lock:
            is_first, self._has_ended = not self._has_ended, True
        if is_first and error is None:
            self.ended.set_result(None)
        elif is_first:
            self.ended.set_exception(error)
