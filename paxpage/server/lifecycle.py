"""From a bound socket to the process's exit code."""

import asyncio
import contextlib
import functools
import socket
from collections.abc import Callable, Iterator

import uvicorn
from starlette.types import ASGIApp

from paxpage.server.async_engine import AsyncEngine
from paxpage.server.heads import BoundedHeads
from paxpage.server.signals import SignalWatcher

ABORT_S = 4.0  # after requests were aborted every answer has so long to reach its client
DEAD_LINGER_S = 2.0  # so long /health says 503 before a dead engine ends the process
KEEP_ALIVE_S = 30


class Lifecycle:
    """Decides when a server ends, and with which exit code. Its methods belong to the event loop."""

    def __init__(self, shutdown_timeout_s: int) -> None:
        """shutdown_timeout_s: what runs may go on for so long after the first signal."""
        self.exit_code = 0
        self.shutdown_timeout_s = shutdown_timeout_s
        self.is_ending = asyncio.Event()

    def end(self, async_engine: AsyncEngine) -> None:
        """Lets what runs go on for a while, then aborts it; new requests are refused from now on."""
        async_engine.refuse_new_requests()
        asyncio.get_running_loop().call_later(self.shutdown_timeout_s, async_engine.abort_all)
        self.is_ending.set()

    def end_dead(self) -> None:
        """Ends a server whose engine died, with exit code 1."""
        self.exit_code = 1
        asyncio.get_running_loop().call_later(DEAD_LINGER_S, self.is_ending.set)


class Server(uvicorn.Server):
    """uvicorn with our signals and a callback when it listens."""

    def __init__(self, app: ASGIApp, lifecycle: Lifecycle, on_listening: Callable[[], None]):
        config = uvicorn.Config(
            app,
            lifespan="on",
            http=BoundedHeads,
            ws="none",
            log_config=None,
            access_log=False,
            server_header=False,
            timeout_keep_alive=KEEP_ALIVE_S,
            timeout_graceful_shutdown=int(lifecycle.shutdown_timeout_s + ABORT_S),
        )
        super().__init__(config)
        self._lifecycle = lifecycle
        self._on_listening = on_listening

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Nothing: SignalWatcher has them."""
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Starts listening and says so."""
        await super().startup(sockets)
        self._on_listening()

    async def on_tick(self, counter: int) -> bool:
        """Whether to end; called ten times a second."""
        return await super().on_tick(counter) or self._lifecycle.is_ending.is_set()


def serve(
    app: ASGIApp,
    async_engine: AsyncEngine,
    lifecycle: Lifecycle,
    signals: SignalWatcher,
    bound: socket.socket,
    on_ready: Callable[[], None],
) -> None:
    """Serves until a signal comes or the engine dies.

    Raises:
        OSError: another process began to listen on the address in the meantime.
    """

    def on_listening() -> None:
        loop = asyncio.get_running_loop()
        signals.hand_over(functools.partial(loop.call_soon_threadsafe, lifecycle.end, async_engine))
        on_ready()

    Server(app, lifecycle, on_listening).run(sockets=[bound])
