"""The tests that python -m paxpage.bench offline runs on one engine."""

import contextlib
import dataclasses
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import numpy as np

from paxpage.bench import long_prompt, workloads
from paxpage.bench.arrivals import due_times
from paxpage.bench.long_prompt import Waits
from paxpage.bench.open_loop import Arrivals, greedy
from paxpage.bench.workloads import WorkloadRequest
from paxpage.config import require
from paxpage.engine.build import serving_config
from paxpage.engine.engine import Engine
from paxpage.engine.llm import LLM, without_old_garbage

SEED = 0
PROMPT_SEED = 7
MARGIN_TOKENS = 8  # that test 7's long prompt leaves of max_model_len
NUM_RUN_REQUESTS = 512  # test 5's requests are the first of so many, so that their lengths are test 1's


class Batch(NamedTuple):
    """Some requests of equal length, given at once."""

    rows: int
    num_inputs: int  # tokens of a prompt, shared ones not counted
    num_outputs: int
    num_shared: int = 0  # tokens that all prompts begin with


class Sizes(NamedTuple):
    """How much each test does."""

    name: str
    num_requests: int  # tests 1 and 5 draw so many at most
    divisor: int  # test 1's and 5's lengths are the workload's by this
    num_arrivals: int
    single: Batch
    shared: Batch
    batch: Batch
    large_batch: Batch
    long_prompt: int  # of the warm-up
    beside: Batch  # test 7's decoding requests; num_outputs: before the long prompt comes
    longest_prompt: int  # test 7's long prompt, if max_model_len is not shorter
    max_model_len: int


FULL = Sizes(
    name="full",
    num_requests=NUM_RUN_REQUESTS,
    divisor=1,
    num_arrivals=256,
    single=Batch(1, 128, 256),
    shared=Batch(64, 32, 128, num_shared=4000),
    batch=Batch(64, 1024, 128),
    large_batch=Batch(256, 448, 128),
    long_prompt=4000,
    beside=Batch(32, 64, 64),
    longest_prompt=32_768,
    max_model_len=4352,
)
SMALL = Sizes(
    name="small",
    num_requests=16,
    divisor=8,
    num_arrivals=8,
    single=Batch(1, 64, 32),
    shared=Batch(8, 16, 16, num_shared=240),
    batch=Batch(8, 64, 32),
    large_batch=Batch(16, 48, 16),
    long_prompt=256,
    beside=Batch(8, 16, 16),
    longest_prompt=448,
    max_model_len=512,
)
SMOKE = Sizes(
    name="smoke",
    num_requests=4,
    divisor=64,
    num_arrivals=3,
    single=Batch(1, 8, 4),
    shared=Batch(2, 4, 3, num_shared=32),
    batch=Batch(2, 8, 4),
    large_batch=Batch(3, 8, 4),
    long_prompt=16,
    beside=Batch(2, 4, 4),
    longest_prompt=48,
    max_model_len=64,
)
SIZES = {sizes.name: sizes for sizes in (FULL, SMALL, SMOKE)}
Work = tuple[list[list[int]], list[int]]  # prompts, and how many tokens each is to generate
Emit = Callable[[str, dict[str, Any]], None]  # a test's name and its figures


@dataclasses.dataclass(frozen=True)
class Effort:
    """What is run, and how often."""

    sizes: Sizes
    repetitions: int
    throughput_repetitions: int
    rates: tuple[float, ...]


