"""Programs kept on disk: found again by the same key alone, right or not at all, and without a trace or a lowering."""

import collections
import dataclasses
import errno
import functools
import logging
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from paxpage import LLM, SamplingParams
from paxpage.config import ModelConfig
from paxpage.engine import executables
from paxpage.engine.compilation import default_cache_dir, programs_folder
from paxpage.engine.executables import ExecutableStore, Program, open_compiler
from paxpage.engine.kv_cache import KVCache
from tests.helpers.engines import assert_idle, ids
from tests.helpers.fixtures import shelf, unchecked_types
from tests.helpers.shelf import Shelf

__all__ = ["shelf", "unchecked_types"]

CONFIG = ModelConfig("LlamaForCausalLM", 512, 64, 128, 2, 4, 2, 16, 128)
LIMITS = {"max_num_seqs": 2, "max_num_batched_tokens": 16, "num_blocks": 9, "max_model_len": 64}
PROMPT = [50 + (7 * j) % 400 for j in range(40)]
EVERYTHING = SamplingParams(
    temperature=0, max_tokens=6, ignore_eos=True, logprobs=2, prompt_logprobs=1, repetition_penalty=1.3
)
COMPILE, LOWER, TRACE = "backend_compile_duration", "jaxpr_to_mlir_module_duration", "jaxpr_trace_duration"
CACHE_OPTIONS = (
    "jax_compilation_cache_dir",
    "jax_persistent_cache_min_compile_time_secs",
    "jax_persistent_cache_min_entry_size_bytes",
    "jax_compilation_cache_max_size",
)


@pytest.fixture
def events() -> Iterator[collections.Counter[str]]:
    """How often JAX traced, lowered, compiled, or found something in its own cache."""
    counts: collections.Counter[str] = collections.Counter()

    def count(event: str, *_: float, **__: str | int) -> None:
        counts[event.rpartition("/")[2]] += 1

    jax.monitoring.register_event_duration_secs_listener(count)
    jax.monitoring.register_event_listener(count)
    yield counts
    jax.monitoring.unregister_event_duration_listener(count)
    jax.monitoring.unregister_event_listener(count)


@pytest.fixture
def cache_options() -> Iterator[None]:
    jax.jit(lambda x: 2 * x - 9)(jnp.zeros(3))  # JAX stays with the folder that it has at the first compilation
    before = {name: getattr(jax.config, name) for name in CACHE_OPTIONS}
    yield
    for name, value in before.items():
        jax.config.update(name, value)


