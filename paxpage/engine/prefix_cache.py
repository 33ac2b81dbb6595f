"""Which blocks hold which tokens, so that equal beginnings are computed once (PagedAttention, SOSP 2023, sec. 4.4).

A full block is known by the digest of (its parent's digest, its token ids), the first one's parent being a digest of
the request's cache_salt: equal digests mean equal salts and equal tokens from the first on. 256 bits of SHA-256 make a
collision no concern, by accident or on purpose.
"""

import hashlib
import itertools
from array import array
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

MAX_CANDIDATES = 8  # newest blocks with the same parent and first token that a beginning is compared with


class CachedBlock(NamedTuple):
    """What a block holds."""

    digest: bytes
    parent: bytes  # digest of the block before it, or of the salt
    token_ids: tuple[int, ...]
    step: int  # in which it was computed


class Closest(NamedTuple):
    """The cached block that shares most of its beginning with some tokens."""

    block_id: int
    num_tokens: int  # shared


def root_digest(salt: str | None) -> bytes:
    """The parent of first blocks. Requests with different salts share nothing."""
    key = b"" if salt is None else b"salt" + salt.encode("utf-8", "surrogatepass")
    return hashlib.sha256(key).digest()


def block_digests(parent: bytes, token_ids: Sequence[int], block_size: int) -> Iterator[bytes]:
    """Digests of token_ids' full blocks, parent being the digest of what comes before them."""
    data = array("I", token_ids).tobytes()
    num_bytes = block_size * array("I").itemsize
    for start in range(0, len(data) - num_bytes + 1, num_bytes):
        parent = hashlib.sha256(parent + data[start : start + num_bytes]).digest()
        yield parent


class PromptHasher:
    """block_digests of whole prompts. What a prompt has in common with the last one is not hashed again, since many
    begin with the same thousands of tokens. Any thread may use it.
    """

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._last: tuple[bytes, array[int], list[bytes]] = (b"", array("I"), [])

    def digests(self, root: bytes, token_ids: Sequence[int]) -> list[bytes]:
        """Of the full blocks of a prompt whose salt has this root digest."""
        data = array("I", token_ids)
        last_root, last_data, last_digests = self._last
        known = last_digests[: _num_equal(data, last_data) // self._block_size] if root == last_root else []
        rest = data[len(known) * self._block_size :]
        digests = [*known, *block_digests(known[-1] if known else root, rest, self._block_size)]
        self._last = root, data, digests
        return digests


def _num_equal(first: "array[int]", second: "array[int]") -> int:
    """num_common of arrays of numbers, by numpy."""
    length = min(len(first), len(second))
    a, b = (np.frombuffer(each, np.uintc, length) if length else np.empty(0) for each in (first, second))
    differing = np.flatnonzero(a != b)
    return int(differing[0]) if len(differing) else length


class PrefixCache:
    """An index of blocks whose contents are known. Who holds a block, and when it is used for something else, is the
    pool's business: the owner of both calls forget() for a block that is handed out anew.
    """

    def __init__(self, max_evicted: int) -> None:
        """max_evicted: how many forgotten digests to remember, for explanations."""
        self._blocks: dict[int, CachedBlock] = {}
        self._by_digest: dict[bytes, int] = {}
        self._children: dict[tuple[bytes, int], dict[int, None]] = {}  # by parent and first token, oldest first
        self._evicted: OrderedDict[bytes, None] = OrderedDict()
        self._max_evicted = max_evicted

    def __len__(self) -> int:
        return len(self._blocks)

    def __contains__(self, block_id: int) -> bool:
        return block_id in self._blocks

    def insert(self, block_id: int, block: CachedBlock) -> None:
        """Makes a full block known; the first with its digest stays the one that is found."""
        assert block_id not in self._blocks, block_id
        digest = block.digest
        if digest in self._by_digest:
            return
        self._blocks[block_id] = block
        self._by_digest[digest] = block_id
        key = (block.parent, block.token_ids[0])
        siblings = self._children.get(key)
        if siblings is None:
            self._children[key] = {block_id: None}
        else:
            siblings[block_id] = None
        self._evicted.pop(digest, None)

    def forget(self, block_id: int) -> None:
        """The block is about to hold something else."""
        block = self._blocks.pop(block_id, None)
        if block is None:
            return
        del self._by_digest[block.digest]
        key = (block.parent, block.token_ids[0])
        del self._children[key][block_id]
        if not self._children[key]:
            del self._children[key]
        self._evicted[block.digest] = None
        if len(self._evicted) > self._max_evicted:
            self._evicted.popitem(last=False)

    def clear(self) -> None:
        """Forgets every block."""
        for block_id in list(self._blocks):
            self.forget(block_id)

    def find(self, digests: Sequence[bytes]) -> list[int]:
        """Blocks of the longest known beginning."""
        found = []
        for block_id in map(self._by_digest.get, digests):
            if block_id is None:
                break
            found.append(block_id)
        return found

    def was_evicted(self, digest: bytes) -> bool:
        """Whether a block with this digest was known and has been forgotten, as far as is remembered."""
        return digest in self._evicted

    def closest(self, parent: bytes, token_ids: Sequence[int], before_step: int | None = None) -> Closest | None:
        """Of the blocks after parent, the one that shares the most first tokens; None if none shares any.

        before_step: only blocks computed in an earlier step.
        """
        if not token_ids:
            return None
        most, best_id = 0, None
        candidates = self._children.get((parent, token_ids[0]), {})
        for block_id in itertools.islice(reversed(candidates), MAX_CANDIDATES):
            block = self._blocks[block_id]
            is_old = before_step is None or block.step < before_step
            # One that shares more than the best so far has the same token where that one differs.
            if is_old and most < len(token_ids) and block.token_ids[most] == token_ids[most]:
                num_tokens = num_common(block.token_ids, token_ids)
                if num_tokens > most:
                    most, best_id = num_tokens, block_id
        return None if best_id is None else Closest(best_id, most)

    def check(self) -> None:
        """Asserts that the indices agree; for tests and idle moments."""
        assert {block.digest: block_id for block_id, block in self._blocks.items()} == self._by_digest
        listed = [block_id for children in self._children.values() for block_id in children]
        assert sorted(listed) == sorted(self._blocks)


def num_common(first: Sequence[int], second: Sequence[int]) -> int:
    """How many leading tokens two sequences share."""
    num_tokens = 0
    for a, b in zip(first, second, strict=False):
        if a != b:
            break
        num_tokens += 1
    return num_tokens
