"""What a trace of jax.profiler says of each kernel. Imports JAX."""

import collections
import re
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax

from paxpage.bench.plots import Roof
from paxpage.bench.products import Product

STREAM = "Stream"  # how a GPU plane's lines of kernels begin
LIBRARY_KERNEL = re.compile(r"nvjet|gemm|cublas|cutlass|xmma", re.IGNORECASE)
NAME_WIDTH = 90


class KernelEvent(NamedTuple):
    """One run of a kernel (on a CPU, of one of XLA's operations); hlo_op is "" where the profiler does not know it."""

    name: str
    hlo_op: str
    start_ns: float
    duration_ns: float


class KernelRow(NamedTuple):
    """One line of the table, for one step."""

    name: str
    us: float
    per_step: float
    floor_us: float | None


def trace(folder: Path, run: Callable[[], object]) -> Path:
    """Runs something under the profiler; the file that Perfetto opens, with host and device on one time axis."""
    options = jax.profiler.ProfileOptions()
    options.python_tracer_level = 0  # every call of a Python function would be an event, and slow
    jax.profiler.start_trace(str(folder), create_perfetto_trace=True, profiler_options=options)
    try:
        run()
    finally:
        jax.profiler.stop_trace()
    return max(folder.rglob("perfetto_trace.json.gz"), key=lambda path: path.stat().st_mtime)


def read_kernels(perfetto_path: Path) -> tuple[list[KernelEvent], bool]:
    """The kernels of a trace in the order of their start; whether they are a device's, or else the host's."""
    (path,) = perfetto_path.parent.glob("*.xplane.pb")
    data = jax.profiler.ProfileData.from_file(str(path))
    events = list(_device_events(data))
    found = events or list(_host_events(data))
    return sorted(found, key=lambda event: event.start_ns), bool(events)


def _device_events(data: Any) -> Iterator[KernelEvent]:
    for plane in data.planes:
        if "GPU" in plane.name:
            for line in plane.lines:
                if line.name.startswith(STREAM):
                    yield from (_event(event) for event in line.events)


def _host_events(data: Any) -> Iterator[KernelEvent]:
    events = (_event(event) for plane in data.planes for line in plane.lines for event in line.events)
    return (event for event in events if event.hlo_op and not event.name.startswith("end: "))


def _event(event: Any) -> KernelEvent:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of the profiler's own types
        stats = dict(event.stats)
    return KernelEvent(event.name, str(stats.get("hlo_op", "")), event.start_ns, event.duration_ns)


def kernel_table(events: Sequence[KernelEvent], num_steps: int, floors_s: Sequence[float | None]) -> list[KernelRow]:
    """Sums by name, slowest first; floors_s: of each event. A name's floor is known if all its events' are."""
    groups: dict[str, list[int]] = collections.defaultdict(list)
    for index, event in enumerate(events):
        groups[event.name].append(index)
    rows = []
    for name, indices in groups.items():
        floors = [floors_s[index] for index in indices]
        floor_s = None if None in floors else sum(floor for floor in floors if floor is not None)
        total_ns = sum(events[index].duration_ns for index in indices)
        floor_us = None if floor_s is None else floor_s / num_steps * 1e6
        rows.append(KernelRow(name, total_ns / num_steps / 1e3, len(indices) / num_steps, floor_us))
    return sorted(rows, key=lambda row: -row.us)


def product_floors(
    events: Sequence[KernelEvent], num_steps: int, found: Sequence[Product], roof: Roof
) -> list[float | None]:
    """Seconds of each event that is a matrix product: by its operation's name, or its kernel's, which XLA makes of it.

    A library's kernels have names of their own: they are matched in order, if there are as many a step as calls.
    """
    by_name = {product.name: product for product in found}
    by_kernel = {product.name.replace(".", "_").replace("-", "_"): product for product in found}
    matched = [by_name.get(event.hlo_op) or by_kernel.get(event.name) for event in events]
    calls = [product for product in found if product.is_library]
    libraries = [i for i, event in enumerate(events) if matched[i] is None and _is_library_kernel(event.name)]
    if calls and len(libraries) == num_steps * len(calls):
        for place, index in enumerate(libraries):
            matched[index] = calls[place % len(calls)]
    return [None if product is None else product.floor_s(roof) for product in matched]


def _is_library_kernel(name: str) -> bool:
    """A sum of the parts of a split product is not one."""
    return LIBRARY_KERNEL.search(name) is not None and "reduce" not in name.lower()


def table_text(rows: Sequence[KernelRow], most: int) -> str:
    """For people."""
    lines = [f"{'us a step':>12} {'floor us':>10} {'a step':>8}  kernel"]
    for row in rows[:most]:
        floor = "-" if row.floor_us is None else f"{row.floor_us:.1f}"
        lines.append(f"{row.us:12.1f} {floor:>10} {row.per_step:8.1f}  {row.name[:NAME_WIDTH]}")
    total = f"{sum(row.us for row in rows):12.1f} {'':>10} {sum(row.per_step for row in rows):8.1f}  all"
    rest = (
        [] if len(rows) <= most else [f"{sum(row.us for row in rows[most:]):12.1f} {'':>19}  {len(rows) - most} more"]
    )
    return "\n".join([*lines, *rest, total])
