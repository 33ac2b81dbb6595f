"""The one list of attention shapes: tests, benchmarks and tuning all read it.

A shape is a head layout, a block size and the rows of one step. CONTRACT is small and made of borders, for tests of
every backend; WORKLOADS is what serving real models looks like, for benchmarks and tuning.
"""

from typing import NamedTuple


class Row(NamedTuple):
    """One request's part in a step."""

    context: int  # tokens whose keys and values the cache held before the step
    num_new: int  # tokens of the step itself: the row's queries

    @property
    def seq_len(self) -> int:
        """Tokens in the cache once the step has written its own."""
        return self.context + self.num_new


class AttentionShape(NamedTuple):
    """One call of paged_attention. When every row has one new token it is a decode step."""

    name: str
    num_heads: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    rows: tuple[Row, ...]

    @property
    def is_decode(self) -> bool:
        """Whether each row has exactly one query."""
        return all(row.num_new == 1 for row in self.rows)

    @property
    def num_tokens(self) -> int:
        """Queries of the step."""
        return sum(row.num_new for row in self.rows)

    @property
    def num_blocks(self) -> int:
        """Blocks that the rows hold together."""
        return sum(-(-row.seq_len // self.block_size) for row in self.rows)


class HeadLayout(NamedTuple):
    """Heads of a model and their size."""

    num_heads: int
    num_kv_heads: int
    head_dim: int

    @property
    def name(self) -> str:
        """For example 9x3x64."""
        return "x".join(map(str, self))


# Small models' layouts first; then those whose head size is no power of two, or the largest; then odd small ones.
HEAD_LAYOUTS = (
    HeadLayout(9, 3, 64),
    HeadLayout(14, 2, 64),
    HeadLayout(32, 8, 128),
    HeadLayout(8, 1, 256),
    HeadLayout(5, 1, 80),
    HeadLayout(6, 2, 96),
    HeadLayout(4, 4, 16),
    HeadLayout(7, 7, 40),
)
BLOCK_SIZES = (16, 16, 16, 16, 8, 32, 64, 128)  # of each layout: together all that are supported
BORDER_LENGTHS = (1, 15, 16, 17, 33, 130)  # around the borders of 16-token blocks, and past a chunk of 128 keys


def _rows(*pairs: tuple[int, int]) -> tuple[Row, ...]:
    return tuple(Row(*pair) for pair in pairs)


STEP_KINDS = {
    "decode": tuple(Row(length - 1, 1) for length in BORDER_LENGTHS),
    "prefill": _rows((0, 16), (0, 130), (0, 1)),
    # Chunks of 16 and others, that begin and end on either side of a border.
    "chunked": _rows((16, 16), (15, 2), (1, 16), (17, 16), (31, 33), (114, 16)),
    "mixed": _rows((129, 1), (0, 17), (15, 1), (16, 33), (0, 15), (16, 1), (0, 33)),
}


def _contract(layout: HeadLayout, block_size: int) -> list[AttentionShape]:
    return [
        AttentionShape(f"{kind}-{layout.name}-block{block_size}", *layout, block_size, rows)
        for kind, rows in STEP_KINDS.items()
    ]


# Every kind of step for every layout, each at a block size of its own: a shape is a compilation for every backend.
CONTRACT = tuple(shape for pair in zip(HEAD_LAYOUTS, BLOCK_SIZES, strict=True) for shape in _contract(*pair))

_LLAMA_8B = HeadLayout(32, 8, 128)
_SMOLLM2_135M = HeadLayout(9, 3, 64)


def _workload(name: str, layout: HeadLayout, rows: tuple[Row, ...], block_size: int = 16) -> AttentionShape:
    return AttentionShape(name, *layout, block_size, rows)


def _decode(num_rows: int, seq_len: int) -> tuple[Row, ...]:
    return (Row(seq_len - 1, 1),) * num_rows


WORKLOADS = (
    _workload("8b-decode-1x4096", _LLAMA_8B, _decode(1, 4096)),
    _workload("8b-decode-32x4096", _LLAMA_8B, _decode(32, 4096)),
    _workload("8b-decode-128x1024", _LLAMA_8B, _decode(128, 1024)),
    _workload("8b-decode-64x4096-block64", _LLAMA_8B, _decode(64, 4096), 64),
    _workload("8b-decode-uneven", _LLAMA_8B, tuple(Row(255 + 61 * index, 1) for index in range(64))),
    _workload("8b-prefill-1x4096", _LLAMA_8B, _rows((0, 4096))),
    _workload("8b-prefill-4x4096", _LLAMA_8B, _rows(*[(0, 4096)] * 4)),
    _workload("8b-chunk-2048-after-6144", _LLAMA_8B, _rows((6144, 2048))),
    _workload("8b-mixed", _LLAMA_8B, _decode(32, 2048) + _rows((0, 1024), (1024, 512))),
    _workload("135m-decode-8x512", _SMOLLM2_135M, _decode(8, 512)),
    _workload("135m-prefill-1x512", _SMOLLM2_135M, _rows((0, 512))),
)
