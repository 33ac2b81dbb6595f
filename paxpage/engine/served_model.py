"""A model to be served, described before it is loaded: a folder, a config with params, or a researcher's own module."""

import dataclasses
import functools
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from paxpage.config import ModelConfig, require, require_int
from paxpage.engine import step
from paxpage.models import registry
from paxpage.models.checkpoint import check_devices, check_params, flatten, params_dtype
from paxpage.models.generation import GenerationDefaults
from paxpage.models.loading import (
    LoadOptions,
    chosen_tokenizer,
    load_params,
    load_tokenizer,
    open_model,
    with_tokenizer_found,
)
from paxpage.models.protocol import CausalLM, KVSpec
from paxpage.models.registry import Params

DEFAULT_MODULE_LEN = 2048  # max_model_len of a module that names no max_position_embeddings

TOKENIZER_CLASS = "PreTrainedTokenizerBase"  # of transformers, which takes seconds to import

Model = str | Path | ModelConfig | nnx.Module


class Loader(NamedTuple):
    """Functions that bring what takes time, to run side by side."""

    load_tokenizer: Callable[[], Any]  # a transformers tokenizer, or None: seconds of imports and parsing
    load_params: Callable[[Callable[[], None]], Params]  # given what it calls now and then; that may end it by raising
    generation: GenerationDefaults  # as the model's files have them; see with_tokenizer


class ServedModel(NamedTuple):
    """All that compiling takes, and functions that bring the rest."""

    name: str
    graphdef: nnx.GraphDef
    abstract_params: Params  # jax.ShapeDtypeStruct
    spec: KVSpec
    dtype: str  # of the keys and values, unless the user chooses another
    max_position_embeddings: int
    vocab_size: int | None  # None: to be found by tracing the model
    num_heads: int | None  # of queries; None: not known
    loader: Loader
    config: ModelConfig | None = None  # None: a module of the user's own


def describe(model: Model, params: Params | None, tokenizer: Any, options: LoadOptions) -> ServedModel:
    """Finds and checks a model without reading its weights. Arguments as for build.build_engine; ValueError by name."""
    if isinstance(tokenizer, (str, Path)):
        options, tokenizer = dataclasses.replace(options, tokenizer=str(tokenizer)), None
    is_tokenizer = tokenizer is None or TOKENIZER_CLASS in (each.__name__ for each in type(tokenizer).__mro__)
    require(is_tokenizer, "tokenizer", tokenizer, "a path, a repository of the hub, or a transformers tokenizer")
    if isinstance(model, nnx.Module):
        require(params is None, "params", "a pytree", "nothing beside an NNX module, which holds its own")
        return _from_module(model, tokenizer, options)
    if isinstance(model, ModelConfig):
        require(params is not None, "params", None, "a pytree, when model is a ModelConfig")
        assert params is not None
        dtype = _checked_dtype(model, params, options)
        return _from_config("model", model, dtype, _loader_of(params, tokenizer, model.vocab_size, options))
    return _from_files(model, params, tokenizer, options)


def _from_files(model: str | Path, params: Params | None, tokenizer: Any, options: LoadOptions) -> ServedModel:
    source = open_model(model, options)
    dtype = source.dtype if params is None else _checked_dtype(source.config, params, options)
    loader = Loader(
        lambda: load_tokenizer(source) if tokenizer is None else tokenizer,
        functools.partial(load_params, source) if params is None else lambda go_on: params,
        source.generation,
    )
    return _from_config(source.name, source.config, dtype, loader)


def raise_if_failed(work: Future[Any]) -> None:
    """Raises what work, which may still be at it, has raised."""
    if work.done():
        work.result()


def _loader_of(params: Params, tokenizer: Any, vocab_size: int | None, options: LoadOptions) -> Loader:
    """Of params that are there already. ValueError for a tokenizer that is not found."""
    require(options.load_format == "auto", "load_format", options.load_format, "auto, for a model in memory")
    path = with_tokenizer_found(options).tokenizer
    read = (lambda: tokenizer) if path is None else functools.partial(chosen_tokenizer, path, vocab_size)
    return Loader(read, lambda go_on: params, GenerationDefaults())


def _from_config(name: str, config: ModelConfig, dtype: str, loader: Loader) -> ServedModel:
    module = registry.abstract_model(config, dtype)
    graphdef, abstract_params = registry.split(module)
    sizes = (config.max_position_embeddings, config.vocab_size, config.num_heads)
    return ServedModel(name, graphdef, abstract_params, module.kv_spec, dtype, *sizes, loader, config)


def _from_module(module: nnx.Module, tokenizer: Any, options: LoadOptions) -> ServedModel:
    is_model = isinstance(module, CausalLM)
    allowed = "modules with kv_spec, __call__ and compute_logits (models.protocol)"
    require(is_model, "model", type(module).__name__, allowed)
    spec: KVSpec = getattr(module, "kv_spec")  # noqa: B009 (the type checker knows nnx.Module alone)
    is_spec = isinstance(spec, KVSpec) and all(isinstance(number, int) and number > 0 for number in spec)
    require(is_spec, "kv_spec", spec, "a KVSpec of three integers, each at least 1")
    graphdef, params = registry.split(module)
    check_devices(flatten(params))
    length = getattr(module, "max_position_embeddings", DEFAULT_MODULE_LEN)
    require_int("max_position_embeddings", length, 1)
    name, loader = type(module).__name__, _loader_of(params, tokenizer, None, options)
    dtype = _own_dtype(_dtype_of(params), options)
    return ServedModel(name, graphdef, step.abstract(params), spec, dtype, length, None, None, loader)


def _checked_dtype(config: ModelConfig, params: Params, options: LoadOptions) -> str:
    check_params(config, params)
    return _own_dtype(params_dtype(params), options)


def _dtype_of(params: Params) -> str:
    dtypes = [leaf.dtype.name for leaf in jax.tree.leaves(params) if jnp.issubdtype(leaf.dtype, jnp.floating)]
    require(bool(dtypes), "model", "a module without an array of floats", "one that has some")
    return dtypes[0]


def _own_dtype(dtype: str, options: LoadOptions) -> str:
    """That of params in memory, which are used as they are."""
    require(options.dtype in ("auto", dtype), "dtype", options.dtype, f"auto, or {dtype}, which the params have")
    return dtype
