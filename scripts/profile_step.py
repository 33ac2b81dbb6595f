"""Profiles steps of a model on this machine: a trace for Perfetto, and a table of kernels beside their floors.

    python scripts/profile_step.py llama8b [--rows 64] [--context 1024] [--mixed-tokens 512] [--out FOLDER]
    python scripts/profile_step.py path/to/model

The steps are an engine's own, so the trace has the host's part (schedule, pack and launch, wait, take in) on the
device's time axis: open perfetto_trace.json.gz at https://ui.perfetto.dev. First decode steps of --rows requests at
about --context tokens; then, with --mixed-tokens, steps in which one row is a chunk of a prompt instead. A floor is
what reading the operands takes at the device's speed, or the arithmetic if that is more: of matrix products by their
shapes, of attention by its keys and values; "-" is not known. Without a GPU the operations are the host's own.
"""

import argparse
import dataclasses
import functools
import os
import pathlib
import sys
import tempfile
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))
os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.92")

import jax

from paxpage import LLM, SamplingParams
from paxpage.bench.models import CONFIGS, model_path
from paxpage.bench.plots import Roof
from paxpage.bench.products import products
from paxpage.bench.timing import roof_of
from paxpage.bench.traces import KernelEvent, kernel_table, product_floors, read_kernels, table_text, trace
from paxpage.bench.workloads import token_ids
from paxpage.engine.batch import StepShape
from paxpage.engine.build import DEFAULT_LIMITS
from paxpage.engine.engine import Engine
from paxpage.models.embedded import default_model_path

WARM_STEPS = 3
SLACK_TOKENS = 16
MAX_LINES = 30
PROMPT = "prompt"  # the request of which mixed steps compute chunks


class Load(NamedTuple):
    """What the steps work on."""

    rows: int
    context: int
    mixed_tokens: int | None
    num_steps: int

    @property
    def num_decoding(self) -> int:
        """Rows with one token; with mixed steps one row is kept for the rest."""
        return self.rows if self.mixed_tokens is None else self.rows - 1

    @property
    def num_batched_tokens(self) -> int:
        """Of a step at most: as usual, so that programs are those of other runs, or what prompts need to get on."""
        _, usual = DEFAULT_LIMITS["cpu" if jax.default_backend() == "cpu" else "gpu"]
        return max(usual, 2 * self.rows, self.mixed_tokens or 0)

    @property
    def num_decode_tokens(self) -> int:
        """That a row generates, at least: the first begins while the others' prompts are computed."""
        num_prompt_steps = -(-self.rows * self.context // (self.num_batched_tokens - self.rows))
        return num_prompt_steps + 2 * (self.num_steps + WARM_STEPS) + SLACK_TOKENS

    @property
    def chunk(self) -> int:
        """Tokens of the prompt in a mixed step."""
        return (self.mixed_tokens or 0) - self.num_decoding

    @property
    def max_model_len(self) -> int:
        """Of the longest request."""
        longest_prompt = (self.num_steps + WARM_STEPS) * self.chunk if self.mixed_tokens else 0
        return max(self.context + self.num_decode_tokens, longest_prompt + SLACK_TOKENS)


def make_llm(path: str, load_format: str, dtype: str, load: Load) -> LLM:
    """An engine for as many rows as the load has."""
    return LLM(
        path,
        load_format=load_format,
        dtype=dtype,
        max_num_seqs=load.rows,
        max_num_batched_tokens=load.num_batched_tokens,
        max_model_len=load.max_model_len,
        enable_prefix_caching=False,
    )


def name_host_parts(engine: Engine) -> None:
    """Gives the host's parts of a step names in the trace."""
    parts = ((engine.scheduler, "schedule"), (engine.runner, "launch"), (engine.runner, "fetch"))
    for owner, name in (*parts, (engine.scheduler, "update")):
        setattr(owner, name, named(getattr(owner, name), name))


def named(function: Callable[..., Any], name: str) -> Callable[..., Any]:
    """The function, each call of it an event of this name."""

    @functools.wraps(function)
    def call(*arguments: Any) -> Any:
        with jax.profiler.TraceAnnotation(f"paxpage {name}"):
            return function(*arguments)

    return call


def add_request(engine: Engine, name: str, num_tokens: int, max_tokens: int) -> None:
    """A greedy request of random tokens."""
    prompt = token_ids(np.random.default_rng([0, num_tokens]), num_tokens, engine.vocab_size)
    params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True, detokenize=False)
    engine.add_request(name, prompt, params)


def step_until_decoding(engine: Engine, num_rows: int) -> None:
    """Until all prompts are computed, and some steps more."""
    engine.wait_until_warm()
    num_decode_steps = 0
    while num_decode_steps < WARM_STEPS:
        engine.step()
        stats = engine.stats()
        is_decode = stats.num_running == num_rows and stats.num_scheduled_tokens == num_rows
        num_decode_steps = num_decode_steps + 1 if is_decode else 0


