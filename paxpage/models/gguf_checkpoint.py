"""A GGUF file's tensors under the names and in the row order that other checkpoints use."""

import numpy as np

from paxpage.config import ModelConfig
from paxpage.models.checkpoint import TensorInfo
from paxpage.models.gguf_config import ROPE_FACTORS, checkpoint_name, family
from paxpage.models.gguf_files import GGUFFile, dequantizer, raw_rows, release_pages


class GGUFCheckpoint:
    """tensors: what the header says, under checkpoint names (a name that GGUF does not share is kept as it is)."""

    chunk_elements = 2**16  # a chunk and its temporaries stay in a core's cache

    def __init__(self, file: GGUFFile, config: ModelConfig) -> None:
        """Raises ValueError if a tensor's quantisation cannot be dequantised."""
        names = {checkpoint_name(name): name for name in file.tensors if name != ROPE_FACTORS}
        self.tensors = {
            name: TensorInfo(file.tensors[own].shape, file.tensors[own].num_bytes) for name, own in names.items()
        }
        self._file = file
        self._raw = {name: raw_rows(file, own) for name, own in names.items()}
        self._dequantize = {name: dequantizer(file.tensors[own].quantization) for name, own in names.items()}
        self._row_order: dict[str, np.ndarray] = {}
        if family(file).is_interleaved:
            self._row_order = {
                name: _halved_row_order(len(rows), config.head_dim)
                for name, rows in self._raw.items()
                if name.endswith(("q_proj.weight", "k_proj.weight")) and len(rows) % config.head_dim == 0
            }

    def read_rows(self, name: str, start: int, stop: int) -> np.ndarray:
        """Rows [start, stop) of axis 0 as numbers; a vector counts as so many rows of one."""
        raw = self._raw[name]
        if len(self.tensors[name].shape) == 1:
            return self._dequantize[name](np.array(raw)).reshape(-1)[start:stop]
        order = self._row_order.get(name)
        rows = np.array(raw[start:stop]) if order is None else raw[order[start:stop]]
        return self._dequantize[name](rows)

    def release(self) -> None:
        """Gives the memory of the file's pages back."""
        release_pages(self._file)


def _halved_row_order(num_rows: int, head_dim: int) -> np.ndarray:
    """Where row i of a projection with rotated halves lies in one with rotated pairs.

    llama.cpp rotates dimensions 2j and 2j + 1 together, so its converter moves row j of a head to 2j and row
    j + head_dim / 2 to 2j + 1.
    """
    return np.arange(num_rows).reshape(-1, head_dim // 2, 2).swapaxes(1, 2).reshape(-1)
