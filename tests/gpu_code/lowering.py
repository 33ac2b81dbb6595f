"""Lowering for an NVIDIA GPU where there is none."""

import contextlib
from collections.abc import Iterator

from jax.sharding import AbstractDevice, AbstractMesh, use_abstract_mesh


@contextlib.contextmanager
def as_h200() -> Iterator[None]:
    """Within it Pallas's Triton backend lowers for an H200."""
    device = AbstractDevice(device_kind="NVIDIA H200", num_cores=None, platform="gpu")
    with use_abstract_mesh(AbstractMesh((), (), abstract_device=device)):
        yield
