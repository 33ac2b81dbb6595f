"""Which beginnings the rows of a batch share, asked before every step and mostly known from the one before."""

import numpy as np

from pallas_kernels.paged_attention import cascade
from paxpage.engine.kv_cache_manager import KVCacheManager
from paxpage.engine.request import Request
from paxpage.engine.scheduler import ScheduledBatch


class PrefixFinder:
    """cascade.shared_prefixes for scheduled batches of at most max_tokens tokens; longer ones share nothing.

    Prefill chunks share what is in the cache before the step, or is written in it: their layers write before they read.
    What it finds in a decode step holds as long as the same requests decode: blocks at the beginning of a running
    request's table are not replaced. One that is preempted, and may come back with other blocks, is missing from a step
    in between, after which all is looked for again.
    """

    def __init__(self, rules: cascade.Rules, max_tokens: int) -> None:
        self.rules = rules
        self.max_tokens = max_tokens
        self._requests: list[Request] = []  # of the last step, if it was a decode step
        self._found: cascade.SharedPrefixes | None = None

    def find(self, batch: ScheduledBatch, manager: KVCacheManager) -> cascade.SharedPrefixes | None:
        """The shared beginnings that are worth reading once, arrays of len(batch.rows); None if there are none."""
        requests = [row.request for row in batch.rows]
        if not batch.is_decode:
            self._requests = []
            return self._search(batch, manager) if batch.num_tokens <= self.max_tokens else None
        if requests != self._requests:
            self._requests, self._found = requests, self._search(batch, manager)
        return self._found

    def _search(self, batch: ScheduledBatch, manager: KVCacheManager) -> cascade.SharedPrefixes | None:
        table_rows = np.array([row.request.row for row in batch.rows])
        if batch.is_decode and not cascade.may_share(manager.block_tables, table_rows, self.rules):
            return None
        contexts = np.array([row.start for row in batch.rows], np.int32)
        starts = np.cumsum([0, *(row.num_tokens for row in batch.rows)], dtype=np.int32)
        return cascade.shared_prefixes(manager.block_tables, table_rows, contexts, starts, self.rules)
