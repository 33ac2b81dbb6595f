"""Fixtures that test folders share by importing them in their conftest."""

from collections.abc import Iterator

import jaxtyping
import pytest

from tests.helpers.shelf import Shelf

SHELF = pytest.StashKey[Shelf]()


@pytest.fixture(autouse=True)
def unchecked_types() -> Iterator[None]:
    """Turns the run-time type checks off within tests, where thousands of steps run and bad values are given.

    Checks on every host function make a step tens of times slower, and would refuse a bad option before paxpage does.
    Fixtures of a wider scope, where models are built and traced, come first and keep their checks.
    """
    before = jaxtyping.config.jaxtyping_disable
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", before)


@pytest.fixture(scope="session")
def shelf(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Shelf:
    """One shelf for the whole session, whichever conftest imports this fixture."""
    stash = request.config.stash
    if SHELF not in stash:
        stash[SHELF] = Shelf(tmp_path_factory.mktemp("shelf"))
        request.config.add_cleanup(stash[SHELF].close)
    return stash[SHELF]
