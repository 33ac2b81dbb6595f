"""The commands that run paxpage in their own process, on the smallest sizes, and scripts/profile_step.py."""

import gzip
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import paged_attention
from pallas_kernels.paged_attention.shapes import HeadLayout
from paxpage.bench import long_prompt, offline, offline_tests, paging
from paxpage.bench.attention_problems import (
    Problem,
    decode_problems,
    make_arrays,
    make_tables,
    num_bytes,
    num_flops,
    prefill_problems,
)
from paxpage.bench.offline_run import with_length
from paxpage.bench.offline_tests import FULL, SIZES, SMALL
from paxpage.bench.timing import measure_roof
from paxpage.config import ModelConfig
from paxpage.models.registry import abstract_params
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
    "7_long_prompt_beside_decodes": ("ttft_ms", "itl_ms_p50_before", "itl_ms_p50", "itl_ms_p99"),
}


def test_offline_runs_all_tests_on_a_cpu(bench: Bench, tiny_dir: Path, tmp_path: Path) -> None:
    out_path = tmp_path / "r.jsonl"
    flags = ("--scale=smoke", f"--tests={offline.TEST_NUMBERS}", f"--out={out_path}")
    exit_code, out, err = bench("offline", f"--model={tiny_dir}", *flags, *LIMITS)
    setup, *lines = json_lines(out)
    assert exit_code == 0 and json_lines(out_path.read_text()) == [setup, *lines]
    assert [line["test"] for line in lines] == list(TESTS) and setup["test"] == "setup"
    for line in lines:
        assert all(isinstance(line[name], (int, float, list)) for name in TESTS[line["test"]]), line
        assert {"engine", "version", "commit", "device", "jax", "flags"} <= set(line)
        assert (line["engine"], line["model"], line["scale"]) == ("paxpage", "TINY", "smoke")
    assert lines[2]["cached_percent"] > 30  # the second request finds the first one's 32 of 36 tokens
    # In steps of 48 tokens, 2 of them the decoding requests', the prompt of 48 takes two; each ends a gap of either.
    assert (lines[6]["n"], lines[6]["long_in_len"], lines[6]["num_gaps"]) == (2, 48, 4)
    assert lines[6]["ttft_floor_ms"] is None and lines[6]["itl_ms_p99"] <= lines[6]["ttft_ms"]
    assert "smoke sizes" in err and "compare only with the same scale" in err


