"""The host side put together for tests, and a stand-in for the model whose cache can be read back."""

import contextlib
import zlib
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import jaxtyping
import numpy as np

from paxpage.config import SchedulerConfig
from paxpage.engine.batch import StepInputs, StepShape, pack, unpack
from paxpage.engine.block_pool import BlockPool
from paxpage.engine.kv_cache_manager import KVCacheManager
from paxpage.engine.prefix_cache import PrefixCache, root_digest
from paxpage.engine.request import PromptDigests, Request, RequestStatus
from paxpage.engine.sampling_params import SamplingParams
from paxpage.engine.scheduler import ScheduledBatch, Scheduler

UNWRITTEN = -1
VOCAB_SIZE = 512


@contextlib.contextmanager
def without_type_checks() -> Iterator[None]:
    """For runs of very many steps, which checked annotations make 40 times slower."""
    before = jaxtyping.config.jaxtyping_disable
    jaxtyping.config.update("jaxtyping_disable", True)
    try:
        yield
    finally:
        jaxtyping.config.update("jaxtyping_disable", before)


class Sizes(NamedTuple):
    """What a scheduler is made of. num_usable: blocks beside the null block; max_model_len 0: all that they hold."""

    num_usable: int = 64
    block_size: int = 16
    max_num_seqs: int = 16
    max_num_batched_tokens: int = 64
    max_model_len: int = 0
    policy: str = "fcfs"
    has_prefix_cache: bool = False
    num_tokens_beside_decodes: int | None = None


def make_scheduler(sizes: Sizes | None = None) -> Scheduler:
    sizes = sizes or Sizes()
    max_model_len = sizes.max_model_len or sizes.num_usable * sizes.block_size
    limits = SchedulerConfig(
        sizes.max_num_seqs, sizes.max_num_batched_tokens, max_model_len, sizes.policy, sizes.num_tokens_beside_decodes
    )
    pool = BlockPool(sizes.num_usable + 1)
    cache = PrefixCache(sizes.num_usable) if sizes.has_prefix_cache else None
    return Scheduler(limits, KVCacheManager(pool, sizes.block_size, sizes.max_num_seqs, max_model_len, cache))


def make_request(
    request_id: str,
    prompt: int | Sequence[int],
    max_tokens: int = 4,
    *,
    priority: int = 0,
    params: SamplingParams | None = None,
    salt: str | None = None,
) -> Request:
    """prompt: token ids, or how many (ids 1, 2, 3, ...)."""
    token_ids = list(range(1, prompt + 1)) if isinstance(prompt, int) else list(prompt)
    params, digests = params or SamplingParams(), PromptDigests(root_digest(salt), ())
    return Request(request_id, token_ids, params, max_tokens=max_tokens, priority=priority, digests=digests)


def next_token(sequence: Sequence[int]) -> int:
    """What the stand-in says after a sequence: every token of it counts, and its place."""
    return zlib.crc32(np.asarray(sequence, np.int32).tobytes()) % VOCAB_SIZE


def outputs_alone(request: Request) -> list[int]:
    """The stand-in's output for the request's prompt with nobody else there."""
    sequence = request.token_ids[: request.num_prompt_tokens]
    for _ in range(request.max_tokens):
        sequence.append(next_token(sequence))
    return sequence[request.num_prompt_tokens :]


class FakeModel:
    """Keeps token ids where a model keeps keys and values.

    A row's next token is a checksum of the whole sequence that the row reads through its block table, so a token that
    was lost, misplaced or overwritten by another request changes the output.
    """

    def __init__(self, manager: KVCacheManager) -> None:
        self.manager = manager
        self.slots = np.full(manager.pool.num_blocks * manager.block_size, UNWRITTEN, np.int32)
        self.sampled = np.zeros(0, np.int32)  # by the last step, as the next one finds it on the device

    def forget(self) -> None:
        """Loses the cache's contents, as a failed step does."""
        self.slots[:] = UNWRITTEN

    def run(self, batch: ScheduledBatch, sampled: Sequence[int] | None = None) -> list[int]:
        """One step: writes the batch's tokens, then gives one token for each row (or those that the test says)."""
        blocks = self.slots.reshape(-1, self.manager.block_size)
        for copies in [np.array(batch.copies)] if batch.copies else []:
            blocks[copies[:, 1]] = blocks[copies[:, 0]]
        inputs = self.inputs(batch)
        is_known = inputs.token_ids >= 0
        unknown = self.sampled[-1 - inputs.token_ids[~is_known]]
        self.slots[inputs.slot_mapping[is_known]] = inputs.token_ids[is_known]
        self.slots[inputs.slot_mapping[~is_known]] = unknown
        if sampled is None:
            readers = [index if row.fork_index < 0 else row.fork_index for index, row in enumerate(batch.rows)]
            sampled = [next_token(self.sequence(inputs, index)) for index in readers]
        self.sampled = np.array(sampled, np.int32)
        return self.sampled.tolist()

    def inputs(self, batch: ScheduledBatch) -> StepInputs:
        """The batch packed into a shape with some padding of both kinds; a decode shape if it has one token a row."""
        num_rows, blocks_per_row = len(batch.rows) + 1, self.manager.block_tables.shape[1]
        num_tokens = num_rows if batch.is_decode else max(batch.num_tokens, num_rows) + 2
        shape = StepShape(num_tokens, num_rows, blocks_per_row)
        return unpack(pack(batch, shape, self.manager), shape)

    def sequence(self, inputs: StepInputs, index: int) -> list[int]:
        """The tokens that row index attends to."""
        positions = np.arange(inputs.seq_lens[index])
        block_size = self.manager.block_size
        blocks = inputs.block_tables[index, positions // block_size]
        return self.slots[blocks * block_size + positions % block_size].tolist()


def step(scheduler: Scheduler, model: FakeModel) -> ScheduledBatch:
    """Schedules, runs and updates once."""
    batch = scheduler.schedule()
    scheduler.update(batch, model.run(batch))
    return batch


def drain(scheduler: Scheduler, model: FakeModel, *, is_async: bool = False, max_steps: int = 10_000) -> int:
    """Steps until nobody is left; returns how many it took. is_async: one is scheduled before the last one's tokens."""
    in_flight: tuple[ScheduledBatch, list[int]] | None = None
    with without_type_checks():
        for num_steps in range(max_steps):
            if not scheduler.has_unfinished_requests():
                return num_steps
            batch = scheduler.schedule()
            launched = (batch, model.run(batch)) if batch.rows else None
            arriving, in_flight = (in_flight, launched) if is_async else (launched, None)
            if arriving is not None:
                scheduler.update(*arriving)
    raise AssertionError(f"requests are left after {max_steps} steps")


def assert_idle(scheduler: Scheduler) -> None:
    """Nobody is left and everything has come back; what is cached may still be found."""
    manager, cache = scheduler.manager, scheduler.manager.prefix_cache
    manager.pool.check()
    if cache is not None:
        cache.check()
    assert not (manager._coming or manager._copies or any(manager._is_borrowed) or scheduler._leaders)
    assert not scheduler.has_unfinished_requests()
    assert manager.pool.num_free == manager.pool.num_usable
    assert scheduler.usage() == (0, 0)
    assert not manager.block_tables.any() and not any(manager.num_blocks_of_row)


def assert_ended(requests: Sequence[Request]) -> None:
    """All ended with all their tokens, and these are the ones that each gets alone."""
    for request in requests:
        assert request.status is RequestStatus.FINISHED, request.request_id
        assert request.output_token_ids == outputs_alone(request), request.request_id
