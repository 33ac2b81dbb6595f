"""The directions of imports and the house rules that a syntax tree can show."""

import ast
import dataclasses
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("paxpage", "pallas_kernels")
OWN_ROOTS = (*PACKAGES, "scripts", "tests")

MAX_LINES = 50
MAX_KERNEL_LINES = 90
MAX_MEDIAN_LINES = 10
MAX_PARAMETERS = 9
WIDE_BY_CONTRACT = ("paxpage.engine.llm.LLM.__init__",)  # its signature is what users of other engines know


@dataclasses.dataclass(frozen=True)
class Zone:
    """Modules with the same rights. Names are modules or, ending in ".*", a package and all in it."""

    modules: tuple[str, ...]
    may_import: tuple[str, ...]  # other zones; a zone's modules may always import each other
    third_party: tuple[str, ...] | None  # None: any


def _in_engine(*names: str) -> tuple[str, ...]:
    return tuple(f"paxpage.engine.{name}" for name in names)


# design.md's layout. A new module is added to the zone whose rights are enough for it.
ZONES = {
    "kernels": Zone(("pallas_kernels.*",), (), ("jax", "numpy", "jaxtyping")),
    "config": Zone(("paxpage.config", "paxpage.outputs"), (), ("numpy",)),
    "command_line": Zone(("paxpage.command_line",), (), ("absl",)),
    "host": Zone(
        _in_engine(
            "adjustments",
            "request",
            "sampling_params",
            "structured_outputs",
            "block_pool",
            "prefix_cache",
            "kv_cache_manager",
            "scheduler",
            "detokenizer",
            "logprobs",
            "accounting",
        ),
        ("config",),
        ("numpy",),
    ),
    "prompts": Zone(("paxpage.prompts", "paxpage.text_bound"), ("config",), None),
    "models": Zone(("paxpage.models.*",), ("config", "kernels"), None),
    "batch": Zone(_in_engine("batch", "sharing", "onward"), ("config", "host", "device", "kernels"), None),
    "device": Zone(
        _in_engine(
            *("kv_cache", "memory", "sampler", "step", "programs", "executables", "model_runner"),
            *("lowering", "lowering_worker", "mosaic_kernels"),
        ),
        ("config", "batch", "models", "kernels"),
        None,
    ),
    "engine": Zone(
        _in_engine("engine", "build", "params_check", "served_model", "compilation", "grammars"),
        ("config", "host", "prompts", "models", "batch", "device", "kernels"),
        None,
    ),
    "llm": Zone(_in_engine("llm"), ("config", "host", "prompts", "models", "engine"), None),
    "exports": Zone(("paxpage", "paxpage.engine"), ("config", "host", "llm"), ()),
    "server": Zone(("paxpage.server.*",), ("config", "host", "prompts", "models", "engine"), None),
    "serve": Zone(("paxpage.serve.*",), ("config", "command_line", "host", "models", "engine", "server"), None),
    # As a user's script would: the public names too, and the kernels by themselves.
    "bench": Zone(
        ("paxpage.bench.*",),
        ("config", "command_line", "host", "models", "engine", "llm", "exports", "kernels"),
        None,
    ),
    "simulate": Zone(("paxpage.simulate.*",), ("config", "host"), ("absl", "numpy", "tqdm")),
    "convert": Zone(("paxpage.convert.*",), ("config", "models"), None),
}
LEAVES = ("serve", "bench", "simulate", "convert")
WITHOUT_JAX = ("config", "command_line", "host", "simulate")


@dataclasses.dataclass(frozen=True)
class Module:
    """One source file: its dotted name and its syntax tree."""

    name: str
    tree: ast.Module
    is_package: bool = False

    @property
    def package(self) -> str:
        """What a relative import starts from."""
        return self.name if self.is_package else self.name.rpartition(".")[0]


def _read_module(path: Path) -> Module:
    parts = path.relative_to(ROOT).with_suffix("").parts
    is_package = parts[-1] == "__init__"
    name = ".".join(parts[:-1] if is_package else parts)
    return Module(name, ast.parse(path.read_text(encoding="utf-8"), str(path)), is_package)


def _read_all(*folders: str) -> dict[str, Module]:
    paths = sorted(path for folder in folders for path in (ROOT / folder).rglob("*.py"))
    return {module.name: module for module in map(_read_module, paths)}


MODULES = _read_all(*PACKAGES)
SCRIPTS = _read_all("scripts")


def zone_of(name: str) -> str:
    """The zone of a module, "" if it has none."""
    packages = [f"{name.rsplit('.', cut)[0]}.*" for cut in range(name.count(".") + 1)]
    zones = [zone for pattern in (name, *packages) for zone, rights in ZONES.items() if pattern in rights.modules]
    return zones[0] if zones else ""


