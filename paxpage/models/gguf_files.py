"""GGUF files: the header (metadata and tensor table) and the tensors in it.

Format: the GGUF specification, version 2 and 3, little-endian. The header is read here in one pass over the mapped
file, because gguf.GGUFReader makes several numpy objects for each of a vocabulary's 100,000 strings (4 s against
0.1 s for SmolLM2); a test holds the two equal. Constants and dequantisation are the gguf library's.
"""

import math
import mmap
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import gguf
import numpy as np
from gguf import GGMLQuantizationType, GGUFValueType

from paxpage.config import require

READABLE_VERSIONS = (2, 3)
HEADER = struct.Struct("<4sIQQ")  # magic, version, number of tensors, number of metadata entries
LENGTH = struct.Struct("<Q")
UINT32 = struct.Struct("<I")
MAX_DIMS = 4
PLAIN_DTYPES: dict[int, np.dtype] = {
    GGMLQuantizationType.F32: np.dtype("<f4"),
    GGMLQuantizationType.F16: np.dtype("<f2"),
}
SCALAR_DTYPES: dict[int, np.dtype] = {
    GGUFValueType.UINT8: np.dtype("u1"),
    GGUFValueType.INT8: np.dtype("i1"),
    GGUFValueType.UINT16: np.dtype("<u2"),
    GGUFValueType.INT16: np.dtype("<i2"),
    GGUFValueType.UINT32: np.dtype("<u4"),
    GGUFValueType.INT32: np.dtype("<i4"),
    GGUFValueType.FLOAT32: np.dtype("<f4"),
    GGUFValueType.BOOL: np.dtype("?"),
    GGUFValueType.UINT64: np.dtype("<u8"),
    GGUFValueType.INT64: np.dtype("<i8"),
    GGUFValueType.FLOAT64: np.dtype("<f8"),
}


class GGUFTensor(NamedTuple):
    """One tensor's place in a file."""

    shape: tuple[int, ...]  # outermost first, in elements
    quantization: GGMLQuantizationType
    row_bytes: int  # of the last axis
    offset: int  # bytes from the start of the file
    num_bytes: int


class _Entry(NamedTuple):
    """One tensor as the header's table gives it."""

    shape: tuple[int, ...]
    kind: int
    offset: int  # from the end of the header


class GGUFFile(NamedTuple):
    """An opened file. data keeps the mapping alive for as long as any array drawn from it."""

    path: Path
    metadata: dict[str, Any]
    tensors: dict[str, GGUFTensor]
    data: np.ndarray  # uint8, the whole file
    buffer: mmap.mmap | None = None  # whose bytes data are, if they are mapped


def release_pages(file: GGUFFile) -> None:
    """Gives the memory of what was read back; it is read again where it is wanted again."""
    if file.buffer is not None and hasattr(mmap, "MADV_DONTNEED"):
        file.buffer.madvise(mmap.MADV_DONTNEED)


def open_gguf(path: str | Path) -> GGUFFile:
    """Maps a GGUF file and reads its header.

    Raises ValueError for a file that is not GGUF, of another version, damaged or cut short, one part of several, or
    with a tensor in a quantisation that the gguf library does not know.
    """
    path = Path(path)
    buffer = _map(path)
    try:
        metadata, table, end = _read_header(buffer)
    except (struct.error, UnicodeDecodeError, OverflowError, RecursionError) as error:
        raise ValueError(f"{path} is damaged, cut short or not GGUF: its header does not end ({error})") from error
    num_parts = metadata.get("split.count", 1)
    require(isinstance(num_parts, int) and num_parts <= 1, "split.count", num_parts, "1 (merge the parts first)")
    alignment = metadata.get("general.alignment", gguf.GGUF_DEFAULT_ALIGNMENT)
    require(isinstance(alignment, int) and alignment > 0, "general.alignment", alignment, "a positive integer")
    start = -(-end // alignment) * alignment
    tensors = {name: _place(path, name, entry, start) for name, entry in table.items()}
    for name, tensor in tensors.items():
        is_inside = tensor.offset + tensor.num_bytes <= len(buffer)
        require(
            is_inside, str(path), f"{len(buffer)} bytes", f"the {tensor.offset + tensor.num_bytes} that {name} ends at"
        )
    return GGUFFile(path, metadata, tensors, np.frombuffer(buffer, np.uint8), buffer)


def raw_rows(file: GGUFFile, name: str) -> np.ndarray:
    """A tensor's bytes, uint8 [num_rows, row_bytes], with all axes but the last folded into rows. Not a copy."""
    tensor = file.tensors[name]
    return file.data[tensor.offset : tensor.offset + tensor.num_bytes].reshape(-1, tensor.row_bytes)


def dequantizer(quantization: GGMLQuantizationType) -> Callable[[np.ndarray], np.ndarray]:
    """A function from raw rows (uint8, contiguous) to numbers. Raises ValueError for a type gguf cannot dequantise."""
    if quantization in PLAIN_DTYPES:
        return lambda rows: rows.view(PLAIN_DTYPES[quantization])
    traits: Any = getattr(gguf.quants, quantization.name, None)
    require(traits is not None, "quantisation", quantization.name, ", ".join(dequantizable()))
    # dequantize_rows takes what it is given in one go; gguf's dequantize cuts it into 16 rows a time, 3 times slower
    traits.init_grid()
    return traits.dequantize_rows


def dequantizable() -> list[str]:
    """Names of the tensor types that can be read."""
    names = [quantization.name for quantization in GGMLQuantizationType]
    return [name for name in names if hasattr(gguf.quants, name) or GGMLQuantizationType[name] in PLAIN_DTYPES]


def _map(path: Path) -> mmap.mmap:
    try:
        with path.open("rb") as file:
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} cannot be read as GGUF: {error}") from error


