"""From requests to blocks: one row of the block tables per running request, grown on demand, shared where it can be.

Three ways to save computing. The blocks of a request's beginning are found in the prefix cache, and shared. A sample
forks from another one of the same prompt, and shares its blocks. Or only the first tokens of a block are wanted, and it
is copied. A block that others may read is never written: whoever has to write into one gets a copy of its own first
(copy-on-write).
"""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from paxpage.engine.block_pool import NULL_BLOCK, BlockPool
from paxpage.engine.prefix_cache import CachedBlock, PrefixCache, PromptHasher, block_digests
from paxpage.engine.request import NEVER, Request


class BlockCopy(NamedTuple):
    """A block's contents, in all layers, to be copied before the next step computes anything."""

    source: int
    target: int


class Prefix(NamedTuple):
    """What of a waiting request's tokens need not be computed."""

    block_ids: list[int]  # whole blocks
    num_tokens: int
    source: int  # the block whose first tokens are the request's next ones; NULL_BLOCK for none
    awaited: bytes | None  # digest of the next block, when a running request is about to compute it


NO_PREFIX = Prefix([], 0, NULL_BLOCK, None)


class BlockReport(NamedTuple):
    """What the prefix cache says of one full block of a prompt."""

    place: int  # of the block in the prompt, from 0
    verdict: str  # hit, differs, evicted, coming (being computed), miss, or off (no prefix cache)
    block_id: int | None  # the block that is found, or that differs
    first_difference: int | None  # index in the prompt of the first token that differs


