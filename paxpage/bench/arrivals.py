"""When requests arrive."""

import math

import numpy as np

from paxpage.config import require


def parse_rates(text: str) -> list[float]:
    """Arrivals a second, separated by commas; inf: all at once.

    Raises:
        ValueError: something that is no positive number.
    """
    allowed = "positive numbers a second, or inf, separated by commas"
    try:
        rates = [float(part) for part in text.split(",")]
    except ValueError:
        rates = []
    require(bool(rates) and all(rate > 0 for rate in rates), "request_rate", text, allowed)
    return rates


def due_times(n: int, rate: float, burstiness: float, seed: int) -> list[float]:
    """When each of n requests is due, seconds from the start; rate is in requests a second, inf: all at once.

    The gaps follow a gamma law of mean 1 / rate and shape burstiness: at 1 arrivals are a Poisson process, below they
    come in bursts, above they are more regular.
    """
    if math.isinf(rate):
        return [0.0] * n
    gaps_s = np.random.default_rng([seed, 5]).gamma(burstiness, 1 / (rate * burstiness), n)
    return np.cumsum(gaps_s).tolist()
