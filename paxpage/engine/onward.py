"""A decode step of the same rows as the step before, one token on: what it is told lies on the device already."""

from typing import NamedTuple

import jax

from paxpage.engine.batch import StepShape
from paxpage.engine.kv_cache_manager import KVCacheManager
from paxpage.engine.scheduler import ScheduledBatch, ScheduledRow


class Left(NamedTuple):
    """What a step leaves for its successor."""

    rows: list[ScheduledRow]
    shape: StepShape
    num_table_changes: int
    packed: jax.Array  # batch.pack's array for these rows' next tokens


class Onward:
    """Keeps what the last step has left, for the next one alone.

    Packing a small batch and sending it takes the host long beside a small model's step, and an array that lies
    elsewhere than the last step's has to be patched into the step's CUDA graph (BUILD_NOTES.md, 2026-11-30).
    """

    def __init__(self) -> None:
        self._left: Left | None = None

    def keep(self, batch: ScheduledBatch, shape: StepShape, manager: KVCacheManager, packed: jax.Array | None) -> None:
        """After each step. packed: step.StepOutput.advanced."""
        self._left = None if packed is None else Left(batch.rows, shape, manager.num_table_changes, packed)

    def take(self, batch: ScheduledBatch, shape: StepShape, manager: KVCacheManager) -> jax.Array | None:
        """The batch's packed array; None if rows, shape or a block table are others than in the step before.

        Each row's token is then what the step before sampled: a row in the middle of its prompt has another one.
        """
        left, self._left = self._left, None
        if left is None or (left.shape, left.num_table_changes) != (shape, manager.num_table_changes):
            return None
        if len(left.rows) != len(batch.rows):
            return None
        pairs = zip(left.rows, batch.rows, strict=True)
        return left.packed if all(goes_on(*pair) for pair in pairs) else None


def goes_on(last: ScheduledRow, row: ScheduledRow) -> bool:
    """Whether a row of one token computes the one that the last step sampled for it."""
    return row.request is last.request and last.is_sampled and row.start == last.start + 1
