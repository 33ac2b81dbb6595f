"""The commands that run paxpage in their own process, on the smallest sizes, and scripts/profile_step.py."""

import gzip
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from paxpage.bench import offline_tests
from paxpage.bench.attention_problems import Problem, decode_problems, num_bytes, num_flops, prefill_problems
from paxpage.bench.offline_tests import FULL, SIZES, SMALL
from paxpage.bench.timing import measure_roof
from tests.bench.conftest import LIMITS, json_lines

Bench = Callable[..., tuple[int, str, str]]
ROOT = Path(__file__).resolve().parents[2]
PNG = b"\x89PNG"
TESTS = {
    "1_offline_throughput": ("out_tok_s", "ms_per_step", "waste_percent"),
    "2_single_latency": ("ms_per_decode_step", "first_token_s"),
    "3_shared_prefix": ("out_tok_s", "cached_percent"),
    "4_batch_decode": ("ms_per_decode_step", "prefill_tok_s"),
    "5_poisson_arrivals": ("ttft_ms_p50", "itl_ms_p99", "normalised_latency_ms_mean"),
    "6_large_batch_decode": ("ms_per_decode_step",),
}


def test_offline_runs_all_tests_on_a_cpu(bench: Bench, tiny_dir: Path, tmp_path: Path) -> None:
    out_path = tmp_path / "r.jsonl"
    exit_code, out, err = bench("offline", f"--model={tiny_dir}", "--scale=smoke", f"--out={out_path}", *LIMITS)
    setup, *lines = json_lines(out)
    assert exit_code == 0 and json_lines(out_path.read_text()) == [setup, *lines]
    assert [line["test"] for line in lines] == list(TESTS) and setup["test"] == "setup"
    for line in lines:
        assert all(isinstance(line[name], (int, float, list)) for name in TESTS[line["test"]]), line
        assert {"engine", "version", "commit", "device", "jax", "flags"} <= set(line)
        assert (line["engine"], line["model"], line["scale"]) == ("paxpage", "TINY", "smoke")
    assert lines[2]["cached_percent"] > 30  # the second request finds the first one's 32 of 36 tokens
    assert "smoke sizes" in err and "compare only with the same scale" in err


def test_sizes_are_what_the_texts_say() -> None:
    """The full tests are those that other engines are measured by; all fit the context that the engine is built for."""
    assert (FULL.num_requests, FULL.divisor, FULL.num_arrivals, FULL.max_model_len) == (512, 1, 256, 4352)
    assert FULL.single == (1, 128, 256, 0) and FULL.shared == (64, 32, 128, 4000)
    assert FULL.batch == (64, 1024, 128, 0) and FULL.large_batch == (256, 448, 128, 0)
    assert SMALL.large_batch.rows <= 32  # a CPU's default
    for sizes in SIZES.values():
        batches = (sizes.single, sizes.shared, sizes.batch, sizes.large_batch)
        longest = max(batch.num_shared + batch.num_inputs + batch.num_outputs for batch in batches)
        assert max(longest, sizes.long_prompt + 32, 2048 // sizes.divisor) <= sizes.max_model_len, sizes.name
    assert set(offline_tests.TESTS) == set("123456")


def test_kernels_on_a_cpu(bench: Bench, tmp_path: Path) -> None:
    exit_code, out, err = bench("kernels", "--scale=smoke", f"--plot-dir={tmp_path}", f"--json={tmp_path / 'k.jsonl'}")
    lines = json_lines(out)
    assert exit_code == 0 and "on the CPU, in float32, the xla backend is timed" in err
    assert [line["kernel"] for line in lines] == ["decode 2 x 32", "prefill 1 x 16"]
    assert all(line["backend"] == "xla" and line["us"] > 0 and line["floor_us"] > 0 for line in lines)
    assert json_lines((tmp_path / "k.jsonl").read_text()) == lines
    plots = sorted(tmp_path.glob("*.png"))
    assert [plot.name for plot in plots] == [f"roofline-paged-attention-{k}.png" for k in ("decode", "prefill")]
    assert all(plot.read_bytes().startswith(PNG) for plot in plots)


def test_a_backend_of_one_s_own_choice_is_checked(bench: Bench) -> None:
    flags = ("--scale=smoke", "--only=decode", "--backends=reference,xla")
    lines = json_lines(bench("kernels", *flags)[1])
    assert [line["backend"] for line in lines] == ["reference", "xla"]
    assert lines[0]["error"] is not None and lines[0]["error"] < 1e-5


def test_costs_of_attention() -> None:
    decode: Problem = decode_problems()[0]
    assert num_bytes(decode, 2) == 32 * 4096 * 2 * 8 * 128 * 2  # the floor of 122 us at 4.4 TB/s
    assert num_flops(decode) == 32 * 4096 * 4 * 32 * 128
    prefill = prefill_problems()[0]
    assert num_flops(prefill) == 4 * 32 * 128 * 4096 * 4097 / 2


def test_a_measured_roof_is_of_this_world() -> None:
    roof = measure_roof("float32")
    assert 1e8 < roof.bytes_per_s < 1e14 and 1e8 < roof.flops_per_s < 1e16


@pytest.fixture(scope="module")
def profiled(tiny_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    """What scripts/profile_step.py prints, and its folder."""
    folder = tmp_path_factory.mktemp("profile")
    sizes = ("--rows=3", "--context=16", "--mixed-tokens=12", "--steps=3", "--load-format=dummy")
    command = [sys.executable, "scripts/profile_step.py", str(tiny_dir), *sizes, f"--out={folder}"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout, folder


@pytest.mark.parametrize("kind", ["decode", "mixed"])
def test_a_trace_that_perfetto_opens(profiled: tuple[str, Path], kind: str) -> None:
    (path,) = (profiled[1] / kind).rglob("perfetto_trace.json.gz")
    events = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
    names = [event.get("name", "") for event in events]
    for part in ("paxpage step", "paxpage schedule", "paxpage launch", "paxpage fetch", "paxpage update"):
        assert sum(name.startswith(part) for name in names) == 3, part
    assert any("fusion" in name for name in names)


def test_a_table_of_operations_beside_their_floors(profiled: tuple[str, Path]) -> None:
    decode, mixed = profiled[0].split("mixed steps: ")
    assert decode.startswith("decode steps: 3 tokens, 3 rows (padded); host time")
    assert mixed.startswith("12 tokens, 3 rows (padded); host time")
    for text in (decode, mixed):
        floors = [line.split()[1] for line in text.splitlines()[2:-2]]
        assert "-" in floors and any(floor.replace(".", "").isdigit() for floor in floors)