def _absolute(module: Module, node: ast.ImportFrom) -> str:
    if not node.level:
        return node.module or ""
    base = module.package.rsplit(".", node.level - 1)[0]
    return f"{base}.{node.module}" if node.module else base


def imports_of(module: Module, modules: dict[str, Module]) -> Iterator[tuple[int, str]]:
    """Line and dotted name of all that is imported, inside functions and under TYPE_CHECKING too.

    `from package import name` gives package.name where that is a module, and package where it is not.
    """
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = _absolute(module, node)
            names = (f"{base}.{alias.name}" for alias in node.names)
            yield from ((node.lineno, name if name in modules else base) for name in names)


def _is_own(name: str) -> bool:
    return name.partition(".")[0] in OWN_ROOTS


def wrong_imports(module: Module, modules: dict[str, Module]) -> list[str]:
    """Imports that the module's zone has no right to."""
    zone = zone_of(module.name)
    if not zone:
        return [f"{module.name} is in no zone: add it to ZONES in tests/test_architecture.py"]
    return [
        f"line {line}: {module.name} ({zone}) imports {name}"
        for line, name in imports_of(module, modules)
        if not _may_import(zone, name)
    ]


def _may_import(zone: str, name: str) -> bool:
    rights = ZONES[zone]
    if _is_own(name):
        is_code = name.partition(".")[0] in PACKAGES
        return is_code and zone_of(name) in (zone, *rights.may_import)
    root = name.partition(".")[0]
    return root in sys.stdlib_module_names or rights.third_party is None or root in rights.third_party


def road_to_jax(name: str, modules: dict[str, Module], seen: frozenset[str] = frozenset()) -> list[str]:
    """The chain of imports by which a module reaches jax or flax; empty where it does not."""
    for _, target in imports_of(modules[name], modules):
        if target.partition(".")[0] in ("jax", "jaxlib", "flax"):
            return [name, target]
        road = road_to_jax(target, modules, seen | {name}) if target in modules and target not in seen else []
        if road:
            return [name, *road]
    return []


Function = ast.FunctionDef | ast.AsyncFunctionDef
FUNCTION_NODES = (ast.FunctionDef, ast.AsyncFunctionDef)


def functions_of(module: Module) -> Iterator[tuple[str, Function]]:
    """Dotted name and node of every function, methods and inner functions included."""

    def walk(node: ast.AST, prefix: str) -> Iterator[tuple[str, Function]]:
        for child in ast.iter_child_nodes(node):
            name = f"{prefix}.{child.name}" if isinstance(child, (ast.ClassDef, *FUNCTION_NODES)) else prefix
            if isinstance(child, FUNCTION_NODES):
                yield name, child
            yield from walk(child, name)

    return walk(module.tree, module.name)


def num_lines(function: Function) -> int:
    """From def to the last line, docstring included, decorators not."""
    return (function.end_lineno or function.lineno) - function.lineno + 1


def long_functions(module: Module) -> list[str]:
    """Functions over the limit."""
    limit = MAX_KERNEL_LINES if module.name.startswith("pallas_kernels") else MAX_LINES
    sizes = ((name, num_lines(function)) for name, function in functions_of(module))
    return [f"{name} has {size} lines, at most {limit}" for name, size in sizes if size > limit]


def wide_functions(module: Module) -> list[str]:
    """Functions with too many parameters; a Pallas kernel has one for each of its refs and is let be."""
    if module.name.startswith("pallas_kernels"):
        return []
    found = []
    for name, function in functions_of(module):
        arguments = function.args
        count = len(arguments.posonlyargs + arguments.args + arguments.kwonlyargs)
        if count > MAX_PARAMETERS and name not in WIDE_BY_CONTRACT:
            found.append(f"{name} has {count} parameters, at most {MAX_PARAMETERS}")
    return found


def passed_kwargs(module: Module) -> list[str]:
    """Functions that take **kwargs: what they accept is written nowhere. A callback may drop them, as **_."""
    nodes = [node for node in ast.walk(module.tree) if isinstance(node, (*FUNCTION_NODES, ast.Lambda))]
    return [
        f"line {node.lineno}: takes **{node.args.kwarg.arg}"
        for node in nodes
        if node.args.kwarg and node.args.kwarg.arg != "_"
    ]


def undocumented_methods(module: Module) -> list[str]:
    """Public methods of public classes without a docstring (ruff sees to modules, classes and functions)."""
    return [
        f"line {method.lineno}: {cls.name}.{method.name} has no docstring"
        for cls in module.tree.body
        if isinstance(cls, ast.ClassDef) and not cls.name.startswith("_")
        for method in cls.body
        if isinstance(method, FUNCTION_NODES) and not method.name.startswith("_") and not ast.get_docstring(method)
    ]


