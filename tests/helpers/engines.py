"""Driving an LLM in tests: requests by token ids, limits changed for a while, and the idle state afterwards."""

import contextlib
import dataclasses
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from paxpage import LLM, CompletionOutput, RequestOutput, SamplingParams
from paxpage.engine.block_pool import NULL_BLOCK
from paxpage.engine.engine import Engine


def greedy_params(max_tokens: int) -> SamplingParams:
    """Temperature 0, end of sequence ignored."""
    return SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)


def ids(prompt: Sequence[int]) -> dict[str, list[int]]:
    """A prompt of token ids, as LLM.generate takes it."""
    return {"prompt_token_ids": list(prompt)}


def complete(
    llm: LLM, prompts: Sequence[Sequence[int]], params: SamplingParams | Sequence[SamplingParams]
) -> list[CompletionOutput]:
    """The first sample of each prompt, all prompts given at once."""
    outputs = llm.generate([ids(prompt) for prompt in prompts], params, use_tqdm=False)
    return [output.outputs[0] for output in outputs]


def tokens(
    llm: LLM, prompts: Sequence[Sequence[int]], params: SamplingParams | Sequence[SamplingParams]
) -> list[list[int]]:
    """Output token ids of each prompt, all prompts given at once."""
    return [output.token_ids for output in complete(llm, prompts, params)]


def tokens_alone(llm: LLM, prompt: Sequence[int], params: SamplingParams) -> list[int]:
    """REF: the request with nobody else, on an empty cache, prefix caching off."""
    assert_idle(llm.engine)
    with prefix_caching_off(llm):
        return tokens(llm, [prompt], params)[0]


@contextlib.contextmanager
def prefix_caching_off(llm: LLM) -> Iterator[None]:
    """Nothing is found and nothing is kept, whatever the idle LLM was built for; its prefix cache is empty then."""
    manager = llm.engine._manager
    before = manager.prefix_cache
    llm.reset_prefix_cache()
    manager.prefix_cache = None
    try:
        yield
    finally:
        manager.prefix_cache = before


@contextlib.contextmanager
def token_budget(llm: LLM, num_tokens: int) -> Iterator[None]:
    """Steps of at most num_tokens tokens, fewer than what the LLM was built for: longer prompts come in chunks."""
    scheduler = llm.engine.scheduler
    before = scheduler.config
    scheduler.config = dataclasses.replace(before, max_num_batched_tokens=num_tokens)
    try:
        yield
    finally:
        scheduler.config = before


@contextlib.contextmanager
def steps_in_flight(llm: LLM, num_steps: int) -> Iterator[None]:
    """Asynchronous scheduling with 1, synchronous with 0, whatever the LLM was built for."""
    engine = llm.engine
    before = engine._max_in_flight
    engine._max_in_flight = num_steps
    try:
        yield
    finally:
        engine._max_in_flight = before


def assert_idle(engine: Engine) -> None:
    """Nobody waits or runs, every block is free, once, and unreferenced, and no table names one.

    Blocks in the prefix cache are among the free ones: they may be found, and may be handed out.
    """
    manager, scheduler, cache = engine._manager, engine.scheduler, engine._manager.prefix_cache
    manager.pool.check()
    assert manager.pool.num_free == manager.pool.num_usable
    assert not any(manager.pool.ref_count(block_id) for block_id in range(manager.pool.num_blocks))
    if cache is not None:
        cache.check()
        assert len(cache) <= manager.pool.num_usable and NULL_BLOCK not in cache
    assert not (manager._coming or manager._copies or any(manager._is_borrowed)), "something is still to come"
    assert not (scheduler.waiting or scheduler.running or scheduler.ending or scheduler._leaders)
    assert not (engine._groups or engine._samples or engine._num_structured)
    assert not manager.block_tables.any() and not any(manager.num_blocks_of_row)
    usage = scheduler.usage()
    assert (usage.allocated, usage.holding) == (0, 0)
    stats = engine.stats()
    assert (stats.num_running, stats.num_waiting, stats.kv_cache_usage) == (0, 0, 0)


def cached_contents(engine: Engine) -> dict[bytes, np.ndarray]:
    """Keys and values of every block in the prefix cache, by digest. For when no step is in flight."""
    cache, arrays = engine._manager.prefix_cache, engine.runner.cache
    assert cache is not None and arrays is not None
    keys, values = (np.array(array, np.float32) for array in arrays)
    return {b.digest: np.stack([keys[:, block_id], values[:, block_id]]) for block_id, b in cache._blocks.items()}


class Arrival(NamedTuple):
    """A request that arrives before step number at_step."""

    prompt: Sequence[int]
    params: SamplingParams
    at_step: int = 0


def serve(engine: Engine, arrivals: dict[str, Arrival]) -> dict[str, RequestOutput]:
    """Steps the engine until all is done; requests that arrive at one step do so in the order given."""
    outputs: dict[str, RequestOutput] = {}
    waiting = dict(arrivals)
    num_steps = 0
    while waiting or engine.has_unfinished_requests():
        for request_id, arrival in list(waiting.items()):
            if arrival.at_step <= num_steps:
                engine.add_request(request_id, list(arrival.prompt), arrival.params)
                del waiting[request_id]
        outputs.update({delta.request_id: delta.output for delta in engine.step() if delta.output is not None})
        num_steps += 1
    return outputs
