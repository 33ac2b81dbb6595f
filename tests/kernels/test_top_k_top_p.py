"""The contract of top_k_top_p_draw: every backend against numpy in float64."""

import inspect
import itertools

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import top_k_top_p_draw
from pallas_kernels.top_k_top_p import api

BACKENDS = api.BACKENDS
ALL = 2**31 - 1
VOCAB_SIZES = [1, 40, 4096, 16_385]
FILTERS = list(itertools.product((1, 3, 50, ALL), (1e-6, 0.3, 0.9, 1.0)))


def scores_of(logits: np.ndarray) -> np.ndarray:
    return (logits - logits.max(axis=1, keepdims=True)).astype(np.float32) + 0.0  # which leaves no -0.0


def random_scores(num_rows: int, vocab_size: int, scale: float = 3.0) -> np.ndarray:
    return scores_of(np.random.default_rng(vocab_size).normal(0, scale, (num_rows, vocab_size)))


def with_noise(scores: np.ndarray, seed: int = 0) -> np.ndarray:
    return (scores + np.random.default_rng(seed).gumbel(size=scores.shape)).astype(np.float32)


def kept_of(scores: np.ndarray, top_k: int, top_p: float, slack: float = 0.0) -> np.ndarray:
    """Of one row; top_p with so much more or less."""
    exact = scores.astype(np.float64)
    best_first = np.sort(exact)[::-1]
    is_kept = exact >= best_first[min(top_k, len(exact)) - 1]
    if top_p == 1:
        return is_kept
    weights = np.where(is_kept, np.exp(exact), 0)
    shares = np.cumsum(np.sort(weights)[::-1]) / weights.sum()
    num_kept = min(int(np.sum(shares < top_p + slack)) + 1, len(exact))
    return is_kept & (exact >= best_first[num_kept - 1])


def draw(scores: np.ndarray, noisy: np.ndarray, top_k: list[int], top_p: list[float], backend: str | None) -> list[int]:
    filters = jnp.asarray(np.array(top_k, np.int32)), jnp.asarray(np.array(top_p, np.float32))
    tokens = top_k_top_p_draw(jnp.asarray(scores), jnp.asarray(noisy), *filters, backend=backend)
    assert tokens.dtype == jnp.int32
    return tokens.tolist()


def check(scores: np.ndarray, noisy: np.ndarray, filters: list[tuple[int, float]], backend: str) -> None:
    """That each token is the best of what is kept; either answer will do where a rounding decides."""
    tokens = draw(scores, noisy, [k for k, _ in filters], [p for _, p in filters], backend)
    for row, (token, (top_k, top_p)) in enumerate(zip(tokens, filters, strict=True)):
        kept = [kept_of(scores[row], top_k, top_p, slack) for slack in (-1e-6, 1e-6)]
        assert token in [int(np.where(each, noisy[row], -np.inf).argmax()) for each in kept], (row, top_k, top_p)


@pytest.mark.parametrize("scale", [0.1, 3.0])
@pytest.mark.parametrize("vocab_size", VOCAB_SIZES)
def test_every_pair_of_filters(vocab_size: int, scale: float, backend: str) -> None:
    """From flat rows, of which most tokens are refused, and from steep ones."""
    scores = random_scores(len(FILTERS), vocab_size, scale)
    check(scores, with_noise(scores), FILTERS, backend)


def test_ties_with_the_last_kept_stay(backend: str) -> None:
    """Halves and whole numbers, so that most tokens tie with others."""
    scores = scores_of(np.round(2 * random_scores(len(FILTERS), 4096, 1.5)) / 2)
    check(scores, with_noise(scores, 1), FILTERS, backend)


def test_among_equals_the_lowest_id_is_drawn(backend: str) -> None:
    scores = np.tile(np.array([-1, 0, 0, -1, 0], np.float32), (3, 1))
    noisy = np.tile(np.array([9, 1, 2, 9, 2], np.float32), (3, 1))
    assert draw(scores, noisy, [3, 5, 3], [1.0, 0.5, 0.5], backend) == [2, 2, 2]
    assert draw(scores, noisy, [ALL, 5, 4], [1.0, 1.0, 1.0], backend) == [0, 0, 0]


