"""Logits to tokens, on the device, every row by its own options. On a GPU nothing is sorted."""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, UInt

from pallas_kernels import top_k_top_p_draw
from paxpage.engine.batch import BANNED_ALWAYS, IS_NO_BAN, NO_TOKEN, AdjustedRows, AdjustedTokens, SamplingInputs

# What a banned token's logit becomes: it is never drawn beside any other, but if all are banned one of them is, and
# there is no NaN.
BANNED = -1e30

# The most likely tokens are looked for in groups of so many tokens; on an NVIDIA GPU with XLA's own kernel, which takes
# at most so many of at least so many (jax 0.11.2). For anything else XLA sorts there.
GROUP_SIZE = 64
KERNEL_TOP_K, KERNEL_WIDTH = 16, 1024

Logits = Float[Array, "num_rows vocab_size"]


class SampledTokens(NamedTuple):
    """What a step gives back, one entry per row; the last four are empty unless log-probabilities were asked for."""

    token_ids: Int[Array, " num_rows"]
    logprobs: Float[Array, " num_rows"]  # of the chosen token, before temperature and filters
    ranks: Int[Array, " num_rows"]  # 1 + how many tokens are more likely
    top_token_ids: Int[Array, "num_rows num_top"]
    top_logprobs: Float[Array, "num_rows num_top"]


def unpack_sampling(packed: Int[Array, "num_rows num_ints"]) -> SamplingInputs:
    """The fields of batch.pack_sampling's array."""
    floats = jax.lax.bitcast_convert_type(packed[:, :3], jnp.float32)
    return SamplingInputs._make([*floats.T, *packed[:, 3:7].T, packed[:, 7:]])


def greedy(logits: Logits) -> Int[Array, " num_rows"]:
    """The most likely token of each row; the lowest id among equals."""
    return jnp.argmax(logits, axis=-1).astype(jnp.int32)


def sample(
    logits: Logits, adjusted: Logits, packed: Int[Array, "num_rows num_ints"], *, num_top: int | None
) -> SampledTokens:
    """Draws one token a row.

    logits: the model's own, for log-probabilities. adjusted: what is drawn from; the same, or what adjust() gives.
    num_top: how many of the most likely tokens to report, None for no log-probabilities at all.
    """
    inputs = unpack_sampling(packed)
    allowed = suppress(adjusted, inputs.suppressed)
    token_ids = jnp.where(inputs.temperature == 0, greedy(allowed), draw(allowed, inputs)).astype(jnp.int32)
    return SampledTokens(token_ids, *describe(logits, token_ids, num_top))


def suppress(logits: Logits, token_ids: Int[Array, "num_rows num_ids"]) -> Logits:
    """Bans the given tokens of each row; ids outside the vocabulary mean nothing."""
    return ban(logits, jnp.arange(logits.shape[0])[:, None], token_ids)


def ban(logits: Logits, rows: Int[Array, "..."], token_ids: Int[Array, "..."]) -> Logits:
    """Lowers the logits at (rows, token_ids) to BANNED; ids outside the vocabulary mean nothing."""
    return logits.at[rows, token_ids].min(BANNED, mode="drop", wrap_negative_indices=False)


def unpack_adjustments(packed: Int[Array, " num_ints"], num_rows: int) -> tuple[Array, AdjustedRows, AdjustedTokens]:
    """Whether it is a step's first call, and the fields of batch.pack_adjustments' array."""
    size = len(AdjustedRows._fields) * num_rows
    options = packed[1 : 1 + size].reshape(-1, num_rows)
    entries = packed[1 + size :].reshape(len(AdjustedTokens._fields), -1)
    floats = jax.lax.bitcast_convert_type(options[:3], jnp.float32)
    tokens = AdjustedTokens(*entries)
    biases = jax.lax.bitcast_convert_type(tokens.bias, jnp.float32)
    return packed[0] == 1, AdjustedRows(*floats, *options[3:]), tokens._replace(bias=biases)


