"""From requests to blocks: one row of the block tables per running request, grown on demand."""

import numpy as np

from paxpage.engine.block_pool import NULL_BLOCK, BlockPool
from paxpage.engine.request import Request


class KVCacheManager:
    """Sole owner of the block tables.

    block_tables is int32 [max_num_seqs, blocks_per_row]; row r's first num_blocks_of_row[r] entries are its blocks in
    order, the rest NULL_BLOCK. A table is append-only while its request runs. num_slots_of_row[r] is how many tokens
    row r may hold before it must allocate() again. The batch builder and the scheduler read them, nobody else writes
    them.
    """

    def __init__(self, pool: BlockPool, block_size: int, max_num_seqs: int, max_model_len: int) -> None:
        self.pool = pool
        self.block_size = block_size
        self.block_tables = np.full((max_num_seqs, self.num_blocks_for(max_model_len)), NULL_BLOCK, np.int32)
        self.num_blocks_of_row = [0] * max_num_seqs
        self.num_slots_of_row = [0] * max_num_seqs
        self._free_rows = list(range(max_num_seqs))[::-1]

    def num_blocks_for(self, num_tokens: int) -> int:
        """Blocks that num_tokens tokens of one request fill or touch."""
        return -(-num_tokens // self.block_size)

    def num_missing_blocks(self, request: Request) -> int:
        """Blocks that the request still has to get for all the tokens it has now."""
        held = self.num_blocks_of_row[request.row] if request.row >= 0 else 0
        return self.num_blocks_for(request.num_tokens) - held

    def assign_row(self, request: Request) -> None:
        """Gives an admitted request its row. max_num_seqs rows exist; the scheduler admits no more."""
        assert request.row < 0, request.request_id
        request.row = self._free_rows.pop()

    def allocate(self, request: Request, num_tokens: int) -> bool:
        """Makes room for the request's first num_tokens tokens; False, and nothing taken, when the pool is short."""
        return num_tokens <= self.num_slots_of_row[request.row] or self._grow(request.row, num_tokens)

    def _grow(self, row: int, num_tokens: int) -> bool:
        held = self.num_blocks_of_row[row]
        num_new = self.num_blocks_for(num_tokens) - held
        if num_new > self.pool.num_free:
            return False
        self.block_tables[row, held : held + num_new] = self.pool.allocate(num_new)
        self._set_num_blocks(row, held + num_new)
        return True

    def _set_num_blocks(self, row: int, num_blocks: int) -> None:
        self.num_blocks_of_row[row] = num_blocks
        self.num_slots_of_row[row] = num_blocks * self.block_size

    def release(self, request: Request) -> None:
        """Takes the request's row and blocks back, last block first, so that beginnings stay longest."""
        row, request.row = request.row, -1
        self.pool.release(self._blocks_of_row(row)[::-1])
        self.block_tables[row, : self.num_blocks_of_row[row]] = NULL_BLOCK
        self._set_num_blocks(row, 0)
        self._free_rows.append(row)

    def block_ids(self, request: Request) -> list[int]:
        """A copy of the request's block table; empty when it is not running."""
        return self._blocks_of_row(request.row) if request.row >= 0 else []

    def _blocks_of_row(self, row: int) -> list[int]:
        return self.block_tables[row, : self.num_blocks_of_row[row]].tolist()
