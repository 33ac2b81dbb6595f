"""What device a kernel is compiled for, and which backend it uses unless it is told."""

import importlib

import jax

HOPPER_KINDS = ("H100", "H200", "H800", "H20", "GH200")
HOPPER_CAPABILITY = "9.0"


def default_backend() -> str:
    """The backend for the device at hand: "triton" for an NVIDIA GPU, "xla" for anything else.

    The device is JAX's default one, or the one that the current abstract mesh names, when compiling for a device that
    is not there.
    """
    described = jax.sharding.get_abstract_mesh().abstract_device
    platform = jax.default_backend() if described is None else described.platform
    return "triton" if platform in ("gpu", "cuda") else "xla"


def device_kind() -> str:
    """That device's name, for example "NVIDIA H200"."""
    described = jax.sharding.get_abstract_mesh().abstract_device
    return jax.devices()[0].device_kind if described is None else described.device_kind


def is_hopper() -> bool:
    """Whether that device is an NVIDIA GPU of compute capability 9.0, for which there are kernels of their own."""
    if jax.sharding.get_abstract_mesh().abstract_device is not None:
        return has_hopper_name()
    return getattr(jax.devices()[0], "compute_capability", None) == HOPPER_CAPABILITY


def has_hopper_name() -> bool:
    """Whether that device's name is one of HOPPER_KINDS, all that is known of a device that is not there."""
    return any(kind in device_kind().split() for kind in HOPPER_KINDS)


def load_runtime() -> None:
    """Loads what compiled Mosaic kernels are linked with.

    JAX does so when it lowers one; for a program that was lowered elsewhere, or is read from disk, somebody else must.
    """
    importlib.import_module("jax.experimental.pallas.mosaic_gpu")
