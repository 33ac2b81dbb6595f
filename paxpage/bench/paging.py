"""The price of paging, for python -m paxpage.bench kernels --paging: attention over blocks beside contiguous twins.

A problem is timed over blocks of each size, once shuffled and once in order (the same compiled kernel, another block
table). The same keys are read again by every call, so those of a small problem come out of the device's own cache, its
twin's no less. Imports JAX.
"""

import functools
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from tqdm import tqdm

from pallas_kernels.paged_attention.config import BLOCK_SIZES
from paxpage.bench.attention_problems import Problem, make_arrays, make_tables, paging_problems
from paxpage.bench.kernels import KernelOptions
from paxpage.bench.kernels_run import (
    REPETITIONS,
    attend_with,
    chosen,
    chosen_backend,
    num_calls_of,
    num_per_turn,
    prepare,
)
from paxpage.bench.plots import PagingLine, plot_paging
from paxpage.bench.results import ResultWriter, origin
from paxpage.bench.timing import lower_loop, seconds_of

IN_ORDER = "blocks in order"  # decode's contiguous twin
PLOT_NAME = "price-of-paging.png"
SIZES_BY_SCALE = {"full": BLOCK_SIZES, "small": BLOCK_SIZES, "smoke": (16, 128)}  # tokens of a block
PROBED_TOKENS = 64
CELL_WIDTH = 15

Compiling = Future[jax.stages.Compiled]  # a timing loop in the making


class Work(NamedTuple):
    """One problem on one backend, with its loops; twin is None for decode, which is its own."""

    problem: Problem
    backend: str | None
    num_calls: int
    paged: dict[int, Compiling]  # by block size
    twin: Compiling | None

    @property
    def loops(self) -> list[Compiling]:
        """All of them."""
        return [*self.paged.values(), *([] if self.twin is None else [self.twin])]


class Price(NamedTuple):
    """One problem's microseconds a call; the lists go with block_sizes."""

    problem: Problem
    backend: str
    twin: str  # what the contiguous twin is
    contiguous_us: float
    block_sizes: list[int]
    shuffled_us: list[float]
    in_order_us: list[float]

    def ratio(self, us: float) -> float:
        """Times the contiguous twin's time."""
        return us / self.contiguous_us


def run(options: KernelOptions, flags: dict[str, Any]) -> int:
    """All problems on all backends: JSON on stdout, a table on stderr, a plot; returns the exit code."""
    dtype, scale = prepare(options)
    problems = chosen(paging_problems(scale), options.only)
    twin = contiguous_implementation(dtype)
    writer = ResultWriter(origin(flags) | {"test": "paging", "dtype": dtype}, options.json, is_printed=True)
    with ThreadPoolExecutor() as pool:
        pairs = [(problem, backend) for problem in problems for backend in options.backends]
        begin_one = functools.partial(begin, dtype=dtype, scale=scale, twin=twin, pool=pool)
        works = [begin_one(*pair) for pair in tqdm(pairs, unit="problem", desc="lowering")]
        for loop in tqdm([loop for work in works for loop in work.loops], unit="loop", desc="compiling"):
            loop.result()  # all of them before any is run: timing wants a quiet machine
    prices = []
    for work in tqdm(works, unit="problem", desc="timing"):
        prices.append(measure(work, dtype, twin))
        writer.write(fields_of(prices[-1]))
    where = f"paged_attention, {dtype}, {jax.devices()[0].device_kind}"
    print("", *table_lines(prices, where, twin), sep="\n", file=sys.stderr)
    if options.plot_dir is not None:
        plot(prices, where, Path(options.plot_dir))
    return 0


def contiguous_implementation(dtype: str) -> str:
    """Whose attention over contiguous arrays prefill is compared with: "cudnn" where the device has it, else "xla"."""
    if jax.default_backend() == "cpu":
        return "xla"
    like = jax.ShapeDtypeStruct((1, PROBED_TOKENS, 1, PROBED_TOKENS), dtype)
    try:
        jax.jit(contiguous_attention("cudnn")).lower(like, like, like).compile()
    except (RuntimeError, NotImplementedError) as error:
        print(f"# no cuDNN, XLA's attention in its place: {str(error).splitlines()[0]}", file=sys.stderr)
        return "xla"
    return "cudnn"


def contiguous_attention(implementation: Any) -> Callable[..., jax.Array]:
    """Causal attention, a function of q [num_rows, num_tokens, num_heads, head_dim] and k, v of num_kv_heads."""
    return functools.partial(jax.nn.dot_product_attention, is_causal=True, implementation=implementation)


def begin(
    problem: Problem, backend: str | None, *, dtype: str, scale: str, twin: str, pool: ThreadPoolExecutor
) -> Work:
    """Lowers all loops of a problem, and has them compiled by the pool."""
    num_calls, per_turn = num_calls_of(problem, scale), num_per_turn(problem, scale)

    def compiling(attend: Callable[..., jax.Array], likes: Sequence[Any]) -> Compiling:
        return pool.submit(lower_loop(attend, likes, num_calls, per_turn).compile)

    attend = attend_with(problem, backend)
    paged = {}
    for size in SIZES_BY_SCALE[scale]:
        paged[size] = compiling(attend, jax.eval_shape(functools.partial(make_arrays, problem, dtype, size)))
    contiguous = None
    if not problem.is_decode:
        contiguous = compiling(contiguous_attention(twin), contiguous_likes(problem, dtype))
    return Work(problem, backend, num_calls, paged, contiguous)