def run_steps(engine: Engine, num_steps: int) -> None:
    """Steps, with nothing in flight afterwards."""
    for index in range(num_steps):
        with jax.profiler.StepTraceAnnotation("paxpage step", step_num=index):
            engine.step()
    jax.block_until_ready(engine.runner.cache)


def profile(engine: Engine, load: Load, folder: pathlib.Path, roof: Roof) -> str:
    """Traces some steps of what the engine has to do; the table's text."""
    run_steps(engine, WARM_STEPS)  # nothing is left in flight to be counted
    path = trace(folder, functools.partial(run_steps, engine, load.num_steps))
    events, is_device = read_kernels(path)
    shape = last_shape(engine, load)
    floors = product_floors(events, load.num_steps, products(hlo_text(engine, shape)), roof)
    floors = [attention_floor(e, engine, load, roof) if f is None else f for e, f in zip(events, floors, strict=True)]
    rows = kernel_table(events, load.num_steps, floors)
    span_us = (max(event.start_ns + event.duration_ns for event in events) - events[0].start_ns) / load.num_steps / 1e3
    head = f"{shape.num_tokens} tokens, {shape.num_rows} rows (padded); {'device' if is_device else 'host'} time"
    head = f"{head}; {span_us:.1f} us a step from the first kernel's start to the last one's end"
    return f"{head}; trace: {path}\n{table_text(rows, MAX_LINES)}"


def last_shape(engine: Engine, load: Load) -> StepShape:
    """The padded size of the steps just run."""
    num_tokens = engine.stats().num_scheduled_tokens
    is_decode = num_tokens <= load.rows
    fitting = (shape for shape in engine.runner.shapes if shape.is_decode == is_decode)
    return next(shape for shape in fitting if shape.num_tokens >= num_tokens and shape.num_rows >= load.num_decoding)


def hlo_text(engine: Engine, shape: StepShape) -> str:
    """Of the compiled step."""
    text = engine.runner._compiled[shape].as_text()
    assert text is not None, "the compiled step has no text"
    return text


def attention_floor(event: KernelEvent, engine: Engine, load: Load, roof: Roof) -> float | None:
    """Seconds to read a layer's keys and values of the rows that a kernel is for; None for other kernels."""
    cache = engine.runner.cache
    assert cache is not None
    _, _, num_kv_heads, _, head_dim = cache.k.shape
    token_bytes = 2 * num_kv_heads * head_dim * cache.k.dtype.itemsize
    if "paged_attention_decode" in event.name:
        running = [request for request in engine.scheduler.running if request.request_id != PROMPT]
        return sum(request.num_tokens for request in running) * token_bytes / roof.bytes_per_s
    if "paged_attention_prefill" in event.name:
        return load.num_steps / 2 * load.chunk * token_bytes / roof.bytes_per_s
    return None


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "model", nargs="?", help=f"{', '.join(CONFIGS)}, or as LLM takes it; the embedded one if not given"
    )
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--context", type=int, default=256, help="tokens of each row's prompt")
    parser.add_argument("--mixed-tokens", type=int, help="tokens of a mixed step; no mixed steps if not given")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--load-format", default="auto")
    parser.add_argument("--out", help="the traces' folder; a new one among the temporary files if not given")
    args = parser.parse_args()
    if args.mixed_tokens is not None and args.mixed_tokens <= args.rows:
        parser.error(f"--mixed-tokens is {args.mixed_tokens}; allowed: more than --rows ({args.rows})")
    load = Load(args.rows, args.context, args.mixed_tokens, args.steps)
    roof = roof_of(jax.devices()[0].device_kind, "float32" if jax.default_backend() == "cpu" else "bfloat16")
    with (
        model_path(args.model or default_model_path(), args.load_format) as (path, load_format),
        make_llm(path, load_format, args.dtype, load) as llm,
    ):
        run(llm.engine, load, pathlib.Path(args.out or tempfile.mkdtemp(prefix="paxpage-profile-")), roof)


def run(engine: Engine, load: Load, folder: pathlib.Path, roof: Roof) -> None:
    """Both kinds of steps, one after the other."""
    limits = dataclasses.replace(engine.scheduler.config, num_tokens_beside_decodes=None)
    engine.scheduler.config = limits
    name_host_parts(engine)
    for index in range(load.num_decoding):
        add_request(engine, f"decoding-{index}", load.context, load.num_decode_tokens)
    if load.num_decoding:
        step_until_decoding(engine, load.num_decoding)
        print("decode steps:", profile(engine, load, folder / "decode", roof), flush=True)
    if load.mixed_tokens is not None:
        engine.scheduler.config = dataclasses.replace(limits, max_num_batched_tokens=load.mixed_tokens)
        add_request(engine, PROMPT, (load.num_steps + WARM_STEPS) * load.chunk, SLACK_TOKENS)
        print("mixed steps:", profile(engine, load, folder / "mixed", roof), flush=True)


if __name__ == "__main__":
    main()
