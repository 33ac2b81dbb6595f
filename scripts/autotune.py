"""Finds the fastest tiles of the attention kernels on this machine's GPU and writes them down.

    python scripts/autotune.py [--heads 32x8x128,32x8x64] [--rows 1,2,4] [--out FILE]

For each head layout and number of rows every candidate of the kernel that would run is timed as python -m
paxpage.bench kernels does it, at two lengths of context with all rows as long and with uneven ones, and the one with
the least sum is kept; one that does not compile is passed over. What the kernel's decode_config would choose stays
unless another is 2% faster, which is more than noise, and nowhere slower than it by more than 1%.
pallas_kernels.paged_attention.tuned reads the file, by default pallas_kernels/paged_attention/tuned/DEVICE.json. It is
written after every shape; other entries that it had stay.
"""

import argparse
import dataclasses
import datetime
import functools
import pathlib
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from tqdm import tqdm

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))

from pallas_kernels.backends import default_backend, device_kind
from pallas_kernels.paged_attention import tuned
from pallas_kernels.paged_attention.api import choose_backend
from pallas_kernels.paged_attention.config import DecodeConfig, Geometry, decode_config
from pallas_kernels.paged_attention.shapes import HeadLayout
from pallas_kernels.paged_attention.triton_common import Refs
from paxpage.bench.attention_problems import Problem, make_arrays
from paxpage.bench.timing import lower_loop, seconds_of

FOLDER = pathlib.Path(tuned.__file__).parent / "tuned"
NUM_ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
CACHED_TOKENS = 262_144  # of a batch at most, so that the longer context of many rows fits a small GPU
SHORT_CONTEXT, LONG_CONTEXT = 512, 4096
NUM_CALLS = 48  # a multiple of timing.CALLS_PER_TURN
MAX_SPLITS = 16
MIN_PROGRAMS, MAX_PROGRAMS = 64, 300  # about half and twice as many as the devices at hand have multiprocessors
GAIN = 0.98  # of the time of decode_config's choice, that another must stay below
NOISE = 1.01  # of the same in any one batch, that another may not exceed

# (configuration, row order) -> a function of make_arrays' arrays
Decode = Callable[[Any, jax.Array], Callable[..., jax.Array]]


class Candidates(NamedTuple):
    """One kernel and the tiles to try."""

    kernel: str
    decode: Decode
    configs: list[Any]
    default: Any  # what decode_config chooses without measurements


def triton_candidates(geometry: Geometry, num_rows: int) -> Candidates:
    """Of the Triton decode kernel."""
    from pallas_kernels.paged_attention import triton_decode

    configs = [
        DecodeConfig(tile_keys, num_splits, num_warps, num_stages)
        for tile_keys in (64, 128)
        for num_splits in (1, 2, 4, 8, MAX_SPLITS)
        for num_warps, num_stages in ((2, 2), (2, 3), (4, 3))
    ]

    def decode(config: Any, row_order: jax.Array) -> Callable[..., jax.Array]:
        return lambda *arrays: triton_decode.decode(refs_of(arrays), None, geometry, config, scale_of(geometry), False)

    return Candidates("triton_decode", decode, configs, decode_config(geometry, num_rows, LONG_CONTEXT))


def mosaic_candidates(geometry: Geometry, num_rows: int) -> Candidates:
    """Of the Mosaic decode kernel."""
    from pallas_kernels.paged_attention import mosaic_decode

    configs = [
        mosaic_decode.MosaicDecodeConfig(tile_keys, num_stages, num_splits)
        for tile_keys in (64, 128)
        for num_stages in (2, 3, 4)
        for num_splits in (1, 2, 4, mosaic_decode.PORTABLE_SPLITS)
    ]

    def decode(config: Any, row_order: jax.Array) -> Callable[..., jax.Array]:
        run = functools.partial(mosaic_decode.decode, out=None, geometry=geometry, config=config, interpret=None)
        return lambda *arrays: run(refs_of(arrays), scale=scale_of(geometry), row_order=row_order)

    default = mosaic_decode.decode_config(geometry, num_rows, LONG_CONTEXT)
    return Candidates("mosaic_decode", decode, configs, default)


def refs_of(arrays: tuple[jax.Array, ...]) -> Refs:
    """What the kernels take, from make_arrays' arrays."""
    q, k, v, tables, seq_lens, starts = arrays
    return Refs(jnp.zeros(1, jnp.int32), tables, seq_lens, starts, q, k, v)


def scale_of(geometry: Geometry) -> float:
    """The usual one."""
    return geometry.head_dim**-0.5


