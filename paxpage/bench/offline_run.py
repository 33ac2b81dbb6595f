"""Builds the engines of python -m paxpage.bench offline and runs its tests. Imports JAX."""

import os
import sys
import time
from typing import Any

import jax
from tqdm import tqdm

from paxpage.bench.arrivals import parse_rates
from paxpage.bench.models import model_path
from paxpage.bench.offline import DEFAULT_RATES, OfflineOptions
from paxpage.bench.offline_tests import SIZES, Effort, OfflineTests, Sizes
from paxpage.bench.results import ResultWriter, origin
from paxpage.config import require
from paxpage.engine.llm import LLM
from paxpage.models.embedded import default_model_path


def run(options: OfflineOptions, flags: dict[str, Any]) -> int:
    """All models, one after another; returns the exit code."""
    for name in options.models or (default_model_path(),):
        run_model(name, options, flags)
    return 0


def run_model(name: str, options: OfflineOptions, flags: dict[str, Any]) -> None:
    """All tests of one model: a line of JSON each on stdout, progress on stderr."""
    sizes = with_length(sizes_of(options.scale, jax.default_backend()), options.max_model_len)
    print(f"# {jax.devices()[0].device_kind}, jax {jax.__version__}; {sizes_text(sizes)}", file=sys.stderr)
    common = {"model": os.path.basename(os.path.normpath(name)), "scale": sizes.name}
    writer = ResultWriter(origin(flags) | common, options.out, is_printed=True)

    def emit(test: str, fields: dict[str, Any]) -> None:
        writer.write({"test": test} | fields)

    started_s = time.perf_counter()
    with make_llm(name, sizes, options) as llm:
        init_s = round(time.perf_counter() - started_s, 2)
        emit("setup", {"init_s": init_s, "num_blocks": llm.engine.stats().num_blocks_usable})
        run_tests(OfflineTests(llm, effort_of(options, sizes), emit), options.tests)


def run_tests(bench: OfflineTests, tests: str) -> None:
    """A warm-up, then the tests, with a progress bar."""
    with tqdm(total=1 + len(tests), unit="test", desc="warm-up") as bar:
        bench.warm_up()
        for test in tests:
            bar.update()
            bar.set_description(f"test {test}")
            bench.run(test)
        bar.update()


def sizes_of(scale: str, platform: str) -> Sizes:
    """auto: full on a GPU, small on a CPU."""
    return SIZES[("small" if platform == "cpu" else "full") if scale == "auto" else scale]


def with_length(sizes: Sizes, max_model_len: int | None) -> Sizes:
    """The same with a longer max_model_len, if one is given; ValueError if it is shorter than the tests need."""
    if max_model_len is None:
        return sizes
    allowed = f"an integer >= {sizes.max_model_len}, the longest request of the tests at scale {sizes.name}"
    require(max_model_len >= sizes.max_model_len, "max_model_len", max_model_len, allowed)
    return sizes._replace(max_model_len=max_model_len)


def sizes_text(sizes: Sizes) -> str:
    """What a reader must know who compares."""
    if sizes.name == "full":
        return "full sizes"
    what = f"fewer and shorter requests than --scale=full (test 1: {sizes.num_requests}, lengths by {sizes.divisor})"
    return f"{sizes.name} sizes: {what}; figures compare only with the same scale"


def make_llm(name: str, sizes: Sizes, options: OfflineOptions) -> LLM:
    """The engine, for requests as long as the tests need."""
    with model_path(name, options.load_format) as (path, load_format):
        return LLM(
            path,
            load_format=load_format,
            dtype=options.dtype,
            max_num_seqs=options.max_num_seqs,
            max_model_len=sizes.max_model_len,
            max_num_batched_tokens=options.max_num_batched_tokens,
            gpu_memory_utilization=options.gpu_memory_utilization,
            enable_prefix_caching=options.enable_prefix_caching,
        )


def effort_of(options: OfflineOptions, sizes: Sizes) -> Effort:
    """What the flags leave open is decided by the sizes."""
    usual = 3 if sizes.name == "full" else 1
    rates = tuple(parse_rates(options.rates or DEFAULT_RATES[sizes.name]))
    return Effort(sizes, options.reps or usual, options.reps1 or usual, rates)
