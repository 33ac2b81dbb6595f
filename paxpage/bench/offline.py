"""python -m paxpage.bench offline: an engine in this process, random prompts of token ids, greedy, no early end.

1: 512 requests at once with ShareGPT-like lengths (workloads.py), output tokens a second.
2: one request, 128 tokens in, 256 out: ms a decode step, and the time to the first token.
3: 64 requests with 4000 tokens in common and 32 of their own, 128 out, nothing cached before: output tokens a second.
4: 64 requests of 1024 tokens in, 128 out: ms a decode step of 64 rows, and prefill tokens a second.
5: 256 of test 1's requests that arrive one by one (Poisson), at each of --rates a second: time to the first token, time
   between tokens (50th and 99th percentile), mean of a request's whole time divided by its number of tokens.
6: 256 requests of 448 tokens in, 128 out: ms a decode step of 256 rows at 512 tokens of context.
7: (only if --tests names it) 32 requests are decoding when a prompt of 32,768 tokens, or of --max_model_len less 8 if
   that is shorter, arrives: the prompt's time to the first token, beside the least that its arithmetic takes on this
   device (null where that is not known); and the 32 requests' time between tokens, before the prompt came (50th
   percentile) and while it is being computed (50th and 99th).
In 5 and 7 steps are kept short beside requests that decode, as a server does; in the others not, as in LLM.generate.
"""

import dataclasses
import os
from collections.abc import Sequence

from paxpage.bench.arrivals import parse_rates
from paxpage.bench.models import CONFIGS
from paxpage.command_line import Flag, help_text, parse_flags, values_of
from paxpage.config import DTYPES, LOAD_FORMATS, require, require_int

TEST_NUMBERS = "1234567"
DEFAULT_TESTS = "123456"
SCALES = ("auto", "full", "small", "smoke")
DEFAULT_RATES = {"full": "8,16,24", "small": "1,2", "smoke": "50"}
FLAGS_BY_GROUP = {
    "model": (
        Flag("model", str, None, f"{', '.join(CONFIGS)} (random weights), a folder, a .gguf file or org/name; several"),
        Flag("dtype", str, "auto", "auto, bfloat16, float16 or float32"),
        Flag("load_format", str, "auto", "auto, safetensors, gguf, orbax or dummy (random weights)"),
        Flag("gpu_memory_utilization", float, 0.9, "share of the GPU's memory to use"),
        Flag("max_num_seqs", int, None, "samples that run at once"),
        Flag("max_num_batched_tokens", int, None, "tokens of one step"),
        Flag(
            "max_model_len",
            int,
            None,
            "tokens of the longest request; None: as tests 1 to 6 need; 33000 for test 7's whole prompt",
        ),
        Flag("enable_prefix_caching", bool, True, "reuse the blocks of prompts with the same beginning"),
    ),
    "tests": (
        Flag("tests", str, DEFAULT_TESTS, f"which to run, in this order: some of {TEST_NUMBERS}"),
        Flag("scale", str, "auto", "full: the sizes above; small, smoke: fewer and shorter requests; auto: by device"),
        Flag("reps", int, None, "repetitions, of which the median counts; 3, or 1 on a CPU"),
        Flag("reps1", int, None, "the same for test 1"),
        Flag("rates", str, None, f"test 5: arrivals a second; {DEFAULT_RATES['full']}, on a CPU fewer"),
    ),
    "output": (Flag("out", str, None, "append the lines to this file too"),),
}


@dataclasses.dataclass(frozen=True)
class OfflineOptions:
    """The command line, checked; see FLAGS_BY_GROUP. None: by device."""

    models: tuple[str, ...]  # none: the embedded one
    dtype: str
    load_format: str
    gpu_memory_utilization: float
    max_num_seqs: int | None
    max_num_batched_tokens: int | None
    max_model_len: int | None
    enable_prefix_caching: bool
    tests: str
    scale: str
    reps: int | None
    reps1: int | None
    rates: str | None
    out: str | None

    def __post_init__(self) -> None:
        is_known = bool(self.tests) and set(self.tests) <= set(TEST_NUMBERS)
        require(is_known, "tests", self.tests, f"some of {TEST_NUMBERS}")
        require(self.scale in SCALES, "scale", self.scale, ", ".join(SCALES))
        require(self.dtype in DTYPES, "dtype", self.dtype, ", ".join(DTYPES))
        require(self.load_format in LOAD_FORMATS, "load_format", self.load_format, ", ".join(LOAD_FORMATS))
        for field in ("reps", "reps1", "max_model_len"):
            if getattr(self, field) is not None:
                require_int(field, getattr(self, field), 1)
        if self.rates is not None:
            parse_rates(self.rates)


def main(argv: Sequence[str]) -> int:
    """Runs the command; returns the exit code. ValueError for bad flags."""
    values = parse_flags(FLAGS_BY_GROUP, argv)
    if values["help"].value:
        print(help_text([*(__doc__ or "").splitlines(), "", "python -m paxpage.bench offline [...]"], FLAGS_BY_GROUP))
        return 0
    flags = values_of(values)
    names = tuple(flags["model"].split(",")) if flags["model"] else ()
    own = [field.name for field in dataclasses.fields(OfflineOptions) if field.name != "models"]
    options = OfflineOptions(models=names, **{name: flags[name] for name in own})
    prepare_environment()
    from paxpage.bench import offline_run

    return offline_run.run(options, flags)


def prepare_environment() -> None:
    """What JAX reads at its import; what is set already stays."""
    os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.92")