@pytest.fixture
def fixed_sources(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Tells what the sources' hash is, whoever edits them while tests run."""
    return lambda digest: monkeypatch.setattr(executables, "source_digest", lambda: digest)


# An engine that starts twice


def _start(shelf: Shelf, folder: Path) -> Any:
    """What an engine answers that keeps its programs there."""
    with LLM(str(shelf.tiny_folder), **LIMITS, compilation_cache_dir=str(folder), show_progress=False) as llm:
        llm.engine.wait_until_warm()
        plain = SamplingParams(seed=3, max_tokens=6, ignore_eos=True)
        outputs = llm.generate([ids(PROMPT), ids(PROMPT[:5])], [EVERYTHING, plain], use_tqdm=False)
        assert_idle(llm.engine)
        runner = llm.engine.runner
        sizes = [stats.temp_size_in_bytes for stats in runner.memory_analysis().values()]
        return [output.outputs[0].token_ids for output in outputs], outputs[0].prompt_logprobs, sizes


@pytest.mark.usefixtures("cache_options")
def test_a_second_start_compiles_and_lowers_nothing(
    shelf: Shelf, tmp_path: Path, events: collections.Counter[str], fixed_sources: Callable[[str], None]
) -> None:
    fixed_sources("these")
    first = _start(shelf, tmp_path)
    num_programs = len(list((tmp_path / "programs").iterdir()))
    assert events[COMPILE] >= num_programs > 5
    events.clear()
    assert _start(shelf, tmp_path) == first
    assert (events[COMPILE], events[LOWER], events[TRACE]) == (0, 0, 0)
    fixed_sources("other")
    assert _start(shelf, tmp_path) == first
    assert events[COMPILE] >= num_programs
    assert len(list((tmp_path / "programs").iterdir())) == 2 * num_programs


@pytest.mark.usefixtures("cache_options")
def test_no_cache_folder_means_no_programs_on_disk(
    shelf: Shelf, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    opened: list[Path] = []
    jax.config.update("jax_compilation_cache_dir", str(tmp_path))
    monkeypatch.setattr(executables, "ExecutableStore", lambda folder, _: opened.append(folder))
    for folder in ("", None):  # None: JAX was given one
        with LLM(str(shelf.tiny_folder), **LIMITS, compilation_cache_dir=folder, show_progress=False):
            assert opened == []


# One program


class Counted:
    """A program that counts how often it is lowered. scale: what only its name tells."""

    def __init__(self, scale: float = 2, shape: tuple[int, ...] = (4,), options: dict[str, Any] | None = None) -> None:
        self.num_lowered = 0
        self.scale = scale
        self.likes = (KVCache(*[jax.ShapeDtypeStruct(shape, jnp.float32)] * 2), None)
        self.program = Program(f"scale {scale}", self.likes, self._lower, options or {})

    def _lower(self) -> jax.stages.Lowered:
        self.num_lowered += 1

        def run(cache: KVCache, _: None) -> tuple[KVCache, None, jax.Array]:
            return KVCache(cache.k * self.scale, cache.v + 1), None, jnp.sin(cache.k) @ cache.v

        return jax.jit(run, donate_argnums=0, keep_unused=True).lower(*self.likes)

    def check(self, store: ExecutableStore) -> jax.stages.Compiled:
        """Right answers, whether it is loaded or compiled."""
        compiled = store.load_or_compile(self.program)
        k, v = np.arange(4, dtype=np.float32), np.ones(4, np.float32)
        donated = KVCache(jnp.asarray(k), jnp.asarray(v))
        cache, nothing, products = compiled(donated, None)
        assert isinstance(cache, KVCache) and nothing is None and donated.k.is_deleted() and donated.v.is_deleted()
        np.testing.assert_array_equal(np.stack(cache), [k * self.scale, v + 1])
        np.testing.assert_allclose(products, np.sin(k) @ v, rtol=1e-5)
        return compiled


def _store(folder: Path, identity: str = "model") -> ExecutableStore:
    return ExecutableStore(folder / "programs", identity)


def _file(folder: Path) -> Path:
    (path,) = (folder / "programs").iterdir()
    return path


def test_a_loaded_program_is_like_the_compiled_one(tmp_path: Path) -> None:
    counted = Counted()
    compiled, loaded = (counted.check(_store(tmp_path)) for _ in range(2))
    assert counted.num_lowered == 1
    assert loaded.out_info == compiled.out_info and loaded.in_tree == compiled.in_tree
    fresh, stats = compiled.memory_analysis(), loaded.memory_analysis()
    assert fresh is not None and stats is not None
    assert (stats.alias_size_in_bytes, stats.temp_size_in_bytes) == (32, fresh.temp_size_in_bytes)


def test_only_its_owner_may_read_it(tmp_path: Path) -> None:
    Counted().check(_store(tmp_path))
    assert [path.stat().st_mode & 0o777 for path in (tmp_path / "programs", _file(tmp_path))] == [0o700, 0o600]


def test_what_is_kept_never_came_from_jaxs_cache(tmp_path: Path, events: collections.Counter[str]) -> None:
    """On a CPU such a program has lost its machine code, which is only seen when it is loaded and run."""
    for name in ("first", "second"):
        _store(tmp_path / name).load_or_compile(Counted().program)
    assert (events["compile_requests_use_cache"], events["cache_hits"]) == (2, 0)
    again = Counted()
    again.check(_store(tmp_path / "second"))
    assert again.num_lowered == 0


@pytest.mark.parametrize(
    "other", [Counted(scale=3), Counted(shape=(5,)), Counted(options={"xla_embed_ir_in_executable": True})]
)
def test_another_program_is_not_found(tmp_path: Path, other: Counted) -> None:
    Counted().check(_store(tmp_path))
    _store(tmp_path).load_or_compile(other.program)
    assert other.num_lowered == 1


def test_another_model_or_option_of_jax_is_not_found(tmp_path: Path) -> None:
    counted = Counted()
    counted.check(_store(tmp_path))
    counted.check(_store(tmp_path, "other model"))
    with jax.default_matmul_precision("highest"):
        counted.check(_store(tmp_path))
    assert counted.num_lowered == 3
    counted.check(_store(tmp_path))
    assert counted.num_lowered == 3


def _flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def _cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-7])


