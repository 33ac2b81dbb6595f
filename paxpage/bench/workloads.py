"""Requests drawn to resemble real traffic, the same for every engine that is measured.

Lengths follow ShareGPT's as a figure of the PagedAttention paper gives them (Kwon et al., SOSP 2023, fig. 11: means of
161 prompt and 338 output tokens): log-normal, rounded, held between 4 and 1024, so placed that the mean after clipping
is the paper's. Given (n, seed, vocab_size) every draw is the same, on any machine.
"""

import statistics
from typing import NamedTuple

import numpy as np

SHORTEST, LONGEST = 4, 1024
FIRST_TOKEN_ID, END_TOKEN_ID = 100, 128_000  # ids below are bytes and marks, above are Llama 3's special tokens
NUM_QUANTILES = 4001
NUM_HALVINGS = 60


class LengthLaw(NamedTuple):
    """A clipped log-normal law of lengths in tokens."""

    mean: float  # after clipping
    sigma: float  # of the logarithm, before it


PROMPT_LAW = LengthLaw(mean=161.0, sigma=1.1)
OUTPUT_LAW = LengthLaw(mean=338.0, sigma=0.9)


class WorkloadRequest(NamedTuple):
    """One request: its prompt, and how many tokens it is to generate."""

    prompt_token_ids: list[int]
    num_output_tokens: int


def lengths(n: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Prompt and output lengths of n requests, int64 [n] each."""
    rng = np.random.default_rng(seed)
    return _draw(rng, PROMPT_LAW, n), _draw(rng, OUTPUT_LAW, n)


def requests(n: int, seed: int, vocab_size: int, *, draw: int = 0) -> list[WorkloadRequest]:
    """n requests with prompts of uniformly drawn token ids; another draw has the same lengths and other ids."""
    rng = token_rng(seed, draw)
    return [
        WorkloadRequest(token_ids(rng, int(num_prompt), vocab_size), int(num_output))
        for num_prompt, num_output in zip(*lengths(n, seed), strict=True)
    ]


def token_rng(seed: int, draw: int) -> np.random.Generator:
    """What token ids are drawn from."""
    return np.random.default_rng([seed, 1, draw] if draw else [seed, 1])


def token_ids(rng: np.random.Generator, n: int, vocab_size: int) -> list[int]:
    """n token ids, uniformly drawn from those that are neither bytes nor marks."""
    return rng.integers(FIRST_TOKEN_ID, min(vocab_size, END_TOKEN_ID), n).tolist()


def location(law: LengthLaw) -> float:
    """The mean of the logarithm that gives the law its mean; by halving, to the last bit of a float."""
    quantiles = _normal_quantiles()
    low, high = 0.0, 9.0
    for _ in range(NUM_HALVINGS):
        middle = (low + high) / 2
        is_short = np.clip(np.exp(middle + law.sigma * quantiles), SHORTEST, LONGEST).mean() < law.mean
        low, high = (middle, high) if is_short else (low, middle)
    return (low + high) / 2


def _normal_quantiles() -> np.ndarray:
    """The standard normal law as NUM_QUANTILES equally likely values."""
    shares = (np.arange(NUM_QUANTILES) + 0.5) / NUM_QUANTILES
    return np.array([statistics.NormalDist().inv_cdf(share) for share in shares.tolist()])


def _draw(rng: np.random.Generator, law: LengthLaw, n: int) -> np.ndarray:
    drawn = rng.lognormal(location(law), law.sigma, n)
    return np.clip(np.rint(drawn), SHORTEST, LONGEST).astype(np.int64)
