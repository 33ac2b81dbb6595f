"""Digests of blocks, and the index of blocks by digest and by beginning."""

import hashlib
import itertools
import struct
import time
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import pytest

from paxpage.engine import prefix_cache
from paxpage.engine.prefix_cache import (
    MAX_CANDIDATES,
    CachedBlock,
    Closest,
    PrefixCache,
    PromptHasher,
    block_digests,
    num_common,
    root_digest,
)
from tests.unit.engine.host_side import without_type_checks

ROOT = root_digest(None)


def digests(token_ids: list[int], block_size: int = 4, root: bytes = ROOT) -> list[bytes]:
    return list(block_digests(root, token_ids, block_size))


def cached(token_ids: list[int], parent: bytes = ROOT, step: int = 0) -> CachedBlock:
    (digest,) = block_digests(parent, token_ids, len(token_ids))
    return CachedBlock(digest, parent, tuple(token_ids), step)


def make_cache(*blocks: CachedBlock, max_evicted: int = 8) -> PrefixCache:
    """With blocks 1, 2, 3, ..."""
    cache = PrefixCache(max_evicted)
    for block_id, block in enumerate(blocks, 1):
        cache.insert(block_id, block)
    cache.check()
    return cache


# Digests


def test_a_digest_is_256_bits_of_sha256_over_the_parent_and_the_tokens() -> None:
    parent = ROOT
    for digest, block in zip(
        digests([7, 8, 9, 2**32 - 1, 1, 2, 3, 4]), ([7, 8, 9, 2**32 - 1], [1, 2, 3, 4]), strict=True
    ):
        parent = hashlib.sha256(parent + struct.pack("=4I", *block)).digest()
        assert digest == parent and len(digest) * 8 == 256


@pytest.mark.parametrize(("num_tokens", "num_blocks"), [(0, 0), (1, 0), (3, 0), (4, 1), (5, 1), (8, 2), (11, 2)])
def test_only_full_blocks_have_digests(num_tokens: int, num_blocks: int) -> None:
    assert len(digests(list(range(num_tokens)))) == num_blocks


def test_digests_are_a_chain() -> None:
    whole = digests(list(range(20)))
    assert digests(list(range(11))) == whole[:2]
    assert list(block_digests(whole[1], list(range(8, 20)), 4)) == whole[2:]
    assert digests([99, *range(1, 20)])[1:] != whole[1:], "all that came before counts"
    assert not set(digests([99, *range(1, 20)])) & set(whole)


def test_order_and_place_count() -> None:
    """openvinotoolkit/openvino.genai#3722: a block was found by a hash of its own tokens."""
    a, b, c, d = (
        digests([*first * 16, *second * 16, 7], 16)
        for first, second in (([100], [100]), ([200], [200]), ([100], [200]), ([200], [100]))
    )
    assert a[0] == c[0] and b[0] == d[0]
    assert len({a[0], a[1], b[0], b[1], c[1], d[1]}) == 6


def test_salts_share_nothing() -> None:
    roots = [root_digest(salt) for salt in (None, "", "a", "b", "ab", "salt", "\ud800", "\u00e9", "e\u0301")]
    assert len(set(roots)) == len(roots) and {len(root) for root in roots} == {32}
    blocks = [digest for root in roots for digest in digests(list(range(8)), root=root)]
    assert len(set(blocks)) == 2 * len(roots)
    assert root_digest("a") == root_digest("a")


def test_equal_blocks_one_after_the_other_differ() -> None:
    assert len(set(digests([5] * 400))) == 100


# Blocks by digest


def test_a_beginning_is_found_as_far_as_it_is_known() -> None:
    first, second, third = digests(list(range(12)))
    cache = make_cache(cached([0, 1, 2, 3]), cached([4, 5, 6, 7], first))
    assert cache.find([first, second, third]) == [1, 2]
    assert cache.find([first]) == [1]
    assert cache.find([]) == [] and cache.find([third, first]) == []
    assert (len(cache), 1 in cache, 3 in cache) == (2, True, False)


def test_nothing_is_found_behind_a_gap() -> None:
    first, second = digests(list(range(8)))
    cache = make_cache(cached([0, 1, 2, 3]), cached([4, 5, 6, 7], first))
    cache.forget(1)
    assert cache.find([first, second]) == [] and cache.find([second]) == [2]
    cache.insert(3, cached([0, 1, 2, 3]))
    assert cache.find([first, second]) == [3, 2]
    cache.check()


