"""Case 31: what a config says is applied, however it is spelled, or refused by name. After lablup/mlxcel#1355."""

import contextlib
import dataclasses
import io
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy

from paxpage import LLM
from paxpage.config import ModelConfig, RopeScaling
from paxpage.models.loading import LoadOptions, load_model, open_model
from paxpage.models.registry import Params
from tests.helpers.checkpoints import LLAMA3_ROPE, TINY, Checkpoint, write_checkpoint
from tests.helpers.oracle import logits_of
from tests.helpers.paged_run import PagedRun

PROMPT = [(3 + 31 * j) % 512 for j in range(400)]
POSITIONS = [0, 15, 63, 64, 399]
TOLERANCE = 1e-4
QUIET = LoadOptions(show_progress=False)
SCALED = Checkpoint("scaled", "Llama", {"rope_parameters": LLAMA3_ROPE})
CHECKPOINTS = {
    "llama3 rope": SCALED,
    "llama3 rope, head_dim not hidden/heads": Checkpoint(
        "wide", "Llama", {"rope_parameters": LLAMA3_ROPE, "head_dim": 32}
    ),
    "tied": Checkpoint("tied", "Llama", {"tie_word_embeddings": True}),
    "untied": TINY,
}


def _load(folder: Path) -> tuple[ModelConfig, Params]:
    loaded = load_model(str(folder), QUIET)
    return loaded.config, loaded.params


def _logits(config: ModelConfig, params: Params, budget: int) -> np.ndarray:
    (trace,) = PagedRun(config, params, max_num_seqs=1, num_blocks=32).run([PROMPT], 1, budget)
    return trace.logits


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_logits_of_a_long_prompt(name: str, tmp_path: Path) -> None:
    """At once and in chunks of 16, within 1e-4 of transformers at borders and far out."""
    oracle = write_checkpoint(tmp_path, CHECKPOINTS[name])
    config, params = _load(tmp_path)
    expected = logits_of(oracle, PROMPT)
    for budget in (512, 16):
        logits = _logits(config, params, budget)
        np.testing.assert_allclose(logits[POSITIONS], expected[POSITIONS], rtol=0, atol=TOLERANCE)
        np.testing.assert_allclose(logits, expected, rtol=0, atol=TOLERANCE)


@pytest.fixture(scope="module")
def scaled_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("scaled")
    write_checkpoint(folder, SCALED)
    return folder


def _respelled(folder: Path, target: Path, changes: dict[str, Any]) -> Path:
    """A copy with entries of its config replaced; None removes one."""
    shutil.copytree(folder, target, dirs_exist_ok=True)
    config = json.loads((target / "config.json").read_text())
    config.update(changes)
    kept = {key: value for key, value in config.items() if value is not None}
    (target / "config.json").write_text(json.dumps(kept))
    return target


OTHER_FIELDS = {key: value for key, value in LLAMA3_ROPE.items() if key != "rope_type"}
SPELLINGS = {
    "rope_scaling with rope_type": {"rope_scaling": LLAMA3_ROPE, "rope_theta": 10000.0, "rope_parameters": None},
    "rope_scaling with type": {
        "rope_scaling": {**OTHER_FIELDS, "type": "llama3"},
        "rope_theta": 10000.0,
        "rope_parameters": None,
    },
    "rope_parameters": {"rope_parameters": {**LLAMA3_ROPE, "rope_theta": 10000.0}},
    "rope_parameters with type": {"rope_parameters": {**OTHER_FIELDS, "type": "llama3", "rope_theta": 10000.0}},
}


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_every_spelling_is_the_same_model(spelling: str, scaled_folder: Path, tmp_path: Path) -> None:
    """One ModelConfig, so one compiled model: the numbers above are theirs too."""
    folder = _respelled(scaled_folder, tmp_path, SPELLINGS[spelling])
    config = open_model(str(folder), QUIET).config
    assert config == open_model(str(scaled_folder), QUIET).config
    assert config.rope_scaling == RopeScaling(8.0, 1.0, 4.0, 64)


def test_the_scaling_matters(scaled_folder: Path) -> None:
    """Left out, it would be seen: already within the original context, and more so past it."""
    config, params = _load(scaled_folder)
    with_scaling = _logits(config, params, 512)
    without = _logits(dataclasses.replace(config, rope_scaling=None), params, 512)
    difference = np.abs(with_scaling - without).max(axis=-1)
    assert difference[0] < TOLERANCE
    assert difference[15] > 100 * TOLERANCE and difference[399] > 100 * TOLERANCE


@pytest.mark.parametrize("key", ["rope_type", "type"])
@pytest.mark.parametrize("entry", ["rope_scaling", "rope_parameters"])
def test_an_unknown_rope_type_stops_the_start_by_name(
    entry: str, key: str, scaled_folder: Path, tmp_path: Path
) -> None:
    changes = {"rope_parameters": None, entry: {**OTHER_FIELDS, key: "longcat"}}
    folder = _respelled(scaled_folder, tmp_path, changes)
    with pytest.raises(ValueError, match=r"rope_type is 'longcat'; allowed: default, llama3"):
        LLM(str(folder), show_progress=False)


def test_a_missing_head_is_an_error_and_never_random(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, TINY)
    _drop_tensor(tmp_path, "lm_head.weight")
    with pytest.raises(ValueError, match=r"lm_head\.weight \[512, 144\] is missing"):
        LLM(str(tmp_path), show_progress=False)


def test_a_tied_checkpoint_holds_no_head(tmp_path: Path) -> None:
    """As transformers writes it; the test above then shows that the flag decides."""
    write_checkpoint(tmp_path, CHECKPOINTS["tied"])
    assert "lm_head.weight" not in safetensors.numpy.load_file(tmp_path / "model.safetensors")
    folder = _respelled(tmp_path, tmp_path / "untied", {"tie_word_embeddings": False})
    with pytest.raises(ValueError, match=r"lm_head\.weight \[512, 144\] is missing"):
        open_model(str(folder), QUIET)


def _drop_tensor(folder: Path, name: str) -> None:
    path = folder / "model.safetensors"
    tensors = safetensors.numpy.load_file(path)
    del tensors[name]
    with contextlib.redirect_stderr(io.StringIO()):
        safetensors.numpy.save_file(tensors, path, metadata={"format": "pt"})