class KVCacheManager:
    """Sole owner of the block tables.

    block_tables is int32 [max_num_seqs, blocks_per_row]; row r's first num_blocks_of_row[r] entries are its blocks in
    order, the rest NULL_BLOCK. A table is append-only while its request runs, but that a shared last block is replaced
    by the request's own copy; num_table_changes counts what is written to them. num_slots_of_row[r] is how many tokens
    row r may hold before it must allocate() again.
    The batch builder and the scheduler read them, nobody else writes them.

    prefix_cache: None to share no beginnings.
    """

    def __init__(
        self,
        pool: BlockPool,
        block_size: int,
        max_num_seqs: int,
        max_model_len: int,
        prefix_cache: PrefixCache | None = None,
    ) -> None:
        self.pool = pool
        self.block_size = block_size
        self.prefix_cache = prefix_cache
        self.block_tables = np.full((max_num_seqs, self.num_blocks_for(max_model_len)), NULL_BLOCK, np.int32)
        self.num_blocks_of_row = [0] * max_num_seqs
        self.num_slots_of_row = [0] * max_num_seqs
        self.num_slots = 0  # sum of num_slots_of_row
        self.num_table_changes = 0
        self._is_borrowed = [False] * max_num_seqs  # the row's last block may have other readers
        self._is_cacheable = [False] * max_num_seqs  # no forget_cached() since the row's first block
        self._free_rows = list(range(max_num_seqs))[::-1]
        self._copies: list[BlockCopy] = []
        self._hasher = PromptHasher(block_size)
        self._coming: dict[bytes, Request] = {}  # digests of blocks that running requests are about to compute
        self._step = 0

    def num_blocks_for(self, num_tokens: int) -> int:
        """Blocks that num_tokens tokens of one request fill or touch."""
        return -(-num_tokens // self.block_size)

    def num_missing_blocks(self, request: Request) -> int:
        """Blocks that a running request still has to get for all the tokens it has now."""
        return self.num_blocks_for(request.num_tokens) - self.num_blocks_of_row[request.row]

    def next_step(self) -> None:
        """Another step is about to be scheduled."""
        self._step += 1

    def take_copies(self) -> list[BlockCopy]:
        """The copies that the step just scheduled starts with; asked once.

        Their sources were kept from being handed out until now: several calls may be needed for all the copies.
        """
        copies, self._copies = self._copies, []
        self.pool.release(copy.source for copy in copies)
        return copies

    # Taking requests in

    def find_prefix(self, request: Request) -> Prefix:
        """The longest beginning of a waiting request that is in the cache, less its last token.

        The last token is always computed: its logits give the next one.
        """
        cache = self.prefix_cache
        if cache is None or request.awaited in self._coming:
            return NO_PREFIX if cache is None else NO_PREFIX._replace(awaited=request.awaited)
        most = min(request.num_tokens - 1, len(request.token_ids))
        self._extend_digests(request, most // self.block_size)
        digests = request.block_digests[: most // self.block_size]
        block_ids = cache.find(digests)
        num_blocks = len(block_ids)
        if num_blocks < len(digests) and digests[num_blocks] in self._coming:
            return Prefix(block_ids, 0, NULL_BLOCK, digests[num_blocks])
        start = num_blocks * self.block_size
        parent = digests[num_blocks - 1] if num_blocks else request.root_digest
        closest = cache.closest(parent, request.token_ids[start : min(most, start + self.block_size)], self._step)
        num_more, source = (closest.num_tokens, closest.block_id) if closest else (0, NULL_BLOCK)
        return Prefix(block_ids, start + num_more, source, None)

    def num_blocks_taken(self, request: Request, prefix: Prefix) -> int:
        """Free blocks that admitting the request with this prefix will use up, now and for its present tokens."""
        num_revived = self.pool.count_free(prefix.block_ids)
        return self.num_blocks_for(request.num_tokens) - len(prefix.block_ids) + num_revived

    def admit(self, request: Request, prefix: Prefix) -> None:
        """Gives a waiting request its row and its prefix, and counts the prefix as computed.

        max_num_seqs rows exist; the scheduler admits no more.
        """
        row = self._assign_row(request)
        self.pool.acquire(prefix.block_ids)
        self._append_blocks(row, prefix.block_ids)
        request.num_computed_tokens = len(prefix.block_ids) * self.block_size
        request.num_readonly_tokens = request.num_computed_tokens if request.is_scored else 0
        if request.is_scored:
            request.num_computed_tokens = 0
        elif prefix.source != NULL_BLOCK and self._copy_beginning(row, prefix.source, self.num_missing_blocks(request)):
            request.num_computed_tokens = prefix.num_tokens
        if self.prefix_cache is not None:
            self._is_cacheable[row] = True
            request.num_cached_blocks = len(prefix.block_ids)
            request.next_block_end = (request.num_cached_blocks + 1) * self.block_size
            self._extend_digests(request, len(request.token_ids) // self.block_size)
            for digest in request.block_digests[request.num_cached_blocks :]:
                self._coming.setdefault(digest, request)

    def fork(self, request: Request, leader: Request) -> None:
        """Gives a waiting request a row that shares all blocks of leader's prompt, its own prompt too.

        The last one, if it is not full, stays shared until somebody else than leader writes into it.
        """
        row, num_tokens = self._assign_row(request), leader.num_prompt_tokens
        block_ids = self.block_ids(leader)[: self.num_blocks_for(num_tokens)]
        self.pool.acquire(block_ids)
        self._append_blocks(row, block_ids)
        self._is_borrowed[row] = num_tokens % self.block_size > 0
        self._is_cacheable[row] = self._is_cacheable[leader.row]
        self._set_num_slots(row, num_tokens)
        request.num_computed_tokens = num_tokens
        request.num_cached_blocks = num_tokens // self.block_size
        request.block_digests = leader.block_digests[: request.num_cached_blocks]
        if self.prefix_cache is not None:
            request.next_block_end = (request.num_cached_blocks + 1) * self.block_size

    def _assign_row(self, request: Request) -> int:
        assert request.row < 0, request.request_id
        request.row = self._free_rows.pop()
        return request.row

    def _copy_beginning(self, row: int, source: int, num_missing: int) -> bool:
        """Appends a copy of source to the row's table; False if num_missing blocks could not be had beside source."""
        is_held = self.pool.ref_count(source) > 0
        if self.pool.num_free + is_held <= num_missing:
            return False
        self.pool.acquire([source])
        (target,) = self._allocate(1)
        self._append_blocks(row, [target])
        self._copies.append(BlockCopy(source, target))
        return True

    # Growing

    def allocate(self, request: Request, num_tokens: int) -> bool:
        """Makes room for the request's first num_tokens tokens; False, and nothing taken, when the pool is short."""
        return num_tokens <= self.num_slots_of_row[request.row] or self._grow(request.row, num_tokens)

    def _grow(self, row: int, num_tokens: int) -> bool:
        num_new = self.num_blocks_for(num_tokens) - self.num_blocks_of_row[row]
        is_copied = self._is_borrowed[row] and self._has_other_readers(row)
        if num_new + is_copied > self.pool.num_free:
            return False
        if is_copied:
            self._replace_last(row)
        self._is_borrowed[row] = False
        self._append_blocks(row, self._allocate(num_new))
        return True

    def _has_other_readers(self, row: int) -> bool:
        """Whether the row's last block is in another table too, or may be found in the prefix cache."""
        block_id = int(self.block_tables[row, self.num_blocks_of_row[row] - 1])
        is_cached = self.prefix_cache is not None and block_id in self.prefix_cache
        return is_cached or self.pool.ref_count(block_id) > 1

    def _replace_last(self, row: int) -> None:
        place = self.num_blocks_of_row[row] - 1
        shared = int(self.block_tables[row, place])
        (own,) = self._allocate(1)
        self.block_tables[row, place] = own
        self.num_table_changes += 1
        self._copies.append(BlockCopy(shared, own))  # the row's reference to it goes with take_copies()

    def _allocate(self, num_blocks: int) -> list[int]:
        block_ids = self.pool.allocate(num_blocks)
        if self.prefix_cache is not None:
            for block_id in block_ids:
                self.prefix_cache.forget(block_id)
        return block_ids

    def _append_blocks(self, row: int, block_ids: list[int]) -> None:
        held = self.num_blocks_of_row[row]
        end = held + len(block_ids)
        if end == held + 1:
            self.block_tables[row, held] = block_ids[0]  # a tenth of what an assignment to a slice takes
        else:
            self.block_tables[row, held:end] = block_ids
        self.num_table_changes += 1
        self.num_blocks_of_row[row] = end
        self._set_num_slots(row, end * self.block_size)

    def _set_num_slots(self, row: int, num_slots: int) -> None:
        self.num_slots += num_slots - self.num_slots_of_row[row]
        self.num_slots_of_row[row] = num_slots

    # Making blocks known

    def cache_blocks(self, request: Request) -> None:
        """Puts the request's full blocks that are not there yet into the prefix cache.

        For when num_computed_tokens has reached next_block_end: what a scheduled step will compute counts, since steps
        run in order, and within one every layer's keys and values are written before any are read.
        """
        assert self.prefix_cache is not None
        if not self._is_cacheable[request.row]:
            request.next_block_end = NEVER
            return
        num_full = min(request.num_computed_tokens, len(request.token_ids)) // self.block_size
        first = request.num_cached_blocks
        if num_full > first:
            self._extend_digests(request, num_full)
            for index, block_id in enumerate(self.block_tables[request.row, first:num_full].tolist(), first):
                self._cache_block(request, index, block_id)
            request.num_cached_blocks = num_full
            request.next_block_end = (num_full + 1) * self.block_size

    def _cache_block(self, request: Request, index: int, block_id: int) -> None:
        assert self.prefix_cache is not None
        digests, size = request.block_digests, self.block_size
        digest = digests[index]
        parent = digests[index - 1] if index else request.root_digest
        token_ids = tuple(request.token_ids[index * size : (index + 1) * size])
        self.prefix_cache.insert(block_id, CachedBlock(digest, parent, token_ids, self._step))
        if self._coming and self._coming.get(digest) is request:
            del self._coming[digest]

    def _extend_digests(self, request: Request, num_blocks: int) -> None:
        digests = request.block_digests
        if not digests and num_blocks:
            digests.extend(self._hasher.digests(request.root_digest, request.token_ids[: num_blocks * self.block_size]))
        elif len(digests) < num_blocks:
            new = request.token_ids[len(digests) * self.block_size : num_blocks * self.block_size]
            digests.extend(block_digests(digests[-1], new, self.block_size))

    # Giving back

    def release(self, request: Request) -> None:
        """Takes the request's row and blocks back, last block first, so that beginnings stay cached longest."""
        if self.prefix_cache is not None:
            self.cache_blocks(request)
            for digest in request.block_digests[request.num_cached_blocks :]:
                if self._coming.get(digest) is request:
                    del self._coming[digest]
        row, request.row = request.row, -1
        request.next_block_end = NEVER
        self.pool.release(self._blocks_of_row(row)[::-1])
        self.block_tables[row, : self.num_blocks_of_row[row]] = NULL_BLOCK
        self.num_table_changes += 1
        self.num_blocks_of_row[row] = 0
        self._set_num_slots(row, 0)
        self._is_borrowed[row] = self._is_cacheable[row] = False
        self._free_rows.append(row)

    def forget_cached(self) -> None:
        """Makes every block unknown: their contents are lost, or belong to other weights.

        Running requests keep theirs and finish, but what they compute from now on follows from it: none becomes known.
        """
        if self.prefix_cache is not None:
            self.prefix_cache.clear()
            self._coming.clear()
            self._is_cacheable = [False] * len(self._is_cacheable)

    # Looking

    def block_ids(self, request: Request) -> list[int]:
        """A copy of the request's block table; empty when it is not running."""
        return self._blocks_of_row(request.row) if request.row >= 0 else []

    def _blocks_of_row(self, row: int) -> list[int]:
        return self.block_tables[row, : self.num_blocks_of_row[row]].tolist()

    def explain(self, token_ids: list[int], root: bytes) -> Iterator[BlockReport]:
        """For each block of a prompt, whether it would be found now, and if not, why."""
        cache, parent, is_whole = self.prefix_cache, root, True
        digests = list(block_digests(root, token_ids, self.block_size))
        for index, digest in enumerate(digests):
            own = token_ids[index * self.block_size : (index + 1) * self.block_size]
            found = cache.find([digest]) if cache is not None and is_whole else []
            is_whole = bool(found)
            yield BlockReport(index, *self._verdict(index, digest, parent, own, found))
            parent = digest

    def _verdict(
        self, index: int, digest: bytes, parent: bytes, own: list[int], found: list[int]
    ) -> tuple[str, int | None, int | None]:
        cache = self.prefix_cache
        if cache is None:
            return "off", None, None
        if found:
            return "hit", found[0], None
        if digest in self._coming:
            return "coming", None, None
        if cache.was_evicted(digest):
            return "evicted", None, None
        closest = cache.closest(parent, own)
        if closest is not None and closest.num_tokens < len(own):  # else it is there, but nothing leads to it
            return "differs", closest.block_id, index * self.block_size + closest.num_tokens
        return "miss", None, None
