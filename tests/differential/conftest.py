"""The checkpoints, each written and loaded once."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.differential.models import CHECKPOINTS
from tests.helpers.checkpoints import Checkpoint, write_checkpoint
from tests.helpers.fixtures import shelf, unchecked_types

__all__ = ["shelf", "unchecked_types"]


class Family(NamedTuple):
    """A checkpoint on disk and transformers' model of it."""

    name: str
    folder: Path
    oracle: Any


@pytest.fixture(scope="module", params=CHECKPOINTS, ids=lambda checkpoint: checkpoint.name)
def family(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Family]:
    """Each of models.CHECKPOINTS in turn."""
    checkpoint: Checkpoint = request.param
    folder = tmp_path_factory.mktemp("family") / checkpoint.name
    yield Family(checkpoint.name, folder, write_checkpoint(folder, checkpoint))
