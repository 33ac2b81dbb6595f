"""Programs that are compiled behind the first requests: each once, found in time, and none lost silently."""

import functools
import logging
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from paxpage import LLM, SamplingParams
from paxpage.engine import sampler
from paxpage.engine.batch import NUM_SAMPLING_INTS, StepShape, num_adjusting_ints
from paxpage.engine.build import sampling_bytes
from paxpage.engine.compilation import CompilationCounter
from paxpage.engine.engine import EngineDeadError
from paxpage.engine.model_runner import ModelRunner, sampled_shapes, step_shapes
from paxpage.engine.programs import Programs
from paxpage.engine.step import temporary_bytes
from tests.helpers.engines import assert_idle, ids, tokens
from tests.helpers.fixtures import shelf, unchecked_types
from tests.helpers.shelf import Limits, Shelf
from tests.helpers.stops import StopsAt

__all__ = ["shelf", "unchecked_types"]

ROOT = Path(__file__).resolve().parents[3]
PROMPT = [50 + (7 * j) % 400 for j in range(40)]
LIMITS = {"max_num_seqs": 1, "max_num_batched_tokens": 16, "num_blocks": 9, "max_model_len": 64}
COMPILERS_OF_RARE = ("_compile_adjust", "_compile_states", "_compile_score")
RARE = SamplingParams(
    temperature=0,
    max_tokens=6,
    ignore_eos=True,
    logprobs=2,
    prompt_logprobs=1,
    repetition_penalty=1.3,
    logit_bias={9: 4},
)
TIMEOUT_S = 30


class Gate:
    """Holds compilations up, and counts them by key."""

    def __init__(self) -> None:
        self.opened = threading.Event()
        self.counts: dict[Any, int] = {}

    def compile(self, key: Any) -> jax.stages.Compiled:
        assert self.opened.wait(TIMEOUT_S)
        self.counts[key] = self.counts.get(key, 0) + 1
        return jax.jit(lambda x: x + 1).lower(1.0).compile()

    def jobs(self, *keys: Any) -> dict[Any, Callable[[], jax.stages.Compiled]]:
        return {key: functools.partial(self.compile, key) for key in keys}


@pytest.fixture
def gate() -> Iterator[Gate]:
    gate = Gate()
    yield gate
    gate.opened.set()


def test_no_more_are_waited_for_than_are_wanted(gate: Gate) -> None:
    programs = Programs()
    gate.opened.set()
    go_on = StopsAt(3)
    with pytest.raises(ValueError, match="no more"):
        programs.compile(gate.jobs(*range(50)), show_progress=False, go_on=go_on)
    programs.join()
    assert go_on.num_calls == 3 and len(gate.counts) < 50 and programs.ended.done()


def fail() -> jax.stages.Compiled:
    raise RuntimeError("injected")


def test_what_was_begun_early_is_waited_for_and_compiled_once(gate: Gate) -> None:
    programs = Programs()
    programs.begin(gate.jobs("early", "other"))
    assert not programs.has("early")
    threading.Timer(0.2, gate.opened.set).start()
    programs.compile(gate.jobs("early", "step"), show_progress=False)
    assert set(programs) == {"early", "other", "step"} and gate.counts == {"early": 1, "other": 1, "step": 1}
    programs.compile_behind({})
    assert programs.ended.result(TIMEOUT_S) is None


def test_what_was_begun_is_waited_for_though_it_fails(gate: Gate) -> None:
    programs = Programs()
    programs.begin(gate.jobs("early") | {"failing": fail})
    threading.Timer(0.2, gate.opened.set).start()
    programs.wait()
    assert programs.has("early") and programs.has("failing")
    with pytest.raises(RuntimeError, match="injected"):
        programs.compile({}, show_progress=False)


def test_what_fails_early_is_said_when_it_is_waited_for() -> None:
    programs = Programs()
    programs.begin({"early": fail})
    with pytest.raises(RuntimeError, match="injected"):
        programs.compile({}, show_progress=False)


def test_the_first_are_there_and_the_later_follow(gate: Gate) -> None:
    programs, open_gate = Programs(), Gate()
    open_gate.opened.set()
    programs.compile(open_gate.jobs("a", "b"), show_progress=False)
    programs.compile_behind(gate.jobs("c"))
    assert set(programs) == {"a", "b"} and not programs.ended.done()
    with pytest.raises(KeyError):
        programs["unknown"]
    gate.opened.set()
    assert programs.ended.result(TIMEOUT_S) is None and programs.error() is None
    assert programs["c"](1.0) == 2 and gate.counts | open_gate.counts == {"a": 1, "b": 1, "c": 1}
    programs.join()


@pytest.mark.parametrize(("num_cores", "num_threads"), [(1, 1), (2, 1), (4, 2), (16, 2)])
def test_threads_are_left_to_requests(
    gate: Gate, monkeypatch: pytest.MonkeyPatch, num_cores: int, num_threads: int
) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: num_cores)
    programs, before = Programs(), threading.active_count()
    programs.compile_behind(gate.jobs(*range(1000)))
    assert threading.active_count() - before == num_threads
    programs.close()
    gate.opened.set()
    programs.join()


