"""The servers that tests share, each started once."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.helpers.fixtures import shelf
from tests.server.process import ServerProcess
from tests.server.tiny import make_tiny

__all__ = ["shelf"]

# Few shapes to compile; 48 tokens a step is no power of two, and prompts of more come in chunks.
SMALL = ("--max_num_seqs=4", "--max_num_batched_tokens=48")


@pytest.fixture(scope="session")
def tiny_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The TINY checkpoint."""
    return make_tiny(tmp_path_factory.mktemp("tiny") / "TINY")


@pytest.fixture(scope="session")
def shared_tiny(tiny_dir: Path) -> Iterator[ServerProcess]:
    """A server of TINY for the whole session."""
    with ServerProcess(f"--model={tiny_dir}", *SMALL, "--tool_call_parser=none") as server:
        yield server.wait_ready()


@pytest.fixture
def tiny(shared_tiny: ServerProcess) -> Iterator[ServerProcess]:
    """The shared server, found and left idle."""
    shared_tiny.wait_idle()
    yield shared_tiny
    shared_tiny.wait_idle()
    assert "Traceback" not in shared_tiny.log()
