"""Steps lowered by other processes: the same modules, and none lost when a process is."""

import functools
import hashlib
import io
import os
import pathlib
import re
import threading
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from paxpage import LLM, SamplingParams
from paxpage.config import ModelConfig, RopeScaling
from paxpage.engine import build, executables, kv_cache, lowering, lowering_worker, model_runner, step
from paxpage.engine.batch import StepShape
from paxpage.engine.lowering import LoweringPool
from paxpage.engine.mosaic_kernels import kernels_of
from paxpage.engine.programs import Jobs, Programs
from paxpage.models import registry
from tests.gpu_code.lowering import as_h200
from tests.helpers.engines import ids
from tests.helpers.fixtures import shelf, unchecked_types
from tests.helpers.shelf import Shelf
from tests.server.process import wait_until

__all__ = ["shelf", "unchecked_types"]

SCALING = RopeScaling(8.0, 1.0, 4.0, 64)
CONFIG = ModelConfig("LlamaForCausalLM", 512, 64, 128, 2, 4, 2, 16, 128, rope_scaling=SCALING)
SHAPES = [StepShape(2, 2, 4), StepShape(16, 2, 4)]
LIMITS = {"max_num_seqs": 2, "max_num_batched_tokens": 16, "num_blocks": 9, "max_model_len": 64}


@pytest.fixture
def pool() -> Iterator[LoweringPool]:
    made = LoweringPool(CONFIG, "float32", 1)
    yield made
    made.close()


@functools.cache
def step_model(config: ModelConfig = CONFIG, dtype: str = "float32", max_rows: int = 2) -> step.StepModel:
    model = registry.abstract_model(config, dtype)
    cache = kv_cache.abstract_cache(model.kv_spec, 9, 16, dtype)
    return step.StepModel(*registry.split(model), cache, max_rows, config.vocab_size)


def messages(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.name == lowering.__name__]


def results(lowered: jax.stages.Lowered, shape: StepShape) -> list[Any]:
    """What a step gives for params and inputs of ones."""
    arguments = step.abstract_arguments(step_model(), shape)
    ones = jax.tree.map(lambda like: jnp.ones(like.shape, like.dtype), arguments)
    return [leaf.tolist() for leaf in jax.tree.leaves(lowered.compile()(*ones))]


