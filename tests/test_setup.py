"""pyproject.toml, constraints.txt, the scripts' search for Python, and what tests/conftest.py promises."""

import ast
import importlib.metadata
import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import jax
import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import paxpage
from paxpage.config import require_int

ROOT = Path(__file__).resolve().parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
CORE = [Requirement(line) for line in PROJECT["dependencies"]]
EXTRAS = {name: list(map(Requirement, lines)) for name, lines in PROJECT["optional-dependencies"].items()}
PINS = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if not line.startswith("#")]
SOURCES = sorted(
    str(path.relative_to(ROOT)) for name in ("paxpage", "pallas_kernels") for path in ROOT.glob(f"{name}/**/*.py")
)
EXTRA_OF = {
    "paxpage/server/": "serve",
    "paxpage/serve.py": "serve",
    "paxpage/bench/": "bench",
    "paxpage/engine/grammars.py": "structured",
}


def _names(requirements: list[Requirement]) -> set[str]:
    return {canonicalize_name(requirement.name) for requirement in requirements}


def _imported_roots(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and not node.level:
            yield (node.module or "").partition(".")[0]


def test_the_version_is_said_once_more_and_the_same() -> None:
    assert paxpage.__version__ == PROJECT["version"]


def test_constraints_are_plain_pins() -> None:
    """A name and a version: no addresses, no hashes, each package once."""
    assert [line for line in PINS if not re.fullmatch(r"[a-z0-9-]+==[A-Za-z0-9.]+", line)] == []
    assert len(set(PINS)) == len({line.partition("==")[0] for line in PINS}) == len(PINS)


def test_every_dependency_is_pinned_within_its_range() -> None:
    pinned = dict(line.split("==") for line in PINS)
    wanted = [*CORE, *EXTRAS["bench"], *EXTRAS["serve"], *EXTRAS["structured"], *EXTRAS["test"]]
    unmet = [
        str(requirement)
        for requirement in wanted
        if requirement.name != "paxpage"
        and not requirement.specifier.contains(pinned.get(canonicalize_name(requirement.name), "0"))
    ]
    assert unmet == []


def test_cuda_extras_ask_for_the_same_jax() -> None:
    ranges = {str(r.specifier) for r in [*CORE, *EXTRAS["cuda12"], *EXTRAS["cuda13"]] if r.name == "jax"}
    assert len(ranges) == 1


@pytest.fixture(scope="module")
def owners() -> dict[str, set[str]]:
    """Import name -> the distributions that bring it."""
    found = importlib.metadata.packages_distributions()
    return {root: {canonicalize_name(name) for name in names} for root, names in found.items()}


@pytest.mark.parametrize("source", SOURCES)
def test_imports_are_declared_dependencies(source: str, owners: dict[str, set[str]]) -> None:
    """What a module imports comes with paxpage, or with the extra for the server or for benchmarks."""
    roots = set(_imported_roots(ROOT / source)) - set(sys.stdlib_module_names) - {"paxpage", "pallas_kernels", ""}
    extras = [
        requirement for start, name in EXTRA_OF.items() if source.startswith(start) for requirement in EXTRAS[name]
    ]
    allowed = _names(CORE + extras)
    assert [root for root in roots if not allowed & owners.get(root, set())] == []


@pytest.mark.skipif(os.environ.get("PAXPAGE_NO_TYPECHECK") == "1", reason="type checks are switched off")
def test_annotations_are_checked_at_run_time() -> None:
    with pytest.raises(Exception, match="require_int"):
        require_int(field=5, value=1, minimum=0)  # type: ignore[arg-type]


def test_compiled_steps_of_tests_stay_apart() -> None:
    assert Path(jax.config.jax_compilation_cache_dir).is_relative_to(ROOT)


def _run_bash(code: str, argument: str, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    command = ["bash", "-euc", code, "test", argument]
    return subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=False)


def _find_python(path: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """Runs find_python with these folders as the only place for a Python."""
    variables = {"PATH": os.environ["PATH"], **environment}
    return _run_bash('source scripts/lib/venv.sh; PATH="$1" find_python', str(path), env=variables)


def _write_command(path: Path, line: str) -> None:
    path.write_text(f"#!/bin/sh\n{line}\n")
    path.chmod(0o755)


def test_a_python_that_does_not_run_is_passed_over(tmp_path: Path) -> None:
    """As a version manager's shim is, for a version that it does not have."""
    _write_command(tmp_path / "python3.12", "exit 127")
    _write_command(tmp_path / "python3", f'exec "{sys.executable}" "$@"')
    assert _find_python(tmp_path).stdout.strip() == sys.executable


def test_no_python_is_an_error_that_says_what_to_do(tmp_path: Path) -> None:
    _write_command(tmp_path / "python3", "exit 1")
    run = _find_python(tmp_path)
    assert run.returncode == 1 and "PYTHON=" in run.stderr


def test_a_named_python_that_does_not_run_is_an_error(tmp_path: Path) -> None:
    run = _find_python(Path(sys.executable).parent, PYTHON="/bin/false")
    assert run.returncode == 1 and "/bin/false" in run.stderr


def test_an_unknown_extra_is_refused() -> None:
    run = _run_bash('source scripts/lib/venv.sh; check_extras "$1"', "serve cuda14")
    assert run.returncode == 1 and "cuda14" in run.stderr and "cuda13" in run.stderr