def _exchange(path: Path) -> None:
    """A whole file of another program under this one's name."""
    other = path.parent.parent / "other"
    ExecutableStore(other, "model").load_or_compile(Counted(scale=7).program)
    next(other.iterdir()).rename(path)


def _make_folder(path: Path) -> None:
    path.unlink()
    (path / "inside").mkdir(parents=True)


def _make_link(path: Path) -> None:
    path.symlink_to(path.rename(path.parent.parent / "elsewhere"))


SPOILERS: dict[str, Callable[[Path], Any]] = {
    "empty": lambda path: path.write_bytes(b""),
    "one bit": _flip,
    "cut": _cut,
    "other program": _exchange,
    "folder": _make_folder,
    "link": _make_link,
    "writable file": lambda path: path.chmod(0o620),
    "writable folder": lambda path: path.parent.chmod(0o770),
}


@pytest.mark.parametrize("spoil", SPOILERS.values(), ids=list(SPOILERS))
def test_a_bad_file_is_a_miss_with_one_line(
    tmp_path: Path, spoil: Callable[[Path], Any], caplog: pytest.LogCaptureFixture
) -> None:
    Counted().check(_store(tmp_path))
    spoil(_file(tmp_path))
    again = Counted()
    again.check(_store(tmp_path))
    assert again.num_lowered == 1
    read = [record.getMessage() for record in caplog.records if "not read" in record.getMessage()]
    assert len(read) == 1 and str(tmp_path) in read[0]


@pytest.mark.parametrize("spoil", ["one bit", "cut", "other program", "writable file", "link"])
def test_a_bad_file_is_written_again(tmp_path: Path, spoil: str) -> None:
    Counted().check(_store(tmp_path))
    SPOILERS[spoil](_file(tmp_path))
    Counted().check(_store(tmp_path))
    again = Counted()
    again.check(_store(tmp_path))
    assert again.num_lowered == 0


def test_a_folder_that_cannot_be_written_is_one_line(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "programs").write_text("a file where the folder should be")
    store = _store(tmp_path)
    for scale in (2, 3):
        Counted(scale=scale).check(store)
    kept = [record for record in caplog.records if "are not kept" in record.getMessage()]
    assert len(kept) == 1 and kept[0].levelno == logging.WARNING


def test_a_full_disk_leaves_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(executables.os, "replace", fail)
    Counted().check(_store(tmp_path))
    assert list((tmp_path / "programs").iterdir()) == [] and "No space left" in caplog.text


