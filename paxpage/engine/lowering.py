"""Step functions traced and lowered by processes of their own, several at a time.

Both are Python's work, under its lock: 1 to 6 s for a step with Mosaic kernels, however many threads there are. A
process lowers for the device that this one has, without touching it, and sends the module; XLA compiles it here, the
kernels of all steps before the first step (see mosaic_kernels).
"""

import contextlib
import dataclasses
import json
import logging
import os
import queue
import subprocess
import sys
import threading
from collections.abc import Sequence
from concurrent import futures
from typing import IO, Any, NamedTuple

import jax
import jax.export

from pallas_kernels import backends
from paxpage.config import ModelConfig
from paxpage.engine import step
from paxpage.engine.batch import StepShape
from paxpage.engine.kv_cache import KVCache
from paxpage.engine.mosaic_kernels import compile_kernels
from paxpage.engine.sampler import SampledTokens

logger = logging.getLogger(__name__)

MAX_PROCESSES = 12  # each takes 0.28 GB of the host's memory after steps of 8B
CORES_FOR_PROCESSES = 3 / 4  # of the machine's; on the rest kernels are compiled as they come
WORKER = "paxpage.engine.lowering_worker"
# What one process may have set and another not; no program depends on it.
OWN_OPTIONS = ("jax_platforms", "jax_compilation_cache_", "jax_persistent_cache_")
NODES = {node.__name__: node for node in (step.StepOutput, KVCache, SampledTokens)}


class Recipe(NamedTuple):
    """What a process makes a step function from, all that step.StepModel and StepShape say."""

    config: ModelConfig
    dtype: str
    num_blocks: int
    block_size: int
    cache_dtype: str
    max_rows: int
    vocab_size: int
    backend: str | None
    shape: StepShape
    platform: str  # "cuda" or "cpu"
    device_kind: str
    options: list[list[str]]  # of JAX, which have to be the process's own

    def to_json(self) -> bytes:
        """One line."""
        fields = self._asdict() | {"config": dataclasses.asdict(self.config)}
        return json.dumps(fields).encode() + b"\n"


class RefusedError(ValueError):
    """What a process says that cannot lower a step, and is well otherwise."""


class Ahead(NamedTuple):
    """A step of several that are lowered ahead."""

    future: futures.Future[jax.stages.Lowered | None]
    all_futures: list[futures.Future[jax.stages.Lowered | None]]

    def result(self) -> jax.stages.Lowered | None:
        """Once all kernels are compiled; None if no process lowered this step."""
        futures.wait(self.all_futures)
        return self.future.result()


class LoweringPool:
    """Processes that lower the step functions of one model, from start(), lower_ahead() or the first lower() on.

    Any thread may call lower(); close() ends the processes. Nothing that goes wrong with one is an error: the step is
    then lowered here, and a line of the log says why.
    """

    def __init__(self, config: ModelConfig, dtype: str, num_processes: int) -> None:
        self._config = config
        self._dtype = dtype
        self._num_processes = num_processes
        self._processes: list[subprocess.Popen[bytes]] = []
        self._idle: queue.SimpleQueue[subprocess.Popen[bytes] | None] = queue.SimpleQueue()
        self._lock = threading.Lock()  # of starting and dropping
        self._warnings: set[str] = set()  # each is given once
        self._is_closed = False
        self._ahead: dict[bytes, Ahead] = {}  # by recipe

    def start(self) -> None:
        """Starts the processes, which takes them some seconds; does not wait."""
        with self._lock:
            try:
                while len(self._processes) < self._num_processes:
                    self._processes.append(_start())
                    self._idle.put(self._processes[-1])
            except OSError as error:
                logger.warning("only %d processes lower steps: %s", len(self._processes), error)
                self._num_processes = len(self._processes)
                if not self._processes:
                    self._idle.put(None)

    def lower_ahead(self, model: step.StepModel, shapes: Sequence[StepShape]) -> None:
        """Has these lowered, and their kernels compiled, before lower() gives the first of them; does not wait."""
        self.start()
        threads = futures.ThreadPoolExecutor(len(shapes), "lower")
        steps = [threads.submit(self._lower_with_kernels, model, shape) for shape in shapes]
        threads.shutdown(wait=False)
        recipes = [self._recipe(model, shape).to_json() for shape in shapes]
        self._ahead.update((recipe, Ahead(one, steps)) for recipe, one in zip(recipes, steps, strict=True))

    def lower(self, model: step.StepModel, shape: StepShape) -> jax.stages.Lowered:
        """step.trace_forward(model, shape).lower(), by the next process that is free.

        RuntimeError if close() comes meanwhile: where start-up has failed, nothing more is worth seconds of tracing.
        """
        was_closed = self._is_closed
        ahead = self._ahead.pop(self._recipe(model, shape).to_json(), None)
        lowered = self._lower_elsewhere(model, shape) if ahead is None else ahead.result()
        if lowered is None and self._is_closed and not was_closed:
            raise RuntimeError("the processes that lower steps were ended before they had lowered this one")
        return lowered or step.trace_forward(model, shape).lower()

    def _lower_with_kernels(self, model: step.StepModel, shape: StepShape) -> jax.stages.Lowered | None:
        lowered = self._lower_elsewhere(model, shape)
        if lowered is not None:
            try:
                compile_kernels(lowered)
            except Exception as error:
                self._warn("kernels are compiled with the steps that they are in", str(error))
        return lowered

    def _lower_elsewhere(self, model: step.StepModel, shape: StepShape) -> jax.stages.Lowered | None:
        """None if no process did."""
        self.start()
        process = self._idle.get()
        if process is None:  # all have gone; others may wait for one too
            self._idle.put(None)
            return None
        try:
            module = _ask(process, self._recipe(model, shape))
        except Exception as error:
            self._warn("steps are lowered in this process", str(error))
            if isinstance(error, RefusedError):
                self._idle.put(process)
            else:
                self._drop(process)
            return None
        self._idle.put(process)
        return _lowered(module, model, shape)

    def _warn(self, what: str, reason: str) -> None:
        if reason not in self._warnings and not self._is_closed:  # close() itself ends a process that is at a step
            self._warnings.add(reason)
            logger.warning("%s: %s", what, reason)

    def _recipe(self, model: step.StepModel, shape: StepShape) -> Recipe:
        _, num_blocks, _, block_size, _ = model.cache.k.shape
        device = jax.local_devices()[0]
        platform = "cpu" if device.platform == "cpu" else "cuda"
        sizes = (num_blocks, block_size, model.cache.k.dtype.name, model.max_rows, model.vocab_size, model.backend)
        return Recipe(self._config, self._dtype, *sizes, shape, platform, device.device_kind, traced_options())

    def _drop(self, process: subprocess.Popen[bytes]) -> None:
        _end(process)
        with self._lock:
            if process in self._processes:  # not after close()
                self._processes.remove(process)
                self._num_processes -= 1
            if not self._processes:
                self._idle.put(None)

    def close(self) -> None:
        """Ends the processes. For whoever is in lower() it is an error; whoever calls it later lowers by himself."""
        self._is_closed = True
        with self._lock:
            self._num_processes = 0
            ended, self._processes = self._processes, []
        self._ahead.clear()
        with contextlib.suppress(queue.Empty):
            while True:
                self._idle.get_nowait()
        self._idle.put(None)
        for process in ended:  # all at once: giving its memory back takes each a fifth of a second
            process.kill()
        for process in ended:
            _end(process)