class OfflineTests:
    """Tests of one engine. Every figure is the median of several repetitions, with nothing cached before each."""

    def __init__(self, llm: LLM, effort: Effort, emit: Emit) -> None:
        self.llm = llm
        self.effort = effort
        self.emit = emit
        self.vocab_size = llm.engine.vocab_size
        self._rng = np.random.default_rng([SEED, PROMPT_SEED])

    @property
    def sizes(self) -> Sizes:
        """How much each test does."""
        return self.effort.sizes

    def run(self, test: str) -> None:
        """Runs the test of this number, a key of TESTS."""
        TESTS[test](self)

    def prompt(self, num_tokens: int) -> list[int]:
        """Random token ids."""
        return workloads.token_ids(self._rng, num_tokens, self.vocab_size)

    def seconds(self, prompts: list[list[int]], num_outputs: list[int]) -> float:
        """Time of one submission of everything, with nothing cached; checks that each gave its number of tokens."""
        self.llm.reset_prefix_cache()
        params = [greedy(n) for n in num_outputs]
        started_s = time.perf_counter()
        outputs = self.llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False)
        elapsed_s = time.perf_counter() - started_s
        lengths = [len(output.outputs[0].token_ids) for output in outputs]
        assert lengths == num_outputs, "a request gave another number of tokens than it was asked for"
        return elapsed_s

    def median(self, make: Callable[[], Work], repetitions: int) -> tuple[float, list[float]]:
        """Median seconds, and all of them."""
        times = [self.seconds(*make()) for _ in range(repetitions)]
        return statistics.median(times), [round(t, 4) for t in times]

    def warm_up(self) -> None:
        """Waits for what is still being compiled; a few requests of mixed length, one full-width batch, a long one."""
        self.llm.engine.wait_until_warm()
        most, width = self.sizes.long_prompt, self.llm.engine.scheduler.config.max_num_seqs
        lengths = [min(n, most) for n in (5, 40, 300, 1000)]
        self.seconds([self.prompt(n) for n in lengths], [8, 16, 32, 8])
        self.seconds([self.prompt(min(64, most)) for _ in range(width)], [8] * width)
        self.seconds([self.prompt(most)], [8])

    def drawn(self, num_requests: int) -> list[WorkloadRequest]:
        """The first requests of the workload, shortened as sizes say."""
        divisor = self.sizes.divisor
        drawn = workloads.requests(max(num_requests, self.sizes.num_requests), SEED, self.vocab_size)[:num_requests]
        return [
            WorkloadRequest(prompt[: max(1, len(prompt) // divisor)], max(2, num_outputs // divisor))
            for prompt, num_outputs in drawn
        ]

    def make_batch(self, batch: Batch) -> Work:
        """New random prompts of a batch's lengths."""
        shared = self.prompt(batch.num_shared)
        return [shared + self.prompt(batch.num_inputs) for _ in range(batch.rows)], [batch.num_outputs] * batch.rows

    def decode_times(self, batch: Batch) -> tuple[float, dict[str, Any]]:
        """Median seconds to the first token of all, and fields with the time of a decode step."""
        repetitions = self.effort.repetitions
        first_s, firsts = self.median(lambda: self.make_batch(batch._replace(num_outputs=1)), repetitions)
        whole_s, times = self.median(lambda: self.make_batch(batch), repetitions)
        step_ms = round(1e3 * (whole_s - first_s) / (batch.num_outputs - 1), 4)
        sizes = {"n": batch.rows, "in_len": batch.num_inputs, "out_len": batch.num_outputs}
        return first_s, sizes | {"secs": times, "first_token_s": firsts, "ms_per_decode_step": step_ms}


def throughput(bench: OfflineTests) -> None:
    """Test 1: everything at once, output tokens a second."""
    work = bench.drawn(bench.sizes.num_requests)
    prompts, num_outputs = [r.prompt_token_ids for r in work], [r.num_output_tokens for r in work]
    engine, repetitions = bench.llm.engine, bench.effort.throughput_repetitions
    meter, before = engine.idle_meter, engine.stats().num_steps
    meter.idle_s, meter.num_idle_launches = 0.0, 0
    median_s, times = bench.median(lambda: (prompts, num_outputs), repetitions)
    num_steps = (engine.stats().num_steps - before) / repetitions
    result = {
        "n": len(work),
        "in_tokens": sum(map(len, prompts)),
        "out_tokens": sum(num_outputs),
        "secs": times,
        "out_tok_s": round(sum(num_outputs) / median_s, 1),
        "num_steps": num_steps,
        "ms_per_step": round(1e3 * median_s / num_steps, 3),
        "device_idle_percent_at_most": round(100 * meter.idle_s / sum(times), 2),
        "idle_launches_percent": round(100 * meter.num_idle_launches / (num_steps * repetitions), 2),
        "waste_percent": round(100 * engine.slots.waste_fraction, 2),
    }
    bench.emit("1_offline_throughput", result)


def single_latency(bench: OfflineTests) -> None:
    """Test 2: one request, ms a decode step and seconds to the first token."""
    bench.emit("2_single_latency", bench.decode_times(bench.sizes.single)[1])


def shared_prefix(bench: OfflineTests) -> None:
    """Test 3: prompts with a long common beginning, output tokens a second."""
    batch, engine = bench.sizes.shared, bench.llm.engine
    before = engine.stats()
    median_s, times = bench.median(lambda: bench.make_batch(batch), bench.effort.repetitions)
    after = engine.stats()
    num_hits = after.num_prefix_hits - before.num_prefix_hits
    num_queries = after.num_prefix_queries - before.num_prefix_queries
    sizes = {"n": batch.rows, "prefix": batch.num_shared, "unique": batch.num_inputs, "out_len": batch.num_outputs}
    result = {
        "secs": times,
        "out_tok_s": round(batch.rows * batch.num_outputs / median_s, 1),
        "cached_percent": round(100 * num_hits / num_queries, 2) if num_queries else 0.0,
    }
    bench.emit("3_shared_prefix", sizes | result)


def batch_decode(bench: OfflineTests) -> None:
    """Test 4: a batch, ms a decode step and prefill tokens a second."""
    batch = bench.sizes.batch
    first_s, result = bench.decode_times(batch)
    bench.emit("4_batch_decode", result | {"prefill_tok_s": round(batch.rows * batch.num_inputs / first_s, 1)})


def poisson_arrivals(bench: OfflineTests) -> None:
    """Test 5: requests one by one at each rate, times to and between tokens. The scheduler's limits are a server's."""
    work, engine = bench.drawn(bench.sizes.num_arrivals), bench.llm.engine
    with limits_of_a_server(engine):
        for rate in bench.effort.rates:
            bench.llm.reset_prefix_cache()
            with without_old_garbage():
                result = Arrivals(engine, work, due_times(len(work), rate, 1.0, SEED)).run()
            bench.emit("5_poisson_arrivals", {"rate_req_s": rate, "n": len(work)} | result)


@contextlib.contextmanager
def limits_of_a_server(engine: Engine) -> Iterator[None]:
    """Within it the scheduler keeps steps short beside requests that decode, as a server's does."""
    offline, beside_decodes = engine.scheduler.config, serving_config(engine.config).num_tokens_beside_decodes
    engine.scheduler.config = dataclasses.replace(offline, num_tokens_beside_decodes=beside_decodes)
    try:
        yield
    finally:
        engine.scheduler.config = offline


def large_batch_decode(bench: OfflineTests) -> None:
    """Test 6: a large batch, ms a decode step."""
    bench.emit("6_large_batch_decode", bench.decode_times(bench.sizes.large_batch)[1])


def long_prompt_beside_decodes(bench: OfflineTests) -> None:
    """Test 7: what a long prompt waits for its first token, and others meanwhile for their next ones."""
    sizes, engine = bench.sizes, bench.llm.engine
    most = engine.scheduler.config.max_num_seqs
    require(most >= 2, "max_num_seqs", most, "at least 2 in test 7: one request beside the long prompt")
    batch = sizes.beside._replace(rows=min(sizes.beside.rows, most - 1))
    num_tokens = min(sizes.longest_prompt, sizes.max_model_len - MARGIN_TOKENS)
    with limits_of_a_server(engine):
        waits = [one_long_prompt(bench, batch, num_tokens) for _ in range(bench.effort.repetitions)]
        limit = engine.scheduler.config.num_tokens_beside_decodes
    floor_s = long_prompt.floor_s(engine.runner.params, num_tokens, jax.devices()[0].device_kind)
    result = {
        "n": batch.rows,
        "in_len": batch.num_inputs,
        "long_in_len": num_tokens,
        "num_tokens_beside_decodes": limit,
        "secs": [round(each.ttft_s, 4) for each in waits],
        "ttft_ms": round(1e3 * statistics.median(each.ttft_s for each in waits), 2),
        "ttft_floor_ms": None if floor_s is None else round(1e3 * floor_s, 2),
    }
    bench.emit("7_long_prompt_beside_decodes", result | long_prompt.gap_fields(waits))


def one_long_prompt(bench: OfflineTests, batch: Batch, num_tokens: int) -> Waits:
    """One repetition, with nothing cached before."""
    bench.llm.reset_prefix_cache()
    prompts, num_before = bench.make_batch(batch)
    with without_old_garbage():
        return long_prompt.waits(bench.llm.engine, prompts, num_before[0], bench.prompt(num_tokens))


TESTS: dict[str, Callable[[OfflineTests], None]] = {
    "1": throughput,
    "2": single_latency,
    "3": shared_prefix,
    "4": batch_decode,
    "5": poisson_arrivals,
    "6": large_batch_decode,
    "7": long_prompt_beside_decodes,
}
