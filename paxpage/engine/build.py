"""From a model and an EngineConfig to a running Engine: sizes, compiled steps, weights."""

import contextlib
import dataclasses
import functools
import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.paged_attention import cascade
from pallas_kernels.paged_attention.api import choose_backend
from pallas_kernels.paged_attention.config import Geometry
from paxpage.config import EngineConfig, ModelConfig, SchedulerConfig, require
from paxpage.engine import executables, kv_cache, memory, step
from paxpage.engine.batch import StepShape
from paxpage.engine.compilation import programs_folder, use_persistent_cache
from paxpage.engine.engine import Engine
from paxpage.engine.executables import Compiler, open_compiler
from paxpage.engine.model_runner import SHARING_BUCKETS, ModelRunner, step_shapes
from paxpage.engine.params_check import SAMPLER_LOGPROBS
from paxpage.engine.sampling_params import ALL_LOGPROBS
from paxpage.engine.served_model import Model, ServedModel, describe, raise_if_failed
from paxpage.models import registry
from paxpage.models.generation import with_tokenizer
from paxpage.models.loading import LoadOptions
from paxpage.models.registry import Params

logger = logging.getLogger(__name__)

# Of a step's logits' size: they, the adjusted ones, and a sampler's own: 3 for an H200, compiled without one, 8 on
# a CPU (BUILD_NOTES.md, 2026-11-30).
SAMPLING_ARRAYS = 11
COMING_MARGIN = 64 * memory.MIB  # over the weights' own bytes, for what loading leaves,
COMING_SHARE = 0.997  # and of the blocks that then fit: 8B once left 64 to 320 MiB less (BUILD_NOTES.md, 2026-11-30)
FEWEST_OF_FITTING = 0.99  # of the blocks that fit: fewer are not worth lowering the steps again
STEP_BYTES_MARGIN = 1.25  # over the sum of a layer's arrays, of which 8B's steps on an H200 take 0.2 to 0.6

DEFAULT_LIMITS = {"cpu": (32, 256), "gpu": (256, 4096)}  # platform: (max_num_seqs, max_num_batched_tokens)

# Of a server, where somebody waits for each token. On an H200, 8B, a step of 512 tokens takes 11.6 ms where one of
# 4,096 takes 83, and computes a prompt at nine tenths of its rate (BUILD_NOTES.md, 2026-11-30; attention not counted).
SERVED_TOKENS_BESIDE_DECODES = {"cpu": None, "gpu": 512}


def serving_config(config: EngineConfig) -> EngineConfig:
    """The same, with steps kept short beside requests that decode, if nothing is said about it.

    For LLM.generate, which gives back everything together, the throughput of long ones is worth more.
    """
    if config.num_tokens_beside_decodes is not None:
        return config
    return dataclasses.replace(config, num_tokens_beside_decodes=SERVED_TOKENS_BESIDE_DECODES[_platform()])