def test_who_needs_one_waits_for_it_alone(gate: Gate) -> None:
    """All threads are busy with other programs, one of which the second lookup waits for."""
    programs, open_gate = Programs(), Gate()
    open_gate.opened.set()
    busy = [f"busy {index}" for index in range(64)]
    programs.compile_behind(gate.jobs(*busy) | open_gate.jobs("needed"))
    assert programs["needed"](1.0) == 2
    threading.Timer(0.1, gate.opened.set).start()
    assert programs[busy[0]](2.0) == 3
    programs.ended.result(TIMEOUT_S)
    assert set((gate.counts | open_gate.counts).values()) == {1} and len(gate.counts) == 64
    programs.join()


def test_a_failure_of_the_first_is_raised(gate: Gate) -> None:
    programs = Programs()
    with pytest.raises(RuntimeError, match="injected"):
        programs.compile({"a": fail} | gate.jobs(*range(64)), show_progress=False)
    gate.opened.set()
    programs.join()
    assert len(gate.counts) < 64  # nobody goes on for an engine that will not be


def test_a_later_failure_is_logged_and_kept(caplog: pytest.LogCaptureFixture) -> None:
    programs = Programs()
    programs.compile_behind({"a": fail})
    with pytest.raises(RuntimeError, match="injected"):
        programs.ended.result(TIMEOUT_S)
    assert str(programs.error()) == "injected"
    with pytest.raises(RuntimeError, match="injected"):
        programs["a"]
    assert [record.levelno for record in caplog.records] == [logging.ERROR]
    programs.join()


def test_closing_in_the_middle(gate: Gate, caplog: pytest.LogCaptureFixture) -> None:
    programs = Programs()
    programs.compile_behind(gate.jobs(*range(64)))
    programs.close()
    assert programs.ended.result(TIMEOUT_S) is None and not programs
    gate.opened.set()
    programs.join()
    assert len(gate.counts) < 64 and not programs and not caplog.records


def test_an_interrupted_compilation_is_done_again(gate: Gate) -> None:
    def interrupted() -> jax.stages.Compiled:
        if not gate.counts:
            gate.counts["interrupted"] = 1
            raise KeyboardInterrupt
        return gate.compile("again")

    blocked, programs = Gate(), Programs()
    programs.compile_behind(blocked.jobs(*range(64)) | {"a": interrupted})
    with pytest.raises(KeyboardInterrupt):
        programs["a"]
    gate.opened.set()
    assert programs["a"](1.0) == 2
    programs.close()
    blocked.opened.set()
    programs.join()


def test_a_process_ends_though_work_is_left() -> None:
    """After what is being compiled at that moment; the rest would take a minute and more."""
    code = "import time; from paxpage.engine.programs import Programs\n"
    code += "Programs().compile_behind({i: lambda: time.sleep(0.5) for i in range(1000)})\n"
    started_s = time.monotonic()
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "") and time.monotonic() - started_s < 30


# In an engine


def hold_up(monkeypatch: pytest.MonkeyPatch, gate: Gate) -> None:
    """Whatever engines compile behind the first requests waits for the gate."""

    def held(original: Callable[..., Any], *arguments: Any) -> Any:
        assert gate.opened.wait(TIMEOUT_S)
        return original(*arguments)

    for name in COMPILERS_OF_RARE:
        original = getattr(ModelRunner, name)
        monkeypatch.setattr(ModelRunner, name, functools.partialmethod(_call, held, original))


def _call(self: ModelRunner, held: Callable[..., Any], original: Callable[..., Any], argument: Any) -> Any:
    return held(original, self, argument)


def answer(llm: LLM) -> Any:
    """What a request that needs every rare program gets; its probabilities rounded."""
    (output,) = llm.generate(ids(PROMPT), RARE, use_tqdm=False)
    (sample,) = output.outputs
    assert output.prompt_logprobs is not None and sample.logprobs is not None
    entries = [*output.prompt_logprobs[1:], *sample.logprobs]
    values = [{token_id: round(entry.logprob, 3) for token_id, entry in each.items()} for each in entries if each]
    return sample.token_ids, values


def test_a_request_right_after_the_start_is_answered_right(
    shelf: Shelf, monkeypatch: pytest.MonkeyPatch, gate: Gate
) -> None:
    """Though what it needs is not compiled yet; once everything is, nothing more is compiled for it."""
    expected = answer(shelf.tiny(Limits(**LIMITS)))
    hold_up(monkeypatch, gate)
    with LLM(str(shelf.tiny_folder), **LIMITS, show_progress=False) as llm:
        counter = CompilationCounter(after=llm.engine.runner.warmed_up)
        assert not llm.engine.runner.warmed_up.done()
        threading.Timer(0.3, gate.opened.set).start()
        assert answer(llm) == expected
        llm.engine.wait_until_warm()
        assert answer(llm) == expected
        counter.close()
        assert counter.num_compilations == 0
        assert_idle(llm.engine)


