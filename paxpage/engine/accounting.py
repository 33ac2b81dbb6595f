"""What memory was reserved for and what it held, and how long the device had nothing to do, step by step."""

import dataclasses
import time

from paxpage.engine.scheduler import SlotUsage

NOTHING = SlotUsage(allocated=0, holding=0)


@dataclasses.dataclass
class SlotAccount:
    """KV slots summed over steps: allocated, holding a token, wasted (allocated but empty)."""

    num_steps: int = 0
    allocated: int = 0
    holding: int = 0
    last: SlotUsage = NOTHING

    def add(self, usage: SlotUsage) -> None:
        """Takes one step in."""
        self.num_steps += 1
        self.allocated += usage.allocated
        self.holding += usage.holding
        self.last = usage

    @property
    def wasted(self) -> int:
        """Slot-steps that were allocated and held nothing."""
        return self.allocated - self.holding

    @property
    def waste_fraction(self) -> float:
        """wasted / allocated, 0 when nothing was."""
        return self.wasted / self.allocated if self.allocated else 0.0


class IdleMeter:
    """An upper bound of the time that the device stood idle between steps, from what the host sees in passing.

    Each time the host looks, the newest step in flight is done or not. If it is done when the next one is launched, the
    device has been idle, at most since the host last saw it busy. Pauses without any request do not count.
    """

    def __init__(self) -> None:
        self.idle_s = 0.0
        self.num_idle_launches = 0
        self._last_busy_s = time.monotonic()

    def saw(self, is_busy: bool) -> None:
        """The host has looked without launching anything."""
        if is_busy:
            self._last_busy_s = time.monotonic()

    def launched(self, was_busy: bool | None) -> None:
        """A step was launched; was_busy: whether the one before was still running, None if there was none."""
        now_s = time.monotonic()
        if was_busy is False:
            self.num_idle_launches += 1
            self.idle_s += now_s - self._last_busy_s
        self._last_busy_s = now_s
