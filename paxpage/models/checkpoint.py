"""Checkpoint tensors -> the params tree: names, shapes, and streaming to the device.

A checkpoint, whatever its format, is seen as named tensors under Hugging Face's names. Every one of paxpage's
parameters is one such tensor, or several laid one under another (q, k, v; gate, up).
"""

import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax
import numpy as np
from tqdm import tqdm

from paxpage.config import DTYPES, ModelConfig, require
from paxpage.models.registry import Params, abstract_params

MAX_NAMED = 10  # problems spelled out in one error
NUM_THREADS = min(8, os.cpu_count() or 2)
ALIGNMENT_BYTES = 64  # from which jax on a CPU takes a numpy array as it is, without a copy


class TensorInfo(NamedTuple):
    """What a checkpoint's header says about a tensor."""

    shape: tuple[int, ...]
    num_bytes: int


@runtime_checkable
class Checkpoint(Protocol):
    """Named tensors that can be read a few rows at a time, from several threads at once."""

    @property
    def chunk_elements(self) -> int:
        """How many numbers are best read at a time."""
        ...

    @property
    def tensors(self) -> Mapping[str, TensorInfo]:
        """What the header says, by name."""
        ...

    def read_rows(self, name: str, start: int, stop: int) -> np.ndarray:
        """Rows [start, stop) of axis 0, in a dtype that numpy can cast; valid until the next read at least."""
        ...

    def release(self) -> None:
        """Gives memory back that what was read still takes, such as pages of mapped files; between reads."""
        ...


class Source(NamedTuple):
    """A checkpoint tensor and the shape that the model wants of it."""

    name: str
    shape: tuple[int, ...]


def flatten(params: Params) -> dict[str, Any]:
    """Nested dicts -> {"layers.0.mlp.down_proj.weight": leaf, ...}, in the order of the model's layers."""
    flat = {}
    for name, value in params.items():
        if isinstance(value, dict):
            flat.update({f"{name}.{rest}": leaf for rest, leaf in flatten(value).items()})
        else:
            flat[name] = value
    return flat


def unflatten(flat: Mapping[str, Any]) -> Params:
    """The reverse of flatten."""
    tree: Params = {}
    for path, leaf in flat.items():
        *parents, last = path.split(".")
        node = tree
        for parent in parents:
            node = node.setdefault(parent, {})
        node[last] = leaf
    return tree


def sources(path: str, shape: tuple[int, ...], config: ModelConfig) -> tuple[Source, ...]:
    """The checkpoint tensors that make up one parameter, in the order of its rows."""
    prefix = "" if path.startswith("lm_head.") else "model."
    kv_rows = config.num_kv_heads * config.head_dim
    fused = {
        "qkv_proj": {"q_proj": config.num_heads * config.head_dim, "k_proj": kv_rows, "v_proj": kv_rows},
        "gate_up_proj": {"gate_proj": config.intermediate_size, "up_proj": config.intermediate_size},
    }
    for name, parts in fused.items():
        if f".{name}." in path:
            return tuple(
                Source(prefix + path.replace(f".{name}.", f".{part}."), (num_rows, *shape[1:]))
                for part, num_rows in parts.items()
            )
    return (Source(prefix + path, shape),)


def check_tensors(config: ModelConfig, abstract: Params, tensors: Mapping[str, TensorInfo]) -> None:
    """Compares a checkpoint's header with what the model needs; nothing is read.

    Raises one ValueError that names missing, extra and misshapen tensors (the first ten, and how many there are).
    """
    flat = flatten(abstract)
    expected = {s.name: s.shape for path, leaf in flat.items() for s in sources(path, leaf.shape, config)}
    found = {name: info.shape for name, info in tensors.items() if not is_ignored(name, config)}
    raise_differences(expected, found, "checkpoint")


def check_params(config: ModelConfig, params: Params) -> None:
    """Checks params that are in memory already: names, shapes, and one dtype for all. Nothing is copied or moved.

    Raises one ValueError that names what is missing, extra, misshapen, not a jax.Array or of another dtype.
    """
    flat = _flat_arrays(params)
    raise_differences(_shapes(flatten(abstract_params(config, "float32"))), _shapes(flat), "params")
    dtype = params_dtype(params)
    _raise_problems(
        [f"{path} is {leaf.dtype}" for path, leaf in flat.items() if leaf.dtype != dtype], f"params ({dtype})"
    )


def check_same_params(params: Params, others: Params) -> None:
    """Checks that others have the names, shapes and dtypes of params. One ValueError that names what differs."""
    expected, found = flatten(params), _flat_arrays(others)
    raise_differences(_shapes(expected), _shapes(found), "params")
    wrong = [path for path, leaf in expected.items() if found[path].dtype != leaf.dtype]
    _raise_problems([f"{path} is {found[path].dtype}, expected {expected[path].dtype}" for path in wrong], "params")


def _flat_arrays(params: Params) -> dict[str, jax.Array]:
    is_tree = isinstance(params, Mapping)
    require(is_tree, "params", type(params).__name__, "nested dicts of jax.Array, as registry.abstract_params has them")
    flat = flatten(params)
    wrong = [f"{path} is {type(leaf)}" for path, leaf in flat.items() if not isinstance(leaf, jax.Array)]
    _raise_problems(wrong, "params (jax.Array)")
    check_devices(flat)
    return flat


def check_devices(flat: Mapping[str, Any]) -> None:
    """Checks that arrays lie where steps run: whole, on JAX's default device. One ValueError that names all others."""
    here = jax.device_put(0).devices()
    elsewhere = {path: leaf for path, leaf in flat.items() if isinstance(leaf, jax.Array) and leaf.devices() != here}
    problems = [f"{path} is on {sorted(map(str, leaf.devices()))}" for path, leaf in elsewhere.items()]
    _raise_problems(problems, f"params (on {next(iter(here))} alone)")