def open_pool(config: ModelConfig, dtype: str) -> LoweringPool | None:
    """Processes for a model of paxpage.models, where they pay: for Mosaic's kernels, on Hopper, if there are cores."""
    if not (backends.is_hopper() and backends.has_hopper_name()):  # by which a process knows what it lowers for
        return None
    num_processes = min(MAX_PROCESSES, int(CORES_FOR_PROCESSES * len(os.sched_getaffinity(0))))
    return LoweringPool(config, dtype, num_processes) if num_processes > 1 else None


def traced_options() -> list[list[str]]:
    """JAX's options that a program may depend on."""
    values = jax.config.values.items()
    return sorted([name, repr(value)] for name, value in values if not name.startswith(OWN_OPTIONS))


def register_nodes() -> None:
    """Tells jax.export the pytrees that step functions take and give."""
    for name, node in NODES.items():
        try:
            jax.export.register_namedtuple_serialization(node, serialized_name=f"paxpage.{name}")
        except ValueError:  # registered before
            continue


def _start() -> subprocess.Popen[bytes]:
    """A process that finds the same modules as this one, and no device."""
    path = os.pathsep.join(folder or os.getcwd() for folder in sys.path)
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": path}
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
    return subprocess.Popen([sys.executable, "-P", "-m", WORKER], env=environment, start_new_session=True, **pipes)


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()
    for pipe in (process.stdin, process.stdout):
        assert pipe is not None
        with contextlib.suppress(OSError):  # of what it did not read any more
            pipe.close()


def _ask(process: subprocess.Popen[bytes], recipe: Recipe) -> bytes:
    """The serialised module. RefusedError for what the process says, ConnectionError if it has gone."""
    assert process.stdin is not None and process.stdout is not None
    process.stdin.write(recipe.to_json())
    process.stdin.flush()
    line = process.stdout.readline()
    if not line:
        raise ConnectionError("a process that lowers has ended")
    header = json.loads(line)
    if "error" in header:
        raise RefusedError(header["error"])
    return _read_exactly(process.stdout, header["num_bytes"])


def _read_exactly(file: IO[bytes], num_bytes: int) -> bytes:
    content = file.read(num_bytes)
    if len(content) < num_bytes:
        raise ConnectionError("a process that lowers has ended in the middle of a module")
    return content


def _lowered(module: bytes, model: step.StepModel, shape: StepShape) -> jax.stages.Lowered:
    register_nodes()
    exported = jax.export.deserialize(bytearray(module))

    def forward_flat(*arguments: Any) -> tuple[step.StepOutput, KVCache]:  # its name is the module's
        return exported.call(*arguments)

    return step.jit_forward(forward_flat, shape).lower(*step.abstract_arguments(model, shape))
