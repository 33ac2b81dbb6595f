"""Every GPU kernel and every kind of step lowers for CUDA with plain jax, on any machine."""

import functools

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels import add_rms_norm, kv_cache_write, paged_attention, rope_kv_cache_write, top_k_top_p_draw
from paxpage.config import ModelConfig
from paxpage.engine import kv_cache, step
from paxpage.engine.batch import StepShape
from paxpage.models import registry
from tests.gpu_code.lowering import as_gpu, as_h200

HEADS = [(32, 8, 128), (9, 3, 64), (5, 1, 80), (6, 2, 96), (8, 1, 256)]
SIZES = {"one row": (1, 1), "decode": (32, 32), "mixed": (64, 8)}


def lower_for_cuda(function, arguments: tuple) -> str:
    with as_h200():
        return jax.jit(function).trace(*arguments).lower(lowering_platforms=("cuda",)).as_text()


def array(shape: tuple[int, ...], dtype: str) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.dtype(dtype))


@pytest.mark.parametrize("size", list(SIZES))
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize(("num_heads", "num_kv_heads", "head_dim"), HEADS)
def test_paged_attention_lowers(num_heads: int, num_kv_heads: int, head_dim: int, dtype: str, size: str) -> None:
    num_tokens, num_rows = SIZES[size]
    cache = array((2, 100, num_kv_heads, 16, head_dim), dtype)
    ints = (array((num_rows, 64), "int32"), array((num_rows,), "int32"), array((num_rows + 1,), "int32"))
    attend = functools.partial(paged_attention, layer=1, backend="triton")
    text = lower_for_cuda(attend, (array((num_tokens, num_heads, head_dim), dtype), cache, cache, *ints))
    assert "paged_attention_decode" in text
    assert ("paged_attention_prefill" in text) == (num_tokens > num_rows)


@pytest.mark.parametrize("block_size", [8, 16, 128])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_kv_cache_write_lowers(block_size: int, dtype: str) -> None:
    cache, new = array((2, 10, 3, block_size, 80), dtype), array((7, 3, 80), "float32")
    write = functools.partial(kv_cache_write, layer=1, backend="triton")
    assert "kv_cache_write" in lower_for_cuda(write, (cache, cache, new, new, array((7,), "int32")))


@pytest.mark.parametrize("has_delta", [True, False])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("size", [64, 96, 576, 4096, 8192])
def test_add_rms_norm_lowers(size: int, dtype: str, has_delta: bool) -> None:
    rows = array((7, size), dtype)
    norm = functools.partial(add_rms_norm, eps=1e-5, backend="triton")
    text = lower_for_cuda(norm, (rows, rows if has_delta else None, array((size,), dtype)))
    assert ("add_rms_norm" if has_delta else "rms_norm") in text


@pytest.mark.parametrize(
    ("device_kind", "is_early"), [("NVIDIA H200", True), ("NVIDIA H100 PCIe", True), ("NVIDIA A100-SXM4-80GB", False)]
)
def test_the_next_kernel_is_launched_early_where_it_can_be(device_kind: str, is_early: bool) -> None:
    """Norms, rotation, a decode row's splits and what joins them."""
    rows, cache = array((1, 4096), "bfloat16"), array((2, 100, 8, 16, 128), "bfloat16")
    ints = (array((1, 64), "int32"), array((1,), "int32"), array((2,), "int32"))
    angles, slots = array((1, 64), "float32"), array((1,), "int32")

    def layer(x, weight, qkv, k, v, cos, sin, slots, *ints):
        summed, normed = add_rms_norm(x, x, weight, eps=1e-5, backend="triton")
        q, k, v = rope_kv_cache_write(k, v, qkv, cos, sin, slots, layer=1, backend="triton")
        return summed, normed, paged_attention(q, k, v, *ints, layer=1, backend="triton")

    arguments = (rows, array((4096,), "bfloat16"), array((1, 48, 128), "bfloat16"), cache, cache, angles, angles, slots)
    with as_gpu(device_kind):
        text = jax.jit(layer).trace(*arguments, *ints).lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("griddepcontrol.launch_dependents") == 4 * is_early


@pytest.mark.parametrize("vocab_size", [1, 49152, 128256])
def test_top_k_top_p_draw_lowers(vocab_size: int) -> None:
    rows = array((7, vocab_size), "float32")
    draw = functools.partial(top_k_top_p_draw, backend="triton")
    text = lower_for_cuda(draw, (rows, rows, array((7,), "int32"), array((7,), "float32")))
    assert "top_k_top_p_draw" in text


@pytest.mark.parametrize("architecture", list(registry.ARCHITECTURES))
@pytest.mark.parametrize(("num_tokens", "num_rows"), SIZES.values(), ids=list(SIZES))
def test_a_step_of_every_family_lowers(architecture: str, num_tokens: int, num_rows: int) -> None:
    is_qwen2, is_qwen3 = architecture.startswith("Qwen2"), architecture.startswith("Qwen3")
    config = ModelConfig(architecture, 512, 128, 256, 2, 4, 2, 64, 1024, has_qkv_bias=is_qwen2, has_qk_norm=is_qwen3)
    model = registry.abstract_model(config, "bfloat16")
    graphdef, params = registry.split(model)
    shape = StepShape(num_tokens, num_rows, 64)
    run = functools.partial(step.forward, graphdef=graphdef, shape=shape, backend="triton")
    cache = kv_cache.abstract_cache(model.kv_spec, 100, 16, "bfloat16")
    text = lower_for_cuda(run, (params, cache, step.abstract_inputs(shape), array((32,), "int32"), None))
    # One kernel for all layers, called once in each.
    assert "paged_attention_decode" in text and "kv_cache_write" in text and "rms_norm" in text
