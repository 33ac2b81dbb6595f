"""Lowering for an NVIDIA GPU where there is none."""

import contextlib
from collections.abc import Iterator

from jax.sharding import AbstractDevice, AbstractMesh, use_abstract_mesh


def as_h200() -> contextlib.AbstractContextManager[None]:
    """Within it Pallas's Triton backend lowers for an H200."""
    return as_gpu("NVIDIA H200")


@contextlib.contextmanager
def as_gpu(device_kind: str) -> Iterator[None]:
    """The same for a GPU of another name."""
    device = AbstractDevice(device_kind=device_kind, num_cores=None, platform="gpu")
    with use_abstract_mesh(AbstractMesh((), (), abstract_device=device)):
        yield
