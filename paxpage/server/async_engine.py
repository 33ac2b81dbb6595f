"""The engine on a thread of its own, and the event loop's side of it.

The event loop sends commands through a queue that the engine thread empties between steps. What a step produced goes
back in one callback a step, into one list per HTTP request: nothing here waits for a reader, and no reader waits for
the engine's lock, for there is none.
"""

import asyncio
import concurrent.futures
import logging
import queue
import sys
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, Protocol, runtime_checkable

from paxpage.engine.sampling_params import SamplingParams
from paxpage.outputs import CompletionDelta
from paxpage.server.errors import ApiError
from paxpage.server.metrics import Metrics, StepStats
from paxpage.server.turns import Turns

LOGGER = logging.getLogger(__name__)
# Threads for bodies of up to so many bytes, which take 0.2 s, 3 s and the rest of a minute to tokenise, and up to
# gigabytes: those of a size hold up each other, and no shorter ones.
PREPARE_THREADS = {2**16: 2, 2**20: 1, sys.maxsize: 1}
RETRY_AFTER_S = 1


@runtime_checkable
class Prepared(Protocol):
    """A request that is checked and tokenised."""

    @property
    def request_id(self) -> str:
        """The engine's name for it."""

    @property
    def prompt_token_ids(self) -> list[int]:
        """The prompt's token ids."""


@runtime_checkable
class StepEngine(Protocol):
    """What the server needs of an engine; paxpage.engine.engine.Engine says what each method does.

    prepare and check_text may be called from any thread. Everything else is called from one thread only.
    """

    def prepare(
        self,
        request_id: str,
        prompt: Any,
        params: SamplingParams,
        *,
        priority: int = 0,
        cache_salt: str | None = None,
    ) -> Prepared:
        """Checks and tokenises a request."""

    def check_text(self, text: str) -> None:
        """Refuses a text that is certainly too long for the model; any thread may call it."""

    def submit(self, prepared: Any) -> None:
        """Puts a prepared request in the queue."""

    def abort(self, request_ids: Iterable[str]) -> list[CompletionDelta]:
        """Ends requests."""

    def step(self) -> list[CompletionDelta]:
        """Runs one step."""

    def has_unfinished_requests(self) -> bool:
        """Whether a step has something to do."""

    def stats(self) -> Any:
        """Counts of what runs and waits."""

    def explain_cache(self, prepared: Any) -> list[Any]:
        """A report for each full block of a prompt."""

    def close(self) -> None:
        """Gives the memory back."""


class RequestFailure(NamedTuple):
    """A request that ended without a result."""

    request_id: str
    error: ApiError


StreamEvent = CompletionDelta | RequestFailure


class Submit(NamedTuple):
    """Command: take a request in."""

    prepared: Prepared
    arrival_time_s: float


class Abort(NamedTuple):
    """Command: end these requests."""

    request_ids: tuple[str, ...]


class Fail(NamedTuple):
    """Command: end with an error that was found elsewhere."""

    error: BaseException


class Stop(NamedTuple):
    """Command: end the thread."""


class Call(NamedTuple):
    """Command: run this with the engine, between two steps."""

    work: Callable[[Any], Any]
    result: concurrent.futures.Future[Any]


Command = Submit | Abort | Call | Fail | Stop


class OutputStream:
    """What the engine says about one HTTP request's prompts. Belongs to the event loop."""

    def __init__(self, request_ids: Sequence[str], turns: Turns | None = None):
        self.request_ids = tuple(request_ids)
        self.unfinished = set(request_ids)
        self._turns = turns or Turns()
        self._events: list[StreamEvent] = []
        self._has_events = asyncio.Event()

    @property
    def is_finished(self) -> bool:
        """Whether every prompt has ended and every event was read."""
        return not self.unfinished and not self._events

    def push(self, event: StreamEvent) -> None:
        """Adds an event; never waits."""
        if isinstance(event, RequestFailure) or event.output is not None:
            self.unfinished.discard(event.request_id)
        self._events.append(event)
        self._has_events.set()

    async def next_events(self) -> list[StreamEvent]:
        """Waits for events and takes all there are, so a slow reader finds them together."""
        await self._has_events.wait()
        await self._turns.take()
        self._has_events.clear()
        events, self._events = self._events, []
        return events


