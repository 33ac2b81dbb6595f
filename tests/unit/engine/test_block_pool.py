"""Blocks, reference counts, the free list."""

from collections.abc import Callable

import pytest

from paxpage.engine.block_pool import NULL_BLOCK, BlockPool


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


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda pool: pool._free.append(pool._free[0]), "free twice"),
        (lambda pool: pool._free.append(NULL_BLOCK), "null block"),
        (lambda pool: pool._ref_counts.__setitem__(NULL_BLOCK, 1), "null block"),
        (lambda pool: pool._ref_counts.__setitem__(pool._free[0], 1), "free and referenced"),
        (lambda pool: pool._free.popleft(), "lost"),
    ],
)
def test_check_sees_damage(damage: Callable[[BlockPool], object], message: str) -> None:
    pool = BlockPool(6)
    pool.allocate(2)
    pool.check()
    damage(pool)
    with pytest.raises(AssertionError, match=message):
        pool.check()
