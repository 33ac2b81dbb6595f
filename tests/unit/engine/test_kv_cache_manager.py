"""Rows and block tables that grow with their requests."""

import pytest

from paxpage.engine.block_pool import NULL_BLOCK, BlockPool
from paxpage.engine.kv_cache_manager import KVCacheManager
from paxpage.engine.request import Request
from tests.unit.engine.host_side import make_request


def make_manager(
    num_usable: int = 8, block_size: int = 4, max_num_seqs: int = 3, max_model_len: int = 21
) -> KVCacheManager:
    return KVCacheManager(BlockPool(num_usable + 1), block_size, max_num_seqs, max_model_len)


def with_row(manager: KVCacheManager, num_tokens: int) -> Request:
    request = make_request(f"{num_tokens} tokens", num_tokens)
    manager.assign_row(request)
    return request


def test_tables_hold_the_longest_request() -> None:
    manager = make_manager(max_num_seqs=3, max_model_len=21)
    assert manager.block_tables.shape == (3, 6)
    assert (manager.block_tables == NULL_BLOCK).all()


@pytest.mark.parametrize(("num_tokens", "num_blocks"), [(0, 0), (1, 1), (4, 1), (5, 2), (8, 2), (9, 3)])
def test_blocks_for_tokens(num_tokens: int, num_blocks: int) -> None:
    assert make_manager().num_blocks_for(num_tokens) == num_blocks


def test_a_table_grows_only_at_block_borders_and_only_at_its_end() -> None:
    manager = make_manager()
    request = with_row(manager, 12)
    tables = []
    for num_tokens in range(1, 13):
        assert manager.allocate(request, num_tokens)
        tables.append(manager.block_ids(request))
    assert [len(table) for table in tables] == [1] * 4 + [2] * 4 + [3] * 4
    assert all(table == tables[-1][: len(table)] for table in tables)
    assert manager.block_tables[request.row].tolist() == [*tables[-1], 0, 0, 0]


def test_nothing_is_taken_when_the_pool_is_short() -> None:
    manager = make_manager(num_usable=3)
    first, second = with_row(manager, 8), with_row(manager, 8)
    assert manager.allocate(first, 8)
    before = (manager.num_blocks_of_row[:], manager.pool.num_free)
    assert not manager.allocate(second, 5)
    assert (manager.num_blocks_of_row, manager.pool.num_free) == before
    assert manager.block_ids(second) == []
    assert manager.allocate(second, 4)


def test_release_gives_back_the_last_block_first() -> None:
    manager = make_manager(num_usable=3)
    request = with_row(manager, 12)
    manager.allocate(request, 12)
    row, block_ids = request.row, manager.block_ids(request)
    manager.release(request)
    assert request.row == -1
    assert manager.block_ids(request) == []
    assert (manager.block_tables[row] == NULL_BLOCK).all() and manager.num_blocks_of_row[row] == 0
    assert manager.pool.allocate(3) == block_ids[::-1]


def test_a_row_serves_again_and_its_old_table_is_gone() -> None:
    manager = make_manager(max_num_seqs=1)
    long, short = make_request("long", 12), make_request("short", 2)
    manager.assign_row(long)
    manager.allocate(long, 12)
    manager.release(long)
    manager.assign_row(short)
    manager.allocate(short, 2)
    assert short.row == 0
    assert (manager.block_tables[0] > 0).tolist() == [True, False, False, False, False, False]


def test_rows_are_distinct_and_assigned_once() -> None:
    manager = make_manager(max_num_seqs=3)
    requests = [with_row(manager, 2) for _ in range(3)]
    assert {request.row for request in requests} == {0, 1, 2}
    with pytest.raises(AssertionError):
        manager.assign_row(requests[0])


def test_missing_blocks_are_those_for_all_present_tokens() -> None:
    manager = make_manager()
    request = make_request("a", 9)
    assert manager.num_missing_blocks(request) == 3
    manager.assign_row(request)
    manager.allocate(request, 5)
    assert manager.num_missing_blocks(request) == 1
    request.append(7)
    manager.allocate(request, 10)
    assert manager.num_missing_blocks(request) == 0


def test_block_ids_are_a_copy() -> None:
    manager = make_manager()
    request = with_row(manager, 4)
    manager.allocate(request, 4)
    manager.block_ids(request).append(99)
    assert 99 not in manager.block_ids(request)
