"""python -m paxpage.bench serve: load on a server with OpenAI's API, whoever made it."""

import asyncio
import dataclasses
import datetime
import math
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tqdm import tqdm

from paxpage.bench.arrivals import due_times, parse_rates
from paxpage.bench.client import CHAT, COMPLETIONS, ENDPOINTS, AnswerError, Client, ServerFacts
from paxpage.bench.datasets import DATASETS, FORMATS, BenchRequest, DatasetOptions, make_requests
from paxpage.bench.load import Body, Load, run_load
from paxpage.bench.plots import LatencyPoint, plot_latency
from paxpage.bench.report import Summary, summarise, table, to_fields
from paxpage.bench.results import ResultWriter, given
from paxpage.command_line import Flag, complain, help_text, parse_flags, values_of
from paxpage.config import require, require_int

PROGRAM = "paxpage.bench serve"
EXIT_FAILED = 1
KEY_VARIABLES = ("PAXPAGE_API_KEY", "OPENAI_API_KEY")
WARM_UP_DRAW = 10_000  # of prompts: none of a run's
TITLE = (
    "Measures a server with OpenAI's API over HTTP: throughput, and the times to and between tokens.",
    f"An API key is taken from ${' or $'.join(KEY_VARIABLES)}.",
    "",
    "python -m paxpage.bench serve [--flag=value ...]",
)
FLAGS_BY_GROUP = {
    "server": (
        Flag("base_url", str, "http://127.0.0.1:8000", "where the server is"),
        Flag("endpoint", str, COMPLETIONS, " or ".join(ENDPOINTS)),
        Flag("model", str, None, "the model's name in the API; the first that the server names if not given"),
        Flag("timeout_s", float, 600.0, "seconds without a sign of life after which a request has failed"),
    ),
    "load": (
        Flag("num_prompts", int, 1000, "requests of a run"),
        Flag("request_rate", str, "inf", "arrivals a second; several, separated by commas, are a run each and a plot"),
        Flag("burstiness", float, 1.0, "shape of the gamma law of gaps; 1: Poisson arrivals, less: bursts"),
        Flag("max_concurrency", int, None, "requests in flight at most"),
        Flag("num_warmups", int, 1, "requests before the first run, not measured; one that fails ends everything"),
        Flag("seed", int, 0, "of prompts, lengths and arrivals"),
    ),
    "requests": (
        Flag("dataset_name", str, "random", ", ".join(DATASETS)),
        Flag("dataset_path", str, None, 'custom: lines of {"prompt": ... or "messages": ..., "output_tokens": ...}'),
        Flag("input_len", int, 1024, "tokens of a prompt (random), or its own after the shared ones (shared-prefix)"),
        Flag("output_len", int, 128, "tokens to generate (random, shared-prefix, custom)"),
        Flag("random_range_ratio", float, 0.0, "random: lengths differ by at most this share, up and down"),
        Flag("shared_prefix_len", int, 1024, "shared-prefix: tokens that prompts have in common"),
        Flag("num_prefixes", int, 1, "shared-prefix: how many different beginnings"),
        Flag("vocab_size", int, 32000, "token ids are drawn from 100 up to this, and below 128000"),
        Flag("prompt_format", str, "auto", f"{', '.join(FORMATS)}; auto: text for a chat, token_ids else"),
        Flag("ignore_eos", bool, False, "generate all tokens asked for (vLLM's and paxpage's field)"),
        Flag("temperature", float, 0.0, "of every request"),
    ),
    "output": (
        Flag("save_result", bool, False, "append a line of JSON for each run to a file"),
        Flag("result_filename", str, None, "that file; bench-serve-DATE-TIME.jsonl if not given"),
        Flag("plot_filename", str, None, "PNG of latency against throughput; beside the results if not given"),
        Flag("disable_tqdm", bool, False, "no progress bar"),
    ),
}


@dataclasses.dataclass(frozen=True)
class ServeBenchOptions:
    """The command line, checked; see FLAGS_BY_GROUP."""

    dataset: DatasetOptions
    rates: tuple[float, ...]
    base_url: str
    endpoint: str
    model: str | None
    timeout_s: float
    burstiness: float
    max_concurrency: int | None
    num_warmups: int
    ignore_eos: bool
    temperature: float
    save_result: bool
    result_filename: str
    plot_filename: str
    disable_tqdm: bool

    def __post_init__(self) -> None:
        require(
            self.base_url.startswith(("http://", "https://")), "base_url", self.base_url, "http://... or https://..."
        )
        require(self.endpoint in ENDPOINTS, "endpoint", self.endpoint, ", ".join(ENDPOINTS))
        require(self.timeout_s > 0, "timeout_s", self.timeout_s, "a positive number")
        require(self.burstiness > 0, "burstiness", self.burstiness, "a positive number")
        require(self.temperature >= 0, "temperature", self.temperature, "a number >= 0")
        require_int("num_warmups", self.num_warmups, 0)
        if self.max_concurrency is not None:
            require_int("max_concurrency", self.max_concurrency, 1)

    @property
    def is_chat(self) -> bool:
        """Whether requests are conversations."""
        return self.endpoint == CHAT

    def requests(self, draw: int) -> list[BenchRequest]:
        """Of one run; see datasets.make_requests."""
        return make_requests(self.dataset, is_chat=self.is_chat, draw=draw)


def main(argv: Sequence[str]) -> int:
    """Runs the command; returns the exit code: 1 if any request failed. ValueError for bad flags."""
    values = parse_flags(FLAGS_BY_GROUP, argv)
    if values["help"].value:
        print(help_text(TITLE, FLAGS_BY_GROUP))
        return 0
    flags = values_of(values)
    options = make_options(flags)
    options.requests(0)  # a bad file is said before the server is asked
    try:
        return asyncio.run(run(options, given(flags)))
    except AnswerError as error:
        return complain(PROGRAM, error, EXIT_FAILED)


