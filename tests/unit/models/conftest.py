"""Checkpoints that several test modules read; each is written once."""

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.unit.models.checkpoints import save_hf

Saver = Callable[..., Path]


@pytest.fixture(scope="session")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Saver:
    """save_hf without the folder: the same arguments give the same folder, which tests must not change."""
    folders: dict[str, Path] = {}

    def save(architecture: str, **options: object) -> Path:
        key = f"{architecture} {sorted(options.items())}"
        if key not in folders:
            folders[key] = save_hf(tmp_path_factory.mktemp("hf"), architecture, **options)
        return folders[key]

    return save