def test_the_first_block_with_a_digest_stays() -> None:
    block = cached([0, 1, 2, 3])
    cache = make_cache(block, block)
    assert (cache.find([block.digest]), len(cache), 2 in cache) == ([1], 1, False)
    cache.forget(2)
    assert cache.find([block.digest]) == [1]
    cache.check()


def test_a_known_block_is_not_made_known_again() -> None:
    cache = make_cache(cached([0, 1, 2, 3]))
    with pytest.raises(AssertionError, match="1"):
        cache.insert(1, cached([4, 5, 6, 7]))


def test_what_is_forgotten_is_remembered_as_evicted_for_a_while() -> None:
    blocks = [cached([index] * 4) for index in range(4)]
    cache = make_cache(*blocks, max_evicted=2)
    for block_id in (1, 2, 3):
        cache.forget(block_id)
    assert [cache.was_evicted(block.digest) for block in blocks] == [False, True, True, False]
    cache.insert(1, blocks[1])
    assert not cache.was_evicted(blocks[1].digest) and cache.find([blocks[1].digest]) == [1]


def test_forgetting_an_unknown_block_is_nothing() -> None:
    cache = make_cache(cached([0, 1, 2, 3]))
    cache.forget(9)
    assert len(cache) == 1


def test_clear_forgets_everything() -> None:
    blocks = [cached([index] * 4) for index in range(3)]
    cache = make_cache(*blocks)
    cache.clear()
    assert len(cache) == 0 and all(cache.was_evicted(block.digest) for block in blocks)
    assert cache.closest(ROOT, [1, 1]) is None
    cache.check()


# Blocks by beginning


def test_the_closest_block_shares_most_first_tokens() -> None:
    cache = make_cache(cached([1, 2, 3, 4]), cached([1, 2, 9, 9]), cached([1, 8, 8, 8]), cached([2, 2, 3, 4]))
    assert cache.closest(ROOT, [1, 2, 9, 4]) == Closest(2, 3)
    assert cache.closest(ROOT, [1, 2, 3]) == Closest(1, 3)
    assert cache.closest(ROOT, [2]) == Closest(4, 1)
    assert cache.closest(ROOT, [3, 2, 3, 4]) is None
    assert cache.closest(ROOT, []) is None


def test_of_equals_the_newest_is_closest() -> None:
    cache = make_cache(cached([1, 2, 3, 4]), cached([1, 2, 5, 6]), cached([1, 7, 7, 7]))
    assert cache.closest(ROOT, [1, 2, 0, 0]) == Closest(2, 2)


def test_only_blocks_after_the_same_parent_are_close() -> None:
    first = cached([1, 2, 3, 4])
    cache = make_cache(first, cached([5, 6, 7, 8], first.digest), cached([5, 6, 0, 0], root_digest("a")))
    assert cache.closest(first.digest, [5, 6, 0, 0]) == Closest(2, 2)
    assert cache.closest(ROOT, [5, 6, 0, 0]) is None
    assert cache.closest(root_digest("b"), [5, 6, 0, 0]) is None


def test_a_forgotten_block_is_not_close() -> None:
    cache = make_cache(cached([1, 2, 3, 4]), cached([1, 2, 9, 9]))
    cache.forget(1)
    assert cache.closest(ROOT, [1, 2, 3, 4]) == Closest(2, 2)
    cache.forget(2)
    assert cache.closest(ROOT, [1, 2, 3, 4]) is None


def test_only_blocks_of_earlier_steps_are_close_when_that_is_asked() -> None:
    cache = make_cache(cached([1, 2, 3, 4], step=5), cached([1, 2, 3, 9], step=7))
    assert cache.closest(ROOT, [1, 2, 3, 9], before_step=7) == Closest(1, 3)
    assert cache.closest(ROOT, [1, 2, 3, 9], before_step=8) == Closest(2, 4)
    assert cache.closest(ROOT, [1, 2, 3, 9], before_step=5) is None