def adjust(
    logits: Logits, adjusted: Logits, packed: Int[Array, " num_ints"], previous: Int[Array, " max_rows"]
) -> Logits:
    """Biases, allowed tokens, penalties and bans, for the tokens that batch.pack_adjustments lists.

    adjusted: what the call before gave; in a step's first call the logits themselves. previous: the tokens that the
    step before sampled. The order is vLLM's: bias first, then the repetition penalty, then frequency and presence.
    """
    is_first, rows, tokens = unpack_adjustments(packed, logits.shape[0])
    pending = jnp.where(rows.previous < 0, BANNED_ALWAYS, previous.at[rows.previous].get(mode="clip"))
    adjusted = jnp.where((is_first & (rows.is_restricted == 1))[:, None], -jnp.inf, adjusted)
    in_flight = AdjustedTokens(jnp.arange(len(pending)), pending, 0.0, 2, IS_NO_BAN)
    # Only where it has no entry: those that have one overwrite this.
    is_alone = is_first & (rows.is_restricted == 0) & (rows.previous >= 0)
    adjusted = place(adjusted, in_flight, penalise(logits, rows, in_flight), is_alone)
    pending_of = pending.at[tokens.row].get(mode="clip")
    counted = tokens._replace(count=tokens.count + 2 * (tokens.token_id == pending_of))
    adjusted = place(adjusted, counted, penalise(logits, rows, counted), tokens.ban == IS_NO_BAN)
    is_banned = (tokens.ban == BANNED_ALWAYS) | (tokens.ban == pending_of)
    return ban(adjusted, tokens.row, jnp.where(is_banned, tokens.token_id, NO_TOKEN))


def place(logits: Logits, tokens: AdjustedTokens, values: Float[Array, " num"], is_set: Bool[Array, " num"]) -> Logits:
    """Puts values in the places of the tokens for which is_set holds."""
    token_ids = jnp.where(is_set, tokens.token_id, NO_TOKEN)
    return logits.at[tokens.row, token_ids].set(values, mode="drop", wrap_negative_indices=False)


def penalise(logits: Logits, rows: AdjustedRows, tokens: AdjustedTokens) -> Float[Array, " num_entries"]:
    """The tokens' logits after bias and penalties."""
    values = logits.at[tokens.row, tokens.token_id].get(mode="clip") + tokens.bias
    repetition, presence, frequency = (field.at[tokens.row].get(mode="clip") for field in rows[:3])
    repeated = jnp.where(values > 0, values / repetition, values * repetition)
    values = jnp.where(tokens.count > 0, repeated, values)
    num_outputs = jnp.asarray(tokens.count) >> 1
    return values - frequency * num_outputs - presence * (num_outputs > 0)


