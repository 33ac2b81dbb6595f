"""Params in an Orbax checkpoint, with their ModelConfig as JSON beside them. Tokenizer files may lie there too."""

from pathlib import Path
from typing import Any

import jax

from paxpage.config import ModelConfig, from_json, require, to_json
from paxpage.models.checkpoint import check_params, flatten, raise_differences
from paxpage.models.registry import Params

GIGABYTE = 10**9
CONFIG_NAME = "paxpage_config.json"
PARAMS_NAME = "params"


def save_params(path: str | Path, config: ModelConfig, params: Params) -> None:
    """Writes params and config to a new or empty folder; `load_model(path)` reads them back.

    Raises ValueError if params do not fit config, or the folder holds a checkpoint already.
    """
    import orbax.checkpoint as ocp  # takes a second, and most loads have no use for it

    check_params(config, params)
    folder = Path(path).expanduser().resolve()
    is_free = not (folder / PARAMS_NAME).exists() and not (folder / CONFIG_NAME).exists()
    require(is_free, "path", str(folder), "a folder without a checkpoint in it")
    folder.mkdir(parents=True, exist_ok=True)
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(folder / PARAMS_NAME, params)
    (folder / CONFIG_NAME).write_text(to_json(config) + "\n", encoding="utf-8")


def read_config(folder: Path) -> ModelConfig:
    """Raises ValueError for a file that save_params did not write."""
    path = folder / CONFIG_NAME
    try:
        return from_json(path.read_text(encoding="utf-8"))
    except (OSError, TypeError, AttributeError, ValueError) as error:
        raise ValueError(f"{path} is not a config written by save_params: {error}") from error


def check_orbax(folder: Path, abstract: Params) -> None:
    """Compares names and shapes with what the model needs, from the checkpoint's metadata alone.

    Raises one ValueError that names missing, extra and misshapen tensors, or says that the metadata cannot be read.
    """
    import orbax.checkpoint as ocp

    try:
        with ocp.StandardCheckpointer() as checkpointer:
            metadata: Any = checkpointer.metadata((folder / PARAMS_NAME).resolve()).item_metadata
        tree = {} if metadata is None else dict(metadata.tree)
        found = {path: tuple(entry.shape) for path, entry in flatten(tree).items()}
    except Exception as error:  # orbax raises what its storage layers do
        raise ValueError(f"{folder / PARAMS_NAME} is damaged, empty or no Orbax checkpoint: {error}") from error
    require(
        bool(found), str(folder / PARAMS_NAME), "damaged, empty or no Orbax checkpoint", "one written by save_params"
    )
    raise_differences({path: leaf.shape for path, leaf in flatten(abstract).items()}, found, str(folder))


def restore_params(folder: Path, abstract: Params) -> Params:
    """Reads params straight to the default device, in the dtypes of abstract. check_orbax must have passed.

    The host holds a gigabyte at a time, or the largest tensor, if that is more, and what Orbax unpacks it from.
    """
    import orbax.checkpoint as ocp

    largest = max(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(abstract))
    handler = ocp.StandardCheckpointHandler(restore_concurrent_gb=-(-largest // GIGABYTE))
    device = jax.sharding.SingleDeviceSharding(_default_device())
    targets = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=device), abstract)
    try:
        with ocp.Checkpointer(handler) as checkpointer:
            return checkpointer.restore((folder / PARAMS_NAME).resolve(), args=ocp.args.StandardRestore(targets))
    except Exception as error:  # orbax raises what its storage layers do
        raise ValueError(f"{folder / PARAMS_NAME} cannot be restored: {error}") from error


def _default_device() -> jax.Device:
    return jax.device_put(0).device