def batches_of(num_rows: int, layout: HeadLayout) -> list[tuple[jax.Array, ...]]:
    """Decode batches of this many rows, at two contexts all as long and from half of it up to all of it.

    They have the same arrays but for the lengths, longest rows first, so that one program computes them, whose row
    order is that of a step for each.
    """
    rng = np.random.default_rng(0)
    contexts = (SHORT_CONTEXT, max(SHORT_CONTEXT, min(LONG_CONTEXT, CACHED_TOKENS // num_rows)))
    even = [np.full(num_rows, context) for context in contexts]
    uneven = [np.sort(rng.integers(context // 2, context + 1, num_rows))[::-1] for context in contexts]
    longest = Problem(f"{num_rows} rows", even[-1], np.ones_like(even[-1]), layout)
    q, k, v, tables, _, starts = make_arrays(longest, jnp.bfloat16)
    return [(q, k, v, tables, jnp.asarray(lens, jnp.int32), starts) for lens in even + uneven]


def best(candidates: Candidates, num_rows: int, layout: HeadLayout) -> tuple[Any, float] | None:
    """The fastest configuration and its microseconds a call; None if none compiles."""
    batches = batches_of(num_rows, layout)
    programs = num_rows * layout.num_kv_heads
    configs = [c for c in candidates.configs if c.num_splits == 1 or programs * c.num_splits <= MAX_PROGRAMS]
    configs = [c for c in configs if c.num_splits >= 8 or programs * c.num_splits >= MIN_PROGRAMS]
    configs = list(dict.fromkeys([candidates.default, *configs]))
    with ThreadPoolExecutor() as pool:
        loops = list(pool.map(compile_or_say, configs, [lower(candidates, config, batches[0]) for config in configs]))
    timed = {
        config: [seconds_of(loop, arrays, repetitions=3) / NUM_CALLS * 1e6 for arrays in batches]
        for config, loop in zip(configs, loops, strict=True)
        if loop is not None
    }
    if not timed:
        return None
    config = choice(timed, candidates.default)
    others = rounded(timed.get(candidates.default, []))
    tqdm.write(f"{config} {rounded(timed[config])} us, decode_config's {others}")
    return config, sum(timed[config]) / len(timed[config])


def choice(timed: dict[Any, list[float]], default: Any) -> Any:
    """Of configurations and their times in each batch, the fastest.

    The default where nothing is clearly faster over all batches without being slower in one.
    """
    most = [NOISE * time for time in timed[default]] if default in timed else [float("inf")]
    never_slower = {config: sum(times) for config, times in timed.items() if np.all(np.asarray(times) <= most)}
    config = min(never_slower, key=lambda config: never_slower[config])
    is_clear = default not in timed or never_slower[config] < GAIN * never_slower[default]
    return config if is_clear else default


def rounded(times: list[float]) -> list[float]:
    """For a line on the screen."""
    return [round(time, 1) for time in times]


def lower(candidates: Candidates, config: Any, arrays: tuple[jax.Array, ...]) -> jax.stages.Lowered | None:
    """The timing loop of a configuration; None, with a line on the screen, if the kernel cannot be made."""
    try:
        row_order = jnp.argsort(-arrays[4], stable=True).astype(jnp.int32)
        # Jitted, so that the calls of a turn are traced and lowered once.
        return lower_loop(jax.jit(candidates.decode(config, row_order)), arrays, NUM_CALLS)
    except Exception as error:
        tqdm.write(f"{candidates.kernel} {config}: {str(error).splitlines()[0][:120]}")
        return None


def compile_or_say(config: Any, lowered: jax.stages.Lowered | None) -> jax.stages.Compiled | None:
    """Compiles; None, with a line on the screen, if this device has too little shared memory or registers."""
    try:
        return None if lowered is None else lowered.compile()
    except Exception as error:
        tqdm.write(f"{config}: {str(error).splitlines()[0][:120]}")
        return None


def entries(work: list[tuple[HeadLayout, int]]) -> Iterator[tuned.Entry]:
    """Of each head layout and number of rows, with a progress bar. ValueError where there is no GPU to measure."""
    if default_backend() != "triton":
        raise ValueError(f"device is {device_kind()!r}; allowed: an NVIDIA GPU, whose kernels are to be timed")
    for layout, num_rows in tqdm(work, desc="tuning", unit="shape"):
        geometry = Geometry(layout.num_heads, layout.num_kv_heads, layout.head_dim, 16, "bfloat16", "bfloat16")
        is_mosaic = choose_backend(geometry, num_rows, is_decode=True) == "mosaic"
        candidates = (mosaic_candidates if is_mosaic else triton_candidates)(geometry, num_rows)
        found = best(candidates, num_rows, layout)
        if found is not None:
            config, us = found
            heads = (candidates.kernel, layout.num_heads, layout.num_kv_heads, layout.head_dim, "bfloat16")
            yield tuned.Entry(*heads, num_rows, dataclasses.asdict(config), round(us, 1))


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--heads", default="32x8x128,32x8x64", help="query heads x key heads x head size, ...")
    parser.add_argument("--rows", default=",".join(map(str, NUM_ROWS)), help="numbers of rows")
    parser.add_argument("--out", help="the file to write")
    args = parser.parse_args()
    kind = device_kind()
    path = pathlib.Path(args.out) if args.out else FOLDER / tuned.file_name(kind)
    layouts = [HeadLayout(*map(int, heads.split("x"))) for heads in args.heads.split(",")]
    work = [(layout, num_rows) for layout in layouts for num_rows in map(int, args.rows.split(","))]
    started_s = time.perf_counter()
    all_entries = {entry[:6]: entry for entry in tuned.read(path)}  # by all but what was found
    path.parent.mkdir(parents=True, exist_ok=True)
    for entry in entries(work):
        all_entries[entry[:6]] = entry
        tuned.write(path, kind, f"{datetime.date.today()}, jax {jax.__version__}", list(all_entries.values()))
    print(f"{len(work)} shapes in {time.perf_counter() - started_s:.0f} s: {path}")


if __name__ == "__main__":
    main()
