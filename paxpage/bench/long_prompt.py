"""A long prompt that arrives at an engine in this process while other requests are decoding: who waits how long."""

import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from paxpage.bench.open_loop import greedy
from paxpage.bench.timing import ROOFS
from paxpage.engine.engine import Engine
from paxpage.models.registry import Params

LONG = "long"  # the request's id


class Waits(NamedTuple):
    """Seconds."""

    ttft_s: float  # of the long prompt: from its arrival to its first token, checking and hashing it included
    before_s: list[float]  # gaps between tokens of each decoding request, that ended before the long prompt came
    beside_s: list[float]  # and from then on, up to its first token


class Decoding:
    """Requests that decode, and the gaps between the tokens of each."""

    def __init__(self, engine: Engine, prompts: Sequence[list[int]]) -> None:
        self.engine = engine
        self.request_ids = [f"decoding-{index}" for index in range(len(prompts))]
        self.gaps_s: list[float] = []
        self._last_s: dict[str, float] = {}
        for request_id, prompt in zip(self.request_ids, prompts, strict=True):
            engine.add_request(request_id, prompt, greedy(engine.max_model_len - len(prompt)))

    def step(self) -> set[str]:
        """One step of the engine, its gaps noted; the ids of all requests that got a token."""
        deltas = self.engine.step()
        now_s = time.perf_counter()
        request_ids = {delta.request_id for delta in deltas}
        for request_id in request_ids.intersection(self.request_ids):
            if request_id in self._last_s:
                self.gaps_s.append(now_s - self._last_s[request_id])
            self._last_s[request_id] = now_s
        return request_ids

    def start(self) -> None:
        """Steps until each has its first token; the gaps until then are forgotten."""
        while len(self._last_s) < len(self.request_ids):
            self.step()
        self.gaps_s = []


def waits(engine: Engine, prompts: Sequence[list[int]], num_before: int, prompt: list[int]) -> Waits:
    """Lets some prompts decode num_before tokens each, then adds the long prompt and ends with its first token.

    The long prompt is checked and hashed before anything runs: a server does so beside its steps, not between them.
    """
    started_s = time.perf_counter()
    prepared = engine.prepare(LONG, prompt, greedy(1))
    prepare_s = time.perf_counter() - started_s
    decoding = Decoding(engine, prompts)
    decoding.start()
    while len(decoding.gaps_s) < num_before * len(prompts):
        decoding.step()
    before_s, decoding.gaps_s = decoding.gaps_s, []
    submitted_s = time.perf_counter()
    engine.submit(prepared)
    while LONG not in decoding.step():
        pass
    ttft_s = prepare_s + time.perf_counter() - submitted_s
    assert decoding.gaps_s, "the decoding requests ended before the long prompt began"
    engine.abort(decoding.request_ids)
    return Waits(ttft_s, before_s, decoding.gaps_s)


def gap_fields(each: Sequence[Waits]) -> dict[str, Any]:
    """Percentiles over the gaps of all repetitions, in ms."""
    before_s = [gap_s for one in each for gap_s in one.before_s]
    beside_s = [gap_s for one in each for gap_s in one.beside_s]
    return {
        "num_gaps": len(beside_s),
        "itl_ms_p50_before": _percentile_ms(before_s, 50),
        "itl_ms_p50": _percentile_ms(beside_s, 50),
        "itl_ms_p99": _percentile_ms(beside_s, 99),
    }


def _percentile_ms(values_s: list[float], percent: int) -> float:
    return round(1e3 * float(np.percentile(values_s, percent)), 3)


def floor_s(params: Params, num_tokens: int, device_kind: str) -> float | None:
    """Seconds that a prompt's arithmetic takes at the least; None for a device whose speed is not known."""
    roof = ROOFS.get(device_kind)
    return None if roof is None else num_flops(params, num_tokens) / roof.flops_per_s


def num_flops(params: Params, num_tokens: int) -> float:
    """Of a prompt: the layers' matrix products, and both of attention's over the pairs that the causal mask leaves."""
    layers = params["layers"]
    num_weights = sum(leaf.size for leaf in jax.tree.leaves(layers) if len(leaf.shape) == 2)
    widths = [layer["self_attn"]["o_proj"]["weight"].shape[1] for layer in layers.values()]  # num_heads * head_dim
    num_pairs = num_tokens * (num_tokens + 1) / 2
    return 2 * num_weights * num_tokens + 4 * sum(widths) * num_pairs
