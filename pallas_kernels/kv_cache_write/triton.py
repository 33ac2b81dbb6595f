"""kv_cache_write on Pallas's Triton backend: keys and values of all tokens in one launch, in place."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt
from jaxtyping import Array, Float, Int

Cache = Float[Array, "num_layers num_blocks num_kv_heads block_size head_dim"]
NewTokens = Float[Array, "num_tokens num_kv_heads head_dim"]
Ref = Any  # a Pallas reference


def kv_cache_write(
    k_cache: Cache,
    v_cache: Cache,
    k: NewTokens,
    v: NewTokens,
    slot_mapping: Int[Array, " num_tokens"],
    layer: Int[Array, ""],
    *,
    interpret: bool = False,
) -> tuple[Cache, Cache]:
    """See api.kv_cache_write. Grid (num_tokens, num_kv_heads): a program writes one head of one token."""
    num_tokens, num_kv_heads, head_dim = k.shape
    k_cache, v_cache = pl.pallas_call(
        functools.partial(_write_program, head_dim=head_dim, block_size=k_cache.shape[3]),
        grid=(num_kv_heads, num_tokens),
        out_shape=(_like(k_cache), _like(v_cache)),
        input_output_aliases={4: 0, 5: 1},
        compiler_params=plt.CompilerParams(num_warps=1, num_stages=1),
        interpret=interpret,
        name="kv_cache_write",
    )(jnp.reshape(layer, (1,)), slot_mapping, k, v, k_cache, v_cache)
    return k_cache, v_cache


def _like(cache: Cache) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(cache.shape, cache.dtype)


def _write_program(*refs: Ref, head_dim: int, block_size: int) -> None:
    layer_ref, slots_ref, k_ref, v_ref, _aliased_k, _aliased_v, k_out_ref, v_out_ref = refs
    head, token = pl.program_id(0), pl.program_id(1)
    slot = plt.load(slots_ref.at[token])
    dims = jnp.arange(1 << (head_dim - 1).bit_length(), dtype=jnp.int32)
    is_real = dims < head_dim
    place = (layer_ref[0], slot // block_size, head, slot % block_size, dims)
    for new_ref, out_ref in ((k_ref, k_out_ref), (v_ref, v_out_ref)):
        value = plt.load(new_ref.at[token, head, dims], mask=is_real, other=0)
        plt.store(out_ref.at[place], value.astype(out_ref.dtype), mask=is_real)
