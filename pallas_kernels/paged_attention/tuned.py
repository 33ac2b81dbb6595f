"""Tile sizes that were measured on a device: generated data, one file for each kind of device in tuned/.

`python scripts/autotune.py` writes the file of the GPU it runs on. Where there is no entry, config.py decides.
"""

import functools
import json
import pathlib
from collections.abc import Sequence
from typing import NamedTuple

from pallas_kernels.backends import device_kind
from pallas_kernels.paged_attention.config import Geometry, most_splits


class Entry(NamedTuple):
    """The fastest tiles of one kernel for one shape."""

    kernel: str
    num_heads: int
    num_kv_heads: int
    head_dim: int
    dtype: str  # of queries and cache
    num_rows: int
    config: dict[str, int]
    us: float  # a call


def find(kernel: str, geometry: Geometry, num_rows: int, max_keys: int) -> dict[str, int] | None:
    """choose() among the entries of the device at hand; rows shorter than those measured are cut into fewer pieces."""
    config = choose(table(device_kind()), kernel, geometry, num_rows)
    if config is None:
        return None
    most = most_splits(config["tile_keys"], max_keys)
    return config | {"num_splits": min(config["num_splits"], 1 << (most.bit_length() - 1))}  # clusters: powers of 2


def choose(entries: Sequence[Entry], kernel: str, geometry: Geometry, num_rows: int) -> dict[str, int] | None:
    """Tiles of the measured number of rows that is num_rows or nearest above it; None if there is none.

    kernel: its module's name, for example "triton_decode".
    """
    heads = (kernel, geometry.num_heads, geometry.num_kv_heads, geometry.head_dim, geometry.dtype)
    same = [entry for entry in entries if entry[:5] == heads and geometry.cache_dtype == geometry.dtype]
    same.sort(key=lambda entry: entry.num_rows)
    above = [entry for entry in same if entry.num_rows >= num_rows]
    return above[0].config if above else None


@functools.cache
def table(kind: str) -> tuple[Entry, ...]:
    """All entries for a kind of device, as JAX names it; none if it was never tuned."""
    return tuple(read(pathlib.Path(__file__).parent / "tuned" / file_name(kind)))


def file_name(kind: str) -> str:
    """For example nvidia_h200.json."""
    return "_".join(kind.lower().replace("/", " ").split()) + ".json"


def read(path: pathlib.Path) -> list[Entry]:
    """The entries of a file; none if there is no such file."""
    return [Entry(**entry) for entry in json.loads(path.read_text())["entries"]] if path.is_file() else []


def write(path: pathlib.Path, kind: str, made: str, entries: list[Entry]) -> None:
    """Writes a file, an entry a line. made: when, and with what."""
    lines = ",\n".join("    " + json.dumps(entry._asdict()) for entry in sorted(entries, key=lambda entry: entry[:6]))
    head = {"device": kind, "command": "python scripts/autotune.py", "made": made}
    path.write_text(json.dumps(head)[:-1] + ',\n  "entries": [\n' + lines + "\n  ]\n}\n")