def _shapes(flat: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    return {path: leaf.shape for path, leaf in flat.items()}


def params_dtype(params: Params) -> str:
    """The dtype of the embedding, which all params share. Raises ValueError for one that models do not compute in."""
    dtype = str(params["embed_tokens"]["weight"].dtype)
    require(dtype in DTYPES[1:], "dtype of params", dtype, ", ".join(DTYPES[1:]))
    return dtype


def is_ignored(name: str, config: ModelConfig) -> bool:
    """Whether a checkpoint may hold this tensor though the model does not use it."""
    return name.endswith("rotary_emb.inv_freq") or (config.is_tied and name == "lm_head.weight")


def raise_differences(expected: Mapping[str, tuple[int, ...]], found: Mapping[str, tuple[int, ...]], what: str) -> None:
    """One ValueError for every name and shape in which two tables differ; none, if they agree."""
    problems = [f"{name} {list(shape)} is missing" for name, shape in expected.items() if name not in found]
    problems += [f"{name} {list(shape)} is extra" for name, shape in found.items() if name not in expected]
    problems += [
        f"{name} is {list(found[name])}, expected {list(shape)}"
        for name, shape in expected.items()
        if name in found and tuple(found[name]) != tuple(shape)
    ]
    _raise_problems(problems, what)


def read_params(
    checkpoint: Checkpoint,
    config: ModelConfig,
    abstract: Params,
    show_progress: bool,
    go_on: Callable[[], None] = lambda: None,
) -> Params:
    """Streams a checkpoint to the default device, in the dtypes of abstract.

    check_tensors must have passed. go_on is called before each layer; what it raises ends the reading. The host holds
    one layer at a time (and, on a CPU, the result itself). Raises ValueError if config says that the output head is the
    embedding and the checkpoint holds another one.
    """
    if config.is_tied and "lm_head.weight" in checkpoint.tensors:
        _require_equal(checkpoint, "lm_head.weight", "model.embed_tokens.weight")
    flat = flatten(abstract)
    total = sum(leaf.size * leaf.dtype.itemsize for leaf in flat.values())
    loaded = {}
    with (
        ThreadPoolExecutor(NUM_THREADS, "paxpage-load") as pool,
        tqdm(total=total, desc="Loading weights", unit="B", unit_scale=True, disable=not show_progress) as bar,
    ):
        for group in _layer_groups(flat):
            go_on()
            host = {path: _empty_aligned(flat[path]) for path in group}
            jobs = [job for path, out in host.items() for job in _jobs(path, out, config, checkpoint.chunk_elements)]
            list(pool.map(lambda job: _read_into(checkpoint, *job), jobs))
            device = jax.block_until_ready(jax.device_put(host))  # or transfers in flight would pile up on the host
            loaded.update(device)
            checkpoint.release()
            bar.update(sum(out.nbytes for out in host.values()))
    return unflatten(loaded)


def _raise_problems(problems: list[str], what: str) -> None:
    if problems:
        shown = "; ".join(problems[:MAX_NAMED])
        more = f"; and {len(problems) - MAX_NAMED} more" if len(problems) > MAX_NAMED else ""
        raise ValueError(f"{what} cannot be used as this model, {len(problems)} tensor(s) do not fit: {shown}{more}")


def _layer_groups(flat: Mapping[str, Any]) -> Iterator[list[str]]:
    """Paths that are read together: those of one layer; every other tensor alone."""
    groups: dict[str, list[str]] = {}
    for path in flat:
        key = ".".join(path.split(".")[:2])
        groups.setdefault(key, []).append(path)
    yield from groups.values()


def _empty_aligned(leaf: jax.ShapeDtypeStruct) -> np.ndarray:
    num_bytes = leaf.size * leaf.dtype.itemsize
    buffer = np.empty(num_bytes + ALIGNMENT_BYTES, np.uint8)
    start = -buffer.ctypes.data % ALIGNMENT_BYTES
    return buffer[start : start + num_bytes].view(leaf.dtype).reshape(leaf.shape)


def _jobs(
    path: str, out: np.ndarray, config: ModelConfig, chunk_elements: int
) -> Iterator[tuple[str, int, np.ndarray]]:
    """(tensor, first row, where its rows go) for every chunk of every source of one parameter."""
    first = 0
    for source in sources(path, out.shape, config):
        num_rows = source.shape[0]
        rows = max(1, chunk_elements // math.prod(source.shape[1:]))
        for start in range(0, num_rows, rows):
            yield source.name, start, out[first + start : first + min(start + rows, num_rows)]
        first += num_rows


def _read_into(checkpoint: Checkpoint, name: str, start: int, out: np.ndarray) -> None:
    out[...] = checkpoint.read_rows(name, start, start + len(out)).reshape(out.shape)


def _require_equal(checkpoint: Checkpoint, name: str, other: str) -> None:
    shape, other_shape = checkpoint.tensors[name].shape, checkpoint.tensors[other].shape
    is_equal = tuple(shape) == tuple(other_shape) and all(
        np.array_equal(checkpoint.read_rows(name, *span), checkpoint.read_rows(other, *span))
        for span in _spans(shape, checkpoint.chunk_elements)
    )
    if not is_equal:
        raise ValueError(f"{name} differs from {other}; allowed: equal or absent where tie_word_embeddings is true")


def _spans(shape: tuple[int, ...], chunk_elements: int) -> Iterable[tuple[int, int]]:
    rows = max(1, chunk_elements // math.prod(shape[1:]))
    return ((start, min(start + rows, shape[0])) for start in range(0, shape[0], rows))