def build_engine(
    model: Model,
    config: EngineConfig,
    *,
    params: Params | None = None,
    tokenizer: Any = None,
    served_model_name: str | None = None,
    options: LoadOptions | None = None,
    show_progress: bool = True,
) -> Engine:
    """Loads, sizes the cache and compiles every step.

    model: a path or hub name; a ModelConfig (with params); or an NNX module that meets models.protocol. params: a
    pytree in the layout of registry.abstract_params, used without a copy in place of the checkpoint's. tokenizer: a
    path, or a transformers tokenizer. ValueError for what a user got wrong: at once, or soon if a tokenizer shows it.
    """
    use_persistent_cache(config.compilation_cache_dir)
    served = describe(model, params, tokenizer, _options(config, options or LoadOptions(), show_progress))
    served = served if served_model_name is None else served._replace(name=served_model_name)
    limits = _limits(config, served)
    plan = _plan(config, limits, served)
    compiler = open_compiler(programs_folder(config.compilation_cache_dir), served.config, served.dtype)
    with ThreadPoolExecutor(3) as pool, contextlib.closing(compiler), contextlib.ExitStack() as if_it_fails:
        set_aside = 0 if config.num_blocks is not None else _temporary_bytes(served, plan, config.block_size)
        count_blocks = functools.partial(_num_blocks, config, limits, served, plan, set_aside)
        early: ModelRunner | None = None
        if compiler.pool is not None:
            is_settled = config.num_blocks is not None or params is not None
            expected = count_blocks() if is_settled else _expected_blocks(count_blocks, served)
            early = _begin_early(_make_runner(config, served, plan, expected, compiler), served, plan, if_it_fails)
        loading_tokenizer = pool.submit(served.loader.load_tokenizer)
        go_on = functools.partial(raise_if_failed, loading_tokenizer)
        loading = pool.submit(served.loader.load_params, go_on)
        if _platform() == "gpu":
            loading.result()  # first: the cache gets what the weights leave, and timing kernels wants a quiet device
        num_blocks = _settled(early, count_blocks)
        runner = _right_runner(early, num_blocks) or _make_runner(config, served, plan, num_blocks, compiler)
        limits = _fit(config, limits, runner.num_blocks)
        allocating = pool.submit(runner.reset)
        runner.warm_up(show_progress=show_progress, go_on=go_on)
        allocating.result()
        runner.set_params(loading.result())
        _check_temporaries(runner, set_aside)
        runner.rehearse()
        tokenizer = loading_tokenizer.result()
        if_it_fails.pop_all()
    engine = _make_engine(runner, config, limits, served, tokenizer)
    runner.warm_up_behind()
    logger.info(start_up_line(engine))
    return engine


def _options(config: EngineConfig, options: LoadOptions, show_progress: bool) -> LoadOptions:
    return dataclasses.replace(
        options, dtype=config.dtype, load_format=config.load_format, seed=config.seed, show_progress=show_progress
    )


def _make_engine(
    runner: ModelRunner, config: EngineConfig, limits: SchedulerConfig, served: ServedModel, tokenizer: Any
) -> Engine:
    is_async = _platform() == "gpu" if config.async_scheduling is None else config.async_scheduling
    return Engine(
        runner,
        config,
        limits,
        tokenizer=tokenizer,
        generation=with_tokenizer(served.loader.generation, tokenizer),
        vocab_size=runner.vocab_size,
        model_name=served.name,
        is_async=is_async,
    )


def start_up_line(engine: Engine) -> str:
    """What was built, in one line: blocks, tokens, and how many full-length requests fit."""
    runner, stats = engine.runner, engine.stats()
    num_tokens = stats.num_blocks_usable * engine.config.block_size
    cache = runner.cache
    assert cache is not None
    return (
        f"{engine.model_name}: {registry.num_bytes(runner.params) / 2**20:,.0f} MiB of weights; KV cache of "
        f"{stats.num_blocks_usable:,} blocks of {engine.config.block_size} tokens in {cache.k.dtype} "
        f"({2 * cache.k.nbytes / 2**20:,.0f} MiB) holds {num_tokens:,} tokens, {num_tokens / engine.max_model_len:.1f} "
        f"requests of the full {engine.max_model_len:,}; attention backend {runner.attention_backend}"
    )


def _limits(config: EngineConfig, served: ServedModel) -> SchedulerConfig:
    num_seqs, num_tokens = DEFAULT_LIMITS[_platform()]
    longest = served.max_position_embeddings
    is_within = config.max_model_len is None or config.max_model_len <= longest
    require(is_within, "max_model_len", config.max_model_len, f"at most the model's own {longest}")
    max_num_seqs = config.max_num_seqs or num_seqs
    limits = SchedulerConfig(
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens or max(num_tokens, max_num_seqs),
        max_model_len=config.max_model_len or longest,
        policy=config.scheduling_policy,
        num_tokens_beside_decodes=config.num_tokens_beside_decodes,
    )
    if config.num_blocks is not None:
        _check_fit(config, limits, config.num_blocks)
    return limits


def _platform() -> str:
    return "cpu" if jax.default_backend() == "cpu" else "gpu"


def _check_fit(config: EngineConfig, limits: SchedulerConfig, num_blocks: int) -> tuple[int, str]:
    """How many tokens the pool holds, also in words. ValueError for a max_model_len that was chosen and is longer."""
    capacity = (num_blocks - 1) * config.block_size
    where = f"{num_blocks - 1} usable blocks of {config.block_size} tokens hold {capacity}"
    is_possible = config.max_model_len is None or limits.max_model_len <= capacity
    require(is_possible, "max_model_len", config.max_model_len, f"at most {capacity}: {where}")
    return capacity, where


