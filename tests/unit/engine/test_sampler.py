"""Sampling on the device against a reference in numpy."""

import functools
import itertools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.top_k_top_p import xla
from paxpage.engine import sampler
from paxpage.engine.batch import MAX_SUPPRESSED, NO_TOKEN, SamplingInputs, pack_sampling
from paxpage.engine.request import Request
from paxpage.engine.sampler import SampledTokens
from paxpage.engine.sampling_params import SamplingParams
from paxpage.engine.scheduler import ScheduledRow

VOCAB_SIZE = 40
NUM_ROWS = 16
NUM_DRAWS = 4096  # of one call, so that one compilation serves all tests
SEEDS = (0, -1, 7, 2**31, 2**32 + 7, 2**63 - 1, -(2**63))
# What chi-square exceeds once in 1e5 times, by degrees of freedom.
CHI_SQUARE_LIMITS = {2: 23.0, 5: 30.9, 9: 39.3}


class Options(NamedTuple):
    """One row's options, as packed."""

    temperature: float = 1.0
    top_k: int = NO_TOKEN
    top_p: float = 1.0
    min_p: float = 0.0


def random_logits(num_rows: int, vocab_size: int = VOCAB_SIZE, scale: float = 3.0) -> np.ndarray:
    return np.random.default_rng(num_rows).normal(0, scale, (num_rows, vocab_size)).astype(np.float32)


def inputs_for(options: list[Options], seed: int = 5) -> SamplingInputs:
    """Row r draws the token at position r."""
    columns = [np.array(column) for column in zip(*options, strict=True)]
    temperature, top_p, min_p = (columns[index].astype(np.float32) for index in (0, 2, 3))
    words = np.full((2, len(options)), [[seed], [0]], np.int32)
    positions = np.arange(len(options), dtype=np.int32)
    suppressed = np.full((len(options), MAX_SUPPRESSED), NO_TOKEN, np.int32)
    return SamplingInputs(temperature, top_p, min_p, columns[1].astype(np.int32), *words, positions, suppressed)


def kept_tokens(logits: np.ndarray, options: Options) -> np.ndarray:
    """Which tokens may be drawn: top_k, then top_p of what is left, then min_p; a tie with the last kept one stays."""
    scaled = (logits.astype(np.float64) - logits.max()) / options.temperature
    best_first = np.sort(scaled)[::-1]
    is_kept = scaled >= best_first[min(options.top_k, len(logits)) - 1]
    if options.top_p < 1:
        weights = np.where(is_kept, np.exp(scaled), 0)
        shares = np.cumsum(np.sort(weights)[::-1]) / weights.sum()
        num_kept = int(np.argmax(shares >= options.top_p)) + 1
        is_kept &= scaled >= best_first[num_kept - 1]
    return is_kept & (np.exp(scaled) >= options.min_p)


def noise_of(low: int, high: int, position: int, size: int) -> np.ndarray:
    """Gumbel noise as the design says it: seed's words, then position, folded into one key."""
    key = jax.random.key(0, impl="threefry2x32")
    for word in (low, high, position):
        key = jax.random.fold_in(key, np.uint32(word))
    return np.asarray(jax.random.gumbel(key, (size,), jnp.float32))


@functools.cache
def compiled_draw() -> object:
    return jax.jit(sampler.draw)


