"""python -m paxpage.bench kernels: the attention kernels beside their floors, and whether they are right.

Llama-3-8B heads (32 query heads, 8 key heads, head_dim 128), blocks of 16 in shuffled order, bfloat16 (CPU: float32).
A figure is the mean of many calls inside one jitted loop, each fed the last one's output, so that no launch from Python
is timed. The floor is what reading the keys and values, or the arithmetic, takes at the least on this device.

With --paging it is the price of paging instead: what it costs that keys and values lie in blocks, wherever there was
room, and not in one contiguous array. Every problem is timed over blocks of 8 to 128 tokens, shuffled and in order,
beside its contiguous twin. Of decode that is the same kernel over the largest blocks, each behind the one before it; of
prefill it is cuDNN's attention, which knows no blocks (where there is no cuDNN, XLA's). A line of JSON for each problem
goes to stdout; a table of microseconds, with the ratio to the twin's, to stderr. About a minute on an H200.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

from paxpage.command_line import Flag, help_text, parse_flags, values_of
from paxpage.config import require

SCALES = ("auto", "full", "small", "smoke")
FLAGS_BY_GROUP = {
    "kernels": (
        Flag("paging", bool, False, "the price of paging: each kernel beside its contiguous twin, block size by size"),
        Flag("backends", str, "", "comma-separated; the device's own choice if none is named"),
        Flag("only", str, "", "problems whose name contains this: decode, prefill, decode 64, ..."),
        Flag("scale", str, "auto", "full; small: problems for a CPU; smoke: the least; auto: by device"),
    ),
    "output": (
        Flag("json", str, None, "append the lines to this file too"),
        Flag("plot_dir", str, None, "a folder for plots, PNG: rooflines, or the ratios of --paging; none if not given"),
    ),
}


@dataclasses.dataclass(frozen=True)
class KernelOptions:
    """The command line, checked; see FLAGS_BY_GROUP."""

    backends: tuple[str | None, ...]
    only: str
    scale: str
    json: str | None
    plot_dir: str | None
    is_paging: bool = False

    def __post_init__(self) -> None:
        require(self.scale in SCALES, "scale", self.scale, ", ".join(SCALES))


def main(argv: Sequence[str]) -> int:
    """Runs the command; returns the exit code. ValueError for bad flags."""
    values = parse_flags(FLAGS_BY_GROUP, argv)
    if values["help"].value:
        print(help_text([*(__doc__ or "").splitlines(), "", "python -m paxpage.bench kernels [...]"], FLAGS_BY_GROUP))
        return 0
    flags: dict[str, Any] = values_of(values)
    backends = tuple(name or None for name in flags["backends"].split(","))
    own = [flags[name] for name in ("only", "scale", "json", "plot_dir", "paging")]
    options = KernelOptions(backends, *own)
    from paxpage.bench import kernels_run, paging  # import JAX

    return (paging if options.is_paging else kernels_run).run(options, flags)