def test_plain_requests_wait_for_nothing(shelf: Shelf, monkeypatch: pytest.MonkeyPatch, gate: Gate) -> None:
    """And an engine may be closed before everything is compiled."""
    hold_up(monkeypatch, gate)
    with LLM(str(shelf.tiny_folder), **LIMITS, show_progress=False) as llm:
        for params in (SamplingParams(temperature=0, max_tokens=4), SamplingParams(seed=1, logprobs=1, max_tokens=4)):
            llm.generate(ids(PROMPT), params, use_tqdm=False)
        assert not llm.engine.runner.warmed_up.done()
        threading.Timer(0.1, gate.opened.set).start()
    assert not any(thread.name == "compile" for thread in threading.enumerate())


FIRST_SIZES = [(1, 1), (12, 12), (300, 12)]
LATER_SIZES = [(8, 8), (64, 12), (256, 12)]


def test_larger_steps_serve_until_smaller_ones_are_compiled(
    shelf: Shelf, monkeypatch: pytest.MonkeyPatch, gate: Gate
) -> None:
    """On a CPU, where ready means that the largest are there, and what one request decodes with."""
    compile_shape, taken = ModelRunner._compile, []

    def compile_or_wait(self: ModelRunner, shape: StepShape) -> jax.stages.Compiled:
        assert shape[:2] in FIRST_SIZES or gate.opened.wait(TIMEOUT_S)
        taken.append(shape[:2])
        return compile_shape(self, shape)

    monkeypatch.setattr(ModelRunner, "_compile", compile_or_wait)
    limits = LIMITS | {"max_num_seqs": 12, "max_num_batched_tokens": 300, "num_blocks": 40}
    with LLM(str(shelf.tiny_folder), **limits, show_progress=False) as llm:
        assert sorted(taken) == FIRST_SIZES
        params = SamplingParams(seed=3, max_tokens=8, ignore_eos=True)
        early = tokens(llm, [PROMPT] + [PROMPT[i:] for i in range(1, 6)], params)
        assert early[0] == tokens(llm, [PROMPT], params)[0]
        assert not llm.engine.runner.warmed_up.done()
        gate.opened.set()
        llm.engine.wait_until_warm()
        assert sorted(taken) == sorted(FIRST_SIZES + LATER_SIZES)
        llm.reset_prefix_cache()
        assert tokens(llm, [PROMPT] + [PROMPT[i:] for i in range(1, 6)], params) == early


def test_an_engine_dies_of_a_program_that_cannot_be_compiled(shelf: Shelf, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also when nobody asks for that program."""
    monkeypatch.setattr(ModelRunner, "_compile_score", lambda self, shape: fail())
    with LLM(str(shelf.tiny_folder), **LIMITS, show_progress=False) as llm:
        with pytest.raises(RuntimeError, match="injected"):
            llm.engine.wait_until_warm()
        with pytest.raises(EngineDeadError, match="a program could not be compiled: injected"):
            llm.generate(ids(PROMPT), SamplingParams(temperature=0), use_tqdm=False)
        assert_idle(llm.engine)


# Which programs there are, and what memory they take


@pytest.mark.parametrize(
    ("max_num_seqs", "expected"), [(4, [1, 4]), (16, [1, 8, 16]), (256, [1, 8, 32, 64, 128, 160, 192, 224, 256])]
)
def test_rows_for_which_there_are_samplers(max_num_seqs: int, expected: list[int]) -> None:
    shapes = step_shapes("gpu", max_num_seqs, 512, blocks_per_row=8)
    sampled = sampled_shapes(shapes, "gpu")
    assert sorted({shape.num_rows for shape in sampled}) == expected
    assert [shape for shape in sampled if not shape.is_decode] == [shape for shape in shapes if not shape.is_decode]


def test_memory_for_sampling_covers_what_the_compiler_says() -> None:
    """Of what is compiled when the cache has long been allocated: logits, adjusted logits, and the programs' own."""
    logits = jax.ShapeDtypeStruct((32, 4096), jnp.float32)
    packed = jax.ShapeDtypeStruct((32, NUM_SAMPLING_INTS), jnp.int32)
    changes = jax.ShapeDtypeStruct((num_adjusting_ints(32),), jnp.int32)
    previous = jax.ShapeDtypeStruct((32,), jnp.int32)
    sample = functools.partial(sampler.sample, num_top=20)
    for compiled in (
        jax.jit(sample).lower(logits, logits, packed).compile(),
        jax.jit(sampler.adjust).lower(logits, logits, changes, previous).compile(),
    ):
        assert 2 * 32 * 4096 * 4 + temporary_bytes(compiled) <= sampling_bytes(32, 4096)
    assert sampling_bytes(1, 4096) == sampling_bytes(32, 4096)  # so many prompt tokens are scored at a time
    assert sampling_bytes(256, 4096) == 8 * sampling_bytes(32, 4096)
