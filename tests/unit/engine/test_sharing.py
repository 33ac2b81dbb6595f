"""Steps whose rows share a beginning: what is found, and that tokens stay the same. What a GPU gains is elsewhere."""

import random
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from pallas_kernels.paged_attention import cascade
from paxpage import LLM
from paxpage.engine.batch import StepShape, pack, unpack, unpack_shared
from paxpage.engine.kv_cache_manager import KVCacheManager
from paxpage.engine.model_runner import choose_shape, step_shapes
from paxpage.engine.request import FinishReason, Request
from paxpage.engine.sampling_params import SamplingParams
from paxpage.engine.scheduler import ScheduledBatch, Scheduler
from paxpage.engine.sharing import PrefixFinder
from tests.helpers.checkpoints import TINY, write_checkpoint
from tests.helpers.engines import greedy_params, tokens
from tests.unit.engine.host_side import (
    FakeModel,
    Sizes,
    assert_ended,
    make_request,
    make_scheduler,
    without_type_checks,
)

RULES = cascade.Rules(
    block_size=16, chunk_queries=5, window_rows=64, num_lanes=2, min_saved_tokens=100, min_saved_tiles=-100
)
SMALL_RULES = RULES._replace(block_size=4, chunk_queries=3, window_rows=16, min_saved_tokens=10)
PROMPTS = [[50 + j % 400 for j in range(150)] + [7 + j] * 5 for j in range(6)]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    """TINY for six requests of 256 tokens."""
    folder: Path = tmp_path_factory.mktemp("sharing") / "TINY"
    write_checkpoint(folder, TINY)
    with LLM(str(folder), dtype="float32", max_num_seqs=6, max_model_len=256, show_progress=False) as llm:
        yield llm


class NotingFinder(PrefixFinder):
    """Keeps what it finds in mixed steps."""

    def __init__(self) -> None:
        super().__init__(RULES, 512)
        self.in_mixed_steps: list[cascade.SharedPrefixes] = []

    def find(self, batch: ScheduledBatch, manager: KVCacheManager) -> cascade.SharedPrefixes | None:
        found = super().find(batch, manager)
        if found is not None and not batch.is_decode:
            self.in_mixed_steps.append(found)
        return found


def test_steps_with_shared_prefixes_give_the_same_tokens(tiny: LLM) -> None:
    """A mixed step with chunks behind a shared prefix, then decode steps.

    Where there is no kernel for them, as here, they are left unread.
    """
    params, runner = greedy_params(8), tiny.engine.runner
    expected = tokens(tiny, PROMPTS, params)
    shapes, finder = list(runner.shapes), NotingFinder()
    decode = next(shape for shape in shapes if shape.is_decode and shape.num_rows == 6)
    mixed = shapes[-1]
    pieces = {decode: cascade.MAX_PIECES, mixed: cascade.max_pieces(mixed.num_tokens, RULES)}
    runner.shapes[:] = [shape._replace(max_pieces=count) for shape, count in pieces.items()]
    runner._finder = finder
    try:
        for shape in runner.shapes:
            runner._compiled[shape] = runner._compile(shape)
        tiny.engine.reset_prefix_cache()
        assert tokens(tiny, PROMPTS, params) == expected
    finally:
        runner.shapes[:], runner._finder = shapes, None
    assert [shared.num_tokens.tolist() for shared in finder.in_mixed_steps] == [[0] + [144] * 5]