def contiguous_likes(problem: Problem, dtype: str) -> list[jax.ShapeDtypeStruct]:
    """Shapes of q, k and v in contiguous arrays, for rows of equal length whose tokens are all queries."""
    num_tokens = int(problem.seq_lens[0])
    assert (problem.seq_lens == num_tokens).all() and (problem.num_queries == num_tokens).all(), problem.name
    heads = (problem.heads.num_heads, problem.heads.num_kv_heads, problem.heads.num_kv_heads)
    shapes = [(len(problem.seq_lens), num_tokens, count, problem.heads.head_dim) for count in heads]
    return [jax.ShapeDtypeStruct(shape, dtype) for shape in shapes]


def measure(work: Work, dtype: str, twin: str) -> Price:
    """Times a problem at each block size, and its twin."""
    times_us = [paged_times_us(work, size, compiling.result(), dtype) for size, compiling in work.paged.items()]
    shuffled_us, in_order_us = (list(column) for column in zip(*times_us, strict=True))
    backend = work.backend or chosen_backend(work.problem, dtype)
    paged = (list(work.paged), shuffled_us, in_order_us)
    if work.twin is None:
        return Price(work.problem, backend, IN_ORDER, in_order_us[-1], *paged)
    keys = jax.random.split(jax.random.key(0), 3)
    likes = contiguous_likes(work.problem, dtype)
    arrays = tuple(jax.random.normal(key, like.shape, dtype) for key, like in zip(keys, likes, strict=True))
    return Price(work.problem, backend, twin, call_us(work, work.twin.result(), arrays), *paged)


def paged_times_us(work: Work, block_size: int, loop: jax.stages.Compiled, dtype: str) -> tuple[float, float]:
    """Microseconds of a call over shuffled blocks, and over blocks in order."""
    arrays = make_arrays(work.problem, dtype, block_size)
    in_order = jnp.asarray(make_tables(work.problem.seq_lens, block_size, is_shuffled=False))
    return call_us(work, loop, arrays), call_us(work, loop, (*arrays[:3], in_order, *arrays[4:]))


def call_us(work: Work, loop: jax.stages.Compiled, arrays: tuple[jax.Array, ...]) -> float:
    """Microseconds of a call."""
    return seconds_of(loop, arrays, REPETITIONS) / work.num_calls * 1e6


def fields_of(price: Price) -> dict[str, Any]:
    """What is written; lists go with block_sizes, ratio is shuffled_us by contiguous_us."""
    return {
        "kernel": price.problem.name,
        "backend": price.backend,
        "contiguous": price.twin,
        "contiguous_us": round(price.contiguous_us, 2),
        "block_sizes": price.block_sizes,
        "shuffled_us": [round(us, 2) for us in price.shuffled_us],
        "in_order_us": [round(us, 2) for us in price.in_order_us],
        "ratio": [round(price.ratio(us), 4) for us in price.shuffled_us],
    }


def table_lines(prices: Sequence[Price], where: str, twin: str) -> list[str]:
    """For people: two lines for each problem."""
    names = {"cudnn": "cuDNN's attention", "xla": "XLA's attention"}
    sizes = "".join(f"{f'{size} tokens':>{CELL_WIDTH}}" for size in prices[0].block_sizes)
    head = [
        f"The price of paging: {where}.",
        "Microseconds of a call; behind them, how many times the contiguous twin's time that is.",
        f"  {'8 tokens, ...':<15}the size of a block; the engine's own is 16 if nothing is said",
        f"  {'shuffled':<15}a row's blocks lie anywhere, as in a cache long in use",
        f"  {'in order':<15}each block lies behind the one before it",
        f"  {'contiguous':<15}of decode, the same kernel over blocks of {prices[0].block_sizes[-1]} tokens in order;",
        f"  {'':<15}of prefill, {names[twin]} over arrays without blocks",
        "",
        f"{'rows x tokens':<17}{'backend':<8}{'blocks':<9}{'contiguous':>10}{sizes}",
    ]
    return head + [line for price in prices for line in _rows_of(price)]


def _rows_of(price: Price) -> list[str]:
    label = f"{price.problem.name:<17}{price.backend:<8}"
    contiguous = f"{price.contiguous_us:10.1f}"
    return [
        f"{label}{'shuffled':<9}{contiguous}{_cells(price, price.shuffled_us)}",
        f"{'':<{len(label)}}{'in order':<9}{'':<{len(contiguous)}}{_cells(price, price.in_order_us)}",
    ]


def _cells(price: Price, times_us: Sequence[float]) -> str:
    return "".join(f"{us:.1f} ({price.ratio(us):.2f})".rjust(CELL_WIDTH) for us in times_us)


def plot(prices: Sequence[Price], where: str, folder: Path) -> None:
    """A PNG of the ratios over shuffled blocks."""
    folder.mkdir(parents=True, exist_ok=True)
    lines = [
        PagingLine(
            f"{price.problem.name} ({price.backend} / {price.twin})",
            [price.ratio(us) for us in price.shuffled_us],
            price.problem.is_decode,
        )
        for price in prices
    ]
    plot_paging(lines, prices[0].block_sizes, f"The price of paging: {where}", folder / PLOT_NAME)
    print(f"plot: {folder / PLOT_NAME}", file=sys.stderr)