class EngineThread:
    """Runs the engine: commands, then a step, and again.

    deliver is called from this thread with what came out; it must not wait. on_death is called once, with the
    exception that ended the engine.
    """

    def __init__(
        self,
        engine: StepEngine,
        metrics: Metrics,
        deliver: Callable[[list[StreamEvent]], None],
        on_death: Callable[[Exception], None],
    ):
        self._engine = engine
        self._metrics = metrics
        self._deliver = deliver
        self._on_death = on_death
        self._commands: queue.SimpleQueue[Command] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    @property
    def num_pending_commands(self) -> int:
        """Commands that the engine has not seen yet, about."""
        return self._commands.qsize()

    def start(self) -> None:
        """Starts the thread."""
        self._thread.start()

    def send(self, command: Command) -> None:
        """Queues a command, from any thread."""
        self._commands.put(command)

    def join(self, timeout_s: float) -> bool:
        """Waits for the thread to end; False if it has not by then."""
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        try:
            while self._obey_commands():
                if self._engine.has_unfinished_requests():
                    self._step()
        except Exception as error:
            LOGGER.exception("the engine died")
            self._metrics.record_failures(self._metrics.unfinished_requests())
            self._on_death(error)
        finally:
            self._refuse_calls()
            self._engine.close()

    def _refuse_calls(self) -> None:
        """Nobody is left to answer what was asked."""
        while not self._commands.empty():
            command = self._commands.get()
            if isinstance(command, Call):
                command.result.set_exception(ApiError(503, "the engine has ended"))

    def _step(self) -> None:
        deltas = self._engine.step()
        self._metrics.record_step(self._read_stats().num_scheduled_tokens)
        self._hand_over(deltas)

    def _hand_over(self, deltas: list[CompletionDelta]) -> None:
        self._metrics.record_deltas(deltas, time.monotonic())
        if deltas:
            self._deliver(list(deltas))

    def _read_stats(self) -> Any:
        """The engine's counts now, also kept for scrapes; called before a step's outputs leave this thread."""
        stats = self._engine.stats()
        self._metrics.stats = StepStats(
            num_running=stats.num_running,
            num_waiting=stats.num_waiting,
            kv_cache_usage=stats.kv_cache_usage,
            num_preemptions=stats.num_preemptions,
        )
        return stats

    def _obey_commands(self) -> bool:
        """Obeys what is queued, waiting for a command when there is nothing else to do. False: stop."""
        is_waiting = not self._engine.has_unfinished_requests()
        while is_waiting or not self._commands.empty():
            command = self._commands.get()
            if isinstance(command, Stop):
                return False
            self._obey(command)
            is_waiting = False
            self._read_stats()
        return True

    def _obey(self, command: Command) -> None:
        if isinstance(command, Submit):
            self._submit(command)
        elif isinstance(command, Abort):
            self._hand_over(self._engine.abort(command.request_ids))
        elif isinstance(command, Call):
            self._call(command)
        elif isinstance(command, Fail):
            raise command.error

    def _call(self, command: Call) -> None:
        try:
            command.result.set_result(command.work(self._engine))
        except Exception as error:  # whoever asked is told
            command.result.set_exception(error)

    def _submit(self, command: Submit) -> None:
        request_id = command.prepared.request_id
        num_prompt_tokens = len(command.prepared.prompt_token_ids)
        self._metrics.start_request(request_id, command.arrival_time_s, num_prompt_tokens)
        try:
            self._engine.submit(command.prepared)
        except ValueError as error:
            self._metrics.record_failures([request_id])
            self._deliver([RequestFailure(request_id, ApiError(400, str(error)))])


