"""Blocks, reference counts, the free list."""

import time
from collections.abc import Callable

import pytest

from paxpage.engine.block_pool import NULL_BLOCK, BlockPool
from tests.unit.engine.host_side import without_type_checks


def test_all_but_the_null_block_can_be_had() -> None:
    pool = BlockPool(5)
    assert (pool.num_usable, pool.num_free) == (4, 4)
    assert sorted(pool.allocate(4)) == [1, 2, 3, 4]
    assert pool.num_free == 0
    assert [pool.ref_count(block_id) for block_id in range(5)] == [0, 1, 1, 1, 1]
    pool.check()


def test_the_least_recently_freed_block_goes_first() -> None:
    pool = BlockPool(6)
    first, second = pool.allocate(2), pool.allocate(2)
    pool.release(second)
    pool.release(first[::-1])
    assert pool.allocate(5) == [5, *second, *first[::-1]]


def test_a_released_block_is_free_at_once() -> None:
    pool = BlockPool(3)
    (block_id, _) = pool.allocate(2)
    pool.release([block_id])
    assert (pool.num_free, pool.ref_count(block_id)) == (1, 0)
    assert pool.allocate(1) == [block_id]
    pool.check()


def test_no_more_than_there_is() -> None:
    pool = BlockPool(3)
    with pytest.raises(AssertionError, match="3, 2"):
        pool.allocate(3)
    assert pool.num_free == 2


@pytest.mark.parametrize("block_id", [NULL_BLOCK, 2])
def test_only_a_held_block_is_released(block_id: int) -> None:
    pool = BlockPool(3)
    pool.allocate(1)
    with pytest.raises(AssertionError, match=f"block {block_id} is released but not held"):
        pool.release([block_id])


def test_a_block_is_released_once() -> None:
    pool = BlockPool(3)
    block_ids = pool.allocate(1)
    with pytest.raises(AssertionError, match="not held"):
        pool.release(block_ids * 2)


def test_a_pool_has_room_for_a_token() -> None:
    with pytest.raises(AssertionError):
        BlockPool(1)


def test_a_block_is_free_when_its_last_reference_goes() -> None:
    pool = BlockPool(4)
    shared, own = pool.allocate(2)
    pool.acquire([shared])
    pool.acquire([shared])
    assert (pool.ref_count(shared), pool.num_free) == (3, 1)
    pool.release([shared, own])
    pool.release([shared])
    assert (pool.ref_count(shared), pool.num_free) == (1, 2)
    pool.check()
    pool.release([shared])
    assert (pool.ref_count(shared), pool.num_free) == (0, 3)
    pool.check()


def test_a_free_block_is_taken_back() -> None:
    pool = BlockPool(5)
    block_ids = pool.allocate(4)
    pool.release(block_ids)
    pool.acquire([block_ids[1]])
    assert (pool.ref_count(block_ids[1]), pool.num_free) == (1, 3)
    pool.check()
    assert pool.allocate(3) == [block_ids[0], *block_ids[2:]], "nobody else is given it"


def test_a_block_that_was_taken_back_goes_last_again() -> None:
    pool = BlockPool(5)
    block_ids = pool.allocate(4)
    pool.release(block_ids)
    pool.acquire(block_ids[:2])
    pool.release([block_ids[1], block_ids[0]])
    assert pool.allocate(4) == [block_ids[2], block_ids[3], block_ids[1], block_ids[0]]


def test_a_block_that_stays_referenced_keeps_no_place_in_the_free_list() -> None:
    pool = BlockPool(4)
    block_ids = pool.allocate(3)
    pool.acquire(block_ids)
    pool.release(block_ids)
    pool.release(block_ids[::-1])
    assert pool.allocate(3) == block_ids[::-1]


def test_the_null_block_is_never_acquired() -> None:
    with pytest.raises(AssertionError):
        BlockPool(3).acquire([NULL_BLOCK])


def seconds_of_a_round(num_blocks: int) -> float:
    """With half the pool free: from the middle of the free list, from its front, back to its end."""
    pool = BlockPool(num_blocks + 1)
    held = pool.allocate(num_blocks // 2)
    start_s = time.process_time()
    for index in range(5_000):
        middle = num_blocks - num_blocks // 4 + index % (num_blocks // 8)
        if pool.ref_count(middle) == 0:
            pool.acquire([middle])
            pool.release([middle])
        pool.release([held[index % len(held)]])
        held[index % len(held)] = pool.allocate(1)[0]
    return time.process_time() - start_s


def test_time_does_not_grow_with_the_number_of_blocks() -> None:
    with without_type_checks():
        few, many = (min(seconds_of_a_round(size) for _ in range(5)) for size in (1_000, 100_000))
    assert many < 5 * few, (few, many)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda pool: pool._free.update({NULL_BLOCK: None}), "null block"),
        (lambda pool: pool._ref_counts.__setitem__(NULL_BLOCK, 1), "null block"),
        (lambda pool: pool._ref_counts.__setitem__(next(iter(pool._free)), 1), "free and referenced"),
        (lambda pool: pool._free.popitem(), "lost"),
        (lambda pool: pool._ref_counts.__setitem__(1, 0), "lost"),
    ],
)
def test_check_sees_damage(damage: Callable[[BlockPool], object], message: str) -> None:
    pool = BlockPool(6)
    pool.allocate(2)
    pool.check()
    damage(pool)
    with pytest.raises(AssertionError, match=message):
        pool.check()
