"""SIGTERM and Ctrl-C: the first asks for a clean end, the second ends the process at once."""

import os
import signal
import sys
import threading
from collections.abc import Callable

SIGNALS = (signal.SIGTERM, signal.SIGINT)


def end_process(exit_code: int) -> None:
    """Ends the process now, whatever its threads are doing."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(exit_code)


class SignalWatcher:
    """Waits for signals on a thread of its own, so that a main thread deep in a compilation delays nothing.

    Until hand_over is called, the first signal ends the process.
    """

    def __init__(self) -> None:
        self._on_first: Callable[[], object] | None = None

    def start(self) -> None:
        """Starts watching. To be called on the main thread before others are started: they inherit its mask."""
        signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
        threading.Thread(target=self._watch, name="signals", daemon=True).start()

    def hand_over(self, on_first: Callable[[], object]) -> None:
        """From now on the first signal calls on_first, on the watching thread."""
        self._on_first = on_first

    def _watch(self) -> None:
        number = signal.sigwait(SIGNALS)
        if self._on_first is not None:
            self._on_first()
            number = signal.sigwait(SIGNALS)
        print(f"ended by {signal.Signals(number).name}", file=sys.stderr)
        end_process(128 + number)
