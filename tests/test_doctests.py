"""Examples in docstrings do what they show."""

import ast
import doctest
import importlib
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def _examples() -> Iterator[tuple[str, str, str]]:
    """Module, name and docstring wherever there is a >>>. From the source: type-checked functions hide theirs."""
    for path in sorted([*(ROOT / "paxpage").rglob("*.py"), *(ROOT / "pallas_kernels").rglob("*.py")]):
        module = ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            text = ast.get_docstring(node) if isinstance(node, DOCUMENTED) else None
            if text and ">>>" in text:
                yield module, getattr(node, "name", "module"), text


def _num_failures(text: str, names: dict[str, object]) -> int:
    test = doctest.DocTestParser().get_doctest(text, names, "example", None, None)
    return doctest.DocTestRunner(verbose=False).run(test).failed


def test_examples() -> None:
    failed = [
        f"{module}.{name}"
        for module, name, text in _examples()
        if _num_failures(text, dict(vars(importlib.import_module(module))))
    ]
    assert failed == []


def test_a_wrong_example_is_caught() -> None:
    assert _num_failures(">>> x + 1\n3\n", {"x": 1}) == 1
