"""Whole compiled programs on disk: what is loaded from here is neither traced nor lowered nor compiled.

JAX's own cache is asked by the lowered program, and lowering takes most of a warm start. Here the key is all that the
program is made from: the source files of both packages, the model's config, shapes, versions, the device. Loading a
program runs code out of the folder, as with JAX's own cache: a folder or file that others can write to is not read.
"""

import contextlib
import functools
import hashlib
import importlib.metadata
import json
import logging
import os
import pathlib
import platform
import secrets
import stat
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
from jax.experimental import serialize_executable

import pallas_kernels
from pallas_kernels import backends
from paxpage.config import ModelConfig
from paxpage.engine import step
from paxpage.engine.batch import StepShape
from paxpage.engine.lowering import NODES as NAMED_TUPLES
from paxpage.engine.lowering import LoweringPool, open_pool, traced_options
from paxpage.models.registry import ARCHITECTURES

logger = logging.getLogger(__name__)

MAX_BYTES, MAX_FILES = 4 * 2**30, 512
SUFFIX = ".program"
STALE_S = 3600  # a temporary file of this age was left by a process that died
PACKAGES = (pathlib.Path(__file__).parents[1], pathlib.Path(pallas_kernels.__file__).parent)
SOURCES = ("*.py", "*.json")
DISTRIBUTIONS = (
    *("jax", "jaxlib", "flax", "numpy"),
    *(f"jax-cuda{version}-{part}" for version in (12, 13) for part in ("plugin", "pjrt")),
    *("nvidia-cublas-cu12", "nvidia-cudnn-cu12", "nvidia-cublas", "nvidia-cudnn-cu13"),
)
# A program that JAX took from its own cache cannot be stored on a CPU: it lost its machine code ("Function not found"
# when it is loaded and run). So JAX's cache must miss: its key holds this option, which changes nothing but a debug
# printout, and whose value is new every time.
SALT_OPTION = "xla_debug_buffer_assignment_show_max"
NODES: dict[str, Callable[..., Any]] = {
    "tuple": tuple,
    **{name: node._make for name, node in NAMED_TUPLES.items()},
}

_IMPORTED_NS = time.time_ns()


class Program(NamedTuple):
    """What to compile, and a name for it that says all that its arguments' shapes do not."""

    name: str
    arguments: tuple[Any, ...]  # pytrees of jax.ShapeDtypeStruct
    lower: Callable[[], jax.stages.Lowered]
    compiler_options: dict[str, Any]

    def compile(self, salt: int | None = None) -> jax.stages.Compiled:
        """Compiles it; a salt keeps JAX from finding it in its own cache."""
        options = self.compiler_options if salt is None else {**self.compiler_options, SALT_OPTION: salt}
        return self.lower().compile(compiler_options=options or None)


def step_program(model: step.StepModel, shape: StepShape, pool: LoweringPool | None = None) -> Program:
    """The step function of one shape, lowered by a process of the pool if there is one."""
    name = repr(("step", shape, model.max_rows, model.vocab_size, model.backend))
    arguments = step.abstract_arguments(model, shape)
    options = step.compiler_options(shape)
    if pool is None:
        return Program(name, arguments, lambda: step.trace_forward(model, shape).lower(), options)
    return Program(name, arguments, lambda: pool.lower(model, shape), options)


class Compiler:
    """Compiles an engine's programs, or loads them from the store; without a store and processes it does all itself.

    close() ends the processes, once the steps are compiled.
    """

    def __init__(self, store: "ExecutableStore | None" = None, pool: LoweringPool | None = None) -> None:
        self.store = store
        self.pool = pool

    def expect(self, model: step.StepModel, shapes: Sequence[StepShape]) -> None:
        """Has steps lowered ahead that the store does not hold; does not wait."""
        missing = [s for s in reversed(shapes) if self.store is None or not self.store.has(step_program(model, s))]
        if self.pool is not None and missing:
            self.pool.lower_ahead(model, missing)

    def step(self, model: step.StepModel, shape: StepShape) -> jax.stages.Compiled:
        """The step function of one shape."""
        return self.program(step_program(model, shape, self.pool))

    def program(self, program: Program) -> jax.stages.Compiled:
        """Any program."""
        return program.compile() if self.store is None else self.store.load_or_compile(program)

    def close(self) -> None:
        """Ends the processes that lower steps."""
        if self.pool is not None:
            self.pool.close()


