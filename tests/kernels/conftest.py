"""The backends that every test of the contract runs on."""

from collections.abc import Iterator

import pytest

GPU_BACKENDS = ("triton", "mosaic")  # the rest run anywhere, triton_interpret among them
TEST_BACKENDS = ("reference", "triton_interpret")  # what others are measured by, or tried out with; never served from


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """A test of `backend` runs on each of its module's BACKENDS: one that is added to them inherits the suite.

    A test of `serving_backend` leaves out those that only tests use. Modules that name no BACKENDS are about
    paged_attention.
    """
    # Imported here: the root conftest gives JAX its settings after this file has been read.
    from pallas_kernels.paged_attention import api

    backends = getattr(metafunc.module, "BACKENDS", api.BACKENDS)
    kinds = {"backend": sorted(backends), "serving_backend": sorted(set(backends) - set(TEST_BACKENDS))}
    for argument in kinds.keys() & set(metafunc.fixturenames):
        marks = {name: [pytest.mark.gpu] if name in GPU_BACKENDS else [] for name in kinds[argument]}
        metafunc.parametrize(argument, [pytest.param(name, marks=found) for name, found in marks.items()])


@pytest.fixture(autouse=True)
def quickly_compiled(request: pytest.FixtureRequest) -> Iterator[None]:
    """XLA does not optimise what stands for Triton's code, which nobody is served from: it takes half the time."""
    import jax  # after the root conftest's settings

    callspec = getattr(request.node, "callspec", None)
    is_interpreted = callspec is not None and callspec.params.get("backend") == "triton_interpret"
    before = jax.config.read("jax_disable_most_optimizations")
    jax.config.update("jax_disable_most_optimizations", is_interpreted)
    yield
    jax.config.update("jax_disable_most_optimizations", before)
