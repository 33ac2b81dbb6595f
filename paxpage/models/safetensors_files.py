"""Checkpoints in safetensors files: one file, or several with an index."""

import math
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open

from paxpage.config import require
from paxpage.models.checkpoint import TensorInfo
from paxpage.models.hf_config import read_json

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"
PICKLE_SUFFIXES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
DTYPE_BYTES = {"F32": 4, "F16": 2, "BF16": 2}
DTYPE_NAMES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}


class SafetensorsCheckpoint:
    """The safetensors files of one folder, mapped; tensors are read a few rows at a time.

    tensors: what the headers say, by name. dtype: of the largest tensor, as ModelConfig spells it.
    """

    chunk_elements = 2**20  # few calls: 2.5 GB take 2.3 s of CPU, 8.2 in chunks of 2**16

    def __init__(self, folder: Path) -> None:
        """Reads the headers. Raises ValueError for missing, pickled or damaged files and unknown dtypes."""
        self.tensors: dict[str, TensorInfo] = {}
        self._paths: dict[str, Path] = {}
        self._mapped: dict[Path, safe_open] = {}
        dtypes = {}
        for path in tensor_files(folder):
            file = _open(path)
            for name in file.keys():  # noqa: SIM118  (not a dict)
                self.tensors[name], dtypes[name] = _describe(file, name, path)
                self._paths[name] = path
        require(bool(self.tensors), str(folder), "no tensors", "at least one")
        self.dtype = DTYPE_NAMES[dtypes[max(self.tensors, key=lambda name: self.tensors[name].num_bytes)]]

    def read_rows(self, name: str, start: int, stop: int) -> np.ndarray:
        """Rows [start, stop) of axis 0, in the file's own dtype."""
        path = self._paths[name]
        file = self._mapped.get(path)
        if file is None:  # two threads may map it, of which one's mapping is kept
            file = self._mapped[path] = _open(path)
        return file.get_slice(name)[start:stop]

    def release(self) -> None:
        """Unmaps the files; the next read maps its own again."""
        self._mapped.clear()


def tensor_files(folder: Path) -> list[Path]:
    """The safetensors files that hold a model: those of the index, else model.safetensors, else the only one there.

    Raises ValueError if there is none (naming pickled files, which are never opened), or a file of the index is gone.
    """
    if (folder / INDEX_NAME).exists():
        return _indexed_files(folder)
    found = sorted(folder.glob("*.safetensors"))
    if folder / SINGLE_NAME in found:
        return [folder / SINGLE_NAME]
    if not found:
        pickled = sorted(path.name for path in folder.iterdir() if path.suffix in PICKLE_SUFFIXES)
        what = f"pickled checkpoint {', '.join(pickled)}" if pickled else "no *.safetensors"
        require(False, str(folder), what, "safetensors files (pickled ones can run code when opened; convert them)")
    names = [path.name for path in found]
    require(len(found) == 1, str(folder), names, f"one safetensors file, or several with {INDEX_NAME}")
    return found


def _indexed_files(folder: Path) -> list[Path]:
    weight_map: Any = read_json(folder / INDEX_NAME).get("weight_map")
    is_map = isinstance(weight_map, dict) and all(isinstance(name, str) for name in weight_map.values())
    require(is_map, f"weight_map in {folder / INDEX_NAME}", weight_map, "tensor names to file names")
    names = sorted(set(weight_map.values()))
    outside = [name for name in names if Path(name).name != name]
    require(not outside, f"weight_map in {folder / INDEX_NAME}", outside, "files of the same folder")
    missing = [name for name in names if not (folder / name).exists()]
    require(not missing, str(folder), f"without {', '.join(missing)}", f"every file that {INDEX_NAME} names")
    return [folder / name for name in names]


def _open(path: Path) -> safe_open:
    try:
        return safe_open(path, framework="numpy")
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{path} is damaged, cut short or not safetensors: {error}") from error


def _describe(file: safe_open, name: str, path: Path) -> tuple[TensorInfo, str]:
    entry = file.get_slice(name)
    dtype, shape = entry.get_dtype(), tuple(entry.get_shape())
    require(dtype in DTYPE_BYTES, f"dtype of {name} in {path}", dtype, ", ".join(DTYPE_BYTES))
    return TensorInfo(shape, math.prod(shape) * DTYPE_BYTES[dtype]), dtype