def test_sizes_are_what_the_texts_say() -> None:
    """The full tests are those that other engines are measured by; all fit the context that the engine is built for."""
    assert (FULL.num_requests, FULL.divisor, FULL.num_arrivals, FULL.max_model_len) == (512, 1, 256, 4352)
    assert FULL.single == (1, 128, 256, 0) and FULL.shared == (64, 32, 128, 4000)
    assert FULL.batch == (64, 1024, 128, 0) and FULL.large_batch == (256, 448, 128, 0)
    assert SMALL.large_batch.rows <= 32  # a CPU's default
    for sizes in SIZES.values():
        batches = (sizes.single, sizes.shared, sizes.batch, sizes.large_batch)
        longest = max(batch.num_shared + batch.num_inputs + batch.num_outputs for batch in (*batches, sizes.beside))
        assert max(longest, sizes.long_prompt + 32, 2048 // sizes.divisor) <= sizes.max_model_len, sizes.name
    assert FULL.beside == (32, 64, 64, 0) and FULL.longest_prompt == 32_768
    assert "".join(offline_tests.TESTS) == offline.TEST_NUMBERS == offline.DEFAULT_TESTS + "7"


def test_a_longer_max_model_len_and_one_too_short() -> None:
    assert with_length(FULL, 33_000) == FULL._replace(max_model_len=33_000)
    assert with_length(FULL, None) is FULL
    with pytest.raises(ValueError, match="max_model_len is 4000; allowed: an integer >= 4352"):
        with_length(FULL, 4000)


def test_the_floor_of_a_long_prompt() -> None:
    """Llama-3.1-8B has 6.98e9 weights in its layers: 0.57 s at 800 TFLOP/s for 32,768 tokens, attention 0.35 s."""
    config = ModelConfig("LlamaForCausalLM", 128_256, 4096, 14_336, 32, 32, 8, 128, 131_072)
    params = abstract_params(config, "bfloat16")
    per_layer = 4096 * (48 * 128 + 4096 + 3 * 14_336)
    attention = 32 * 4 * 4096 * 32_768 * 32_769 / 2
    assert long_prompt.num_flops(params, 32_768) == 2 * 32 * per_layer * 32_768 + attention
    assert long_prompt.floor_s(params, 32_768, "NVIDIA H200") == pytest.approx(0.92, abs=0.01)
    assert long_prompt.floor_s(params, 32_768, "cpu") is None


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


def test_the_price_of_paging_on_a_cpu(bench: Bench, tmp_path: Path) -> None:
    flags = ("--paging", "--scale=smoke", f"--plot-dir={tmp_path}", f"--json={tmp_path / 'k.jsonl'}")
    exit_code, out, err = bench("kernels", *flags)
    lines = json_lines(out)
    assert exit_code == 0 and json_lines((tmp_path / "k.jsonl").read_text()) == lines
    assert [line["kernel"] for line in lines] == ["decode 2 x 256", "prefill 1 x 32"]
    decode, prefill = lines
    assert (decode["contiguous"], prefill["contiguous"]) == ("blocks in order", "xla")
    assert decode["contiguous_us"] == decode["in_order_us"][-1] and decode["block_sizes"] == [16, 128]
    for line in lines:
        assert line["test"] == "paging" and len(line["in_order_us"]) == 2
        expected = [us / line["contiguous_us"] for us in line["shuffled_us"]]
        assert line["ratio"] == pytest.approx(expected, rel=0.01)
        (row,) = (row for row in err.splitlines() if row.startswith(line["kernel"]))
        shown = [float(word.strip("()")) for word in row.split()[-5:]]
        cells = [number for pair in zip(line["shuffled_us"], line["ratio"], strict=True) for number in pair]
        assert shown == pytest.approx([line["contiguous_us"], *cells], abs=0.06)  # rounded twice
    assert "of prefill, XLA's attention over arrays without blocks" in err
    assert (tmp_path / paging.PLOT_NAME).read_bytes().startswith(PNG)


def test_block_tables_in_order_and_shuffled() -> None:
    lens = np.array([33, 16, 1])
    in_order = make_tables(lens, 16, is_shuffled=False)
    assert in_order.tolist() == [[1, 2, 3], [4, 0, 0], [5, 0, 0]]
    shuffled = make_tables(lens, 16, is_shuffled=True)
    assert sorted(shuffled[in_order > 0]) == [1, 2, 3, 4, 5] and not shuffled[in_order == 0].any()
    assert shuffled.tolist() != in_order.tolist()


def test_prefill_s_contiguous_twin_computes_the_same() -> None:
    """Blocks in order are a contiguous array, but for the null block in front and room at the end."""
    lens = np.full(2, 128)
    problem = Problem("", lens, lens, HeadLayout(4, 2, 16))
    q, k, v, _, *rows = make_arrays(problem, "float32", 32)
    tables = jnp.asarray(make_tables(lens, 32, is_shuffled=False))
    likes = paging.contiguous_likes(problem, "float32")
    flat = [cache[0].swapaxes(1, 2).reshape(-1, 2, 16)[32 : 32 + 256] for cache in (k, v)]
    arrays = [array.reshape(like.shape) for array, like in zip((q, *flat), likes, strict=True)]
    expected = paging.contiguous_attention("xla")(*arrays).reshape(q.shape)
    np.testing.assert_allclose(paged_attention(q, k, v, tables, *rows, layer=0), expected, atol=1e-5)


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
    assert mixed.startswith("64 tokens, 3 rows (padded); host time")  # 12, in the smallest usual shape
    for text in (decode, mixed):
        floors = [line.split()[1] for line in text.splitlines()[2:-2]]
        assert "-" in floors and any(floor.replace(".", "").isdigit() for floor in floors)