CONTAINER_NODES = (ast.List, ast.Dict, ast.Set, ast.ListComp, ast.DictComp, ast.SetComp)
CONTAINER_CALLS = ("list", "dict", "set", "bytearray", "defaultdict", "deque", "OrderedDict", "Counter")
MUTATORS = ("append", "extend", "insert", "add", "update", "setdefault", "pop", "popitem", "remove", "discard", "clear")


def _is_container(value: ast.expr | None) -> bool:
    if isinstance(value, ast.Call):
        return getattr(value.func, "id", getattr(value.func, "attr", None)) in CONTAINER_CALLS
    return isinstance(value, CONTAINER_NODES)


def _module_containers(module: Module) -> dict[str, int]:
    found: dict[str, int] = {}
    for node in module.tree.body:
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        if _is_container(getattr(node, "value", None)):
            found |= {target.id: node.lineno for target in targets if isinstance(target, ast.Name)}
    return found


def _mutated_name(node: ast.AST) -> str | None:
    """The name whose value this statement or call changes in place, if any."""
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in MUTATORS:
        return getattr(node.func.value, "id", None)
    if isinstance(node, ast.Subscript) and not isinstance(node.ctx, ast.Load):
        return getattr(node.value, "id", None)
    return None


def module_globals(module: Module) -> list[str]:
    """Mutable state at module level: containers not named as constants, constants changed, `global`."""
    containers = _module_containers(module)
    found = [
        f"line {line}: {name} is a mutable container at module level and not named as a constant"
        for name, line in containers.items()
        if name != name.upper() and not (name.startswith("__") and name.endswith("__"))
    ]
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Global):
            found.append(f"line {node.lineno}: global {', '.join(node.names)}")
        elif _mutated_name(node) in containers:
            found.append(f"line {node.lineno}: {_mutated_name(node)} of module level is changed")
    return found


def forced_attributes(module: Module) -> list[str]:
    """object.__setattr__ and classes named mixin."""
    found = []
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Attribute) and ast.unparse(node) == "object.__setattr__":
            found.append(f"line {node.lineno}: object.__setattr__")
        if isinstance(node, ast.ClassDef) and node.name.lower().endswith("mixin"):
            found.append(f"line {node.lineno}: {node.name} is a mixin")
    return found


HOUSE_RULES: tuple[Callable[[Module], list[str]], ...] = (
    long_functions,
    wide_functions,
    passed_kwargs,
    undocumented_methods,
    module_globals,
    forced_attributes,
)


def test_zones_contradict_no_decision() -> None:
    """Leaves are imported by nobody, the server by serve alone, and only batch and the engine see both sides."""
    importers = {zone: {name for name, rights in ZONES.items() if zone in rights.may_import} for zone in ZONES}
    assert all(not importers[leaf] for leaf in LEAVES)
    assert importers["server"] == {"serve"} and importers["exports"] == {"bench"}
    assert importers["host"] & importers["device"] == {"batch", "engine"}
    assert "host" not in ZONES["device"].may_import


def test_the_whole_source_is_read() -> None:
    assert {"paxpage.config", "paxpage.engine.sampling_params", "pallas_kernels"} <= set(MODULES)


@pytest.mark.parametrize("name", MODULES)
def test_imports_follow_the_directions(name: str) -> None:
    assert wrong_imports(MODULES[name], MODULES) == []


@pytest.mark.parametrize("name", [name for name in MODULES if zone_of(name) in WITHOUT_JAX])
def test_host_modules_never_reach_jax(name: str) -> None:
    assert road_to_jax(name, MODULES) == []


def test_importing_host_modules_loads_no_jax() -> None:
    """What the packages' __init__ files import counts here: a simulation and a command line's --help start at once."""
    names = [name for name in MODULES if zone_of(name) in WITHOUT_JAX]
    code = (
        f"import sys, {', '.join(names)}; print(sorted({{'jax', 'flax', 'torch', 'transformers'}} & set(sys.modules)))"
    )
    run = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "[]"


@pytest.mark.parametrize("name", [*MODULES, *SCRIPTS])
def test_house_rules(name: str) -> None:
    module = MODULES.get(name) or SCRIPTS[name]
    assert [fault for rule in HOUSE_RULES for fault in rule(module)] == []


def test_median_function_is_short() -> None:
    sizes = [num_lines(function) for module in MODULES.values() for _, function in functions_of(module)]
    assert statistics.median(sizes) <= MAX_MEDIAN_LINES


def _module(name: str, source: str) -> Module:
    return Module(name, ast.parse(source))


def _with(name: str, source: str) -> dict[str, Module]:
    """A small stand-in for the source tree, with one module more."""
    quiet = ("paxpage.engine.scheduler", "paxpage.engine.model_runner", "paxpage.engine.batch", "paxpage.server.routes")
    return {**{other: _module(other, "") for other in quiet}, name: _module(name, source)}