class ExecutableStore:
    """Programs of one model in a folder that several processes may use at once.

    Nothing that goes wrong with the folder is an error: what cannot be read is compiled, what cannot be written is not
    kept, and one line of the log says why. identity: see identity_of.
    """

    def __init__(self, folder: pathlib.Path, identity: str) -> None:
        self._folder = folder
        self._identity = identity
        self._is_writable = True
        self._used: set[str] = set()  # names of files, which are not removed
        self._lock = threading.Lock()  # of removing

    def has(self, program: Program) -> bool:
        """Whether there is a file for it, which may yet be damaged."""
        return self._path(self._key(program)).exists()

    def load_or_compile(self, program: Program) -> jax.stages.Compiled:
        """The program, from the folder if it is there; else it is compiled and kept."""
        key = self._key(program)
        path = self._path(key)
        self._used.add(path.name)
        try:
            return self._load(path, key, program)
        except FileNotFoundError:
            pass
        except Exception as error:
            logger.warning("a compiled program is not read but compiled again: %s: %s", path, error)
        compiled = program.compile(secrets.randbits(62))
        self._keep(path, key, compiled)
        return compiled

    def _path(self, key: str) -> pathlib.Path:
        return self._folder / f"{key}{SUFFIX}"

    def _key(self, program: Program) -> str:
        leaves, tree = jax.tree.flatten(program.arguments)
        shapes = [(leaf.shape, leaf.dtype.name) for leaf in leaves]
        parts = (self._identity, traced_options(), program.name, sorted(program.compiler_options.items()), tree, shapes)
        return hashlib.sha256(repr(parts).encode()).hexdigest()

    def _load(self, path: pathlib.Path, key: str, program: Program) -> jax.stages.Compiled:
        content = _read_own(path)
        digest, body = content[:32], content[32:]
        _expect(hashlib.sha256(body).digest() == digest, "damaged")
        header_text, _, payload = body.partition(b"\n")
        header = json.loads(header_text)
        _expect(header["key"] == key, "of another program")
        with contextlib.suppress(OSError):  # of a read-only file system, say
            os.utime(path)  # the oldest are removed first
        trees = jax.tree.structure((program.arguments, {})), jax.tree.structure(_from_json(header["output"]))
        device = jax.local_devices()[0]
        return serialize_executable.deserialize_and_load(
            payload, *trees, backend=device.client, execution_devices=[device]
        )

    def _keep(self, path: pathlib.Path, key: str, compiled: jax.stages.Compiled) -> None:
        if not self._is_writable:
            return
        try:
            payload, _, out_tree = serialize_executable.serialize(compiled)
            output = _to_json(jax.tree.unflatten(out_tree, range(out_tree.num_leaves)))
            body = json.dumps({"key": key, "output": output}).encode() + b"\n" + payload
            make_own_folder(self._folder)
            _write(path, hashlib.sha256(body).digest() + body)
            self._remove_oldest()
        except Exception as error:
            self._is_writable = False
            logger.warning("compiled programs are not kept in %s: %s", self._folder, error)

    def _remove_oldest(self) -> None:
        """Down to MAX_FILES and MAX_BYTES, but for what this process uses."""
        with self._lock:
            files = sorted(_stats(self._folder), key=lambda file: file[1].st_mtime)
            num_bytes, num_files = sum(each.st_size for _, each in files), len(files)
            for path, each in files:
                is_stale = path.suffix != SUFFIX and time.time() - each.st_mtime > STALE_S
                is_over = path.suffix == SUFFIX and (num_bytes > MAX_BYTES or num_files > MAX_FILES)
                if is_stale or (is_over and path.name not in self._used):
                    path.unlink(missing_ok=True)
                    num_bytes, num_files = num_bytes - each.st_size, num_files - 1