def test_what_is_most_wanted_may_be_refused_again_and_again(backend: str) -> None:
    """The noise puts the tokens in the opposite order: every token but the kept ones is tried."""
    scores = -np.arange(60, dtype=np.float32)[None].repeat(3, axis=0) / 10
    assert draw(scores, -scores, [1, 20, ALL], [1.0, 1.0, 0.5], backend)[:2] == [0, 19]
    check(scores, -scores, [(1, 1.0), (20, 0.5), (ALL, 0.5)], backend)


def test_what_must_not_be_drawn_is_not(backend: str) -> None:
    """-inf in noisy, as min_p makes it; the filters count it all the same."""
    scores = random_scores(len(FILTERS), 4096)
    check(scores, np.where(scores > -5, with_noise(scores), -np.inf).astype(np.float32), FILTERS, backend)


def test_a_draw_ends_where_all_that_is_kept_must_not_be_drawn(backend: str) -> None:
    """Against the contract; what comes out is a token."""
    scores, noisy = np.array([[0, -1, -2]], np.float32), np.array([[-np.inf, 1, 2]], np.float32)
    assert draw(scores, noisy, [1], [1.0], backend)[0] in range(3)


def test_impossible_tokens_weigh_nothing(backend: str) -> None:
    """-inf in both, as masks make it, more of them than top_k leaves."""
    scores = random_scores(len(FILTERS), 4096)
    scores[:, 5:-5] = -np.inf
    scores = scores_of(scores)
    check(scores, with_noise(scores), FILTERS, backend)


def test_a_row_is_drawn_from_alone_as_among_others(backend: str) -> None:
    scores = random_scores(len(FILTERS), 4097)
    noisy = with_noise(scores)
    together = draw(scores, noisy, [k for k, _ in FILTERS], [p for _, p in FILTERS], backend)
    alone = [
        draw(scores[[row]], noisy[[row]], [k], [p], backend)[0] for row, (k, p) in enumerate(FILTERS)
    ]  # fmt: skip
    assert together == alone


def test_nan_stays_in_its_row(backend: str) -> None:
    """And a draw from it ends."""
    scores = random_scores(3, 4096)
    noisy = with_noise(scores)
    top_k, top_p = [20, 20, ALL], [0.9, 0.9, 0.9]
    expected = draw(scores, noisy, top_k, top_p, backend)
    scores[1], noisy[1] = np.nan, np.nan
    tokens = draw(scores, noisy, top_k, top_p, backend)
    assert tokens[::2] == expected[::2] and 0 <= tokens[1] < 4096


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"scores": jnp.zeros(5)}, r"scores's shape is \(5,\); allowed: \[num_rows, vocab_size\]"),
        ({"scores": jnp.zeros((2, 0))}, r"scores's shape is \(2, 0\); allowed: \[num_rows, vocab_size\]"),
        ({"noisy": jnp.zeros((2, 4))}, r"noisy's shape is \(2, 4\); allowed: \(2, 5\), as the other arrays have it"),
        ({"top_k": jnp.ones(3, jnp.int32)}, r"top_k's shape is \(3,\); allowed: \(2,\)"),
        ({"top_p": jnp.ones((2, 1))}, r"top_p's shape is \(2, 1\); allowed: \(2,\)"),
        ({"scores": jnp.zeros((2, 5), jnp.bfloat16)}, "scores's dtype is bfloat16; allowed: float32"),
        ({"top_k": jnp.ones(2)}, "top_k's dtype is float32; allowed: int32"),
        ({"backend": "mosaic"}, r"backend is 'mosaic'; allowed: .*reference.*xla"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(changes: dict, message: str) -> None:
    """Without the run-time type checks of test runs, which would be the first to see it."""
    arrays = {"scores": jnp.zeros((2, 5)), "noisy": jnp.zeros((2, 5)), "top_k": jnp.ones(2, jnp.int32)}
    arrays = arrays | {"top_p": jnp.ones(2)} | changes
    with pytest.raises(ValueError, match=message):
        inspect.unwrap(top_k_top_p_draw)(**arrays)
