"""top_k_top_p_draw in jax.numpy: the definition, and the CPU's path.

It looks for a threshold instead of sorting the vocabulary: float32 values are mapped to unsigned integers of the same
order, and the largest threshold that keeps enough is found bit by bit, 32 passes over the row.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, UInt

Rows = Float[Array, "num_rows vocab_size"]
Keys = UInt[Array, "num_rows vocab_size"]


def top_k_top_p_draw(
    scores: Rows, noisy: Rows, top_k: Int[Array, " num_rows"], top_p: Float[Array, " num_rows"]
) -> Int[Array, " num_rows"]:
    """See api.top_k_top_p_draw."""
    kept = keep_top_p(keep_top_k(scores, top_k), top_p)
    return jnp.argmax(jnp.where(kept > -jnp.inf, noisy, -jnp.inf), axis=-1).astype(jnp.int32)


def keep_top_k(logits: Rows, top_k: Int[Array, " num_rows"]) -> Rows:
    """-inf but for the top_k largest of each row."""
    keys = ordered_keys(logits)
    threshold = largest_key(keys, lambda is_kept: jnp.sum(is_kept, axis=-1) >= jnp.minimum(top_k, logits.shape[1]))
    return jnp.where(keys >= threshold[:, None], logits, -jnp.inf)


def keep_top_p(logits: Rows, top_p: Float[Array, " num_rows"]) -> Rows:
    """-inf but for the fewest largest of each row whose probabilities reach top_p; rows with top_p 1 stay whole."""
    keys = ordered_keys(logits)
    weights = jnp.exp(logits - jnp.max(logits, axis=-1, keepdims=True))
    enough = top_p * jnp.sum(weights, axis=-1)
    threshold = largest_key(keys, lambda is_kept: jnp.sum(jnp.where(is_kept, weights, 0), axis=-1) >= enough)
    is_kept = (keys >= threshold[:, None]) | (top_p >= 1)[:, None]
    return jnp.where(is_kept, logits, -jnp.inf)


def ordered_keys(values: Rows) -> Keys:
    """uint32 keys in the order of the float32 values (sign bit flipped, negatives inverted)."""
    bits = jax.lax.bitcast_convert_type(values, jnp.uint32)
    is_negative = bits >> 31 == 1
    return jnp.where(is_negative, ~bits, bits | jnp.uint32(1 << 31))


def largest_key(
    keys: Keys,
    is_enough: Callable[[Bool[Array, "num_rows vocab_size"]], Bool[Array, " num_rows"]],
) -> UInt[Array, " num_rows"]:
    """The largest threshold t for which {keys >= t} is enough; 0 if nothing is. Set bit by bit from the highest."""

    def body(index: Int[Array, ""], found: UInt[Array, " num_rows"]) -> UInt[Array, " num_rows"]:
        candidate = found | (jnp.uint32(1) << (31 - index).astype(jnp.uint32))
        return jnp.where(is_enough(keys >= candidate[:, None]), candidate, found)

    return jax.lax.fori_loop(0, 32, body, jnp.zeros(keys.shape[0], jnp.uint32))
