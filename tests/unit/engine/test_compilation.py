"""The count of compilations and the persistent cache's folder."""

from collections.abc import Iterator
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from paxpage.engine.compilation import CompilationCounter, default_cache_dir, use_persistent_cache

CACHE_OPTIONS = (
    "jax_compilation_cache_dir",
    "jax_persistent_cache_min_compile_time_secs",
    "jax_persistent_cache_min_entry_size_bytes",
)


@pytest.fixture
def counter() -> Iterator[CompilationCounter]:
    counter = CompilationCounter()
    yield counter
    counter.close()


@pytest.fixture
def cache_options() -> Iterator[None]:
    """Puts the process's own options back."""
    before = {name: getattr(jax.config, name) for name in CACHE_OPTIONS}
    yield
    for name, value in before.items():
        jax.config.update(name, value)


def test_a_new_shape_compiles_once(counter: CompilationCounter) -> None:
    triple = jax.jit(lambda x: 3 * x + 1)
    inputs = [jnp.zeros(5), jnp.zeros(5) + 2, jnp.zeros(6)]
    before, counts = counter.num_compilations, []
    for value in inputs:
        triple(value)
        counts.append(counter.num_compilations - before)
    assert counts == [1, 1, 2]


def test_a_closed_counter_stands_still() -> None:
    counter = CompilationCounter()
    counter.close()
    jax.jit(lambda x: 5 * x - 2)(jnp.zeros(7))
    assert counter.num_compilations == 0


def test_two_counters_are_independent(counter: CompilationCounter) -> None:
    other = CompilationCounter()
    other.close()
    jax.jit(lambda x: 7 * x - 3)(jnp.zeros(7))
    assert counter.num_compilations >= 1 and other.num_compilations == 0


def test_the_users_cache_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert default_cache_dir() == str(tmp_path / "paxpage" / "compilation")
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert default_cache_dir() == str(tmp_path / ".cache" / "paxpage" / "compilation")


@pytest.mark.parametrize(
    ("present", "asked", "expected"),
    [
        ("mine", None, "mine"),
        ("mine", "", "mine"),
        ("mine", "other", "other"),
        (None, "", None),
        (None, "other", "other"),
    ],
)
@pytest.mark.usefixtures("cache_options")
def test_which_folder_is_used(present: str | None, asked: str | None, expected: str | None) -> None:
    jax.config.update("jax_compilation_cache_dir", present)
    use_persistent_cache(asked)
    assert jax.config.jax_compilation_cache_dir == expected


@pytest.mark.usefixtures("cache_options")
def test_without_a_word_it_is_the_users_folder_and_everything_is_kept(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    jax.config.update("jax_compilation_cache_dir", None)
    use_persistent_cache(None)
    assert [getattr(jax.config, name) for name in CACHE_OPTIONS] == [default_cache_dir(), 0, 0]