@pytest.mark.parametrize(
    ("name", "source"),
    [
        ("pallas_kernels.paged_attention.api", "import flax"),
        ("pallas_kernels.paged_attention.api", "from paxpage.config import require"),
        ("paxpage.engine.block_pool", "import jax.numpy as jnp"),
        ("paxpage.engine.request", "from paxpage.engine import model_runner"),
        ("paxpage.engine.request", "from . import model_runner"),
        ("paxpage.engine.request", "def f():\n    from .model_runner import ModelRunner"),
        ("paxpage.config", "from paxpage.engine.request import Request"),
        ("paxpage.models.llama", "from paxpage.engine.batch import StepInputs"),
        ("paxpage.engine.step", "from paxpage.engine.scheduler import Scheduler"),
        ("paxpage.engine.engine", "from paxpage.server import routes"),
        ("paxpage.server.app", "import paxpage.serve"),
        ("paxpage.server.app", "from paxpage import LLM"),
        ("paxpage.bench", "from paxpage.server.routes import app"),
        ("paxpage.bench.load", "import paxpage.serve"),
        ("paxpage.serve", "from paxpage.bench import load"),
        ("paxpage.command_line", "from paxpage.config import require"),
        ("paxpage.engine.llm", "import tests.helpers"),
    ],
)
def test_a_wrong_import_is_caught(name: str, source: str) -> None:
    modules = _with(name, source)
    assert len(wrong_imports(modules[name], modules)) == 1


@pytest.mark.parametrize(
    ("name", "source"),
    [
        ("pallas_kernels.paged_attention.xla", "import functools\nimport jax\nfrom . import reference"),
        ("paxpage.engine.batch", "from paxpage.engine import kv_cache, scheduler"),
        ("paxpage.engine.model_runner", "from paxpage.engine.batch import StepInputs\nimport flax"),
        ("paxpage.serve", "from paxpage.server import routes"),
        ("paxpage.bench.kernels_run", "from pallas_kernels import paged_attention\nfrom paxpage import LLM"),
    ],
)
def test_a_right_import_is_let_through(name: str, source: str) -> None:
    modules = {**_with(name, source), "paxpage.engine.kv_cache": _module("paxpage.engine.kv_cache", "")}
    assert wrong_imports(modules[name], modules) == []


def test_jax_is_found_at_the_end_of_a_chain() -> None:
    modules = _with("paxpage.engine.scheduler", "from paxpage.engine import request") | {
        "paxpage.engine.request": _module("paxpage.engine.request", "import paxpage.engine.scheduler\nimport jax.numpy")
    }
    road = ["paxpage.engine.scheduler", "paxpage.engine.request", "jax.numpy"]
    assert road_to_jax("paxpage.engine.scheduler", modules) == road


def test_a_module_without_a_zone_is_named() -> None:
    faults = wrong_imports(_module("paxpage.engine.novelty", ""), {})
    assert len(faults) == 1 and "paxpage.engine.novelty is in no zone" in faults[0]


@pytest.mark.parametrize(
    ("rule", "source"),
    [
        (long_functions, "def f():\n" + "    x = 1\n" * MAX_LINES),
        (wide_functions, "class A:\n    def f(self, a, b, c, d, e, f, g, /, h, *, i): pass"),
        (passed_kwargs, "def f(**options): g(**options)"),
        (passed_kwargs, "f = lambda **options: 0"),
        (undocumented_methods, "class A:\n    async def f(self): pass"),
        (module_globals, "seen = {}"),
        (module_globals, "seen: dict[int, int] = collections.defaultdict(int)"),
        (module_globals, "def f():\n    global seen\n    seen = 1"),
        (module_globals, "SEEN = set()\ndef f(x): SEEN.add(x)"),
        (module_globals, "SEEN = {}\ndef f(x): SEEN[x] = 1"),
        (module_globals, "SEEN = [1]\ndef f(): del SEEN[0]"),
        (forced_attributes, "def f(x): object.__setattr__(x, 'a', 1)"),
        (forced_attributes, "class StopMixin: pass"),
    ],
)
def test_a_broken_rule_is_caught(rule: Callable[[Module], list[str]], source: str) -> None:
    assert len(rule(_module("paxpage.example", source))) == 1


@pytest.mark.parametrize("rule", HOUSE_RULES)
def test_what_the_rules_allow(rule: Callable[[Module], list[str]]) -> None:
    source = (
        '__all__ = ["f"]\nLIMITS = {"a": 1}\nTable = dict[str, int]\n\ndef f(a, *rest, **_):\n    found = [a]\n'
        + ('    found.append(LIMITS["a"])\n\nclass A:\n    def f(self):\n        """Does."""\n    def _g(self): pass\n')
    )
    assert rule(_module("paxpage.example", source)) == []
