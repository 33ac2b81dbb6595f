"""Rows and block tables that grow with their requests."""

import pytest

from paxpage.engine.block_pool import NULL_BLOCK, BlockPool
from paxpage.engine.kv_cache_manager import NO_PREFIX, BlockCopy, BlockReport, KVCacheManager, Prefix
from paxpage.engine.prefix_cache import PrefixCache, root_digest
from paxpage.engine.request import PromptDigests, Request
from paxpage.engine.sampling_params import SamplingParams
from tests.unit.engine.host_side import make_request


def make_manager(
    num_usable: int = 8,
    block_size: int = 4,
    max_num_seqs: int = 3,
    max_model_len: int = 21,
    *,
    has_prefix_cache: bool = False,
) -> KVCacheManager:
    cache = PrefixCache(num_usable) if has_prefix_cache else None
    return KVCacheManager(BlockPool(num_usable + 1), block_size, max_num_seqs, max_model_len, cache)


def admit(manager: KVCacheManager, request: Request) -> Request:
    """With what is found of its beginning."""
    manager.next_step()
    manager.admit(request, manager.find_prefix(request))
    return request


def with_row(manager: KVCacheManager, num_tokens: int) -> Request:
    return admit(manager, make_request(f"{num_tokens} tokens", num_tokens))


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
    admit(manager, long)
    manager.allocate(long, 12)
    manager.release(long)
    admit(manager, short)
    manager.allocate(short, 2)
    assert short.row == 0
    assert (manager.block_tables[0] > 0).tolist() == [True, False, False, False, False, False]


def test_rows_are_distinct_and_assigned_once() -> None:
    manager = make_manager(max_num_seqs=3)
    requests = [with_row(manager, 2) for _ in range(3)]
    assert {request.row for request in requests} == {0, 1, 2}
    with pytest.raises(AssertionError):
        admit(manager, requests[0])


def test_missing_blocks_are_those_for_all_present_tokens() -> None:
    manager = make_manager()
    request = admit(manager, make_request("a", 9))
    assert manager.num_missing_blocks(request) == 3
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


# Sharing


def caching(num_usable: int = 12, max_num_seqs: int = 4) -> KVCacheManager:
    return make_manager(num_usable, max_num_seqs=max_num_seqs, max_model_len=40, has_prefix_cache=True)


def computed(manager: KVCacheManager, token_ids: list[int], salt: str | None = None) -> Request:
    """A running request all of whose tokens have been computed."""
    request = admit(manager, make_request(str(token_ids), token_ids, salt=salt))
    compute(manager, request, len(token_ids))
    return request


def compute(manager: KVCacheManager, request: Request, num_tokens: int) -> None:
    """The first num_tokens tokens, in one step."""
    manager.next_step()
    assert manager.allocate(request, num_tokens)
    request.num_computed_tokens = num_tokens
    if num_tokens >= request.next_block_end:
        manager.cache_blocks(request)


def prefix_of(manager: KVCacheManager, token_ids: list[int], salt: str | None = None) -> Prefix:
    """What a newcomer with these tokens would find in the next step."""
    manager.next_step()
    return manager.find_prefix(make_request("newcomer", token_ids, salt=salt))


A = [1, 2, 3, 4, 5, 6, 7, 8, 9, 10]


def test_without_a_prefix_cache_nothing_is_found() -> None:
    manager = make_manager()
    request = with_row(manager, 9)
    compute(manager, request, 9)
    assert manager.find_prefix(make_request("b", 9)) == NO_PREFIX
    manager.forget_cached()
    manager.release(request)


def test_full_blocks_are_found_while_their_owner_runs_and_after() -> None:
    manager = caching()
    request = computed(manager, A)
    blocks = manager.block_ids(request)
    assert prefix_of(manager, [*A, 11, 12]) == Prefix(blocks[:2], 8, NULL_BLOCK, None)
    manager.release(request)
    assert prefix_of(manager, [*A, 11, 12]) == Prefix(blocks[:2], 8, NULL_BLOCK, None)


def test_a_block_that_is_filled_later_is_found_from_then_on() -> None:
    manager = caching()
    request = computed(manager, A)
    for token_id in (11, 12, 13):
        request.append(token_id)
    compute(manager, request, 11)
    assert len(prefix_of(manager, [*A, 11, 12, 13]).block_ids) == 2
    compute(manager, request, 12)
    assert len(prefix_of(manager, [*A, 11, 12, 13]).block_ids) == 3


