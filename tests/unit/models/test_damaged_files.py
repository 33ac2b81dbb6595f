"""Damaged model files, at random: a ValueError that names the file, or another model; no crash, no flood of memory."""

import json
import re
import shutil
import struct
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from paxpage.models.loading import LoadOptions, load_model, open_model
from tests.unit.models.checkpoints import read_hf, write_gguf
from tests.unit.models.conftest import Saver

QUIET = LoadOptions(show_progress=False)
MAX_PEAK_BYTES = 64 * 2**20
HUGE = [struct.pack("<Q", number) for number in (2**31 - 1, 2**32, 2**40, 2**62, 2**63 - 1, 2**64 - 1)]

Damage = Callable[[bytes], bytes]


@st.composite
def damages(draw: st.DrawFn, num_header_bytes: int, places: list[int]) -> Damage:
    """Ways to damage a file: a bit, a length that is huge, bytes gone or doubled, the end gone. Mostly in its header.

    places: where numbers are that sizes follow from.
    """
    anywhere = st.integers(0, num_header_bytes - 1)
    place = draw(st.one_of(st.sampled_from(places), anywhere) if places else anywhere)
    kind = draw(st.sampled_from(["bit", "huge", "gone", "doubled", "end"]))
    if kind == "bit":
        bit = draw(st.integers(0, 7))
        return lambda whole: whole[:place] + bytes([whole[place] ^ 1 << bit]) + whole[place + 1 :]
    if kind == "huge":
        number = draw(st.sampled_from(HUGE))[: draw(st.sampled_from([4, 8]))]
        return lambda whole: whole[:place] + number + whole[place + len(number) :]
    length = draw(st.integers(1, 40))
    if kind == "gone":
        return lambda whole: whole[:place] + whole[place + length :]
    if kind == "doubled":
        return lambda whole: whole[: place + length] + whole[place:]
    share = draw(st.floats(0, 1))
    return lambda whole: whole[: int(share * len(whole))]


def check_damaged(path: Path, whole: bytes, damage: Damage) -> bool:
    """Loads the damaged file; whether it was refused, which its error then says by name."""
    path.write_bytes(damage(whole))
    tracemalloc.start()
    try:
        load_model(str(path if path.suffix == ".gguf" else path.parent), QUIET)
    except ValueError as error:
        assert str(path if path.suffix == ".gguf" else path.parent) in str(error), error
        return True
    finally:
        _, peak_bytes = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert peak_bytes < MAX_PEAK_BYTES
    return False


def run_fuzz(path: Path, places: list[int], num_header_bytes: int, num_examples: int = 100) -> None:
    """Hypothesis over check_damaged; most damage must be seen."""
    whole = path.read_bytes()
    seen: list[bool] = []

    @settings(max_examples=num_examples, suppress_health_check=list(HealthCheck), database=None, derandomize=True)
    @given(damage=damages(num_header_bytes, places))
    def fuzz(damage: Damage) -> None:
        seen.append(check_damaged(path, whole, damage))

    fuzz()
    assert sum(seen) > 0.4 * len(seen)


def value_places(whole: bytes) -> list[int]:
    """Where the values of a GGUF file's numbers of layers, heads and sizes are, and its first counts."""
    keys = ("block_count", "embedding_length", "feed_forward_length", "head_count", "head_count_kv", "context_length")
    ends = [match.end() for key in keys for match in re.finditer(rf"llama\.\S*?{key}(?=\x04)".encode(), whole)]
    assert len(ends) >= len(keys) - 1
    return [8, 16, *(end + 4 for end in ends)]


def test_gguf(saved: Saver, tmp_path: Path) -> None:
    tensors = read_hf(saved("LlamaForCausalLM"))
    metadata: dict[str, Any] = {"tokenizer.ggml.tokens": ["a", "b"], "n": [1, 2, 3]}
    path = write_gguf(tmp_path / "damaged.gguf", tensors, metadata=metadata)
    whole = path.read_bytes()
    run_fuzz(path, value_places(whole), num_header_bytes=whole.index(b"output_norm") + 40, num_examples=60)


@pytest.fixture
def folder(saved: Saver, tmp_path: Path) -> Path:
    return Path(shutil.copytree(saved("LlamaForCausalLM"), tmp_path / "damaged"))


def test_safetensors(folder: Path) -> None:
    path = folder / "model.safetensors"
    num_header_bytes = 8 + struct.unpack("<Q", path.read_bytes()[:8])[0]
    run_fuzz(path, [0], num_header_bytes)


def test_config(folder: Path) -> None:
    path = folder / "config.json"
    whole = path.read_bytes()
    run_fuzz(path, [], len(whole))


@pytest.mark.parametrize("field", ["num_hidden_layers", "vocab_size", "hidden_size", "head_dim", "num_attention_heads"])
@pytest.mark.parametrize("number", [0, -1, 2**31, 2**63, 2**70])
def test_sizes_of_a_config(folder: Path, field: str, number: int) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), field: number}))
    with pytest.raises(ValueError, match=re.escape(str(folder))):
        open_model(str(folder), QUIET)
