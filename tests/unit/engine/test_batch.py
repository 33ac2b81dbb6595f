"""Scheduled batches as padded arrays, against a recomputation in plain Python."""

import random
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from paxpage.engine.batch import (
    MAX_SUPPRESSED,
    NO_TOKEN,
    NUM_SAMPLING_INTS,
    StepInputs,
    StepShape,
    needs_logprobs,
    needs_sampler,
    pack,
    pack_sampling,
    slots_of,
    unpack,
)
from paxpage.engine.kv_cache_manager import KVCacheManager
from paxpage.engine.request import Request
from paxpage.engine.sampling_params import MAX_STOP_TOKEN_IDS, SamplingParams
from paxpage.engine.scheduler import ScheduledBatch, ScheduledRow
from tests.unit.engine.host_side import FakeModel, Sizes, make_request, make_scheduler


def padded(values: list[int], length: int, padding: int = 0) -> list[int]:
    return values + [padding] * (length - len(values))


def expected_inputs(batch: ScheduledBatch, shape: StepShape, manager: KVCacheManager) -> dict[str, Any]:
    """What pack is to write, one token after the other."""
    token_ids, positions, slots, ends, seq_lens, last, tables = [], [], [], [0], [], [], []
    for row in batch.rows:
        request, start, num_tokens = row.request, row.start, row.num_tokens
        table = manager.block_ids(request)
        for position in range(start, start + num_tokens):
            is_known = position < len(request.token_ids)
            token_ids.append(request.token_ids[position] if is_known else -1 - row.previous_index)
            positions.append(position)
            slots.append(table[position // manager.block_size] * manager.block_size + position % manager.block_size)
        ends.append(len(token_ids))
        seq_lens.append(start + num_tokens)
        last.append(len(token_ids) - 1)
        tables.append(padded(table, shape.blocks_per_row))
    return {
        "token_ids": padded(token_ids, shape.num_tokens),
        "positions": padded(positions, shape.num_tokens),
        "slot_mapping": padded(slots, shape.num_tokens),
        "query_start_loc": padded(ends, shape.num_rows + 1, len(token_ids)),
        "seq_lens": padded(seq_lens, shape.num_rows),
        "logits_indices": padded(last, shape.num_rows),
        "row_order": sorted(range(shape.num_rows), key=lambda row: -padded(seq_lens, shape.num_rows)[row]),
        "block_tables": tables + [[0] * shape.blocks_per_row] * (shape.num_rows - len(tables)),
    }


def as_lists(inputs: StepInputs) -> dict[str, Any]:
    return {name: value.tolist() for name, value in inputs._asdict().items()}


def test_a_small_batch_number_by_number() -> None:
    scheduler = make_scheduler(Sizes(num_usable=6, block_size=4, max_num_seqs=4, max_num_batched_tokens=8))
    first, second = make_request("a", [50, 51, 52]), make_request("b", [60, 61, 62, 63, 64, 65, 66])
    scheduler.add(first)
    scheduler.add(second)
    scheduler.update(scheduler.schedule(), [53, 0])
    shape = StepShape(6, 3, 6)
    inputs = unpack(pack(scheduler.schedule(), shape, scheduler.manager), shape)
    assert as_lists(inputs) == {
        "token_ids": [53, 65, 66, 0, 0, 0],
        "positions": [3, 5, 6, 0, 0, 0],
        "slot_mapping": [1 * 4 + 3, 3 * 4 + 1, 3 * 4 + 2, 0, 0, 0],
        "query_start_loc": [0, 1, 3, 3],
        "seq_lens": [4, 7, 0],
        "logits_indices": [0, 2, 0],
        "row_order": [1, 0, 2],
        "block_tables": [[1, 0, 0, 0, 0, 0], [2, 3, 0, 0, 0, 0], [0, 0, 0, 0, 0, 0]],
    }


@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize("seed", range(4))
def test_pack_against_a_plain_recomputation(seed: int, is_async: bool) -> None:
    rng = random.Random(seed)
    sizes = Sizes(
        num_usable=rng.randint(8, 30), block_size=rng.choice([4, 8, 16]), max_num_seqs=rng.randint(1, 8),
        max_num_batched_tokens=rng.randint(8, 40),
    )  # fmt: skip
    scheduler = make_scheduler(sizes)
    manager, model = scheduler.manager, FakeModel(scheduler.manager)
    for index in range(15):
        prompt = [rng.randrange(512) for _ in range(rng.randint(1, 20))]
        scheduler.add(make_request(str(index), prompt, rng.randint(1, 12)))
    num_steps, num_unknown, in_flight = 0, 0, None
    while scheduler.has_unfinished_requests():
        batch = scheduler.schedule()
        launched = None
        if batch.rows:
            shape = StepShape(
                batch.num_tokens + rng.randint(0, 5), len(batch.rows) + rng.randint(0, 3), manager.block_tables.shape[1]
            )
            packed = pack(batch, shape, manager)
            assert (packed.dtype, packed.shape) == (np.int32, (shape.num_ints,))
            assert as_lists(unpack(packed, shape)) == expected_inputs(batch, shape, manager)
            launched = (batch, model.run(batch))
            num_unknown += sum(row.previous_index >= 0 for row in batch.rows)
        arriving, in_flight = (in_flight, launched) if is_async else (launched, None)
        if arriving is not None:
            scheduler.update(*arriving)
        num_steps += 1
    assert num_steps > 20 and (num_unknown > 20) == is_async


def test_a_table_narrower_than_the_shape_is_padded_with_the_null_block() -> None:
    scheduler = make_scheduler(Sizes(num_usable=3, block_size=4))
    scheduler.add(make_request("a", 6))
    batch, shape = scheduler.schedule(), StepShape(8, 2, 5)
    inputs = unpack(pack(batch, shape, scheduler.manager), shape)
    assert as_lists(inputs) == expected_inputs(batch, shape, scheduler.manager)


def test_unpack_gives_the_same_on_the_device() -> None:
    shape = StepShape(5, 3, 4)
    packed = np.arange(shape.num_ints, dtype=np.int32)
    on_host, on_device = unpack(packed, shape), unpack(jnp.asarray(packed), shape)
    assert as_lists(on_host) == as_lists(on_device)
    assert [value.shape for value in on_host] == [(5,), (5,), (5,), (4,), (3,), (3,), (3,), (3, 4)]
    assert np.concatenate([value.ravel() for value in on_host]).tolist() == packed.tolist()


def test_decode_shapes_have_one_query_a_row() -> None:
    assert StepShape(8, 8, 4).is_decode and not StepShape(16, 8, 4).is_decode


def test_slots() -> None:
    tables = np.array([[3, 7, 0], [2, 0, 0]], np.int32)
    slots = slots_of(tables, np.array([0, 0, 1]), np.array([3, 4, 1], np.int32), 4)
    assert (slots.dtype, slots.tolist()) == (np.int32, [15, 28, 9])


def test_no_token_goes_to_the_null_block() -> None:
    with pytest.raises(AssertionError, match="no block"):
        slots_of(np.array([[3, 0]], np.int32), np.array([0]), np.array([4]), 4)


# Sampling options


def row_of(params: SamplingParams, *, seed: int = 0, num_outputs: int = 0, eos: tuple[int, ...] = ()) -> ScheduledRow:
    request = Request("a", [1, 2, 3], params, max_tokens=99, seed=seed, eos_token_ids=frozenset(eos))
    for _ in range(num_outputs):
        request.append(9)
    return ScheduledRow(request, 0, request.num_tokens, is_sampled=True, previous_index=-1)


def floats(packed: np.ndarray) -> list[list[float]]:
    return packed[:, :3].copy().view(np.float32).tolist()


def test_options_as_integers() -> None:
    params = SamplingParams(temperature=0.5, top_p=0.25, min_p=0.125, top_k=7)
    packed = pack_sampling([row_of(params, seed=2**32 + 5, num_outputs=4)], 1)
    assert (packed.dtype, packed.shape) == (np.int32, (1, NUM_SAMPLING_INTS))
    assert floats(packed) == [[0.5, 0.25, 0.125]]
    assert packed[0, 3:].tolist() == [7, 5, 1, 7, *[NO_TOKEN] * MAX_SUPPRESSED]


@pytest.mark.parametrize(
    ("seed", "low", "high"),
    [(0, 0, 0), (-1, -1, -1), (2**31, -(2**31), 0), (2**32, 0, 1), (2**63 - 1, -1, 2**31 - 1), (-(2**63), 0, -(2**31))],
)
def test_a_seed_is_two_words(seed: int, low: int, high: int) -> None:
    packed = pack_sampling([row_of(SamplingParams(), seed=seed)], 1)
    assert packed[0, 4:6].tolist() == [low, high]


@pytest.mark.parametrize("top_k", [0, -1])
def test_without_top_k_all_are_kept(top_k: int) -> None:
    assert pack_sampling([row_of(SamplingParams(top_k=top_k))], 1)[0, 3] == NO_TOKEN


@pytest.mark.parametrize("temperature", [0.0, 1e-12, 1e-8])
def test_tiny_temperatures_travel_as_zero(temperature: float) -> None:
    assert floats(pack_sampling([row_of(SamplingParams(temperature=temperature))], 1))[0][0] == 0.0


def test_a_token_in_flight_counts() -> None:
    """The position and min_tokens of a row whose last token only the device knows."""
    params = SamplingParams(min_tokens=2, stop_token_ids=[30])
    row = row_of(params, num_outputs=1)
    row.request.num_tokens += 1
    row = row._replace(start=4, num_tokens=1, previous_index=0)
    packed = pack_sampling([row], 1)[0]
    assert (packed[6], packed[7]) == (5, NO_TOKEN)
    assert pack_sampling([row._replace(start=3)], 1)[0, 6:8].tolist() == [4, 30]


def test_one_requests_row_changes_no_others() -> None:
    first = row_of(SamplingParams(min_tokens=1, stop_token_ids=[30]), seed=1)
    second = row_of(SamplingParams(temperature=0.5, top_k=3), seed=2)
    alone = [pack_sampling([row], 1)[0].tolist() for row in (first, second)]
    assert pack_sampling([second, first], 2).tolist() == alone[::-1]
    assert pack_sampling([first, second], 2).tolist() == alone


def test_padding_rows_are_greedy() -> None:
    packed = pack_sampling([row_of(SamplingParams())] * 2, 5)
    assert packed.shape[0] == 5
    assert floats(packed)[2:] == [[0.0, 0.0, 0.0]] * 3
    assert packed[2:, 3].tolist() == [1, 1, 1]


def test_ends_are_suppressed_before_min_tokens() -> None:
    params = SamplingParams(min_tokens=2, stop_token_ids=[30, 4])
    early = pack_sampling([row_of(params, num_outputs=1, eos=(7, 4))], 1)[0, 7:].tolist()
    late = pack_sampling([row_of(params, num_outputs=2, eos=(7, 4))], 1)[0, 7:].tolist()
    assert early == padded([4, 7, 30], MAX_SUPPRESSED, NO_TOKEN)
    assert late == [NO_TOKEN] * MAX_SUPPRESSED


def test_ignored_ends_are_not_suppressed() -> None:
    params = SamplingParams(min_tokens=2, ignore_eos=True, stop_token_ids=[30])
    assert pack_sampling([row_of(params, eos=(7,))], 1)[0, 7:9].tolist() == [30, NO_TOKEN]


def test_as_many_stop_tokens_as_are_allowed_fit() -> None:
    params = SamplingParams(min_tokens=2, stop_token_ids=range(100, 100 + MAX_STOP_TOKEN_IDS))
    packed = pack_sampling([row_of(params, eos=tuple(range(16)))], 1)
    assert packed[0, 7:].tolist() == [*range(16), *range(100, 100 + MAX_STOP_TOKEN_IDS)]


@pytest.mark.parametrize(
    ("params", "expected"),
    [
        (SamplingParams(temperature=0.0), (False, False)),
        (SamplingParams(temperature=1e-9), (False, False)),
        (SamplingParams(), (True, False)),
        (SamplingParams(temperature=0.0, min_tokens=1), (True, False)),
        (SamplingParams(temperature=0.0, logprobs=0), (True, True)),
    ],
)
def test_who_needs_the_sampler(params: SamplingParams, expected: tuple[bool, bool]) -> None:
    rows = [row_of(SamplingParams(temperature=0.0)), row_of(params)]
    assert (needs_sampler(rows), needs_logprobs(rows)) == expected


def test_a_row_that_gets_no_token_needs_no_sampler() -> None:
    rows = [row_of(SamplingParams(logprobs=2))._replace(is_sampled=False)]
    assert not needs_sampler(rows) and not needs_logprobs(rows)