def draw(logits: np.ndarray, options: list[Options], seed: int = 5) -> np.ndarray:
    """One draw a row, in calls of NUM_DRAWS rows over VOCAB_SIZE tokens; missing tokens are impossible."""
    num_rows, vocab_size = logits.shape
    size = -(-num_rows // NUM_DRAWS) * NUM_DRAWS
    padded = np.full((size, VOCAB_SIZE), -np.inf, np.float32)
    padded[:num_rows, :vocab_size], padded[num_rows:, 0] = logits, 0
    inputs = inputs_for(options + options[:1] * (size - num_rows), seed)
    calls = [slice(start, start + NUM_DRAWS) for start in range(0, size, NUM_DRAWS)]
    drawn = [compiled_draw()(padded[part], SamplingInputs(*(field[part] for field in inputs))) for part in calls]
    return np.concatenate(drawn)[:num_rows]


@functools.cache
def compiled_sample(num_top: int | None) -> object:
    return jax.jit(functools.partial(sampler.sample, num_top=num_top))


def row_of(params: SamplingParams, *, seed: int = 0, num_outputs: int = 0, eos: tuple[int, ...] = ()) -> ScheduledRow:
    request = Request("a", [1, 2, 3], params, max_tokens=99, seed=seed, eos_token_ids=frozenset(eos))
    for _ in range(num_outputs):
        request.append(9)
    return ScheduledRow(request, 0, request.num_tokens, is_sampled=True, previous_index=-1)


def sample(logits: np.ndarray, rows: list[ScheduledRow], num_top: int | None = None) -> SampledTokens:
    """Over the road that the engine takes: options packed as integers, the batch padded to NUM_ROWS or more."""
    num_rows = max(NUM_ROWS, len(rows))
    padded = np.zeros((num_rows, logits.shape[1]), np.float32)
    padded[: len(rows)] = logits
    return compiled_sample(num_top)(jnp.asarray(padded), jnp.asarray(padded), pack_sampling(rows, num_rows))


def sampled_ids(logits: np.ndarray, rows: list[ScheduledRow]) -> list[int]:
    return sample(logits, rows).token_ids[: len(rows)].tolist()


# What may be drawn

COMBINATIONS = [
    Options(*values)
    for values in itertools.product(
        (0.3, 1.0, 2.5), (1, 3, VOCAB_SIZE, NO_TOKEN), (0.01, 0.5, 0.93, 1.0), (0.0, 0.07, 0.6, 1.0)
    )
]


def test_every_combination_draws_what_the_reference_draws() -> None:
    logits = random_logits(len(COMBINATIONS))
    kept = [kept_tokens(row, options) for row, options in zip(logits, COMBINATIONS, strict=True)]
    assert {int(row.sum()) for row in kept} >= {1, 2, 3, 4, VOCAB_SIZE}
    noise = [noise_of(5, 0, position, VOCAB_SIZE) for position in range(len(COMBINATIONS))]
    scaled = logits / np.array([[options.temperature] for options in COMBINATIONS], np.float32)
    expected = np.where(kept, scaled + noise, -np.inf).argmax(axis=1)
    assert draw(logits, COMBINATIONS).tolist() == expected.tolist()


@pytest.mark.parametrize("index", range(0, len(COMBINATIONS), 7))
def test_all_that_is_kept_and_nothing_else_can_be_drawn(index: int) -> None:
    """Many draws from logits so flat that none of the kept tokens is rare."""
    options = COMBINATIONS[index]
    logits = random_logits(len(COMBINATIONS), scale=0.7)[index]
    drawn = set(draw(np.tile(logits, (20_000, 1)), [options] * 20_000).tolist())
    is_kept = kept_tokens(logits, options)
    likely = is_kept & (logits > logits.max() - 5 * options.temperature)
    assert set(np.flatnonzero(likely).tolist()) <= drawn <= set(np.flatnonzero(is_kept).tolist())


TIED = np.array([2, 5, 5, 1, 5, 0, 2, 2, -3, -3], np.float32)


@pytest.mark.parametrize(
    ("top_k", "expected"), [(1, {1, 2, 4}), (3, {1, 2, 4}), (4, {0, 1, 2, 4, 6, 7}), (7, {0, 1, 2, 3, 4, 6, 7})]
)
def test_ties_with_the_last_of_top_k_stay(top_k: int, expected: set[int]) -> None:
    kept = xla.keep_top_k(jnp.asarray(TIED[None]), jnp.array([top_k]))
    assert set(np.flatnonzero(np.isfinite(kept[0])).tolist()) == expected


@pytest.mark.parametrize(
    ("top_p", "expected"), [(0.1, {1, 2, 4}), (0.33, {1, 2, 4}), (0.9, {1, 2, 4}), (0.97, {0, 1, 2, 4, 6, 7})]
)
def test_ties_with_the_last_of_top_p_stay(top_p: float, expected: set[int]) -> None:
    kept = xla.keep_top_p(jnp.asarray(TIED[None]), jnp.array([top_p]))
    assert set(np.flatnonzero(np.isfinite(kept[0])).tolist()) == expected


def test_ties_with_min_p_stay() -> None:
    logits = np.log(np.array([0.4, 0.2, 0.2, 0.1, 0.1], np.float32))
    for min_p, expected in ((0.499, {0, 1, 2}), (0.501, {0}), (0.249, {0, 1, 2, 3, 4}), (1.0, {0})):
        drawn = draw(np.tile(logits, (2000, 1)), [Options(min_p=min_p)] * 2000)
        assert set(drawn.tolist()) == expected


def test_kept_logits_are_untouched() -> None:
    logits = jnp.asarray(random_logits(4))
    for kept in (
        xla.keep_top_k(logits, jnp.array([1, 3, 40, 99])),
        xla.keep_top_p(logits, jnp.array([0.1, 0.5, 0.9, 1])),
    ):
        assert bool(jnp.all((kept == logits) | (kept == -jnp.inf)))
        assert bool(jnp.all(jnp.max(kept, axis=1) == jnp.max(logits, axis=1)))


def test_a_top_p_of_one_keeps_even_what_a_sum_of_floats_does_not_feel() -> None:
    logits = np.full((4, VOCAB_SIZE), -80, np.float32)
    logits[:, :3] = 0, -1, -40
    kept = xla.keep_top_p(jnp.asarray(logits), jnp.array([1.0, 0.999999, 0.7, 1.0]))
    assert np.isfinite(kept).sum(axis=1).tolist() == [VOCAB_SIZE, 2, 1, VOCAB_SIZE]


def test_top_p_after_top_k_counts_only_what_is_left() -> None:
    """0.4 and 0.3 are 4/7 and 3/7 once the others are gone: 0.5 of that is the first alone."""
    logits = np.log(np.array([0.4, 0.3, 0.2, 0.1], np.float32))
    drawn = draw(np.tile(logits, (2000, 1)), [Options(top_k=2, top_p=0.5)] * 2000)
    assert set(drawn.tolist()) == {0}
    assert set(draw(np.tile(logits, (2000, 1)), [Options(top_p=0.5)] * 2000).tolist()) == {0, 1}


def test_keys_are_in_the_order_of_the_floats() -> None:
    values = np.array([-np.inf, -3e38, -2.0, -1e-30, 0.0, 1e-30, 1.5, 1.5000001, 3e38, np.inf], np.float32)
    keys = np.asarray(xla.ordered_keys(jnp.asarray(values[None])))[0]
    assert (np.diff(keys.astype(np.int64)) > 0).all()


# How often


def chi_square(counts: np.ndarray, shares: np.ndarray) -> float:
    expected = counts.sum() * shares
    return float(((counts - expected) ** 2 / expected).sum())


@pytest.mark.parametrize(
    ("options", "num_kept"), [(Options(), 10), (Options(0.5), 10), (Options(1.7, top_k=6), 6), (Options(top_p=0.6), 3)]
)
def test_tokens_come_as_often_as_they_should(options: Options, num_kept: int) -> None:
    shares = np.array([0.3, 0.2, 0.14, 0.1, 0.08, 0.06, 0.05, 0.03, 0.025, 0.015])
    logits = np.log(shares).astype(np.float32)
    counts = np.bincount(draw(np.tile(logits, (20_000, 1)), [options] * 20_000, seed=11), minlength=10)
    weights = np.where(kept_tokens(logits, options), shares ** (1 / options.temperature), 0)
    is_kept = weights > 0
    assert int(is_kept.sum()) == num_kept and counts[~is_kept].sum() == 0
    assert chi_square(counts[is_kept], weights[is_kept] / weights.sum()) < CHI_SQUARE_LIMITS[num_kept - 1]


def test_a_wrong_temperature_would_show() -> None:
    shares = np.array([0.3, 0.2, 0.14, 0.1, 0.08, 0.06, 0.05, 0.03, 0.025, 0.015])
    counts = np.bincount(
        draw(np.tile(np.log(shares).astype(np.float32), (20_000, 1)), [Options(0.9)] * 20_000), minlength=10
    )
    assert chi_square(counts, shares) > CHI_SQUARE_LIMITS[9]


def test_successive_positions_and_neighbouring_seeds_are_unrelated() -> None:
    """How often two draws agree is what chance gives."""
    logits, size = np.zeros((20_000, 10), np.float32), 20_000
    first, second = draw(logits, [Options()] * size, seed=1), draw(logits, [Options()] * size, seed=2)
    for agreeing in ((first == second), (first[1:] == first[:-1]), (first[1:] == second[:-1])):
        assert abs(agreeing.mean() - 0.1) < 5 * math.sqrt(0.09 / size)


# Seeds and company


def drawn_alone(logits: np.ndarray, seed: int, num_outputs: int = 0) -> int:
    return sampled_ids(logits[None], [row_of(SamplingParams(temperature=0.8), seed=seed, num_outputs=num_outputs)])[0]


@pytest.mark.parametrize("seed", SEEDS)
def test_noise_comes_from_the_seeds_words_and_the_position(seed: int) -> None:
    logits = random_logits(30, scale=0.5)
    drawn = [drawn_alone(row, seed, index) for index, row in enumerate(logits)]
    low, high = seed % 2**32, (seed % 2**64) >> 32
    noise = [noise_of(low, high, 3 + index, VOCAB_SIZE) for index in range(30)]
    assert drawn == (logits / np.float32(0.8) + np.array(noise)).argmax(axis=1).tolist()


def test_different_seeds_and_positions_draw_differently() -> None:
    logits = np.zeros(VOCAB_SIZE, np.float32)
    streams = {tuple(drawn_alone(logits, seed, index) for index in range(8)) for seed in SEEDS}
    assert len(streams) == len(SEEDS)
    assert all(len(set(stream)) > 3 for stream in streams)


@pytest.mark.parametrize("num_others", [1, 7, NUM_ROWS - 1, 3 * NUM_ROWS])
@pytest.mark.parametrize("place", [0, -1])
def test_a_row_draws_the_same_in_any_company(num_others: int, place: int) -> None:
    """vllm-project/vllm#51226: a seeded request lost its seed beside one that had none."""
    own = random_logits(1, scale=1.0)[0]
    params = SamplingParams(temperature=0.8, top_k=20, top_p=0.9, min_p=0.01)
    alone = [sampled_ids(own[None], [row_of(params, seed=42, num_outputs=index)])[0] for index in range(16)]
    others = [
        row_of(SamplingParams(temperature=0.0 if i % 3 == 0 else 1.3, top_k=1 + i), seed=i) for i in range(num_others)
    ]
    logits = random_logits(num_others + 1, scale=9)
    together = []
    for index in range(16):
        rows = list(others)
        rows.insert(0 if place == 0 else num_others, row_of(params, seed=42, num_outputs=index))
        logits[place] = own
        together.append(sampled_ids(logits, rows)[place])
    assert together == alone
    assert len(set(alone)) > 2


# Extremes


def test_greedy_takes_the_first_of_the_best() -> None:
    logits = np.array([[1, 3, 3, 0], [-5, -7, -5, -5], [0, 0, 0, 0]], np.float32)
    assert sampler.greedy(jnp.asarray(logits)).tolist() == [1, 0, 0]


def test_tiny_temperatures() -> None:
    """NVIDIA/TensorRT-LLM#15715: dividing by a tiny temperature overflowed; vllm#22180: NaN in greedy neighbours."""
    temperatures = (0.0, 1e-12, 1e-8, 1e-4, 1e-2, 1.0)
    logits = np.repeat(random_logits(1, scale=30), len(temperatures), axis=0)
    rows = [row_of(SamplingParams(temperature=temperature), seed=3) for temperature in temperatures]
    together = sampled_ids(logits, rows)
    best = int(logits[0].argmax())
    assert together[:5] == [best] * 5
    assert together == [sampled_ids(logits[:1], [row])[0] for row in rows]


@pytest.mark.parametrize("temperature", [1e-5, 1e-4, 1e-2, 1e6])
def test_extreme_temperatures_give_no_nan(temperature: float) -> None:
    """NaN would make argmax say its own index: row after row the same, whatever the logits."""
    logits = np.random.default_rng(1).normal(0, 1e4, (200, VOCAB_SIZE)).astype(np.float32)
    drawn = draw(logits, [Options(temperature, top_p=0.999)] * 200)
    if temperature < 1:
        assert drawn.tolist() == logits.argmax(axis=1).tolist()
    else:
        assert len(set(drawn.tolist())) == VOCAB_SIZE


def test_logits_of_minus_infinity_are_never_drawn() -> None:
    logits = random_logits(400)
    logits[:, ::2] = -np.inf
    drawn = draw(logits, [COMBINATIONS[index % len(COMBINATIONS)] for index in range(400)])
    assert (drawn % 2 == 1).all()


def test_one_token_left() -> None:
    logits = np.full((200, VOCAB_SIZE), -np.inf, np.float32)
    logits[:, 17] = -4.0
    assert set(draw(logits, [COMBINATIONS[index % len(COMBINATIONS)] for index in range(200)]).tolist()) == {17}


# Tokens that must not come


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_ends_do_not_come_before_min_tokens(temperature: float) -> None:
    params = SamplingParams(temperature=temperature, min_tokens=2, stop_token_ids=[6])
    logits = np.zeros((2, VOCAB_SIZE), np.float32)
    logits[:, [4, 6]] = 50, 60
    logits[:, 9] = 40
    rows = [row_of(params, num_outputs=1, eos=(4,)), row_of(params, num_outputs=2, eos=(4,))]
    assert sampled_ids(logits, rows) == [9, 6]


@pytest.mark.parametrize(
    "ids", [(VOCAB_SIZE,), (VOCAB_SIZE + 5, 2**31 - 2), (NO_TOKEN,), (-1,), (-VOCAB_SIZE, -(2**31))]
)
def test_an_id_outside_the_vocabulary_suppresses_nothing(ids: tuple[int, ...]) -> None:
    logits = jnp.asarray(random_logits(3))
    suppressed = sampler.suppress(logits, jnp.array([ids] * 3, jnp.int32))
    assert bool(jnp.array_equal(suppressed, logits))


def test_suppression_is_exact() -> None:
    logits = random_logits(3)
    ids = np.array([[0, 39, NO_TOKEN], [5, 5, 40], [NO_TOKEN, NO_TOKEN, NO_TOKEN]], np.int32)
    expected = logits.copy()
    expected[0, [0, 39]] = expected[1, 5] = sampler.BANNED
    assert np.array_equal(np.asarray(sampler.suppress(jnp.asarray(logits), jnp.asarray(ids))), expected)


# Log-probabilities


def reference_logprobs(logits: np.ndarray) -> np.ndarray:
    wide = logits.astype(np.float64)
    shifted = wide - wide.max(axis=1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True))