def _read_header(buffer: mmap.mmap) -> tuple[dict[str, Any], dict[str, _Entry], int]:
    """Metadata, the table of tensors, and where the header ends."""
    magic, version, num_tensors, num_entries = HEADER.unpack_from(buffer, 0)
    require(magic == b"GGUF", "first four bytes of the GGUF file", magic, "b'GGUF'")
    require(version in READABLE_VERSIONS, "GGUF version", version, "2, 3 (little-endian)")
    position = HEADER.size
    metadata: dict[str, Any] = {}
    table: dict[str, _Entry] = {}
    for _ in range(num_entries):
        key, position = _read_string(buffer, position)
        metadata[key], position = _read_value(buffer, position)
    for _ in range(num_tensors):
        name, position = _read_string(buffer, position)
        require(name not in table, "tensor name", name, "each name once")
        table[name], position = _read_tensor_entry(buffer, position)
    return metadata, table, position


def _read_string(buffer: mmap.mmap, position: int) -> tuple[str, int]:
    start = position + LENGTH.size
    end = start + LENGTH.unpack_from(buffer, position)[0]
    if end > len(buffer):
        raise struct.error(f"a string of {end - start} bytes at byte {start} of {len(buffer)}")
    return buffer[start:end].decode(), end


def _read_value(buffer: mmap.mmap, position: int) -> tuple[Any, int]:
    kind = UINT32.unpack_from(buffer, position)[0]
    position += UINT32.size
    if kind == GGUFValueType.STRING:
        return _read_string(buffer, position)
    if kind == GGUFValueType.ARRAY:
        return _read_array(buffer, position)
    values, position = _read_scalars(buffer, position, kind, 1)
    return values[0], position


def _read_array(buffer: mmap.mmap, position: int) -> tuple[list, int]:
    kind, length = UINT32.unpack_from(buffer, position)[0], LENGTH.unpack_from(buffer, position + UINT32.size)[0]
    position += UINT32.size + LENGTH.size
    if kind == GGUFValueType.STRING:
        return _read_strings(buffer, position, length)
    if kind != GGUFValueType.ARRAY:
        return _read_scalars(buffer, position, kind, length)
    arrays = []
    for _ in range(length):
        array, position = _read_array(buffer, position)
        arrays.append(array)
    return arrays, position


def _read_strings(buffer: mmap.mmap, position: int, length: int) -> tuple[list[str], int]:
    # _read_string written out: a vocabulary and its merges are 100,000 strings
    strings, unpack_length, size = [], LENGTH.unpack_from, len(buffer)
    for _ in range(length):
        start = position + 8
        position = start + unpack_length(buffer, position)[0]
        if position > size:
            raise struct.error(f"a string of {position - start} bytes at byte {start} of {size}")
        strings.append(buffer[start:position].decode())
    return strings, position


def _read_scalars(buffer: mmap.mmap, position: int, kind: int, length: int) -> tuple[list, int]:
    require(kind in SCALAR_DTYPES, "GGUF metadata value type", kind, "0 to 12, as in the GGUF specification")
    dtype = SCALAR_DTYPES[kind]
    end = position + length * dtype.itemsize
    if end > len(buffer):
        raise struct.error(f"{length} values at byte {position} of {len(buffer)}")
    return np.frombuffer(buffer[position:end], dtype).tolist(), end


def _read_tensor_entry(buffer: mmap.mmap, position: int) -> tuple[_Entry, int]:
    num_dims = UINT32.unpack_from(buffer, position)[0]
    require(1 <= num_dims <= MAX_DIMS, "number of dimensions of a GGUF tensor", num_dims, f"1 to {MAX_DIMS}")
    entry = struct.Struct(f"<{num_dims}QIQ")
    *dims, kind, offset = entry.unpack_from(buffer, position + UINT32.size)
    return _Entry(tuple(reversed(dims)), kind, offset), position + UINT32.size + entry.size


def _place(path: Path, name: str, entry: _Entry, start: int) -> GGUFTensor:
    is_known = entry.kind in GGMLQuantizationType
    require(is_known, f"quantisation of {name} in {path}", f"type {entry.kind}", ", ".join(dequantizable()))
    quantization = GGMLQuantizationType(entry.kind)
    block_size, block_bytes = gguf.GGML_QUANT_SIZES[quantization]
    row_length = entry.shape[-1]
    is_whole = row_length % block_size == 0
    require(min(entry.shape) > 0, f"shape of {name} in {path}", entry.shape, "dimensions of at least 1")
    require(is_whole, f"row length of {name}", row_length, f"a multiple of {block_size} for {quantization.name}")
    row_bytes = row_length // block_size * block_bytes
    num_bytes = math.prod(entry.shape[:-1]) * row_bytes
    return GGUFTensor(entry.shape, quantization, row_bytes, start + entry.offset, num_bytes)
