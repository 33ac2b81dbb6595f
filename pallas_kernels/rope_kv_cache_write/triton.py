"""rope_kv_cache_write on Pallas's Triton backend: one launch from the projection to attention, in place."""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt
from jaxtyping import Array, Float, Int

from pallas_kernels.early_launch import can_launch_early, program_id
from pallas_kernels.paged_attention.config import next_power_of_2

Cache = Float[Array, "num_layers num_blocks num_kv_heads block_size head_dim"]
Angles = Float[Array, "num_tokens half"]
Ref = Any  # a Pallas reference


class Refs(NamedTuple):
    """The kernel's inputs and outputs, whole arrays in device memory."""

    layer: Ref  # int32 [1]
    slots: Ref  # int32 [num_tokens]
    qkv: Ref  # [num_tokens, num_heads + 2 num_kv_heads, head_dim]
    cos: Ref  # float32 [num_tokens, head_dim / 2]
    sin: Ref
    aliased_k: Ref  # k_cache as it comes in, not read
    aliased_v: Ref
    q_out: Ref  # [num_tokens, num_heads, head_dim]
    k_cache: Ref  # [num_layers, num_blocks, num_kv_heads, block_size, head_dim]
    v_cache: Ref


def rope_kv_cache_write(
    k_cache: Cache,
    v_cache: Cache,
    qkv: Float[Array, "num_tokens num_heads_and_2_num_kv_heads head_dim"],
    cos: Angles,
    sin: Angles,
    slot_mapping: Int[Array, " num_tokens"],
    layer: Int[Array, ""],
    *,
    interpret: bool = False,
) -> tuple[Float[Array, "num_tokens num_heads head_dim"], Cache, Cache]:
    """See api.rope_kv_cache_write.

    Grid (num_kv_heads, num_tokens): a program rotates one key head of one token and the query heads that read it, and
    writes that key head and its value head to their slot.
    """
    num_kv_heads = k_cache.shape[2]
    num_tokens, num_heads, head_dim = qkv.shape[0], qkv.shape[1] - 2 * num_kv_heads, qkv.shape[2]
    is_early = can_launch_early(interpret=interpret)
    q, k_cache, v_cache = pl.pallas_call(
        functools.partial(_program, num_heads=num_heads, num_kv_heads=num_kv_heads, is_early=is_early),
        grid=(num_kv_heads, num_tokens),
        out_shape=(
            jax.ShapeDtypeStruct((num_tokens, num_heads, head_dim), qkv.dtype),
            jax.ShapeDtypeStruct(k_cache.shape, k_cache.dtype),
            jax.ShapeDtypeStruct(v_cache.shape, v_cache.dtype),
        ),
        input_output_aliases={5: 1, 6: 2},
        compiler_params=plt.CompilerParams(num_warps=1, num_stages=1),
        interpret=interpret,
        name="rope_kv_cache_write",
    )(jnp.reshape(layer, (1,)), slot_mapping, qkv, cos, sin, k_cache, v_cache)
    return q, k_cache, v_cache


def _program(*references: Ref, num_heads: int, num_kv_heads: int, is_early: bool) -> None:
    refs = Refs(*references)
    head, token = program_id(0, is_early=is_early), pl.program_id(1)
    group = num_heads // num_kv_heads
    _rotate_queries(refs, token, head * group, group)
    place = _place(refs, token, head)
    _rotate_key(refs, token, num_heads + head, place)
    _copy_value(refs, token, num_heads + num_kv_heads + head, place)


def _place(refs: Refs, token: Array, head: Array) -> tuple[Array, ...]:
    """Index of the token's key and value in a cache, all but the dimension."""
    block_size = refs.k_cache.shape[3]
    slot = plt.load(refs.slots.at[token])
    return refs.layer[0], slot // block_size, head, slot % block_size


def _rotate_queries(refs: Refs, token: Array, first: Array, group: int) -> None:
    """The query heads first .. first + group - 1."""
    heads = jnp.arange(next_power_of_2(group), dtype=jnp.int32)[:, None]
    pairs, is_pair = _pairs(refs)
    pairs, is_real = pairs[None, :], (heads < group) & is_pair[None, :]
    index = (token, first + jnp.minimum(heads, group - 1))
    cos, sin = (plt.load(ref.at[token, pairs], mask=is_pair[None, :], other=0) for ref in (refs.cos, refs.sin))
    x1, x2 = _load_halves(refs.qkv, index, pairs, is_real)
    _store_halves(refs.q_out, (token, first + heads), pairs, is_real, _rotated(x1, x2, cos, sin))


def _rotate_key(refs: Refs, token: Array, index: Array, place: tuple[Array, ...]) -> None:
    pairs, is_real = _pairs(refs)
    cos, sin = (plt.load(ref.at[token, pairs], mask=is_real, other=0) for ref in (refs.cos, refs.sin))
    x1, x2 = _load_halves(refs.qkv, (token, index), pairs, is_real)
    y1, y2 = _rotated(x1, x2, cos, sin)
    rounded = (y1.astype(refs.qkv.dtype), y2.astype(refs.qkv.dtype))
    _store_halves(refs.k_cache, place, pairs, is_real, rounded)


def _copy_value(refs: Refs, token: Array, index: Array, place: tuple[Array, ...]) -> None:
    pairs, is_real = _pairs(refs)
    _store_halves(refs.v_cache, place, pairs, is_real, _load_halves(refs.qkv, (token, index), pairs, is_real))


def _pairs(refs: Refs) -> tuple[Array, Array]:
    """Indices of the pairs of dimensions up to a power of 2, and which are real."""
    half = refs.cos.shape[1]
    pairs = jnp.arange(next_power_of_2(half), dtype=jnp.int32)
    return pairs, pairs < half


def _load_halves(ref: Ref, index: tuple, pairs: Array, is_real: Array) -> tuple[Array, Array]:
    load = functools.partial(plt.load, mask=is_real, other=0)
    return load(ref.at[(*index, pairs)]), load(ref.at[(*index, pairs + ref.shape[-1] // 2)])


def _store_halves(ref: Ref, index: tuple, pairs: Array, is_real: Array, halves: tuple[Array, Array]) -> None:
    half = ref.shape[-1] // 2
    for start, values in zip((0, half), halves, strict=True):
        plt.store(ref.at[(*index, pairs + start)], values.astype(ref.dtype), mask=is_real)


def _rotated(x1: Array, x2: Array, cos: Array, sin: Array) -> tuple[Array, Array]:
    x1, x2 = x1.astype(jnp.float32), x2.astype(jnp.float32)
    return x1 * cos - x2 * sin, x2 * cos + x1 * sin
