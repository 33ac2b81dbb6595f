"""A model driven by the engine's scheduler, batch builder and paged attention, every layer's output recorded."""

import functools
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from paxpage.config import ModelConfig, SchedulerConfig
from paxpage.engine import batch as batches
from paxpage.engine import kv_cache
from paxpage.engine.block_pool import BlockPool
from paxpage.engine.kv_cache_manager import KVCacheManager
from paxpage.engine.model_runner import choose_shape
from paxpage.engine.request import Request
from paxpage.engine.sampling_params import SamplingParams
from paxpage.engine.scheduler import ScheduledBatch, Scheduler
from paxpage.engine.step import PagedAttend
from paxpage.models.protocol import KVSpec
from paxpage.models.registry import Params, abstract_model, merge, split

BLOCK_SIZE = 16
MAX_MODEL_LEN = 512


class Trace(NamedTuple):
    """One request, prompt and greedy output, as far as the cache has seen it (all but the last token)."""

    token_ids: list[int]
    residuals: np.ndarray  # [num_layers + 1, num_tokens, hidden_size]: the embeddings, then after each layer
    hidden: np.ndarray  # [num_tokens, hidden_size], after the last norm
    logits: np.ndarray  # [num_tokens, vocab_size]


class Recorder:
    """Stands for a layer: calls it, and keeps what went in (the first one) and what came out."""

    def __init__(self, layer: nnx.Module, seen: list[jax.Array]) -> None:
        self.layer = layer
        self.seen = seen

    def __call__(
        self, x: jax.Array, delta: jax.Array | None, angles: tuple, index: int, attend: PagedAttend
    ) -> tuple[jax.Array, jax.Array]:
        self.seen += [x] if index == 0 else []
        x, delta = self.layer(x, delta, angles, index, attend)
        self.seen.append(x + delta)
        return x, delta


def recorded_forward(
    params: Params, cache: kv_cache.KVCache, packed: jax.Array, *, graphdef: nnx.GraphDef, shape: batches.StepShape
) -> tuple[tuple[jax.Array, jax.Array, jax.Array], kv_cache.KVCache]:
    """engine.step.forward, but for every token, and with the layers' outputs."""
    inputs = batches.unpack(packed, shape)
    attend = PagedAttend(cache, inputs, None)
    model = merge(graphdef, params)
    seen: list[jax.Array] = []
    model.layers = nnx.static([Recorder(layer, seen) for layer in model.layers])
    hidden = model(inputs.token_ids, inputs.positions, attend)
    return (jnp.stack(seen), hidden, model.compute_logits(hidden)), attend.cache


class PagedRun:
    """Generates greedily, keeping everything. Compiled once for decode steps and once for each token budget."""

    def __init__(self, config: ModelConfig, params: Params, *, max_num_seqs: int = 4, num_blocks: int = 128) -> None:
        dtype = jax.tree.leaves(params)[0].dtype.name
        self._params = params
        self._max_num_seqs = max_num_seqs
        self._num_blocks = num_blocks
        graphdef, _ = split(abstract_model(config, dtype))
        spec = KVSpec(config.num_layers, config.num_kv_heads, config.head_dim)
        self._cache_args = (spec, num_blocks, BLOCK_SIZE, dtype)
        forward = functools.partial(recorded_forward, graphdef=graphdef)
        self._forward = jax.jit(forward, static_argnames="shape", donate_argnums=1)

    def run(self, prompts: Sequence[Sequence[int]], max_tokens: int, budget: int) -> list[Trace]:
        """All prompts at once, at most budget tokens a step."""
        manager = KVCacheManager(BlockPool(self._num_blocks), BLOCK_SIZE, self._max_num_seqs, MAX_MODEL_LEN)
        scheduler = Scheduler(SchedulerConfig(self._max_num_seqs, budget, MAX_MODEL_LEN), manager)
        requests = [self._request(index, prompt, max_tokens) for index, prompt in enumerate(prompts)]
        for request in requests:
            scheduler.add(request)
        cache = kv_cache.allocate(*self._cache_args)
        parts: dict[str, list[tuple[np.ndarray, ...]]] = {request.request_id: [] for request in requests}
        while scheduler.has_unfinished_requests():
            batch = scheduler.schedule()
            recorded, cache = self._step(batch, manager, cache, budget)
            ends = np.cumsum([row.num_tokens for row in batch.rows])
            for row, end in zip(batch.rows, ends.tolist(), strict=True):
                own = slice(end - row.num_tokens, end)
                residuals, hidden, logits = recorded
                parts[row.request.request_id].append((residuals[:, own], hidden[own], logits[own]))
            scheduler.update(batch, recorded[2][ends - 1].argmax(-1).tolist())
        manager.pool.check()
        return [_trace(request, parts[request.request_id]) for request in requests]

    def _request(self, index: int, prompt: Sequence[int], max_tokens: int) -> Request:
        params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
        return Request(str(index), prompt, params, max_tokens=max_tokens)

    def _step(
        self, batch: ScheduledBatch, manager: KVCacheManager, cache: kv_cache.KVCache, budget: int
    ) -> tuple[list[np.ndarray], kv_cache.KVCache]:
        num_rows, blocks_per_row = self._max_num_seqs, -(-MAX_MODEL_LEN // BLOCK_SIZE)
        sizes = ((num_rows, num_rows), (max(budget, num_rows + 1), num_rows))
        shapes = [batches.StepShape(*size, blocks_per_row) for size in sizes]
        shape = choose_shape(shapes, batch)
        recorded, cache = self._forward(self._params, cache, batches.pack(batch, shape, manager), shape=shape)
        return [np.asarray(array.astype(jnp.float32)) for array in recorded], cache


def _trace(request: Request, parts: list[tuple[np.ndarray, ...]]) -> Trace:
    residuals, hidden, logits = zip(*parts, strict=True)
    return Trace(request.token_ids, np.concatenate(residuals, axis=1), np.concatenate(hidden), np.concatenate(logits))
