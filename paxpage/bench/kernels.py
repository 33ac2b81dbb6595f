"""python -m paxpage.bench kernels: the attention kernels beside their floors, and whether they are right.

Llama-3-8B heads (32 query heads, 8 key heads, head_dim 128), blocks of 16 in shuffled order, bfloat16 (CPU: float32).
A figure is the mean of many calls inside one jitted loop, each fed the last one's output, so that no launch from Python
is timed. The floor is what reading the keys and values, or the arithmetic, takes at the least on this device.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

from paxpage.command_line import Flag, help_text, parse_flags, values_of
from paxpage.config import require

SCALES = ("auto", "full", "small", "smoke")
FLAGS_BY_GROUP = {
    "kernels": (
        Flag("backends", str, "", "comma-separated; the device's own choice if none is named"),
        Flag("only", str, "", "problems whose name contains this: decode, prefill, decode 64, ..."),
        Flag("scale", str, "auto", "full; small: problems for a CPU; smoke: the least; auto: by device"),
    ),
    "output": (
        Flag("json", str, None, "append the lines to this file too"),
        Flag("plot_dir", str, None, "a folder for roofline plots, PNG, one for each kernel; no plots if not given"),
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
    options = KernelOptions(backends, flags["only"], flags["scale"], flags["json"], flags["plot_dir"])
    from paxpage.bench import kernels_run  # imports JAX

    return kernels_run.run(options, flags)
