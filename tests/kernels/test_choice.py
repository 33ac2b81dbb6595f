"""Which backend and which tiles paged_attention takes, on this device and on an H200 that is not there."""

import logging
import pathlib

import jax.numpy as jnp
import pytest
from jax.sharding import AbstractDevice, AbstractMesh, use_abstract_mesh

from pallas_kernels import paged_attention
from pallas_kernels.paged_attention import tuned
from pallas_kernels.paged_attention.api import _log_refusal, choose_backend
from pallas_kernels.paged_attention.config import DecodeConfig, Geometry
from tests.gpu_code.lowering import as_h200

LLAMA = Geometry(32, 8, 128, 16, "bfloat16", "bfloat16")


def test_without_a_gpu_it_is_xla() -> None:
    assert choose_backend(LLAMA, 256, True) == choose_backend(LLAMA, 1, False) == "xla"


def test_on_an_h200_few_rows_decode_on_triton_and_all_else_runs_on_mosaic() -> None:
    with as_h200():
        assert [choose_backend(LLAMA, rows, True) for rows in (1, 7, 8, 256)] == ["triton"] * 2 + ["mosaic"] * 2
        assert choose_backend(LLAMA, 1, False) == "mosaic"


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"head_dim": 96}, "head_dim is 96; allowed: 64, 128"),
        ({"dtype": "float32", "cache_dtype": "float32"}, "q is float32, the cache float32; allowed"),
        ({"num_heads": 256}, "num_heads / num_kv_heads is 32; allowed: up to 16"),
    ],
)
def test_what_mosaic_does_not_take_runs_on_triton_and_the_log_says_so(
    change: dict[str, object], reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    geometry = Geometry(**(LLAMA.__dict__ | change))  # type: ignore[arg-type]
    _log_refusal.cache_clear()
    with as_h200(), caplog.at_level(logging.INFO):
        assert [choose_backend(geometry, 256, True) for _ in range(3)] == ["triton"] * 3
    assert caplog.text.count(f"paged_attention takes backend triton and not mosaic: {reason}") == 1


def test_on_another_gpu_it_is_triton() -> None:
    device = AbstractDevice(device_kind="NVIDIA A100-SXM4-80GB", num_cores=None, platform="gpu")
    with use_abstract_mesh(AbstractMesh((), (), abstract_device=device)):
        assert choose_backend(LLAMA, 256, True) == choose_backend(LLAMA, 1, False) == "triton"


def test_mosaic_is_refused_by_name_where_it_cannot_run() -> None:
    cache = jnp.zeros((1, 4, 8, 16, 128), jnp.float16)
    q, ints = jnp.zeros((1, 32, 128), jnp.float16), jnp.zeros((1, 1), jnp.int32)
    with pytest.raises(ValueError, match=r"backend is 'mosaic' and the device cpu; allowed: .* Hopper"):
        paged_attention(q, cache, cache, ints, ints[0] + 1, jnp.arange(2, dtype=jnp.int32), layer=0, backend="mosaic")


def test_tuned_tiles_are_those_of_the_next_number_of_rows(tmp_path: pathlib.Path) -> None:
    path = tmp_path / tuned.file_name("NVIDIA Test/1")
    assert path.name == "nvidia_test_1.json" and tuned.read(path) == []
    written = [
        tuned.Entry("triton_decode", 32, 8, 128, "bfloat16", rows, {"num_splits": splits}, 1.0)
        for rows, splits in ((64, 1), (1, 16), (8, 4))
    ]
    tuned.write(path, "NVIDIA Test/1", "today", written)
    assert tuned.read(path) == sorted(written, key=lambda entry: entry.num_rows)
    found = [tuned.choose(tuned.read(path), "triton_decode", LLAMA, rows) for rows in (1, 2, 8, 9, 64, 65)]
    assert [config and config["num_splits"] for config in found] == [16, 4, 4, 1, 1, None]


def test_an_h200_has_tiles_that_were_measured_for_few_rows() -> None:
    few, many = (tuned.choose(tuned.table("NVIDIA H200"), "triton_decode", LLAMA, rows) for rows in (3, 8))
    assert few is not None and DecodeConfig(**few).num_splits == 4
    assert many is None  # there Mosaic decodes, and config.py decides
    with as_h200():
        found = [tuned.find("triton_decode", LLAMA, 3, max_keys) for max_keys in (4096, 800, 64)]
    assert [config and config["num_splits"] for config in found] == [4, 2, 1]


@pytest.mark.parametrize("other", [{"num_heads": 24}, {"head_dim": 64}, {"dtype": "float16"}])
def test_other_layouts_have_no_tuned_tiles(other: dict[str, object]) -> None:
    entries = [tuned.Entry("triton_decode", 32, 8, 128, "bfloat16", 1, {"num_splits": 1}, 1.0)]
    geometry = Geometry(**(LLAMA.__dict__ | other))  # type: ignore[arg-type]
    assert tuned.choose(entries, "triton_decode", geometry, 1) is None
    assert tuned.choose(entries, "mosaic_decode", LLAMA, 1) is None