@pytest.mark.parametrize("num_tokens", [4, 8])
def test_the_last_token_is_left_to_compute(num_tokens: int) -> None:
    manager = caching()
    request = computed(manager, A)
    blocks = manager.block_ids(request)
    num_whole = num_tokens // 4 - 1
    assert prefix_of(manager, A[:num_tokens]) == Prefix(blocks[:num_whole], num_tokens - 1, blocks[num_whole], None)


def test_a_prompt_of_one_token_finds_nothing() -> None:
    manager = caching()
    computed(manager, A)
    assert prefix_of(manager, A[:1]) == NO_PREFIX


def test_part_of_a_block_is_found_and_copied() -> None:
    manager = caching()
    owner = computed(manager, A)
    source = manager.block_ids(owner)[1]
    request = make_request("b", [*A[:6], 99, 98, 97])
    manager.next_step()
    prefix = manager.find_prefix(request)
    assert prefix == Prefix(manager.block_ids(owner)[:1], 6, source, None)
    num_free = manager.pool.num_free
    assert manager.num_blocks_taken(request, prefix) == 2
    manager.admit(request, prefix)
    first, target = manager.block_ids(request)
    assert (first, request.num_computed_tokens) == (prefix.block_ids[0], 6)
    assert target not in manager.block_ids(owner)
    assert (manager.pool.ref_count(source), manager.pool.num_free) == (2, num_free - 1)
    assert manager.take_copies() == [BlockCopy(source, target)] and manager.take_copies() == []
    assert manager.pool.ref_count(source) == 1


def test_a_source_nobody_holds_is_kept_until_it_is_copied() -> None:
    manager = caching(num_usable=3)
    manager.release(computed(manager, A[:8]))
    request = make_request("b", [1, 2, 99])
    manager.next_step()
    manager.admit(request, manager.find_prefix(request))
    assert (manager.pool.num_free, request.num_computed_tokens) == (1, 2)
    ((source, _),) = manager.take_copies()
    assert manager.pool.num_free == 2 and source in (manager.prefix_cache or ())


def test_nothing_is_copied_when_the_request_could_not_be_held_beside_the_source() -> None:
    manager = caching(num_usable=3)
    manager.release(computed(manager, A[:8]))
    request = make_request("b", [1, 2, *range(90, 99)])
    manager.next_step()
    prefix = manager.find_prefix(request)
    assert prefix.num_tokens == 2 and prefix.source != NULL_BLOCK
    manager.admit(request, prefix)
    assert (request.num_computed_tokens, manager.block_ids(request), manager.take_copies()) == (0, [], [])
    assert manager.allocate(request, 11)


def test_what_this_step_computes_is_shared_but_not_copied() -> None:
    """Every layer's keys and values are written before any are read; copies are made before that."""
    manager = caching()
    owner = computed(manager, A)
    same_step = make_request("b", [*A[:6], 99])
    assert manager.find_prefix(same_step) == Prefix(manager.block_ids(owner)[:1], 4, NULL_BLOCK, None)
    manager.next_step()
    assert manager.find_prefix(same_step).num_tokens == 6


def test_salts_find_nothing_of_each_other() -> None:
    manager = caching()
    computed(manager, A, "a")
    assert prefix_of(manager, [*A, 1], "a").num_tokens == 8
    assert prefix_of(manager, [*A, 1], "b") == prefix_of(manager, [*A, 1]) == NO_PREFIX


def test_digests_that_were_made_before_are_used() -> None:
    manager = caching()
    computed(manager, A)
    digests = PromptDigests(root_digest(None), [b"x" * 32, b"y" * 32])
    request = Request("b", [*A, 11], SamplingParams(), max_tokens=1, digests=digests)
    assert manager.find_prefix(request).block_ids == []


def test_blocks_are_evicted_in_the_order_of_their_last_use_last_of_a_sequence_first() -> None:
    manager = caching(num_usable=8)
    a, b, c = ([first, *range(20, 31)] for first in (1, 2, 3))
    for prompt in (a, b, a):
        manager.release(computed(manager, prompt))
        manager.take_copies()
    computed(manager, c)
    assert verdicts(manager, b) == ["hit", "evicted", "evicted"]
    assert verdicts(manager, a)[:2] == ["hit", "hit"]
    assert prefix_of(manager, b).num_tokens == 4