def test_log_probabilities_are_the_models_own() -> None:
    """Before temperature, filters and suppression."""
    logits = random_logits(NUM_ROWS)
    params = SamplingParams(
        temperature=0.3, top_k=2, min_tokens=1, stop_token_ids=[int(logits[0].argmax())], logprobs=5
    )
    tokens = sample(logits, [row_of(params, seed=seed) for seed in range(NUM_ROWS)], num_top=5)
    expected = reference_logprobs(logits)
    chosen = np.take_along_axis(expected, np.asarray(tokens.token_ids)[:, None], axis=1)
    order = np.argsort(-expected, axis=1, kind="stable")
    np.testing.assert_allclose(tokens.logprobs, chosen[:, 0], rtol=0, atol=1e-5)
    np.testing.assert_allclose(tokens.top_logprobs, np.take_along_axis(expected, order[:, :5], 1), rtol=0, atol=1e-5)
    assert np.asarray(tokens.top_token_ids).tolist() == order[:, :5].tolist()
    assert np.asarray(tokens.ranks).tolist() == [
        1 + int((row > value).sum()) for row, value in zip(expected, chosen, strict=True)
    ]
    assert set(np.asarray(tokens.ranks).tolist()) >= {1, 2}


def test_the_greedy_token_is_first() -> None:
    logits = random_logits(NUM_ROWS)
    tokens = sample(logits, [row_of(SamplingParams(temperature=0.0, logprobs=1))] * NUM_ROWS, num_top=5)
    assert set(np.asarray(tokens.ranks).tolist()) == {1}
    assert np.array_equal(tokens.token_ids, tokens.top_token_ids[:, 0])
    assert np.array_equal(tokens.logprobs, tokens.top_logprobs[:, 0])