def test_shapes_for_sharing_are_chosen_where_something_is_shared() -> None:
    shapes = step_shapes("gpu", 256, 1024, 8, sharing_rules=RULES)
    assert [shape.num_rows for shape in shapes if shape.is_decode and shape.max_pieces] == [64, 128, 192, 256]
    mixed = [shape for shape in shapes if not shape.is_decode]
    assert [shape.max_pieces for shape in mixed] == [32 + shape.num_tokens // 64 for shape in mixed]
    assert len(shapes) == len(set(shapes))
    assert step_shapes("gpu", 256, 8192, 8, sharing_rules=RULES)[-1].max_pieces == 0, "more than 4096 tokens"
    without = {shape._replace(max_pieces=0) for shape in shapes}
    assert without == set(step_shapes("gpu", 256, 1024, 8))
    scheduler = make_scheduler(Sizes(num_usable=200, max_num_seqs=40))
    for index in range(40):
        scheduler.add(make_request(str(index), 1))
    scheduler.update(scheduler.schedule(), [7] * 40)
    batch = scheduler.schedule()
    assert choose_shape(shapes, batch) == StepShape(64, 64, 8)
    assert choose_shape(shapes, batch, has_shared=True) == StepShape(64, 64, 8, cascade.MAX_PIECES)


def test_what_decode_steps_share_is_looked_for_when_their_requests_change() -> None:
    """And in every mixed step, where rows of more than one query share nothing."""
    scheduler = make_scheduler(Sizes(num_usable=200, max_num_seqs=8, max_num_batched_tokens=300, has_prefix_cache=True))
    for index, prompt in enumerate(PROMPTS):
        scheduler.add(make_request(str(index), prompt, max_tokens=20))
    finder = PrefixFinder(RULES, max_tokens=60)

    def find() -> tuple[cascade.SharedPrefixes | None, int]:
        batch = scheduler.schedule()
        found = finder.find(batch, scheduler.manager)
        scheduler.update(batch, [7] * len(batch.rows))
        return found, len(batch.rows)

    find()
    while scheduler.waiting or any(request.num_computed_tokens < 155 for request in scheduler.running):
        find()
    (first, num_rows), (second, _) = find(), find()
    assert first is second and first is not None and num_rows == 6
    assert first.num_tokens.tolist() == [144] * 6 and first.place.tolist() == list(range(6))
    scheduler.add(make_request("late", [9] * 40))
    mixed, num_rows = find()
    assert mixed is not None and num_rows == 7 and mixed.num_tokens.tolist() == [144] * 6 + [0]
    again, num_rows = find()
    assert again is not None and again is not first and num_rows == 7 and again.num_tokens.tolist() == [144] * 6 + [0]
    scheduler.add(make_request("long", [8] * 70))
    assert find() == (None, 8), "a step of more than 60 tokens"
    anew, num_rows = find()
    assert anew is not None and anew is not again and num_rows == 8 and anew.num_tokens.tolist() == [144] * 6 + [0] * 2


def test_prefill_chunks_behind_blocks_that_are_cached_share_them() -> None:
    """Beside rows of one query with the same blocks, which share them too, and a prompt of which nothing is cached."""
    scheduler = make_scheduler(
        Sizes(num_usable=200, max_num_seqs=16, max_num_batched_tokens=300, has_prefix_cache=True)
    )
    for index, prompt in enumerate(PROMPTS):
        scheduler.add(make_request(str(index), prompt, max_tokens=20))
    while scheduler.waiting or any(request.num_computed_tokens < 155 for request in scheduler.running):
        batch = scheduler.schedule()
        scheduler.update(batch, [7] * len(batch.rows))
    for index in range(5):
        scheduler.add(make_request(f"late {index}", [*PROMPTS[0][:150], *[30 + index] * 15]))
    scheduler.add(make_request("other", [9] * 40))
    batch = scheduler.schedule()
    shared = PrefixFinder(RULES, max_tokens=300).find(batch, scheduler.manager)
    assert [row.num_tokens for row in batch.rows] == [1] * 6 + [21] * 5 + [40] and shared is not None
    assert shared.num_tokens.tolist() == [144] * 11 + [0]
    assert shared.place[6:11].tolist() == [6 + 21 * index - (64 if index > 2 else 0) for index in range(5)]


@pytest.mark.parametrize("seed", range(6))
def test_what_is_found_in_any_traffic_holds_each_rows_own_tokens(seed: int) -> None:
    """With preemption, samples of one prompt, scored prompts, aborts, and a cache that is forgotten or lost."""
    draw = random.Random(seed)
    scheduler = make_scheduler(Sizes([60, 200][seed % 2], 4, 24, [60, 300][seed // 2 % 2], has_prefix_cache=True))
    model, finder = FakeModel(scheduler.manager), PrefixFinder(SMALL_RULES, max_tokens=10**6)
    beginnings = [[draw.randrange(500) for _ in range(length)] for length in (40, 90)]
    requests: list[Request] = []
    num_found = 0
    with without_type_checks():
        while len(requests) < 500 or scheduler.has_unfinished_requests():
            if len(requests) < 500 and draw.random() < 0.5:
                requests += add_some(scheduler, draw, draw.choice(beginnings), len(requests))
            disturb(scheduler, model, draw)
            batch = scheduler.schedule()
            found = finder.find(batch, scheduler.manager) if batch.rows else None
            sampled = model.run(batch) if batch.rows else []
            num_found += 0 if found is None else num_that_share(found, batch, model)
            for row in batch.rows:
                if row.request.is_scored and row.is_sampled:
                    scheduler.end_scoring(row.request)
            scheduler.update(batch, sampled)
    assert num_found > 500
    assert_ended([request for request in requests if request.finish_reason is not FinishReason.ABORT])


def add_some(scheduler: Scheduler, draw: random.Random, beginning: list[int], number: int) -> list[Request]:
    """Requests with one beginning, each alone, or samples of one prompt."""
    added: list[Request] = []
    for _ in range(6):
        prompt = beginning + [draw.randrange(500) for _ in range(draw.choice([0, 1, 3, 20]))]
        params = SamplingParams(prompt_logprobs=0) if draw.random() < 0.2 else None
        names = [f"{number + len(added) + index}" for index in range(1 if params else draw.choice([1, 3]))]
        samples = [make_request(name, prompt, draw.choice([1, 4, 20]), params=params) for name in names]
        scheduler.add_samples(samples)
        added += samples
    return added


def disturb(scheduler: Scheduler, model: FakeModel, draw: random.Random) -> None:
    """Now and then."""
    if draw.random() < 0.05 and scheduler.running:
        scheduler.finish(draw.choice(scheduler.running), FinishReason.ABORT)
    if draw.random() < 0.03:
        scheduler.manager.forget_cached()
    if draw.random() < 0.03:
        scheduler.preempt_all()
        model.forget()


def num_that_share(found: cascade.SharedPrefixes, batch: ScheduledBatch, model: FakeModel) -> int:
    """How many rows do; in the blocks by way of which their pieces are read are their own tokens."""
    manager, sharing = model.manager, np.flatnonzero(found.num_tokens)
    for index in sharing.tolist():
        num_tokens, row = int(found.num_tokens[index]), batch.rows[index]
        assert num_tokens <= row.start
        pieces = found.pieces[found.first_piece[index] :: max(1, found.stride[index])][: found.num_pieces[index]]
        positions = np.arange(num_tokens)
        for reader in set(pieces[:, 0].tolist()):
            blocks = manager.block_tables[batch.rows[reader].request.row, positions // manager.block_size]
            slots = blocks * manager.block_size + positions % manager.block_size
            assert model.slots[slots].tolist() == row.request.token_ids[:num_tokens]
    return len(sharing)


def test_shared_prefixes_travel_with_the_batch() -> None:
    """Padded with zeros; rows with the most keys of their own come first."""
    scheduler = make_scheduler(Sizes(num_usable=60, max_num_seqs=4, max_num_batched_tokens=200, has_prefix_cache=True))
    prompts = [[1] * 3, [2] * 33, [3] * 40]
    for index, prompt in enumerate(prompts):
        scheduler.add(make_request(str(index), prompt))
    scheduler.update(scheduler.schedule(), [7] * 3)
    batch, shape = scheduler.schedule(), StepShape(5, 5, 60, 2)
    rows = np.array([[0, 32, 32], [0, 0, 0], [0, 1, 1], [0, 1, 2], [0, 1, 1]], np.int32)
    shared = cascade.SharedPrefixes(np.array([[1, 0, 32, 0, 1], [0] * 5], np.int32), np.array([1], np.int32), *rows)
    packed = pack(batch, shape, scheduler.manager, shared)
    assert packed.shape == (shape.num_ints,)
    for field, values in zip(unpack_shared(packed, shape), shared, strict=True):
        assert field[: len(values)].tolist() == values.tolist() and not field[len(values) :].any()
    inputs, plain = unpack(packed, shape), unpack(pack(batch, shape._replace(max_pieces=0), scheduler.manager), shape)
    assert inputs.seq_lens.tolist() == [4, 34, 41, 0, 0] and inputs.row_order.tolist() == [2, 0, 1, 3, 4]
    assert np.array_equal(inputs.block_tables, plain.block_tables)
    assert not any(field.any() for field in unpack_shared(pack(batch, shape, scheduler.manager), shape))