def test_a_block_that_is_used_for_something_else_is_not_found() -> None:
    manager = caching(num_usable=3)
    manager.release(computed(manager, A[:8]))
    computed(manager, list(range(50, 61)))
    assert prefix_of(manager, [*A[:8], 9]) == NO_PREFIX
    assert verdicts(manager, A[:8]) == ["evicted", "evicted"]


def test_a_newcomer_awaits_a_block_that_a_running_request_is_about_to_compute() -> None:
    manager = caching()
    owner = admit(manager, make_request("a", A))
    assert manager.find_prefix(make_request("b", [*A, 11])).awaited == owner.block_digests[0]
    compute(manager, owner, 5)
    newcomer = make_request("c", [*A, 11])
    assert manager.find_prefix(newcomer) == Prefix(manager.block_ids(owner)[:1], 0, NULL_BLOCK, owner.block_digests[1])
    newcomer.awaited = owner.block_digests[1]
    compute(manager, owner, 7)
    assert manager.find_prefix(newcomer).awaited == owner.block_digests[1]
    compute(manager, owner, 10)
    assert manager.find_prefix(newcomer) == Prefix(manager.block_ids(owner)[:2], 8, NULL_BLOCK, None)


def test_nobody_awaits_a_block_of_a_request_that_is_gone() -> None:
    manager = caching()
    owner = admit(manager, make_request("a", A))
    newcomer = make_request("b", [*A, 11])
    newcomer.awaited = manager.find_prefix(newcomer).awaited
    manager.release(owner)
    assert newcomer.awaited is not None and manager.find_prefix(newcomer) == NO_PREFIX


def test_forgotten_blocks_are_not_found_and_what_follows_from_them_does_not_become_known() -> None:
    """As when weights have changed: the running request goes on with keys and values of the old ones."""
    manager = caching()
    half, whole = admit(manager, make_request("half", A)), computed(manager, list(range(50, 59)))
    compute(manager, half, 4)
    manager.forget_cached()
    assert prefix_of(manager, [*A, 11]) == NO_PREFIX, "and nothing is awaited"
    compute(manager, half, 10)
    for request in (half, whole):
        manager.release(request)
    assert manager.prefix_cache is not None and len(manager.prefix_cache) == 0
    computed(manager, A)
    assert prefix_of(manager, [*A, 11]).num_tokens == 8


def test_samples_that_fork_after_blocks_were_forgotten_make_nothing_known() -> None:
    manager = caching()
    leader = computed(manager, A)
    manager.forget_cached()
    sample = make_request("b", A)
    manager.fork(sample, leader)
    for token_id in range(11, 20):
        sample.append(token_id)
    compute(manager, sample, 18)
    manager.release(sample)
    assert len(manager.prefix_cache or ()) == 0


# Forks


@pytest.mark.parametrize("has_prefix_cache", [False, True])
def test_a_fork_shares_the_prompts_blocks(has_prefix_cache: bool) -> None:
    manager = make_manager(has_prefix_cache=has_prefix_cache)
    leader = with_row(manager, 10)
    compute(manager, leader, 10)
    sample = make_request("sample", 10)
    manager.fork(sample, leader)
    blocks = manager.block_ids(leader)
    assert manager.block_ids(sample) == blocks and sample.num_computed_tokens == 10
    assert [manager.pool.ref_count(block_id) for block_id in blocks] == [2, 2, 2]
    manager.release(leader)
    assert [manager.pool.ref_count(block_id) for block_id in blocks] == [1, 1, 1]
    manager.release(sample)
    assert manager.pool.num_free == manager.pool.num_usable


def forked(num_prompt: int) -> tuple[KVCacheManager, Request, Request]:
    manager = make_manager()
    leader, sample = with_row(manager, num_prompt), make_request("sample", num_prompt)
    compute(manager, leader, num_prompt)
    manager.fork(sample, leader)
    return manager, leader, sample


def test_a_partly_filled_block_is_copied_by_the_second_writer() -> None:
    manager, leader, sample = forked(10)
    shared = manager.block_ids(leader)
    compute(manager, leader, 11)
    assert manager.block_ids(leader) == shared and manager.take_copies() == []
    compute(manager, sample, 11)
    *whole, own = manager.block_ids(sample)
    assert whole == shared[:2] and own not in shared and manager.block_ids(leader) == shared
    assert manager.pool.ref_count(shared[2]) == 2, "until it is copied"
    assert manager.take_copies() == [BlockCopy(shared[2], own)]
    assert manager.pool.ref_count(shared[2]) == 1
    compute(manager, sample, 12)
    assert manager.block_ids(sample) == [*whole, own] and manager.take_copies() == []