def mask(logits: Logits, masks: UInt[Array, "num_rows num_words"]) -> Logits:
    """-inf for tokens whose bit is not set: bit i % 32 of word i // 32 is token i's. After adjust(), bans included."""
    token_ids = jnp.arange(logits.shape[1])
    bits = masks[:, token_ids // 32] >> (token_ids % 32).astype(jnp.uint32) & 1
    return jnp.where(bits == 1, logits, -jnp.inf)


def draw(logits: Logits, inputs: SamplingInputs) -> Int[Array, " num_rows"]:
    """One draw a row from softmax(logits / temperature) restricted to top_k, then top_p, then min_p (Gumbel-max)."""
    temperature = jnp.where(inputs.temperature == 0, 1, inputs.temperature)[:, None]
    # Less the maximum first: no temperature can then overflow.
    scaled = (logits - jnp.max(logits, axis=-1, keepdims=True)) / temperature
    make_noise = jax.vmap(functools.partial(gumbel, size=logits.shape[1]))
    noise = make_noise(inputs.seed_low, inputs.seed_high, inputs.position)
    noisy = jnp.where(scaled >= jnp.log(inputs.min_p)[:, None], scaled + noise, -jnp.inf)
    # What is drawn for a greedy row is not looked at: it is to cost nothing.
    is_greedy = inputs.temperature == 0
    top_k, top_p = jnp.where(is_greedy, NO_TOKEN, inputs.top_k), jnp.where(is_greedy, 1, inputs.top_p)
    return top_k_top_p_draw(scaled, noisy, top_k, top_p)


def gumbel(
    seed_low: Int[Array, ""], seed_high: Int[Array, ""], position: Int[Array, ""], size: int
) -> Float[Array, " size"]:
    """Noise that depends on a request's seed and its own token position alone, so never on the rest of the batch."""
    key = jax.random.key(0, impl="threefry2x32")
    for value in (seed_low, seed_high, position):
        key = jax.random.fold_in(key, jax.lax.bitcast_convert_type(value, jnp.uint32))
    return jax.random.gumbel(key, (size,), jnp.float32)


def describe(logits: Logits, token_ids: Int[Array, " num_rows"], num_top: int | None) -> tuple[Array, ...]:
    """Log-probabilities and ranks of the chosen tokens and the num_top most likely ones; empty for num_top None."""
    num_rows = logits.shape[0]
    if num_top is None:
        empty = jnp.zeros((0,))
        return empty, empty.astype(jnp.int32), jnp.zeros((num_rows, 0), jnp.int32), jnp.zeros((num_rows, 0))
    logprobs = jax.nn.log_softmax(logits, axis=-1)
    chosen = jnp.take_along_axis(logprobs, token_ids[:, None], axis=-1)
    ranks = 1 + jnp.sum(logprobs > chosen, axis=-1)
    # At least one: XLA has no use for an array of none, and drops what nobody looks at.
    top_logprobs, top_token_ids = most_likely(logprobs, max(num_top, 1))
    return chosen[:, 0], ranks.astype(jnp.int32), top_token_ids[:, :num_top], top_logprobs[:, :num_top]


def most_likely(
    logprobs: Logits, num_top: int
) -> tuple[Float[Array, "num_rows num_top"], Int[Array, "num_rows num_top"]]:
    """The num_top best of each row, and which tokens they are; of equals the lowest id first, as jax.lax.top_k has it.

    Rows have no NaN, or nothing else. The best lie in the num_top groups of tokens whose own best are best, of equals
    the first groups: only those are looked through. logprobs are read twice and need not be there as an array: XLA
    computes them where they are read.
    """
    num_rows, vocab_size = logprobs.shape
    if vocab_size <= num_top * GROUP_SIZE:
        places = best_places(logprobs, num_top)
        return jnp.take_along_axis(logprobs, places, axis=-1), places
    padding = ((0, 0), (0, -vocab_size % GROUP_SIZE))
    grouped = jnp.pad(logprobs, padding, constant_values=-jnp.inf).reshape(num_rows, -1, GROUP_SIZE)
    groups = ascending(best_places(jnp.max(grouped, axis=-1), num_top))[:, :, None]
    found = jnp.take_along_axis(grouped, groups, axis=1).reshape(num_rows, -1)
    token_ids = (groups * GROUP_SIZE + jnp.arange(GROUP_SIZE)).reshape(num_rows, -1)
    places = best_places(found, num_top)
    return jnp.take_along_axis(found, places, axis=-1), jnp.take_along_axis(token_ids, places, axis=-1)


def best_places(logprobs: Float[Array, "num_rows size"], num_top: int) -> Int[Array, "num_rows num_top"]:
    """Where the num_top best of each row are, best first, of equals the first; KERNEL_TOP_K at a time."""
    # What is no number comes last, with -inf. Then the next larger numbers, of which -inf is none: what is -inf here is
    # padding or has been found.
    values = jnp.nextafter(jnp.where(jnp.isnan(logprobs), -jnp.inf, logprobs), jnp.inf)
    padding = ((0, 0), (0, max(0, KERNEL_WIDTH - values.shape[1])))
    values = jnp.pad(values, padding, constant_values=-jnp.inf)
    rows, places = jnp.arange(values.shape[0])[:, None], []
    for start in range(0, num_top, KERNEL_TOP_K):
        _, found = jax.lax.top_k(values, min(KERNEL_TOP_K, num_top - start))
        values = values.at[rows, found].set(-jnp.inf)
        places.append(found)
    return jnp.concatenate(places, axis=-1)


def ascending(numbers: Int[Array, "num_rows num"]) -> Int[Array, "num_rows num"]:
    """Each row's few distinct numbers, the least first: each one's place is how many are less."""
    places = jnp.sum(numbers[:, :, None] > numbers[:, None, :], axis=-1)
    is_there = places[:, :, None] == jnp.arange(numbers.shape[1])
    return jnp.sum(jnp.where(is_there, numbers[:, :, None], 0), axis=1)
