"""PNG plots. matplotlib comes with the extra paxpage[bench] and is imported only here."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

DPI = 120


class LatencyPoint(NamedTuple):
    """One arrival rate: what came out, and how long it took."""

    label: str
    output_throughput: float  # tokens a second
    median_ttft_ms: float
    p99_ttft_ms: float
    median_itl_ms: float
    p99_itl_ms: float


class RooflinePoint(NamedTuple):
    """One kernel on one problem."""

    label: str
    intensity: float  # operations a byte
    flops_per_s: float


class PagingLine(NamedTuple):
    """One problem: how many times its contiguous twin's time it takes, at each block size."""

    label: str
    ratios: Sequence[float]
    is_decode: bool


class Roof(NamedTuple):
    """What a device can do at most."""

    bytes_per_s: float
    flops_per_s: float


def plot_latency(points: Sequence[LatencyPoint], title: str, path: Path) -> None:
    """Latency against throughput, a point for each arrival rate: time to the first token, and between tokens."""
    figure = _figure(10, 4)
    panels = (("time to first token (ms)", 2, 3), ("between tokens (ms)", 4, 5))
    for axes, (label, median, p99) in zip(figure.subplots(1, 2), panels, strict=True):
        throughputs = [point.output_throughput for point in points]
        axes.plot(throughputs, [point[median] for point in points], "o-", label="median")
        axes.plot(throughputs, [point[p99] for point in points], "s--", label="99th percentile")
        for point in points:
            axes.annotate(point.label, (point.output_throughput, point[median]), fontsize=8)
        axes.set(xlabel="output tokens a second", ylabel=label, ylim=(0, None))
        axes.legend()
    figure.suptitle(title)
    figure.savefig(path)


def plot_roofline(points: Sequence[RooflinePoint], roof: Roof, title: str, path: Path) -> None:
    """Speed against arithmetic intensity, with what memory and arithmetic allow (Williams et al., CACM 2009)."""
    figure = _figure(7, 5)
    axes = figure.subplots()
    ridge = roof.flops_per_s / roof.bytes_per_s
    ends = [min(ridge, *(point.intensity for point in points)) / 2, max(ridge, *(p.intensity for p in points)) * 2]
    steps = [ends[0], ridge, ends[1]]
    axes.plot(steps, [min(roof.flops_per_s, x * roof.bytes_per_s) / 1e12 for x in steps], "k-", label="roof")
    for point in points:
        axes.plot(point.intensity, point.flops_per_s / 1e12, "o", label=point.label)
    axes.set(xscale="log", yscale="log", xlabel="operations a byte", ylabel="TFLOP/s", title=title)
    axes.legend(fontsize=7)
    figure.savefig(path)


def plot_paging(lines: Sequence[PagingLine], block_sizes: Sequence[int], title: str, path: Path) -> None:
    """Ratio to the contiguous twin against the block size, a line for each problem."""
    figure = _figure(7, 5)
    axes = figure.subplots()
    axes.axhline(1, color="black", linewidth=0.8, label="contiguous")
    for line in lines:
        axes.plot(block_sizes, line.ratios, "o-" if line.is_decode else "s--", label=line.label)
    axes.set_xscale("log", base=2)
    axes.set_xticks(block_sizes, labels=[str(size) for size in block_sizes])
    axes.set(xlabel="tokens of a block", ylabel="time / time of the contiguous twin", ylim=(0, None), title=title)
    axes.legend(fontsize=7)
    figure.savefig(path)


def _figure(width: float, height: float) -> Any:
    """An empty figure in inches, drawn without a screen."""
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), dpi=DPI, layout="constrained")