def _fit(config: EngineConfig, limits: SchedulerConfig, num_blocks: int) -> SchedulerConfig:
    """max_model_len no longer than the pool: one request can then always run."""
    capacity, where = _check_fit(config, limits, num_blocks)
    if limits.max_model_len <= capacity:
        return limits
    logger.warning("max_model_len is lowered from %d to %d: %s", limits.max_model_len, capacity, where)
    return dataclasses.replace(limits, max_model_len=capacity)


class Plan(NamedTuple):
    """What follows from the limits, before the weights are there."""

    shapes: list[StepShape]
    sharing_rules: cascade.Rules | None
    cache_dtype: str


def _plan(config: EngineConfig, limits: SchedulerConfig, served: ServedModel) -> Plan:
    blocks_per_row = -(-limits.max_model_len // config.block_size)
    dtype = served.dtype if config.kv_cache_dtype == "auto" else config.kv_cache_dtype
    is_cascading = config.enable_cascade_attention
    rules = _sharing_rules(served, config.block_size, dtype, limits.max_num_seqs) if is_cascading else None
    sizes = (limits.max_num_seqs, limits.max_num_batched_tokens, blocks_per_row)
    return Plan(step_shapes(_platform(), *sizes, sharing_rules=rules), rules, dtype)


def _num_blocks(
    config: EngineConfig,
    limits: SchedulerConfig,
    served: ServedModel,
    plan: Plan,
    set_aside: int,
    coming_bytes: int = 0,
) -> int:
    """As chosen, or as many as fit beside what is in use, set aside and coming."""
    if config.num_blocks is not None:
        return config.num_blocks
    bytes_per_block = kv_cache.bytes_per_block(served.spec, config.block_size, plan.cache_dtype)
    most_useful = limits.max_num_seqs * plan.shapes[0].blocks_per_row + 1
    share = config.gpu_memory_utilization
    return memory.num_blocks_that_fit(bytes_per_block, set_aside, share, most_useful, coming_bytes)


def _expected_blocks(count: Callable[[int], int], coming: ServedModel) -> int:
    """How many blocks will most likely fit once a model's weights, which are still to come, are there."""
    return max(2, int(COMING_SHARE * count(registry.num_bytes(coming.abstract_params) + COMING_MARGIN)))


def _begin_early(
    runner: ModelRunner, served: ServedModel, plan: Plan, if_it_fails: contextlib.ExitStack
) -> ModelRunner:
    """Has its programs made while the weights are: steps lowered by other processes, all others compiled here."""
    if_it_fails.callback(runner.close)
    cache = kv_cache.abstract_cache(*runner.layout)
    runner.compiler.expect(_step_model(served, plan, cache), plan.shapes)
    runner.begin_warm_up()
    return runner


def _settled(early: ModelRunner | None, count: Callable[[], int]) -> int:
    """How many blocks fit; if not as many as expected, then once nothing compiles, which may hold memory meanwhile."""
    num_blocks = count()
    if early is None or is_as_expected(early.num_blocks, num_blocks):
        return num_blocks
    early.wait_for_begun()
    return count()


def _right_runner(early: ModelRunner | None, num_blocks: int) -> ModelRunner | None:
    """The one begun early, if so many blocks fit as it was begun for."""
    if early is None or is_as_expected(early.num_blocks, num_blocks):
        return early
    logger.info("%d blocks fit, %d were expected: steps are lowered again", num_blocks, early.num_blocks)
    early.close()
    return None


def is_as_expected(expected: int, num_blocks: int) -> bool:
    """Whether so many blocks, for which programs were begun before the weights were there, are hardly less than fit."""
    return FEWEST_OF_FITTING * num_blocks <= expected <= num_blocks


def _make_runner(
    config: EngineConfig, served: ServedModel, plan: Plan, num_blocks: int, compiler: Compiler
) -> ModelRunner:
    runner = ModelRunner(
        served.graphdef,
        served.abstract_params,
        kv_cache.CacheLayout(served.spec, num_blocks, config.block_size, plan.cache_dtype),
        plan.shapes,
        platform=_platform(),
        max_logprobs=SAMPLER_LOGPROBS if config.max_logprobs == ALL_LOGPROBS else config.max_logprobs,
        vocab_size=served.vocab_size,
        sharing_rules=plan.sharing_rules,
    )
    runner.compiler = compiler
    return runner


def _sharing_rules(served: ServedModel, block_size: int, dtype: str, max_num_seqs: int) -> cascade.Rules | None:
    """When to read shared prefixes once; None where no kernel can, or the number of query heads is not known."""
    if served.num_heads is None:
        return None
    heads = (served.num_heads, served.spec.num_kv_heads, served.spec.head_dim)
    geometry = Geometry(*heads, block_size, served.dtype, dtype)
    fewest_rows = min([*SHARING_BUCKETS[_platform()], max_num_seqs])
    is_possible = choose_backend(geometry, fewest_rows, is_decode=True) == "mosaic"
    return cascade.rules_for(geometry) if is_possible else None


def _largest_step(
    served: ServedModel, plan: Plan, block_size: int, num_blocks: int
) -> tuple[step.StepModel, StepShape]:
    cache = kv_cache.abstract_cache(served.spec, num_blocks, block_size, plan.cache_dtype)
    return _step_model(served, plan, cache), plan.shapes[-1]


def _step_model(served: ServedModel, plan: Plan, cache: kv_cache.KVCache) -> step.StepModel:
    shape = plan.shapes[-1]
    vocab_size = served.vocab_size or step.vocab_size_of(served.graphdef, served.abstract_params, cache, shape)
    return step.StepModel(served.graphdef, served.abstract_params, cache, shape.num_rows, vocab_size)


def _temporary_bytes(served: ServedModel, plan: Plan, block_size: int) -> int:
    """What the largest step takes beside params and cache, or its sampling, and the logits kept between steps.

    Of this package's models an estimate from above, which is checked once the steps are compiled; otherwise asked of
    the compiler, which takes it as long as a step. Both only where memory is bounded.
    """
    if jax.local_devices()[0].memory_stats() is None:
        return 0
    model, shape = _largest_step(served, plan, block_size, num_blocks=2)
    buffers = [step.logits_buffer_of(rows, model.vocab_size) for rows in {s.num_rows for s in plan.shapes}]
    kept_bytes = sum(buffer.size * buffer.dtype.itemsize for buffer in buffers if buffer is not None)
    if served.config is not None:
        step_bytes = step_bytes_at_most(served.config, served.dtype, shape)
    else:
        step_bytes = step.temporary_bytes(executables.step_program(model, shape).compile())
    return kept_bytes + max(step_bytes, sampling_bytes(shape.num_rows, model.vocab_size))


def step_bytes_at_most(config: ModelConfig, dtype: str, shape: StepShape) -> int:
    """More than a step of a model of paxpage.models takes beside params and cache: a layer's arrays, and the logits."""
    heads = 2 * config.num_heads + 2 * config.num_kv_heads
    per_token = 3 * config.intermediate_size + 4 * config.hidden_size + heads * config.head_dim
    per_row = 2 * config.vocab_size * jnp.dtype("float32").itemsize
    num_bytes = shape.num_tokens * per_token * jnp.dtype(dtype).itemsize + shape.num_rows * per_row
    return int(STEP_BYTES_MARGIN * num_bytes)


def _check_temporaries(runner: ModelRunner, set_aside: int) -> None:
    """Says so if steps take more memory than was set aside for them."""
    taken = max(map(step.analysed_bytes, runner.memory_analysis().values())) if set_aside else 0
    if taken > set_aside:
        message = "a step takes %d MiB beside weights and cache, and only %d MiB are set aside for it"
        logger.warning(f"{message}: choose a smaller gpu_memory_utilization", taken >> 20, set_aside >> 20)


def sampling_bytes(num_rows: int, vocab_size: int) -> int:
    """At least what lives while logits of num_rows rows, or of a prompt's tokens, are adjusted, drawn from, described.

    Not asked of the compiler: most of these programs are compiled when the cache has long taken its place.
    """
    return SAMPLING_ARRAYS * max(num_rows, step.SCORED_PER_CALL) * vocab_size * 4