def open_compiler(folder: pathlib.Path | None, config: ModelConfig | None, dtype: str) -> Compiler:
    """Of a model: with a store in folder, and processes, where what they give is what this process would make.

    So there are none for a user's own module, whose code nobody hashed (config is None, or its architecture is not
    this package's); nor when source files changed since they were imported, or over several processes or a chosen
    device. Code that was replaced in memory alone is not seen.
    """
    is_own = config is not None and ARCHITECTURES[config.architecture].__module__.startswith("paxpage.models.")
    is_simple = jax.process_count() == 1 and jax.config.jax_default_device is None
    sources = source_digest() if is_own and is_simple else None
    if sources is None or config is None:
        return Compiler()
    if backends.is_hopper():
        backends.load_runtime()
    store = None if folder is None else ExecutableStore(folder, identity_of(sources, config, dtype))
    return Compiler(store, open_pool(config, dtype))


def identity_of(sources: str, config: ModelConfig, dtype: str) -> str:
    """What all programs of a model have in common: its config, the source files, the versions, the device."""
    device = jax.local_devices()[0]
    kind = (device.client.platform, device.client.platform_version, device.device_kind, jax.local_device_count())
    flags = [os.environ.get(name) for name in ("XLA_FLAGS", "NPROC")]
    return repr((sources, config, dtype, kind, _host(), flags, _versions()))


def source_digest() -> str | None:
    """A hash of the source files of both packages; None if there are none, or some are newer than this process's."""
    digest, is_empty = hashlib.sha256(), True
    for package in PACKAGES:
        for path in sorted(path for pattern in SOURCES for path in package.rglob(pattern)):
            if path.stat().st_ctime_ns > _IMPORTED_NS:
                logger.info("%s changed since it was imported: compiled programs are neither read nor kept", path)
                return None
            content = path.read_bytes()
            digest.update(f"{package.name}/{path.relative_to(package)} {len(content)}\n".encode() + content)
            is_empty = False
    return None if is_empty else digest.hexdigest()


def make_own_folder(folder: pathlib.Path) -> None:
    """Makes a folder for its owner alone. PermissionError if it is there and others can write to it."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    _check_own(folder.stat(), "the folder")


def _check_own(stats: os.stat_result, name: str) -> None:
    is_own = stats.st_uid == os.geteuid() and not stats.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
    if not is_own:
        raise PermissionError(f"others can write to {name}")


def _read_own(path: pathlib.Path) -> bytes:
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    with open(descriptor, "rb") as file:
        _check_own(path.parent.stat(), "the folder")
        _check_own(os.fstat(descriptor), "it")
        return file.read()


def _write(path: pathlib.Path, content: bytes) -> None:
    """All of it or nothing."""
    descriptor, temporary = tempfile.mkstemp(dir=path.parent, suffix=".tmp")
    try:
        with open(descriptor, "wb") as file:
            file.write(content)
        os.replace(temporary, path)
    except BaseException:
        pathlib.Path(temporary).unlink(missing_ok=True)
        raise


def _stats(folder: pathlib.Path) -> Iterator[tuple[pathlib.Path, os.stat_result]]:
    for path in folder.iterdir():
        try:
            yield path, path.stat()
        except FileNotFoundError:
            continue  # another process removed it


def _expect(condition: bool, problem: str) -> None:
    if not condition:
        raise ValueError(problem)


def _to_json(tree: Any) -> Any:
    """A pytree of tuples and NODES, its leaves numbers, as lists that begin with a node's name."""
    if not isinstance(tree, tuple):
        _expect(tree is None or isinstance(tree, int), f"output of type {type(tree).__name__}")
        return tree
    name = type(tree).__name__
    _expect(name in NODES, f"output of type {name}")
    return [name, *map(_to_json, tree)]


def _from_json(value: Any) -> Any:
    return NODES[value[0]](map(_from_json, value[1:])) if isinstance(value, list) else value


@functools.cache
def _versions() -> list[str]:
    """Of what programs are traced, compiled and run with."""
    return [f"{name} {_version(name)}" for name in DISTRIBUTIONS]


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


@functools.cache
def _host() -> tuple[Any, ...]:
    """What code for this CPU depends on: its instructions, and how many threads may run."""
    cores = os.cpu_count(), len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else None
    try:
        lines = pathlib.Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    wanted = ("model name", "flags", "Features", "CPU part")
    features = sorted({line for line in lines if line.startswith(wanted)})
    return platform.machine(), platform.processor(), cores, features
