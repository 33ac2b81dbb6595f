"""One line of JSON for each result, with what it takes to know where it came from."""

import json
import subprocess
from pathlib import Path
from typing import Any

import paxpage

ROOT = Path(paxpage.__file__).resolve().parents[1]
GIT_TIMEOUT_S = 10.0


class ResultWriter:
    """Writes lines that all begin with the same fields, to a file (appended to; None: none) and, if told, to stdout."""

    def __init__(self, origin: dict[str, Any], path: str | None, *, is_printed: bool) -> None:
        self._origin = origin
        self._path = path
        self._is_printed = is_printed

    def write(self, fields: dict[str, Any]) -> None:
        """Adds one result."""
        line = json.dumps(self._origin | fields)
        if self._is_printed:
            print(line, flush=True)
        if self._path is not None:
            with open(self._path, "a", encoding="utf-8") as file:
                file.write(line + "\n")


def origin(flags: dict[str, Any]) -> dict[str, Any]:
    """Engine, version, commit, device, jax and the flags that are not None, for what ran in this process."""
    import jax

    return {
        "engine": "paxpage",
        "version": paxpage.__version__,
        "commit": commit(),
        "device": jax.devices()[0].device_kind,
        "jax": jax.__version__,
        "flags": given(flags),
    }


def given(flags: dict[str, Any]) -> dict[str, Any]:
    """Flags that have a value."""
    return {name: value for name, value in flags.items() if value is not None}


def commit() -> str | None:
    """The git commit that paxpage runs from, "-dirty" behind it if files differ; None outside a checkout."""
    if not (ROOT / ".git").exists():
        return None
    command = ["git", "-C", str(ROOT), "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=GIT_TIMEOUT_S, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()
