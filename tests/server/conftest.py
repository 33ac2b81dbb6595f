"""The servers that tests share, each started once."""

from collections.abc import Iterator
from pathlib import Path

import openai
import pytest

from tests.helpers.fixtures import shelf
from tests.server.parrot import make_parrot
from tests.server.process import ServerProcess
from tests.server.tiny import make_tiny

__all__ = ["shelf"]

# Few shapes to compile; 48 tokens a step is no power of two, and prompts of more come in chunks.
SMALL = ("--max_num_seqs=4", "--max_num_batched_tokens=48")

PARROT_KEY = "key-of-parrot"


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


@pytest.fixture(scope="session")
def parrot_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The PARROT checkpoint."""
    return make_parrot(tmp_path_factory.mktemp("parrot") / "PARROT")


@pytest.fixture(scope="session")
def shared_parrot(parrot_dir: Path) -> Iterator[ServerProcess]:
    """A server of PARROT for the whole session, with an API key and a log of JSON."""
    flags = (f"--model={parrot_dir}", *SMALL, "--log_format=json")
    with ServerProcess(*flags, env={"PAXPAGE_API_KEY": PARROT_KEY}) as server:
        server.client.headers["Authorization"] = f"Bearer {PARROT_KEY}"
        yield server.wait_ready()


@pytest.fixture
def parrot(shared_parrot: ServerProcess) -> Iterator[ServerProcess]:
    """The shared server, left idle."""
    yield shared_parrot
    shared_parrot.wait_idle()
    assert "Traceback" not in shared_parrot.log()


@pytest.fixture
def client(parrot: ServerProcess) -> Iterator[openai.OpenAI]:
    """The openai client of PARROT's server."""
    with openai.OpenAI(base_url=f"{parrot.url}/v1", api_key=PARROT_KEY, max_retries=0) as client:
        yield client
