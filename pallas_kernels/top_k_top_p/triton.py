"""top_k_top_p_draw on Pallas's Triton backend: draw from all, and draw again only if the filters refuse the token.

The best token of all is also the best of those that are kept, if it is one of them, which two sums over the row show:
how many tokens score higher, and how probable these are together. If it is not, all that scores no higher is refused
as well, and the best of the rest is next. From a language model's softmax most first draws are kept, so a row is read
a few times, where a search for the thresholds reads it 32 times for each. Only where both filters cut, the probability
of what top_k keeps is searched for first.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt
from jaxtyping import Array, Bool, Float, Int

Ref = Any  # a Pallas reference
Rows = Float[Array, "num_rows vocab_size"]
Scalar = Float[Array, ""]
Index = Int[Array, ""]
Values = Float[Array, " tile"]
Columns = Int[Array, " tile"]

TILE = 4096  # tokens that are added at a time,
LOADED = 4  # and tiles that are loaded at a time, of all arrays: loads in flight for an SM, and registers for no more
NUM_WARPS = 16
INFINITY_BITS = 0x7F800000


def top_k_top_p_draw(
    scores: Rows,
    noisy: Rows,
    top_k: Int[Array, " num_rows"],
    top_p: Float[Array, " num_rows"],
    *,
    interpret: bool = False,
) -> Int[Array, " num_rows"]:
    """See api.top_k_top_p_draw. Grid (num_rows,): a program draws for one row."""
    num_rows, size = scores.shape
    first = jnp.argmax(noisy, axis=-1).astype(jnp.int32)  # by the whole device, whatever the number of rows
    return pl.pallas_call(
        functools.partial(_draw_program, size=size),
        grid=(num_rows,),
        out_shape=jax.ShapeDtypeStruct((num_rows,), jnp.int32),
        compiler_params=plt.CompilerParams(num_warps=NUM_WARPS, num_stages=1),
        interpret=interpret,
        name="top_k_top_p_draw",
    )(scores, noisy, first, top_k, top_p)


class Row(NamedTuple):
    """What one program reads."""

    scores: Ref  # [num_rows, vocab_size]
    noisy: Ref
    number: Index
    size: int

    def score(self, token: Index) -> Scalar:
        """One token's score."""
        return plt.load(self.scores.at[self.number, token])


class Above(NamedTuple):
    """Sums over the tokens that score higher than some, and over all."""

    num_above: Any
    mass: Any  # of exp(score)
    total: Any


def _draw_program(
    scores_ref: Ref, noisy_ref: Ref, first_ref: Ref, top_k_ref: Ref, top_p_ref: Ref, out_ref: Ref, *, size: int
) -> None:
    row = Row(scores_ref, noisy_ref, pl.program_id(0), size)
    first, top_k, top_p = (plt.load(ref.at[row.number]) for ref in (first_ref, top_k_ref, top_p_ref))
    has_k, has_p = top_k < size, top_p < 1
    # Where nothing is cut, nothing is read.
    above = _above(row, row.score(first), jnp.where(has_k | has_p, jnp.int32(size), jnp.int32(0)))
    total = _kept_mass(row, top_k, above.total, has_k & has_p)
    enough = jnp.where(has_p, top_p * total, jnp.inf)

    def is_refused(state: tuple[Index, Index, Scalar]) -> Bool[Array, ""]:
        _, count, mass = state
        return (count >= top_k) | (mass >= enough)

    def draw_again(state: tuple[Index, Index, Scalar]) -> tuple[Index, Index, Scalar]:
        best = _best_above(row, row.score(state[0]))
        is_found = best < row.size  # as it always is, unless what must not be drawn is all that is kept
        token = jnp.where(is_found, best, state[0])
        sums = _above(row, row.score(token), row.size)
        return token, jnp.where(is_found, sums.num_above, 0), jnp.where(is_found, sums.mass, 0)

    token, _, _ = jax.lax.while_loop(is_refused, draw_again, (first, above.num_above, above.mass))
    plt.store(out_ref.at[row.number], token)


