"""From a model and an EngineConfig to a running Engine: weights, sizes, compiled steps."""

import dataclasses
import logging
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from paxpage.config import EngineConfig, ModelConfig, SchedulerConfig, require
from paxpage.engine import kv_cache, memory, step
from paxpage.engine.batch import StepShape
from paxpage.engine.compilation import use_persistent_cache
from paxpage.engine.engine import Engine
from paxpage.engine.model_runner import ModelRunner, step_shapes
from paxpage.models import registry
from paxpage.models.checkpoint import check_params
from paxpage.models.generation import GenerationDefaults, with_tokenizer
from paxpage.models.loading import LoadOptions, load_params, load_tokenizer, open_model
from paxpage.models.protocol import CausalLM, KVSpec
from paxpage.models.registry import Params

logger = logging.getLogger(__name__)

DEFAULT_MODULE_LEN = 2048  # max_model_len of a module that names no max_position_embeddings
DEFAULT_LIMITS = {"cpu": (32, 256), "gpu": (256, 8192)}  # platform: (max_num_seqs, max_num_batched_tokens)

Model = str | ModelConfig | nnx.Module


class ServedModel(NamedTuple):
    """A model ready to be served, wherever it came from."""

    name: str
    graphdef: nnx.GraphDef
    params: Params
    spec: KVSpec
    dtype: str  # of the keys and values, unless the user chooses another
    max_position_embeddings: int
    tokenizer: Any
    generation: GenerationDefaults


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
    path, or a transformers tokenizer. Everything a user may have got wrong raises ValueError, before compiling.
    """
    use_persistent_cache(config.compilation_cache_dir)
    options = options or LoadOptions()
    options = dataclasses.replace(
        options, dtype=config.dtype, load_format=config.load_format, seed=config.seed, show_progress=show_progress
    )
    served = _serve_model(model, params, tokenizer, options)
    if served_model_name is not None:
        served = served._replace(name=served_model_name)
    limits = _limits(config, served)
    runner = _build_runner(config, limits, served)
    limits = _fit(config, limits, runner.num_blocks)
    runner.warm_up(show_progress=show_progress)
    engine = Engine(
        runner, config, limits,
        tokenizer=served.tokenizer, generation=served.generation, vocab_size=runner.vocab_size, model_name=served.name,
        is_async=_platform() == "gpu" if config.async_scheduling is None else config.async_scheduling,
    )  # fmt: skip
    logger.info(start_up_line(engine))
    return engine


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


def _serve_model(model: Model, params: Params | None, tokenizer: Any, options: LoadOptions) -> ServedModel:
    if isinstance(model, nnx.Module):
        require(params is None, "params", "a pytree", "nothing beside an NNX module, which holds its own")
        return _from_module(model, tokenizer, options)
    if isinstance(model, ModelConfig):
        require(params is not None, "params", None, "a pytree, when model is a ModelConfig")
        assert params is not None
        return _from_config(model, params, tokenizer, "model", GenerationDefaults())
    return _from_files(model, params, tokenizer, options)


def _from_files(model: str, params: Params | None, tokenizer: Any, options: LoadOptions) -> ServedModel:
    if isinstance(tokenizer, str):
        options, tokenizer = dataclasses.replace(options, tokenizer=tokenizer), None
    source = open_model(model, options)
    with ThreadPoolExecutor(1) as pool:  # a tokenizer is seconds of imports and parsing: beside the weights
        loading = pool.submit(load_tokenizer, source) if tokenizer is None else None
        params = load_params(source) if params is None else params
        tokenizer = tokenizer if loading is None else loading.result()
    generation = with_tokenizer(source.generation, tokenizer)
    return _from_config(source.config, params, tokenizer, source.name, generation)


def _from_config(
    config: ModelConfig, params: Params, tokenizer: Any, name: str, generation: GenerationDefaults
) -> ServedModel:
    check_params(config, params)
    dtype = jax.tree.leaves(params)[0].dtype.name
    module = registry.abstract_model(config, dtype)
    graphdef, _ = registry.split(module)
    length = config.max_position_embeddings
    return ServedModel(name, graphdef, params, module.kv_spec, dtype, length, tokenizer, generation)


def _from_module(module: nnx.Module, tokenizer: Any, options: LoadOptions) -> ServedModel:
    is_model = isinstance(module, CausalLM)
    allowed = "modules with kv_spec, __call__ and compute_logits (models.protocol)"
    require(is_model, "model", type(module).__name__, allowed)
    spec: KVSpec = getattr(module, "kv_spec")  # noqa: B009 (the type checker knows nnx.Module alone)
    graphdef, params = registry.split(module)
    length = getattr(module, "max_position_embeddings", DEFAULT_MODULE_LEN)
    dtype = next(leaf.dtype.name for leaf in jax.tree.leaves(params) if jnp.issubdtype(leaf.dtype, jnp.floating))
    generation = GenerationDefaults()
    return ServedModel(type(module).__name__, graphdef, params, spec, dtype, length, tokenizer, generation)


def _limits(config: EngineConfig, served: ServedModel) -> SchedulerConfig:
    num_seqs, num_tokens = DEFAULT_LIMITS[_platform()]
    longest = served.max_position_embeddings
    is_within = config.max_model_len is None or config.max_model_len <= longest
    require(is_within, "max_model_len", config.max_model_len, f"at most the model's own {longest}")
    max_num_seqs = config.max_num_seqs or num_seqs
    return SchedulerConfig(
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens or max(num_tokens, max_num_seqs),
        max_model_len=config.max_model_len or longest,
        policy=config.scheduling_policy,
    )


def _platform() -> str:
    return "cpu" if jax.default_backend() == "cpu" else "gpu"


def _fit(config: EngineConfig, limits: SchedulerConfig, num_blocks: int) -> SchedulerConfig:
    """max_model_len no longer than the pool: one request can then always run."""
    capacity = (num_blocks - 1) * config.block_size
    if limits.max_model_len <= capacity:
        return limits
    where = f"{num_blocks - 1} usable blocks of {config.block_size} tokens hold {capacity}"
    require(config.max_model_len is None, "max_model_len", config.max_model_len, f"at most {capacity}: {where}")
    logger.warning("max_model_len is lowered from %d to %d: %s", limits.max_model_len, capacity, where)
    return dataclasses.replace(limits, max_model_len=capacity)


def _build_runner(config: EngineConfig, limits: SchedulerConfig, served: ServedModel) -> ModelRunner:
    blocks_per_row = -(-limits.max_model_len // config.block_size)
    shapes = step_shapes(_platform(), limits.max_num_seqs, limits.max_num_batched_tokens, blocks_per_row)
    dtype = served.dtype if config.kv_cache_dtype == "auto" else config.kv_cache_dtype
    num_blocks = config.num_blocks
    if num_blocks is None:
        temporary_bytes = _temporary_bytes(served, shapes[-1], config.block_size, dtype)
        bytes_per_block = kv_cache.bytes_per_block(served.spec, config.block_size, dtype)
        most_useful = limits.max_num_seqs * blocks_per_row + 1
        share = config.gpu_memory_utilization
        num_blocks = memory.num_blocks_that_fit(bytes_per_block, temporary_bytes, share, most_useful)
    _fit(config, limits, num_blocks)
    return ModelRunner(
        served.graphdef, served.params, served.spec, shapes,
        num_blocks=num_blocks, block_size=config.block_size, dtype=dtype, max_logprobs=config.max_logprobs,
    )  # fmt: skip


def _temporary_bytes(served: ServedModel, shape: StepShape, block_size: int, dtype: str) -> int:
    """What the largest step takes beside params and cache; asked of the compiler only where memory is bounded."""
    if jax.local_devices()[0].memory_stats() is None:
        return 0
    abstract = step.abstract(served.params)
    cache = kv_cache.abstract_cache(served.spec, 2, block_size, dtype)
    return step.temporary_bytes(step.compile_forward(served.graphdef, abstract, cache, shape, shape.num_rows))