class AsyncEngine:
    """The event loop's side: checks requests on worker threads, opens and closes streams of outputs.

    max_num_queued_reqs: None, or how many prompts may wait beyond those that max_num_seqs lets run.
    on_dead: called on the event loop when the engine died, after every open stream was told.
    """

    def __init__(
        self,
        engine: StepEngine,
        metrics: Metrics,
        *,
        max_num_seqs: int,
        max_num_queued_reqs: int | None = None,
        on_dead: Callable[[], None] = lambda: None,
    ):
        self.metrics = metrics
        self.is_dead = False
        self.turns = Turns()
        self._engine = engine
        self._max_num_seqs = max_num_seqs
        self._max_num_queued_reqs = max_num_queued_reqs
        self._on_dead = on_dead
        self._is_closing = False
        self._streams: dict[str, OutputStream] = {}
        self._thread = EngineThread(engine, metrics, self._post_events, self._post_death)
        self._workers = {
            most_bytes: concurrent.futures.ThreadPoolExecutor(num_threads, thread_name_prefix="prepare")
            for most_bytes, num_threads in PREPARE_THREADS.items()
        }

    @property
    def has_open_streams(self) -> bool:
        """Whether a client waits for anything."""
        return bool(self._streams)

    def start(self) -> None:
        """Starts the engine thread; to be called on the event loop."""
        self._loop = asyncio.get_running_loop()
        self._thread.start()

    async def prepare[ResultT](self, work: Callable[[], ResultT], num_bytes: int) -> ResultT:
        """Runs work (checking and tokenising) on a worker thread for its size: num_bytes, of the request's body."""
        workers = next(pool for most_bytes, pool in self._workers.items() if num_bytes <= most_bytes)
        return await self._loop.run_in_executor(workers, work)

    async def call[ResultT](self, work: Callable[[Any], ResultT]) -> ResultT:
        """Runs work with the engine on its thread, between two steps; to be short. ApiError 503 as for open()."""
        self._require_alive()
        result: concurrent.futures.Future[ResultT] = concurrent.futures.Future()
        self._thread.send(Call(work, result))
        return await asyncio.wrap_future(result)

    def open(self, prepared: Sequence[Prepared], arrival_time_s: float) -> OutputStream:
        """Hands prepared requests to the engine; the stream must be closed when its reader is done or gone.

        Raises:
            ApiError: 503 when the engine is dead or the server stops, 429 when the queue is full, 400 for more than
                it ever holds and for a request id in use.
        """
        self._require_alive()
        self._require_room(len(prepared))
        stream = OutputStream([item.request_id for item in prepared], self.turns)
        self._require_new(stream.request_ids)
        for item in prepared:
            self._streams[item.request_id] = stream
            self._thread.send(Submit(item, arrival_time_s))
        return stream

    def close(self, stream: OutputStream) -> None:
        """Ends what is unfinished of a stream; what still comes for it is dropped."""
        is_unfinished = bool(stream.unfinished)
        for request_id in stream.request_ids:
            if self._streams.get(request_id) is stream:
                del self._streams[request_id]
        if is_unfinished and not self.is_dead:
            self._thread.send(Abort(tuple(sorted(stream.unfinished))))
            LOGGER.info("aborted %s: its client left", ", ".join(sorted(stream.unfinished)))

    def fail(self, error: BaseException) -> None:
        """Ends the engine as if a step had raised error; any thread may call it."""
        self._thread.send(Fail(error))

    def refuse_new_requests(self) -> None:
        """From now on open answers 503."""
        self._is_closing = True

    def abort_all(self) -> None:
        """Ends every request; their streams end with finish_reason "abort"."""
        if self._streams:
            LOGGER.info("aborting %d unfinished requests: the server stops", len(self._streams))
            self._thread.send(Abort(tuple(self._streams)))

    async def stop(self, timeout_s: float) -> bool:
        """Ends the threads; False if the engine is still in a step after timeout_s."""
        for workers in self._workers.values():
            workers.shutdown(wait=False, cancel_futures=True)
        self._thread.send(Stop())
        return await asyncio.to_thread(self._thread.join, timeout_s)

    def _require_alive(self) -> None:
        if self.is_dead:
            raise ApiError(503, "the engine is dead; see the server's log")
        if self._is_closing:
            raise ApiError(503, "the server is stopping", retry_after_s=RETRY_AFTER_S)

    def _require_room(self, num_new: int) -> None:
        if self._max_num_queued_reqs is None:
            return
        most = self._max_num_queued_reqs + self._max_num_seqs
        if num_new > most:  # there is never room: nobody should try again
            raise ApiError(400, f"prompt has {num_new} prompts; allowed: at most {most}, the whole queue", "prompt")
        stats = self.metrics.stats
        num_free_rows = 0 if stats.num_waiting else max(self._max_num_seqs - stats.num_running, 0)
        num_queued = stats.num_waiting + self._thread.num_pending_commands
        if num_queued + num_new > self._max_num_queued_reqs + num_free_rows:
            self.metrics.count_rejection()
            message = f"the queue is full: {num_queued} requests wait; allowed: {self._max_num_queued_reqs}"
            raise ApiError(429, message, retry_after_s=RETRY_AFTER_S)

    def _require_new(self, request_ids: Sequence[str]) -> None:
        for request_id in request_ids:
            if request_id in self._streams:
                raise ApiError(400, f"request_id is {request_id!r}; allowed: one that is not running", "request_id")

    def _post_events(self, events: list[StreamEvent]) -> None:
        self._loop.call_soon_threadsafe(self._push_events, events)

    def _post_death(self, error: Exception) -> None:
        self._loop.call_soon_threadsafe(self._die, error)

    def _push_events(self, events: list[StreamEvent]) -> None:
        for event in events:
            stream = self._streams.get(event.request_id)
            if stream is None:  # its client left in the meantime
                continue
            stream.push(event)
            if event.request_id not in stream.unfinished:
                del self._streams[event.request_id]

    def _die(self, error: Exception) -> None:
        self.is_dead = True
        failed = ApiError(500, f"the engine died: {type(error).__name__}")
        self._push_events([RequestFailure(request_id, failed) for request_id in tuple(self._streams)])
        self._on_dead()
