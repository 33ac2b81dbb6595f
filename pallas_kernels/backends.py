"""Which backend a kernel uses unless it is told."""

import jax


def default_backend() -> str:
    """The backend for the device at hand: "triton" for an NVIDIA GPU, "xla" for anything else.

    The device is JAX's default one, or the one that the current abstract mesh names, when compiling for a device that
    is not there.
    """
    described = jax.sharding.get_abstract_mesh().abstract_device
    platform = jax.default_backend() if described is None else described.platform
    return "triton" if platform in ("gpu", "cuda") else "xla"
