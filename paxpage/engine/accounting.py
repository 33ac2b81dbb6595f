"""What memory was reserved for and what it held, step by step."""

import dataclasses

from paxpage.engine.kv_cache_manager import SlotUsage

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