def test_a_beginning_is_compared_with_so_many_of_the_newest() -> None:
    cache = make_cache(cached([1, 2, 3, 4]), *(cached([1, 9, 9, index]) for index in range(MAX_CANDIDATES)))
    assert cache.closest(ROOT, [1, 2, 3, 4]) == Closest(MAX_CANDIDATES + 1, 1)
    cache.forget(7)
    assert cache.closest(ROOT, [1, 2, 3, 4]) == Closest(1, 4)


@pytest.mark.parametrize(
    ("first", "second", "number"),
    [([], [1], 0), ([1], [], 0), ([1, 2], [1, 2], 2), ([1, 2], [1, 2, 3], 2), ([1, 2, 3], [1, 5, 3], 1), ([4], [5], 0)],
)
def test_leading_tokens_in_common(first: list[int], second: list[int], number: int) -> None:
    assert num_common(first, second) == num_common(tuple(second), first) == number


@pytest.mark.parametrize(
    "damage",
    [
        lambda cache: cache._by_digest.popitem(),
        lambda cache: cache._children.popitem(),
        lambda cache: cache._blocks.popitem(),
        lambda cache: cache._by_digest.__setitem__(b"?", 1),
        lambda cache: cache._by_digest.__setitem__(next(iter(cache._by_digest)), 2),
    ],
)
def test_check_sees_damage(damage: Callable[[PrefixCache], object]) -> None:
    cache = make_cache(cached([1, 2, 3, 4]), cached([1, 2, 9, 9]))
    damage(cache)
    with pytest.raises(AssertionError):
        cache.check()


# Time


def seconds_of_a_round(num_blocks: int) -> float:
    """The oldest block is forgotten, a new one comes, both kinds of search; all after one parent and first token."""
    cache = PrefixCache(num_blocks)
    blocks = [CachedBlock(struct.pack("32xQ", i), ROOT, (1, i, 2, 3), 0) for i in range(num_blocks + 2_000)]
    for block_id, block in enumerate(blocks[:num_blocks]):
        cache.insert(block_id, block)
    start_s = time.process_time()
    for block_id, block in enumerate(blocks[num_blocks:]):
        cache.forget(block_id % num_blocks)
        cache.insert(block_id % num_blocks, block)
        cache.find([block.digest, b"unknown"])
        cache.closest(ROOT, [1, 5])
    return time.process_time() - start_s


def test_time_does_not_grow_with_the_number_of_blocks() -> None:
    with without_type_checks():
        few, many = (min(seconds_of_a_round(size) for _ in range(3)) for size in (1_000, 100_000))
    assert many < 4 * few, (few, many)


def test_digests_take_time_in_proportion_to_the_tokens() -> None:
    """Each token is hashed once, whatever came before."""
    with without_type_checks():
        start_s = time.process_time()
        last = next(itertools.islice(block_digests(ROOT, list(range(160_000)), 16), 9_999, None))
        took_s = time.process_time() - start_s
    assert len(last) == 32 and took_s < 1, took_s


@pytest.mark.parametrize("block_size", [1, 4, 16])
def test_a_hasher_of_prompts_gives_what_hashing_each_gives(block_size: int) -> None:
    hasher, roots = PromptHasher(block_size), [root_digest(salt) for salt in (None, "a")]
    rng = np.random.default_rng(block_size)
    base = rng.integers(0, 2**31, 70).tolist()
    for _ in range(300):
        kept = int(rng.integers(0, 71))
        prompt = base[:kept] + rng.integers(0, 2**31, int(rng.integers(0, 40))).tolist()
        root = roots[int(rng.integers(0, 2))]
        assert hasher.digests(root, prompt) == list(block_digests(root, prompt, block_size))
        if rng.random() < 0.3:
            base = (prompt + base)[:70]


def test_what_two_prompts_have_in_common_is_hashed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    hasher, hashed = PromptHasher(16), []

    def count(parent: bytes, token_ids: Sequence[int], block_size: int) -> Iterator[bytes]:
        hashed.append(len(token_ids))
        return block_digests(parent, token_ids, block_size)

    monkeypatch.setattr(prefix_cache, "block_digests", count)
    for last in (1, 2):
        hasher.digests(ROOT, [*range(160), last])
    hasher.digests(root_digest("other"), [*range(160), 2])
    assert hashed == [161, 1, 161]
