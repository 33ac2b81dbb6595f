"""The backends that every test of the contract runs on."""

import pytest

GPU_BACKENDS = ("triton", "mosaic")  # the rest run anywhere, triton_interpret among them
TEST_BACKENDS = ("reference", "triton_interpret")  # what others are measured by, or tried out with; never served from


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """A test of `backend` runs on each of BACKENDS: one that is added there inherits the suite.

    A test of `serving_backend` leaves out those that only tests use.
    """
    # Imported here: the root conftest gives JAX its settings after this file has been read.
    from pallas_kernels.paged_attention.api import BACKENDS

    kinds = {"backend": sorted(BACKENDS), "serving_backend": sorted(set(BACKENDS) - set(TEST_BACKENDS))}
    for argument in kinds.keys() & set(metafunc.fixturenames):
        marks = {name: [pytest.mark.gpu] if name in GPU_BACKENDS else [] for name in kinds[argument]}
        metafunc.parametrize(argument, [pytest.param(name, marks=found) for name, found in marks.items()])