def test_equally_likely_tokens_share_a_rank() -> None:
    logits = jnp.array([[1.0, 3.0, 3.0, 2.0]] * 4)
    _, ranks, _, _ = sampler.describe(logits, jnp.array([1, 2, 3, 0]), 2)
    assert ranks.tolist() == [1, 1, 3, 4]


def test_a_hopeless_token_has_a_finite_rank_and_no_nan() -> None:
    logits = jnp.array([[0.0, -jnp.inf, -1e30, 500.0]])
    logprobs, ranks, _, top = sampler.describe(logits, jnp.array([1]), 4)
    assert (logprobs.tolist(), ranks.tolist()) == ([-math.inf], [4])
    assert not bool(jnp.isnan(top).any())


LEAST = float(np.finfo(np.float32).min)
# The values of tokens that are looked through for the most likely ones, by what is hard about them.
HARD_VALUES = {
    "distinct": lambda rng, shape: -rng.permuted(np.arange(math.prod(shape)).reshape(shape), axis=1) / 64,
    "many equal": lambda rng, shape: -rng.integers(0, 5, shape),
    "all equal": lambda rng, shape: np.zeros(shape),
    "hardly any above -inf": lambda rng, shape: np.where(rng.random(shape) < 0.01, -rng.random(shape), -np.inf),
    "all -inf": lambda rng, shape: np.full(shape, -np.inf),
    "neighbours of -inf": lambda rng, shape: rng.choice([-np.inf, LEAST, np.nextafter(LEAST, 0)], shape),
    "neighbours of 0": lambda rng, shape: -rng.choice([0.0, np.finfo(np.float32).tiny, 2.0**-23], shape),
    "best last": lambda rng, shape: np.tile(np.arange(shape[1]) - shape[1], (shape[0], 1)),
    "best together": lambda rng, shape: np.where(np.arange(shape[1]) // 64 == 7, 0, -1) - rng.integers(0, 2, shape),
}


@pytest.mark.parametrize("name", HARD_VALUES)
@pytest.mark.parametrize(
    ("num_top", "vocab_size"),
    [
        (1, 1),
        (1, 65),
        (5, 320),
        (5, 321),
        (16, 4096),
        (17, 4096),
        (20, 20),
        (20, 1280),
        (20, 1300),
        (33, 3000),
        (100, 7001),
    ],
)
def test_the_most_likely_are_those_of_a_sort(name: str, num_top: int, vocab_size: int) -> None:
    """The lowest ids among equals, as jax.lax.top_k has it; whether groups divide the vocabulary or it has just one."""
    values = HARD_VALUES[name](np.random.default_rng(vocab_size), (4, vocab_size)).astype(np.float32)
    expected = np.argsort(-values, axis=1, kind="stable")[:, :num_top]
    top, token_ids = jax.jit(sampler.most_likely, static_argnums=1)(values, num_top)
    assert token_ids.tolist() == expected.tolist()
    assert np.array_equal(top, np.take_along_axis(values, expected, axis=1))


def test_log_probabilities_of_what_is_no_number_are_of_tokens() -> None:
    """Distinct ones, of the vocabulary."""
    _, _, token_ids, top = sampler.describe(jnp.full((1, 3000), jnp.nan), jnp.array([1]), 20)
    assert len({*token_ids[0].tolist()} & {*range(3000)}) == 20 and bool(jnp.isnan(top).all())


def test_what_is_no_number_comes_last() -> None:
    values = jnp.array([[-1.0, jnp.nan, -0.5, -jnp.inf, jnp.nan, -3.0]])
    assert sampler.best_places(values, 6).tolist() == [[2, 0, 5, 1, 3, 4]]


def test_of_no_tokens_but_the_chosen_one() -> None:
    logits = random_logits(NUM_ROWS)
    tokens = sample(logits, [row_of(SamplingParams(temperature=0.0, logprobs=0))] * NUM_ROWS, num_top=0)
    assert tokens.top_token_ids.shape == tokens.top_logprobs.shape == (NUM_ROWS, 0)
    assert set(np.asarray(tokens.ranks).tolist()) == {1}


def test_nobody_asks_nothing_is_computed() -> None:
    tokens = sample(random_logits(2), [row_of(SamplingParams())] * 2)
    assert [value.size for value in tokens] == [NUM_ROWS, 0, 0, 0, 0]
