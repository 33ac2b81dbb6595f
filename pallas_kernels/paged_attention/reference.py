"""The plain definition of paged_attention: every row at the full width of its block table, in float32. Slow."""

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

Cache = Float[Array, "num_layers num_blocks num_kv_heads block_size head_dim"]
Queries = Float[Array, "num_tokens num_heads head_dim"]


def paged_attention(
    q: Queries,
    k_cache: Cache,
    v_cache: Cache,
    block_tables: Int[Array, "num_rows blocks_per_row"],
    seq_lens: Int[Array, " num_rows"],
    query_start_loc: Int[Array, " num_rows_plus_1"],
    *,
    layer: Int[Array, ""],
    scale: float,
) -> Queries:
    """See api.paged_attention."""
    is_decode = q.shape[0] == seq_lens.shape[0]
    rows, positions = (
        decode_positions(seq_lens) if is_decode else ragged_positions(q.shape[0], seq_lens, query_start_loc)
    )
    k = gather_rows(k_cache, layer, block_tables)[rows]
    v = gather_rows(v_cache, layer, block_tables)[rows]
    key_positions = jnp.arange(k.shape[1])
    is_visible = key_positions[None, :] <= positions[:, None]
    attend = jax.vmap(functools.partial(attend_one, scale=scale))
    return attend(q.astype(jnp.float32), k, v, is_visible).astype(q.dtype)


def decode_positions(seq_lens: Int[Array, " num_rows"]) -> tuple[Int[Array, " num_rows"], Int[Array, " num_rows"]]:
    """Each token's row and position when every row has one query; a padding row's position is -1."""
    return jnp.arange(seq_lens.shape[0]), seq_lens - 1


def ragged_positions(
    num_tokens: int, seq_lens: Int[Array, " num_rows"], query_start_loc: Int[Array, " num_rows_plus_1"]
) -> tuple[Int[Array, " num_tokens"], Int[Array, " num_tokens"]]:
    """Each token's row and position in its sequence; padding tokens get some row and position -1."""
    tokens = jnp.arange(num_tokens)
    rows = jnp.searchsorted(query_start_loc, tokens, side="right", method="compare_all") - 1
    is_padding = tokens >= query_start_loc[-1]
    rows = jnp.clip(rows, 0, seq_lens.shape[0] - 1)
    positions = seq_lens[rows] - query_start_loc[rows + 1] + tokens
    return rows, jnp.where(is_padding, -1, positions)


def gather_rows(
    cache: Cache, layer: Int[Array, ""], block_tables: Int[Array, "num_rows num_blocks_of_row"]
) -> Float[Array, "num_rows num_keys num_kv_heads head_dim"]:
    """Each row's keys (or values) laid end to end."""
    blocks = cache[layer, block_tables]
    num_rows, _, num_kv_heads, _, head_dim = blocks.shape
    return jnp.swapaxes(blocks, 2, 3).reshape(num_rows, -1, num_kv_heads, head_dim)


def attend_one(
    q: Float[Array, "num_heads head_dim"],
    k: Float[Array, "num_keys num_kv_heads head_dim"],
    v: Float[Array, "num_keys num_kv_heads head_dim"],
    is_visible: Bool[Array, " num_keys"],
    scale: float,
) -> Float[Array, "num_heads head_dim"]:
    """One token's attention. What is not visible is removed by selection, so that a NaN there stays there."""
    group = q.shape[0] // k.shape[1]
    k = jnp.where(is_visible[:, None, None], k, 0).astype(jnp.float32).repeat(group, axis=1)
    v = jnp.where(is_visible[:, None, None], v, 0).astype(jnp.float32).repeat(group, axis=1)
    scores = jnp.einsum("hd,khd->hk", q, k, precision="highest") * scale
    weights = jnp.where(
        is_visible, jnp.exp(scores - jnp.max(scores, where=is_visible, initial=-1e30, axis=1, keepdims=True)), 0
    )
    total = jnp.sum(weights, axis=1, keepdims=True)
    return jnp.einsum("hk,khd->hd", weights / jnp.where(total == 0, 1, total), v, precision="highest")