def test_nothing_is_copied_when_the_prompt_ends_with_a_block() -> None:
    manager, leader, sample = forked(8)
    for request in (leader, sample):
        compute(manager, request, 9)
    assert manager.take_copies() == []
    first, second = manager.block_ids(leader), manager.block_ids(sample)
    assert first[:2] == second[:2] and first[2] != second[2]


def test_the_last_holder_of_a_partly_filled_block_writes_into_it() -> None:
    manager, leader, sample = forked(10)
    blocks = manager.block_ids(leader)
    manager.release(leader)
    compute(manager, sample, 11)
    assert manager.block_ids(sample) == blocks and manager.take_copies() == []


def test_a_block_that_has_become_known_is_not_written_by_its_last_holder() -> None:
    manager = caching()
    leader, sample = computed(manager, A), make_request("sample", A)
    manager.fork(sample, leader)
    for token_id in (11, 12):
        leader.append(token_id)
    compute(manager, leader, 12)
    blocks = manager.block_ids(leader)
    manager.release(leader)
    compute(manager, sample, 11)
    assert manager.take_copies() == [BlockCopy(blocks[2], manager.block_ids(sample)[2])]
    assert len(prefix_of(manager, [*A, 11, 12, 13]).block_ids) == 3


def test_a_copy_needs_a_free_block() -> None:
    manager = make_manager(num_usable=3)
    leader, sample = with_row(manager, 10), make_request("sample", 10)
    compute(manager, leader, 10)
    manager.fork(sample, leader)
    before = (manager.block_ids(sample), manager.num_slots)
    assert not manager.allocate(sample, 11)
    assert (manager.block_ids(sample), manager.num_slots) == before and manager.take_copies() == []


# Why a block is found or not


def verdicts(manager: KVCacheManager, token_ids: list[int], salt: str | None = None) -> list[str]:
    return [report.verdict for report in manager.explain(token_ids, root_digest(salt))]


def test_explain_hit_differs_and_miss() -> None:
    manager = caching()
    blocks = manager.block_ids(computed(manager, A))
    assert list(manager.explain([*A[:6], 99, 8, 9, 10, 11, 12, 13], root_digest(None))) == [
        BlockReport(0, "hit", blocks[0], None),
        BlockReport(1, "differs", blocks[1], 6),
        BlockReport(2, "miss", None, None),
    ]
    assert list(manager.explain([1, 99, 3, 4], root_digest(None))) == [BlockReport(0, "differs", blocks[0], 1)]
    assert list(manager.explain([99, 2, 3, 4], root_digest(None))) == [BlockReport(0, "miss", None, None)]
    assert list(manager.explain([1, 2, 3], root_digest(None))) == []
    assert verdicts(manager, A[:8], "a") == ["miss", "miss"]


def test_explain_off() -> None:
    manager = make_manager()
    assert list(manager.explain(A, root_digest(None))) == [
        BlockReport(0, "off", None, None),
        BlockReport(1, "off", None, None),
    ]


def test_explain_coming() -> None:
    manager = caching()
    half = admit(manager, make_request("half", A))
    assert verdicts(manager, A) == ["coming", "coming"]
    compute(manager, half, 5)
    assert verdicts(manager, A) == ["hit", "coming"]
    manager.release(half)
    assert verdicts(manager, A) == ["hit", "miss"]


def test_explain_evicted_by_a_reset() -> None:
    manager = caching()
    computed(manager, A)
    manager.forget_cached()
    assert verdicts(manager, A) == ["evicted", "evicted"]


def test_explain_says_of_a_block_that_nothing_leads_to_that_it_is_missed() -> None:
    """The block before it is gone, so it is not found; it does not differ either."""
    manager = caching()
    first = computed(manager, A[:4])
    second = admit(manager, make_request("b", A))
    compute(manager, second, 10)
    assert manager.prefix_cache is not None
    manager.prefix_cache.forget(manager.block_ids(first)[0])
    assert list(manager.explain(A, root_digest(None))) == [
        BlockReport(0, "evicted", None, None),
        BlockReport(1, "miss", None, None),
    ]
    assert prefix_of(manager, [*A, 11]).block_ids == []
