"""Set-up of every test run: type checks at run time, the device, the compilation cache, GPU tests.

Environment: PAXPAGE_TEST_GPU=1 runs on an NVIDIA GPU and adds the tests marked gpu (without it everything runs on the
CPU, whatever the machine has). PAXPAGE_NO_TYPECHECK=1 leaves the run-time type checks out, to time or debug.
"""

import os
import sys
from pathlib import Path

import hypothesis
import jaxtyping
import pytest

PACKAGES = ("paxpage", "pallas_kernels")
IS_GPU_RUN = os.environ.get("PAXPAGE_TEST_GPU") == "1"
# An int passes for a float, as type checkers have it. jaxtyping takes the text of an expression.
TYPE_CHECKER = "beartype.beartype(conf=beartype.BeartypeConf(is_pep484_tower=True))"
CACHE_BYTES = 2 * 2**30
# Files of half a minute and more, longest first. Of two processes neither is then left alone with one at the end.
SLOW_FILES = (
    "kernels/test_paged_attention.py",
    "server/test_clients_leaving.py",
    "cases/test_case_33.py",
    "bench/test_in_process.py",
    "cases/test_case_13.py",
    "gpu_code/test_deviceless.py",
    "test_demo.py",
    "server/test_failed_steps.py",
    "server/test_faults.py",
    "differential/test_smollm2.py",
    "cases/test_case_09.py",
    "kernels/test_cascade.py",
    "kernels/test_mosaic_decode.py",
    "server/test_requests.py",
    "server/test_default_model.py",
    "unit/engine/test_structured_llm.py",
    "cases/test_case_01.py",
    "cases/test_sameness.py",
    "unit/engine/test_executables.py",
    "kernels/test_mosaic_prefill.py",
    "server/test_load.py",
    "property/test_scheduler_machine.py",
    "kernels/test_rms_norm.py",
)


def install_type_checks() -> None:
    """Checks every annotation of the packages' functions at run time, shapes included."""
    too_early = [name for name in (*PACKAGES, "jax") if name in sys.modules]
    assert not too_early, f"imported before tests/conftest.py could set them up: {too_early}"
    if os.environ.get("PAXPAGE_NO_TYPECHECK") != "1":
        jaxtyping.install_import_hook(PACKAGES, TYPE_CHECKER)


def choose_device() -> None:
    """For this process and those it starts. A GPU run without a GPU fails instead of passing on the CPU."""
    os.environ["JAX_PLATFORMS"] = "cuda,cpu" if IS_GPU_RUN else "cpu"
    # Pallas's Mosaic interpreter blocks a thread of XLA's pool for each warpgroup: with fewer than those it would hang.
    os.environ.setdefault("NPROC", "8")
    # The GPU is shared with the servers that tests start.
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")


def isolate_caches(config: pytest.Config) -> None:
    """Compiled steps are kept between runs, apart from the user's own. pytest --cache-clear removes them."""
    folder = config.cache.mkdir("jax")
    os.environ["JAX_COMPILATION_CACHE_DIR"] = str(folder)
    os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
    # With a limit JAX takes a lock for each entry: test runs side by side never read one that is half written.
    os.environ["JAX_COMPILATION_CACHE_MAX_SIZE"] = str(CACHE_BYTES)
    if "jax" in sys.modules:  # the conftest of a folder named on the command line imported it: the variables come late
        sys.modules["jax"].config.update("jax_compilation_cache_dir", str(folder))
        sys.modules["jax"].config.update("jax_persistent_cache_min_compile_time_secs", 0)
        sys.modules["jax"].config.update("jax_compilation_cache_max_size", CACHE_BYTES)
    os.environ["XDG_CACHE_HOME"] = str(config.cache.mkdir("home"))


def pytest_configure(config: pytest.Config) -> None:
    """Before any test module is imported."""
    isolate_caches(config)
    # Examples take as long as compiling does, on machines of any speed. In CI hypothesis's own profile holds.
    hypothesis.settings.register_profile("paxpage", deadline=None)
    if "CI" not in os.environ:
        hypothesis.settings.load_profile("paxpage")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leaves GPU tests out of a CPU run, and puts slow files first."""
    gpu_items = [] if IS_GPU_RUN else [item for item in items if item.get_closest_marker("gpu")]
    if gpu_items:
        config.hook.pytest_deselected(items=gpu_items)
        items[:] = [item for item in items if item not in gpu_items]
    places = {Path(__file__).parent / name: place for place, name in enumerate(SLOW_FILES)}
    assert all(path.exists() for path in places), "SLOW_FILES names a file that is not there"
    items.sort(key=lambda item: places.get(item.path, len(places)))


def pytest_report_header() -> str:
    """Says where the tests run, and why GPU tests do not."""
    if IS_GPU_RUN:
        return "device: NVIDIA GPU (PAXPAGE_TEST_GPU=1)"
    return "device: CPU; tests marked gpu are deselected (PAXPAGE_TEST_GPU=1 runs them)"


install_type_checks()
choose_device()
