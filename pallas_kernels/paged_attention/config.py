"""Tile sizes of the GPU kernels: frozen, typed, chosen by pure functions of the shape."""

import dataclasses
from typing import Any

import numpy as np

BLOCK_SIZES = (8, 16, 32, 64, 128)
MIN_DOT = 16  # a Triton dot wants 16 along each axis


def next_power_of_2(n: int) -> int:
    """The smallest power of 2 that is at least n."""
    return 1 << max(0, n - 1).bit_length()


@dataclasses.dataclass(frozen=True)
class Geometry:
    """What a kernel must know of the arrays it is given."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    dtype: str  # of q and of the output
    cache_dtype: str

    @classmethod
    def of(cls, q: Any, k_cache: Any) -> "Geometry":
        """Of paged_attention's arrays."""
        _, _, num_kv_heads, block_size, head_dim = k_cache.shape
        return cls(q.shape[1], num_kv_heads, head_dim, block_size, q.dtype.name, k_cache.dtype.name)

    @property
    def group(self) -> int:
        """Query heads that read one key head."""
        return self.num_heads // self.num_kv_heads

    @property
    def padded_dim(self) -> int:
        """head_dim up to a power of 2, as Triton's tiles want."""
        return max(MIN_DOT, next_power_of_2(self.head_dim))

    @property
    def item_bytes(self) -> int:
        """Bytes of a cache element."""
        return np.dtype(np.float32).itemsize if self.cache_dtype == "float32" else 2


@dataclasses.dataclass(frozen=True)
class DecodeConfig:
    """Tiles of the decode kernel."""

    tile_keys: int  # keys loaded at a time, a power of 2
    num_splits: int  # pieces that each row's keys are cut into, merged afterwards when more than 1
    num_warps: int
    num_stages: int

    def __post_init__(self) -> None:
        assert self.tile_keys == next_power_of_2(self.tile_keys) >= MIN_DOT, self.tile_keys
        assert self.num_splits >= 1, self.num_splits


@dataclasses.dataclass(frozen=True)
class PrefillConfig:
    """Tiles of the prefill kernel."""

    tile_rows: int  # queries times heads of a group, a power of 2
    tile_keys: int
    num_warps: int
    num_stages: int

    def __post_init__(self) -> None:
        assert self.tile_rows == next_power_of_2(self.tile_rows) >= MIN_DOT, self.tile_rows
        assert self.tile_keys == next_power_of_2(self.tile_keys) >= MIN_DOT, self.tile_keys


def decode_queries(geometry: Geometry) -> int:
    """Most queries of one row that the decode kernel takes: those that fill its smallest tile."""
    return max(1, MIN_DOT // geometry.group)


def decode_config(geometry: Geometry, num_rows: int, max_keys: int) -> DecodeConfig:
    """As measured on an H200 with 8 key heads of 128 (BUILD_NOTES.md, 2026-11-29).

    Without splits there is no merge, which pays from about 192 programs on. Many programs hide each other's latency
    with small tiles; few want large ones.
    """
    num_programs = num_rows * geometry.num_kv_heads
    is_wide = geometry.padded_dim * geometry.item_bytes > 256
    if num_programs >= 384:
        return DecodeConfig(32 if is_wide else 64, 1, num_warps=2, num_stages=2)
    tile_keys = 32 if is_wide else 128
    wanted = 1 if num_programs >= 192 else next_power_of_2(128 // num_programs)
    num_splits = min(wanted, 16, most_splits(tile_keys, max_keys))
    return DecodeConfig(tile_keys, num_splits, num_warps=2 if num_splits == 1 else 4, num_stages=3)


def most_splits(tile_keys: int, max_keys: int) -> int:
    """Pieces of two tiles at least that the longest row can be cut into."""
    return max(1, max_keys // (2 * tile_keys))


def prefill_config(geometry: Geometry) -> PrefillConfig:
    """The largest tiles whose registers do not spill; 128 rows of 64 keys in 16 bits, smaller in 32 bits.

    On an H200 a third stage is 10% faster for heads of 128 (374 against 339 TFLOP/s), but spills.
    """
    most_rows, tile_keys, num_warps = 128, 64, 4
    if geometry.item_bytes == 4:
        most_rows, tile_keys, num_warps = 32, 16 if geometry.padded_dim > 64 else 32, 8
    elif geometry.padded_dim > 128:
        most_rows, tile_keys = 64, 32
    elif geometry.padded_dim != geometry.head_dim:
        most_rows = 64
    return PrefillConfig(max(most_rows, next_power_of_2(geometry.group)), tile_keys, num_warps, num_stages=2)
