"""Steps compiled for an H200 without one: in place, in one command buffer, no kernels more than were counted."""

import json
import os
import pathlib
import re
import subprocess
import sys

import pytest

from pallas_kernels.paged_attention.cascade import MAX_PIECES
from paxpage.engine.build import sampling_bytes

ROOT = pathlib.Path(__file__).resolve().parents[2]
CUDA_WHEELS = ROOT / ".venv" / "cuda-compiler"
# As compiled with jax 0.11.2; a change is a decision, not an accident. Three of decode's 12 are split-K sums that XLA,
# without a device to time matrix products on, takes for granted.
KERNELS_PER_LAYER = {"few": 13, "decode": 12, "mixed": 11, "shared": 13}
SHAPES = {
    "few": (4, 4, 0),
    "decode": (32, 32, 0),
    "mixed": (512, 256, 2 * MAX_PIECES + 512 // 64),
    "shared": (32, 32, MAX_PIECES),
}
# Of Mosaic's kernels in each kind of step, and "unshared", a mixed step that takes no shared prefixes: bytes that a
# thread stores because it has too few registers, at most.
SPILLED_BYTES: dict[str, dict[str, int]] = {
    "few": {},
    "decode": {"decode": 0},
    "mixed": {"prefixes": 0, "decode": 0, "prefill": 0},
    "shared": {"prefixes": 0, "decode": 0},
    "unshared": {"decode": 0, "prefill": 60},
}
VOCAB_SIZE = 128256
# Kernels that a draw for any number of rows takes, and then log-probabilities of so many tokens (None: of none).
SAMPLER_OPERATIONS = {None: 11, 20: 31, 100: 51}
SPILLED = re.compile(r"Function properties for paged_attention_(\w+)_mosaic_gpu_kernel\n.* (\d+) bytes spill stores")


def compile_steps(sizes: tuple[int, ...], folder: pathlib.Path, *layers: str) -> list[dict[str, int]]:
    """A step for each number of layers."""
    # A kernel that XLA itself compiles fails if it spills registers. Of Mosaic's ptxas only prints what they spill.
    flags = f"--xla_dump_to={folder} --xla_gpu_fail_ptx_compilation_on_register_spilling=true"
    env = os.environ | {"PYTHONPATH": f"{ROOT}:{CUDA_WHEELS}", "JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags}
    env |= {"MOSAIC_GPU_DUMP_PTXAS": "1"}
    env |= {"TF_CPP_MIN_LOG_LEVEL": "0", "TF_CPP_VMODULE": "llvm_command_line_options=1"}  # see compile_step
    env.pop("JAX_COMPILATION_CACHE_DIR", None)  # what comes from a cache is not dumped
    command = [sys.executable, "-m", "tests.gpu_code.compile_step", *map(str, (*sizes, folder, *layers))]
    done = subprocess.run(command, env=env, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    stats = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert len(stats) == len(layers)
    spilled = {f"{kernel} spills": int(num_bytes) for kernel, num_bytes in SPILLED.findall(done.stdout)}
    return [each | spilled for each in stats]


def check_spills(stats: dict[str, int], most: dict[str, int]) -> None:
    """most: bytes by kernel."""
    found = {name.removesuffix(" spills"): count for name, count in stats.items() if name.endswith(" spills")}
    assert found.keys() == most.keys() and all(found[kernel] <= most[kernel] for kernel in most), found


@pytest.fixture(scope="module", params=list(SHAPES))
def compiled(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[str, dict[str, int], dict[str, int]]:
    """A kind of step with two layers and with three."""
    need_compiler()
    two, three = compile_steps(SHAPES[request.param], tmp_path_factory.mktemp("dump"), "2", "3")
    return request.param, two, three


def need_compiler() -> None:
    if not CUDA_WHEELS.exists():
        pytest.skip("no CUDA compiler: scripts/test.sh installs it")


def test_no_hidden_copy_of_the_cache(compiled: tuple[str, dict[str, int], dict[str, int]]) -> None:
    _, two, three = compiled
    for stats in (two, three):
        assert stats["alias_bytes"] >= stats["cache_bytes"]
        assert stats["temp_bytes"] < stats["cache_bytes"] // 4, stats
    # A copy of a layer's cache would show as its bytes, layer by layer.
    assert three["temp_bytes"] - two["temp_bytes"] < two["cache_bytes"] // 8, (two, three)


def test_a_small_step_leaves_what_it_is_given_where_it_was(
    compiled: tuple[str, dict[str, int], dict[str, int]],
) -> None:
    """The cache, and where a CUDA graph would be patched, the logits' buffer and what the host has packed."""
    kind, two, _ = compiled
    num_rows = SHAPES[kind][1]
    logits_bytes = 4 * VOCAB_SIZE * num_rows if kind != "mixed" else 0
    packed_bytes = two["packed_bytes"] if kind in ("few", "decode") else 0
    assert two["alias_bytes"] == two["cache_bytes"] + logits_bytes + packed_bytes, two


def test_a_step_takes_no_more_memory_than_is_set_aside(compiled: tuple[str, dict[str, int], dict[str, int]]) -> None:
    for stats in compiled[1:]:
        assert 0 < stats["step_bytes"] <= stats["step_bytes_at_most"], stats


def test_kernels_per_layer_are_those_counted(compiled: tuple[str, dict[str, int], dict[str, int]]) -> None:
    kind, two, three = compiled
    assert three["num_kernels"] - two["num_kernels"] == KERNELS_PER_LAYER[kind], (two, three)


def test_registers_spill_no_more_than_counted(compiled: tuple[str, dict[str, int], dict[str, int]]) -> None:
    kind, two, _ = compiled
    check_spills(two, SPILLED_BYTES[kind])


def test_registers_spill_no_more_than_counted_where_no_prefixes_are_shared(tmp_path: pathlib.Path) -> None:
    need_compiler()
    num_tokens, num_rows, _ = SHAPES["mixed"]
    (stats,) = compile_steps((num_tokens, num_rows, 0), tmp_path, "1")
    check_spills(stats, SPILLED_BYTES["unshared"])


def test_one_command_buffer_holds_the_whole_of_a_decode_step(
    compiled: tuple[str, dict[str, int], dict[str, int]],
) -> None:
    """A mixed step has none: patching it takes the host longer than launching its kernels."""
    kind, two, _ = compiled
    if kind == "mixed":
        assert two["num_command_buffers"] == 0 and two["num_outside"] > 2 * KERNELS_PER_LAYER[kind]
    else:
        assert (two["num_command_buffers"], two["num_outside"]) == (1, 0), two


@pytest.mark.parametrize("compiled", ["decode"], indirect=True)
def test_what_another_process_lowered_compiles(
    compiled: tuple[str, dict[str, int], dict[str, int]], tmp_path: pathlib.Path
) -> None:
    """To the same, and linked with what Mosaic's kernels need, though nothing was lowered where it is compiled.

    Kernels that are there already are not compiled again: for them LLVM is given Mosaic's options, and XLA's after it.
    """
    kind, two, _ = compiled
    (sent,) = compile_steps(SHAPES[kind], tmp_path, "2sent")
    assert sent.pop("num_changes_of_options") == 0 and two["num_changes_of_options"] >= 2
    assert sent == {name: value for name, value in two.items() if name != "num_changes_of_options"}


def sampler_stats(num_rows: int, num_top: int | None, vocab_size: int = VOCAB_SIZE) -> dict[str, int]:
    """Fails if a kernel spills registers."""
    need_compiler()
    flags = "--xla_gpu_fail_ptx_compilation_on_register_spilling=true"
    env = os.environ | {"PYTHONPATH": f"{ROOT}:{CUDA_WHEELS}", "JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags}
    sizes = map(json.dumps, (num_rows, num_top, vocab_size))
    command = [sys.executable, "-m", "tests.gpu_code.compile_sampler", *sizes]
    done = subprocess.run(command, env=env, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    stats: dict[str, int] = json.loads(done.stdout)
    return stats


@pytest.mark.parametrize(("num_rows", "num_top"), [(1, None), (64, None), (256, None), (1, 20), (256, 20), (256, 100)])
def test_a_draw_is_a_few_kernels_without_a_loop_or_a_sort_among_them(num_rows: int, num_top: int | None) -> None:
    """None of which spills registers. A loop of XLA's would launch kernels in every turn."""
    stats = sampler_stats(num_rows, num_top)
    assert stats["num"] <= SAMPLER_OPERATIONS[num_top], stats
    assert (stats["num_other"], stats["num_sorts"]) == (0, 0), stats
    assert stats["temp_bytes"] <= sampling_bytes(num_rows, VOCAB_SIZE), stats


@pytest.mark.parametrize(("num_top", "vocab_size"), [(20, 49152), (100, 32000), (20, 1000), (5, 151655)])
def test_no_vocabulary_is_sorted_for_log_probabilities(num_top: int, vocab_size: int) -> None:
    """Whether groups of tokens divide it or not, and however few of them there are."""
    assert sampler_stats(256, num_top, vocab_size)["num_sorts"] == 0