def make_options(flags: dict[str, Any]) -> ServeBenchOptions:
    """Checks the flags' values.

    Raises:
        ValueError: a value is out of its range.
    """
    stem = f"bench-serve-{datetime.datetime.now():%Y%m%d-%H%M%S}"
    result_filename = flags["result_filename"] or f"{stem}.jsonl"
    names = {"result_filename": result_filename, "plot_filename": flags["plot_filename"] or _beside(result_filename)}
    dataset_fields = [field.name for field in dataclasses.fields(DatasetOptions)]
    own_fields = {field.name for field in dataclasses.fields(ServeBenchOptions)} - {"dataset", "rates"}
    dataset = DatasetOptions(**{name: flags[name] for name in dataset_fields})
    rates = tuple(parse_rates(flags["request_rate"]))
    own = {name: (flags | names)[name] for name in own_fields}
    return ServeBenchOptions(dataset=dataset, rates=rates, **own)


def _beside(result_filename: str) -> str:
    return str(Path(result_filename).with_suffix(".png"))


async def run(options: ServeBenchOptions, flags: dict[str, Any]) -> int:
    """All runs; AnswerError if the server cannot be used at all."""
    key = next((os.environ[name] for name in KEY_VARIABLES if os.environ.get(name)), None)
    async with Client(options.base_url, api_key=key, timeout_s=options.timeout_s) as client:
        facts = await client.facts(options.model)
        await warm_up(client, options, facts)
        path = options.result_filename if options.save_result else None
        writer = ResultWriter(origin_of(facts, flags), path, is_printed=False)
        summaries = []
        for draw, rate in enumerate(options.rates):
            summary = await run_at(client, options, facts, draw)
            summaries.append(summary)
            print(table(summary), flush=True)
            writer.write(fields_of(options, rate) | to_fields(summary))
    if path is not None:
        print(f"results: {path}")
    if len(options.rates) > 1:
        plot(options, facts, summaries)
    return EXIT_FAILED if any(summary.num_failed for summary in summaries) else 0


async def warm_up(client: Client, options: ServeBenchOptions, facts: ServerFacts) -> None:
    """A few requests one after another.

    Raises:
        AnswerError: one failed.
    """
    if not options.num_warmups:
        return
    for request in options.requests(WARM_UP_DRAW)[: options.num_warmups]:
        result = await client.send(options.endpoint, make_body(request, options, facts.model))
        if result.error is not None:
            raise AnswerError(f"the first request failed: {result.error}")


async def run_at(client: Client, options: ServeBenchOptions, facts: ServerFacts, draw: int) -> Summary:
    """One run at the draw-th rate."""
    rate, requests = options.rates[draw], options.requests(draw)
    print(f"{facts.model} at {options.base_url}: {len(requests)} requests, {rate_text(rate)}", file=sys.stderr)
    if draw and options.dataset.dataset_name == "custom":
        print("the same prompts as in the run before: a prefix cache may know them", file=sys.stderr)
    due_s = due_times(len(requests), rate, options.burstiness, options.dataset.seed)
    bodies = [make_body(request, options, facts.model) for request in requests]
    load = Load(options.endpoint, bodies, due_s, options.max_concurrency)
    with tqdm(total=len(bodies), unit="request", disable=options.disable_tqdm) as bar:
        result = await run_load(client, load, bar.update)
    return summarise(result, [num_sent_tokens(request) for request in requests])


def make_body(request: BenchRequest, options: ServeBenchOptions, model: str) -> Body:
    """What is posted."""
    body: Body = {
        "model": model,
        "messages" if options.is_chat else "prompt": request.prompt,
        "max_tokens": request.max_tokens,
        "temperature": options.temperature,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    return body | ({"ignore_eos": True} if options.ignore_eos else {})


def num_sent_tokens(request: BenchRequest) -> int:
    """Of the prompt, 0 where only a tokenizer would know."""
    has_ids = isinstance(request.prompt, list) and isinstance(request.prompt[0], int)
    return len(request.prompt) if has_ids else 0


def origin_of(facts: ServerFacts, flags: dict[str, Any]) -> dict[str, Any]:
    """What the server says of itself; its device and its jax it does not say."""
    date = datetime.datetime.now().isoformat(timespec="seconds")
    server = {"engine": facts.engine, "version": facts.version, "commit": None, "device": None, "jax": None}
    return {"test": "serve", "date": date, **server, "model_id": facts.model, "flags": flags}


def fields_of(options: ServeBenchOptions, rate: float) -> dict[str, Any]:
    """The run's own settings, by the names that vLLM's benchmark gives."""
    return {
        "request_rate": "inf" if math.isinf(rate) else rate,
        "burstiness": options.burstiness,
        "max_concurrency": options.max_concurrency,
        "num_prompts": options.dataset.num_prompts,
    }


def rate_text(rate: float) -> str:
    """For people."""
    return "all at once" if math.isinf(rate) else f"{rate:g} a second"


def plot(options: ServeBenchOptions, facts: ServerFacts, summaries: Sequence[Summary]) -> None:
    """Latency against throughput over the rates; those of which nothing succeeded are left out."""
    points = [
        LatencyPoint(f"{rate:g}/s", s.output_throughput, s.ttft.median, s.ttft.p99, s.itl.median, s.itl.p99)
        for rate, s in zip(options.rates, summaries, strict=True)
        if s.num_completed
    ]
    if points:
        plot_latency(points, facts.model, Path(options.plot_filename))
        print(f"plot: {options.plot_filename}")