def test_the_oldest_programs_of_others_are_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(executables, "MAX_FILES", 3)
    folder = tmp_path / "programs"
    for age, name in ((300, "old"), (200, "older.used"), (100, "new")):
        before = set(folder.iterdir()) if folder.exists() else set()
        Counted().check(_store(tmp_path, name))
        (path,) = set(folder.iterdir()) - before
        os.utime(path, (time.time() - age,) * 2)
    used = Counted()
    used.check(_store(tmp_path, "old"))  # no longer the oldest
    (folder / "left.tmp").write_bytes(b"by a process that died")
    os.utime(folder / "left.tmp", (1, 1))
    own = _store(tmp_path, "own")
    for scale in (2, 3):
        Counted(scale=scale).check(own)
    assert len(list(folder.iterdir())) == 3 and used.num_lowered == 0
    for name, num_lowered in (("old", 0), ("new", 1)):
        monkeypatch.setattr(executables, "MAX_FILES", 100)
        counted = Counted()
        counted.check(_store(tmp_path, name))
        assert counted.num_lowered == num_lowered


def test_a_program_that_cannot_be_stored_is_compiled(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    like = jax.ShapeDtypeStruct((4,), jnp.float32)
    lower = functools.partial(jax.jit(lambda x: {"a": x + 1}).lower, like)
    compiled = _store(tmp_path).load_or_compile(Program("dict", (like,), lower, {}))
    assert compiled(jnp.zeros(4))["a"].tolist() == [1] * 4
    assert "are not kept" in caplog.text and not (tmp_path / "programs").exists()


# What a store is for


def test_the_hash_sees_every_byte_of_the_sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(executables, "PACKAGES", (tmp_path,))
    monkeypatch.setattr(executables, "_IMPORTED_NS", time.time_ns() + 10**12)
    found = [executables.source_digest()]
    for name, text in (("a.py", "x = 1"), ("a.py", "x = 2"), ("b/c.json", "{}"), ("b/d.json", "{}"), ("b/c.json", "")):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
        found.append(executables.source_digest())
    assert found[0] is None and len(set(found)) == 6
    (tmp_path / "notes.txt").write_text("no part of a program")
    assert executables.source_digest() == found[-1]
    monkeypatch.setattr(executables, "_IMPORTED_NS", 0)
    assert executables.source_digest() is None  # sources changed since they were imported


def test_only_own_models_have_a_store(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fixed_sources: Callable[[str], None]
) -> None:
    fixed_sources("these")
    assert open_compiler(tmp_path, CONFIG, "float32").store is not None
    assert open_compiler(tmp_path, None, "float32").store is None
    with jax.default_device(jax.local_devices()[0]):
        assert open_compiler(tmp_path, CONFIG, "float32").store is None
    monkeypatch.setitem(executables.ARCHITECTURES, CONFIG.architecture, Counted)
    assert open_compiler(tmp_path, CONFIG, "float32").store is None


def test_a_later_engine_has_none_once_sources_changed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.py").write_text("x = 1")
    monkeypatch.setattr(executables, "PACKAGES", (tmp_path,))
    for change_ns, is_kept in ((10**12, True), (-(10**12), False)):
        monkeypatch.setattr(executables, "_IMPORTED_NS", time.time_ns() + change_ns)
        assert (open_compiler(tmp_path, CONFIG, "float32").store is not None) is is_kept


def test_models_and_dtypes_have_keys_of_their_own() -> None:
    other = dataclasses.replace(CONFIG, rope_theta=5e5)
    identities = {executables.identity_of("these", CONFIG, dtype) for dtype in ("float32", "bfloat16")}
    identities |= {executables.identity_of(sources, other, "float32") for sources in ("these", "others")}
    assert len(identities) == 4


@pytest.mark.parametrize(
    ("present", "asked", "expected"),
    [
        ("default", None, "default"),
        ("mine", "mine", "mine"),
        ("mine", None, None),  # JAX was given it by other means
        ("mine", "", None),
        ("default", "", None),
        (None, "", None),
        ("gs://mine", "gs://mine", None),
    ],
)
@pytest.mark.usefixtures("cache_options")
def test_where_programs_are_kept(present: str | None, asked: str | None, expected: str | None) -> None:
    folders = {"default": default_cache_dir()}
    jax.config.update("jax_compilation_cache_dir", folders.get(present or "", present))
    found = programs_folder(asked)
    assert found == (None if expected is None else Path(folders.get(expected, expected)) / "programs")
