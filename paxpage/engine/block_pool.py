"""Who holds which block. Knows nothing of bytes, heads, layers, requests or what a block holds."""

from collections import OrderedDict
from collections.abc import Iterable

NULL_BLOCK = 0


class BlockPool:
    """Blocks 0 .. num_blocks - 1 with reference counts and a free list, least recently freed first.

    Block 0 is the null block: padding reads and writes there; it is never handed out. So num_blocks - 1 are usable,
    and at every moment num_free + (blocks with a reference) is that number. A free block keeps what it holds until it
    is handed out again, and acquire() takes it back. Every operation is O(1) a block.
    """

    def __init__(self, num_blocks: int) -> None:
        assert num_blocks >= 2, num_blocks
        self.num_blocks = num_blocks
        self._ref_counts = [0] * num_blocks
        self._free = OrderedDict.fromkeys(range(1, num_blocks))

    @property
    def num_usable(self) -> int:
        """Blocks that can hold tokens: all but the null block."""
        return self.num_blocks - 1

    @property
    def num_free(self) -> int:
        """Blocks nobody references."""
        return len(self._free)

    def ref_count(self, block_id: int) -> int:
        """How many block tables name this block."""
        return self._ref_counts[block_id]

    def count_free(self, block_ids: Iterable[int]) -> int:
        """How many of these blocks nobody references."""
        return [self._ref_counts[block_id] for block_id in block_ids].count(0)

    def allocate(self, num_blocks: int) -> list[int]:
        """Takes blocks off the free list, each with one reference. The caller has checked num_free."""
        free, ref_counts, block_ids = self._free, self._ref_counts, []
        assert num_blocks <= len(free), (num_blocks, len(free))
        for _ in range(num_blocks):
            block_id, _ = free.popitem(last=False)
            ref_counts[block_id] = 1
            block_ids.append(block_id)
        return block_ids

    def acquire(self, block_ids: Iterable[int]) -> None:
        """One reference more to each block, free or not."""
        ref_counts = self._ref_counts
        for block_id in block_ids:
            assert block_id != NULL_BLOCK
            count = ref_counts[block_id]
            if count == 0:
                del self._free[block_id]
            ref_counts[block_id] = count + 1

    def release(self, block_ids: Iterable[int]) -> None:
        """Takes one reference off each block; those nobody references become free, in the order given."""
        ref_counts = self._ref_counts
        for block_id in block_ids:
            count = ref_counts[block_id] - 1
            assert count >= 0, f"block {block_id} is released but not held"
            ref_counts[block_id] = count
            if count == 0:
                self._free[block_id] = None

    def check(self) -> None:
        """Asserts the pool's invariants; O(num_blocks), for tests and idle moments."""
        free = set(self._free)
        assert NULL_BLOCK not in free and self._ref_counts[NULL_BLOCK] == 0, "the null block was handed out"
        referenced = {block_id for block_id in range(1, self.num_blocks) if self._ref_counts[block_id] > 0}
        assert not free & referenced, "a block is free and referenced"
        assert len(free) + len(referenced) == self.num_usable, "a block is lost"