def _above(row: Row, pivot: Scalar, size: Index | int) -> Above:
    """Of the tokens that score higher than pivot; zeros if size, which is the row's own otherwise, is 0."""

    def add(tile: tuple[Columns, Values], sums: Above) -> Above:
        _, scores = tile
        weights, is_above = jnp.exp(scores), scores > pivot
        count = sums.num_above + is_above.astype(jnp.int32)
        return Above(count, sums.mass + jnp.where(is_above, weights, 0), sums.total + weights)

    zeros = Above(jnp.zeros((TILE,), jnp.int32), jnp.zeros((TILE,), jnp.float32), jnp.zeros((TILE,), jnp.float32))
    return Above._make(map(jnp.sum, _over_tiles(row, (row.scores,), add, zeros, size)))


def _kept_mass(row: Row, top_k: Index, total: Scalar, is_wanted: Bool[Array, ""]) -> Scalar:
    """The sum of exp(score) over what top_k keeps; total unless it is wanted.

    Scores are at most 0, so the bits of their magnitudes are integers of the same order: the smallest one within which
    there are top_k tokens is found by halving, or one with exactly as many.
    """

    def is_wide(state: tuple[Index, Index, Scalar]) -> Bool[Array, ""]:
        low, high, _ = state
        return high - low > 1

    def halve(state: tuple[Index, Index, Scalar]) -> tuple[Index, Index, Scalar]:
        low, high, mass = state
        middle = low + (high - low) // 2
        count, mass_within = _within(row, middle)
        is_enough = count >= top_k
        low = jnp.where(is_enough, jnp.where(count == top_k, middle - 1, low), middle)
        return low, jnp.where(is_enough, middle, high), jnp.where(is_enough, mass_within, mass)

    low = jnp.where(is_wanted, jnp.int32(-1), jnp.int32(INFINITY_BITS))
    return jax.lax.while_loop(is_wide, halve, (low, jnp.int32(INFINITY_BITS), total))[2]


def _within(row: Row, most_bits: Index) -> tuple[Index, Scalar]:
    """How many tokens have scores of a magnitude whose bits are at most these, and their sum of exp(score)."""

    def add(tile: tuple[Columns, Values], sums: tuple[Columns, Values]) -> tuple[Columns, Values]:
        columns, scores = tile
        bits = jax.lax.bitcast_convert_type(jnp.abs(scores), jnp.int32)
        is_within = (bits <= most_bits) & (columns < row.size)
        return sums[0] + is_within.astype(jnp.int32), sums[1] + jnp.where(is_within, jnp.exp(scores), 0)

    zeros = jnp.zeros((TILE,), jnp.int32), jnp.zeros((TILE,), jnp.float32)
    count, mass = _over_tiles(row, (row.scores,), add, zeros, row.size)
    return jnp.sum(count), jnp.sum(mass)


def _best_above(row: Row, pivot: Scalar) -> Index:
    """The token of the largest noisy score among those that score higher than pivot, the lowest among equals.

    The row's size if all of them are -inf.
    """

    def choose(tile: tuple[Columns, Values, Values], best: tuple[Values, Columns]) -> tuple[Values, Columns]:
        columns, scores, noisy = tile
        is_better = (scores > pivot) & (noisy > best[0])
        return jnp.where(is_better, noisy, best[0]), jnp.where(is_better, columns, best[1])

    nothing = jnp.full((TILE,), -jnp.inf, jnp.float32), jnp.full((TILE,), row.size, jnp.int32)
    values, tokens = _over_tiles(row, (row.scores, row.noisy), choose, nothing, row.size)
    return jnp.min(jnp.where(values == jnp.max(values), tokens, row.size))


def _over_tiles(row: Row, refs: tuple[Ref, ...], function: Any, carry: Any, size: Index | int) -> Any:
    """Folds function((columns, *tiles), carry) over the row's first tokens; -inf stands past its end."""
    num_tiles = LOADED // len(refs)  # of each array

    def body(index: Index, carry: Any) -> Any:
        starts = [(index * num_tiles + number) * TILE for number in range(num_tiles)]
        columns = [start + jnp.arange(TILE, dtype=jnp.int32) for start in starts]
        tiles = [[_load(ref, row, each) for ref in refs] for each in columns]  # all loads before the first sum
        for each, loaded in zip(columns, tiles, strict=True):
            carry = function((each, *loaded), carry)
        return carry

    return jax.lax.fori_loop(0, pl.cdiv(size, TILE * num_tiles), body, carry)


def _load(ref: Ref, row: Row, columns: Columns) -> Values:
    return plt.load(ref.at[row.number, columns], mask=columns < row.size, other=-jnp.inf)
