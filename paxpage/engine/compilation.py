"""XLA's persistent compilation cache, and a count of compilations."""

import os
import pathlib
from concurrent.futures import Future

import jax

MAX_CACHE_BYTES = 8 * 2**30
_COMPILE_EVENT = "/jax/core/compile/backend_compile_duration"


def default_cache_dir() -> str:
    """paxpage's folder in the user's cache folder (XDG_CACHE_HOME, else ~/.cache)."""
    base = os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache"
    return str(pathlib.Path(base) / "paxpage" / "compilation")


def use_persistent_cache(cache_dir: str | None) -> None:
    """Keeps every compiled step on disk. A folder that JAX has been given already stays; "" turns it off here."""
    if cache_dir == "" or (cache_dir is None and jax.config.jax_compilation_cache_dir):
        return
    jax.config.update("jax_compilation_cache_dir", cache_dir or default_cache_dir())
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", 0)
    # With a limit JAX locks the folder, so that two processes never see each other's half-written entries.
    jax.config.update("jax_compilation_cache_max_size", MAX_CACHE_BYTES)


def programs_folder(cache_dir: str | None) -> pathlib.Path | None:
    """Where executables.ExecutableStore keeps programs, after use_persistent_cache(cache_dir); None: nowhere.

    Only in a folder that was chosen for paxpage: one that JAX was given by other means is JAX's alone, as who can write
    to it, and what is kept in it, was decided elsewhere.
    """
    used = jax.config.jax_compilation_cache_dir
    is_own = bool(used) and cache_dir != "" and used == (cache_dir or default_cache_dir())
    is_on = jax.config.jax_enable_compilation_cache and "://" not in (used or "")
    return pathlib.Path(used) / "programs" if is_own and is_on else None


class CompilationCounter:
    """Counts XLA compilations (loads from JAX's cache included, from executables.ExecutableStore not) in this process
    from its creation on.

    after: nothing counts before this is done.
    """

    def __init__(self, after: Future[None] | None = None) -> None:
        self.num_compilations = 0
        self._after = after
        jax.monitoring.register_event_duration_secs_listener(self._on_event)

    def _on_event(self, event: str, duration_secs: float, **_: str | int) -> None:
        if event == _COMPILE_EVENT and (self._after is None or self._after.done()):
            self.num_compilations += 1

    def close(self) -> None:
        """Stops counting."""
        jax.monitoring.unregister_event_duration_listener(self._on_event)