def test_what_a_process_lowers_is_the_same_step(
    pool: LoweringPool, caplog: pytest.LogCaptureFixture, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From the modules that this process has, not those of the folder that it is in."""
    (tmp_path / "json.py").write_text("raise SystemExit")
    monkeypatch.chdir(tmp_path)
    for shape in SHAPES:
        here = step.trace_forward(step_model(), shape).lower()
        there = pool.lower(step_model(), shape)
        assert results(there, shape) == results(here, shape)
    assert messages(caplog) == []


def test_a_process_that_dies_costs_a_line_of_the_log(pool: LoweringPool, caplog: pytest.LogCaptureFixture) -> None:
    pool.start()
    pool._processes[0].kill()
    for shape in SHAPES:
        pool.lower(step_model(), shape).compile()
    assert len(messages(caplog)) == 1
    assert re.search("lowered in this process: .*(has ended|Broken pipe)", messages(caplog)[0])


@pytest.mark.parametrize(
    ("name", "value"), [("jax_default_matmul_precision", "float32"), ("jax_default_prng_impl", "rbg")]
)
def test_processes_set_otherwise_lower_nothing(
    name: str, value: str, pool: LoweringPool, caplog: pytest.LogCaptureFixture
) -> None:
    """Which is said once, and costs no process."""
    before = getattr(jax.config, name)
    jax.config.update(name, value)
    try:
        for shape in SHAPES:
            pool.lower(step_model(), shape)
    finally:
        jax.config.update(name, before)
    assert len(messages(caplog)) == 1 and name in messages(caplog)[0]
    (process,) = pool._processes
    assert process.poll() is None


def test_steps_lowered_ahead_are_given_when_the_kernels_of_all_are_compiled(
    pool: LoweringPool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    begun, may_end, given = threading.Semaphore(0), threading.Event(), threading.Event()

    def compile_kernels(lowered: jax.stages.Lowered) -> None:
        begun.release()
        if not given.is_set() and lowered.as_text().count("16xi32"):  # of the mixed step
            assert may_end.wait(60)

    def lower() -> None:
        lowered.append(pool.lower(step_model(), SHAPES[0]))
        given.set()

    lowered: list[jax.stages.Lowered] = []
    monkeypatch.setattr(lowering, "compile_kernels", compile_kernels)
    pool.lower_ahead(step_model(), SHAPES)
    thread = threading.Thread(target=lower, daemon=True)
    thread.start()
    assert all(begun.acquire(timeout=60) for _ in SHAPES)
    assert not given.wait(0.2)
    may_end.set()
    assert given.wait(60)
    here = [step.trace_forward(step_model(), shape).lower() for shape in SHAPES]
    lowered.append(pool.lower(step_model(), SHAPES[1]))
    assert [results(*one) for one in zip(lowered, SHAPES, strict=True)] == [
        results(*one) for one in zip(here, SHAPES, strict=True)
    ]
    assert messages(caplog) == []


def test_a_step_is_lowered_again_for_another_model(pool: LoweringPool) -> None:
    """As when more or fewer blocks fit than were expected."""
    model = step_model()
    other = model._replace(
        cache=kv_cache.abstract_cache(registry.abstract_model(CONFIG, "float32").kv_spec, 7, 16, "float32")
    )
    pool.lower_ahead(model, SHAPES[:1])
    assert "x7x" in pool.lower(other, SHAPES[0]).as_text()
    assert "x9x" in pool.lower(model, SHAPES[0]).as_text()


def test_only_steps_that_are_not_kept_are_expected(pool: LoweringPool, tmp_path: pathlib.Path) -> None:
    """Nor is a process started if all are."""
    compiler = executables.Compiler(executables.ExecutableStore(tmp_path / "programs", "these"), pool)
    executables.Compiler(compiler.store).step(step_model(), SHAPES[1])
    compiler.expect(step_model(), SHAPES[1:])
    assert pool._processes == []
    compiler.expect(step_model(), SHAPES)
    assert len(pool._processes) == len(pool._ahead) == 1
    compiler.step(step_model(), SHAPES[0])
    assert pool._ahead == {}


def test_kernels_that_cannot_be_compiled_ahead_cost_a_line_of_the_log(
    pool: LoweringPool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def compile_kernels(lowered: jax.stages.Lowered) -> None:
        raise RuntimeError("no compiler")

    monkeypatch.setattr(lowering, "compile_kernels", compile_kernels)
    pool.lower_ahead(step_model(), SHAPES)
    for shape in SHAPES:
        pool.lower(step_model(), shape).compile()
    assert messages(caplog) == ["kernels are compiled with the steps that they are in: no compiler"]


def test_the_end_comes_while_steps_are_lowered_ahead(pool: LoweringPool, caplog: pytest.LogCaptureFixture) -> None:
    """Nothing is said of a process that is ended at its work."""
    pool.lower_ahead(step_model(), SHAPES)
    steps = next(iter(pool._ahead.values())).all_futures
    wait_until(pool._idle.empty)
    pool.close()
    assert [future.result(60) for future in steps] == [None, None]
    assert messages(caplog) == []
    for shape in SHAPES:
        pool.lower(step_model(), shape).compile()


def test_after_the_end_steps_are_lowered_here(pool: LoweringPool) -> None:
    pool.start()
    (process,) = pool._processes
    pool.close()
    assert process.poll() is not None
    for shape in SHAPES:
        pool.lower(step_model(), shape)
    assert pool._processes == []


def test_the_end_comes_while_steps_are_waited_for(caplog: pytest.LogCaptureFixture) -> None:
    """As when one of them cannot be compiled, or with Ctrl-C: nobody is left waiting or at work, and no process."""
    pool, refused = LoweringPool(CONFIG, "float32", 1), []
    pool.start()
    (process,) = pool._processes

    def lower(shape: StepShape) -> None:
        with pytest.raises(RuntimeError, match="were ended") as error:
            pool.lower(step_model(), shape)
        refused.append(error)

    threads = [threading.Thread(target=lower, args=(shape,), daemon=True) for shape in SHAPES]
    for thread in threads:
        thread.start()
    wait_until(pool._idle.empty)
    threads.append(threading.Thread(target=pool.close, daemon=True))
    threads[-1].start()
    for thread in threads:
        thread.join(60)
    assert not any(thread.is_alive() for thread in threads)
    assert len(refused) == 2 and process.poll() is not None and pool._processes == []
    assert messages(caplog) == []


def test_processes_that_cannot_be_started(
    pool: LoweringPool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(lowering.sys, "executable", "/nothing/python")
    for shape in SHAPES:
        pool.lower(step_model(), shape).compile()
    assert len(messages(caplog)) == 1 and "/nothing/python" in messages(caplog)[0]


def test_an_answer_in_other_words(
    pool: LoweringPool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(lowering, "WORKER", "json.tool")  # repeats what it reads, once it has read all
    pool.start()
    (process,) = pool._processes
    assert process.stdin is not None
    process.stdin.write(b"5")
    process.stdin.close()
    process.stdin = io.BytesIO()
    pool.lower(step_model(), SHAPES[0]).compile()
    assert len(messages(caplog)) == 1 and pool._processes == []


def test_a_process_ends_with_its_input(pool: LoweringPool) -> None:
    """So none outlives an engine that was killed."""
    pool.start()
    (process,) = pool._processes
    assert process.stdin is not None
    process.stdin.close()
    assert process.wait(timeout=60) == 0


def test_without_a_hopper_there_are_no_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor need there be what only Linux has."""
    monkeypatch.delattr(os, "sched_getaffinity", raising=False)
    assert lowering.open_pool(CONFIG, "float32") is None


def test_a_module_for_a_device_that_is_not_here() -> None:
    """As a process lowers it for an H200, and as a process that has one would."""
    config = ModelConfig("LlamaForCausalLM", 512, 512, 512, 1, 8, 2, 64, 128)
    model, shape = step_model(config, "bfloat16", 64), StepShape(64, 64, 4)
    sizes = (9, 16, "bfloat16", 64, 512, None)
    recipe = lowering.Recipe(config, "bfloat16", *sizes, shape, "cuda", "NVIDIA H200", lowering.traced_options())
    there = jax.export.deserialize(bytearray(lowering_worker.export(lowering_worker.from_json(recipe.to_json()))))
    with as_h200():
        here = step.trace_forward(model, shape).lower(lowering_platforms=("cuda",))
    kernels = [re.findall(r"custom_call @(\S+)\(", module) for module in (there.mlir_module(), here.as_text())]
    assert kernels[0] == kernels[1] and any("mosaic" in name for name in kernels[0])
    found = kernels_of(here)
    assert len(found) == kernels[1].count("mosaic_gpu_v2") > 0
    assert all(hashlib.sha256(module).digest() == kernel_hash for kernel_hash, module in found.items())
    assert lowering_worker.from_json(recipe.to_json()) == recipe


def test_an_engine_whose_steps_other_processes_lower(
    shelf: Shelf, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    pools: list[LoweringPool] = []
    modules: list[bytes] = []
    ask = lowering._ask

    def open_pool(config: ModelConfig, dtype: str) -> LoweringPool:
        pools.append(LoweringPool(config, dtype, 2))
        return pools[-1]

    def ask_and_keep(*args: Any) -> bytes:
        modules.append(ask(*args))
        return modules[-1]

    def answers() -> list[list[int]]:
        with LLM(str(shelf.tiny_folder), **LIMITS, compilation_cache_dir="", show_progress=False) as llm:
            llm.engine.wait_until_warm()
            params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
            outputs = llm.generate([ids([50, 60, 70]), ids(range(40))], params, use_tqdm=False)
            return [output.outputs[0].token_ids for output in outputs]

    expected = answers()
    monkeypatch.setattr(executables, "source_digest", lambda: "these")
    monkeypatch.setattr(executables, "open_pool", open_pool)
    monkeypatch.setattr(lowering, "_ask", ask_and_keep)
    assert answers() == expected
    assert len(modules) == 3 and messages(caplog) == []  # what a CPU compiles before it is ready
    assert [pool._processes for pool in pools] == [[]]


def test_memory_that_compiling_holds_for_a_while_is_there_again(
    shelf: Shelf, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A start that finds less free than it expected looks again once nothing else compiles, before it lowers anew.

    It expects a little less than what fits beside the weights.
    """
    found, has_waited = iter([40, 32, 39]), []
    wait = Programs.wait

    def wait_and_say(self: Programs) -> None:
        wait(self)
        has_waited.append(not self._jobs or all(job.future.done() for job in self._jobs.values()))

    monkeypatch.setattr(executables, "source_digest", lambda: "these")
    monkeypatch.setattr(executables, "open_pool", lambda config, dtype: LoweringPool(config, dtype, 1))
    monkeypatch.setattr(build, "_num_blocks", lambda *_: next(found))
    monkeypatch.setattr(Programs, "wait", wait_and_say)
    caplog.set_level("INFO", build.__name__)
    with LLM(
        str(shelf.tiny_folder), **LIMITS | {"num_blocks": None}, compilation_cache_dir="", show_progress=False
    ) as llm:
        assert llm.engine.runner.num_blocks == 39
    assert has_waited == [True] and next(found, None) is None
    lines = [record.getMessage() for record in caplog.records if record.name == build.__name__]
    assert lines and not any("lowered again" in line for line in lines)


def test_what_was_begun_early_ends_with_a_start_that_fails(
    shelf: Shelf, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Ctrl-C while weights are loaded: no thread goes on to compile for nobody, and the log has no warning of it."""
    begun: list[Programs] = []

    class KeptPrograms(Programs):
        def begin(self, jobs: Jobs) -> None:
            begun.append(self)
            super().begin(jobs)

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(executables, "source_digest", lambda: "these")
    monkeypatch.setattr(executables, "open_pool", lambda config, dtype: LoweringPool(config, dtype, 1))
    monkeypatch.setattr(model_runner, "Programs", KeptPrograms)
    monkeypatch.setattr(build, "_right_runner", interrupt)
    with pytest.raises(KeyboardInterrupt):
        LLM(str(shelf.tiny_folder), **LIMITS, compilation_cache_dir="", show_progress=False)
    (programs,) = begun
    assert programs.ended.done() and not programs._jobs
    programs.join()
    assert messages(caplog) == []
