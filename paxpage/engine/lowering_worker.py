"""A process of lowering.LoweringPool: reads a recipe from each line of standard input, writes a module for each.

An answer is a line of JSON, {"num_bytes": n} and n bytes after it, or {"error": "..."}. Ends with its input.
"""

import contextlib
import json
import os
import sys
from collections.abc import Iterator
from typing import Any, BinaryIO

import jax
import jax.export
from jax.sharding import AbstractDevice, AbstractMesh, use_abstract_mesh

from paxpage.config import ModelConfig, RopeScaling
from paxpage.engine import kv_cache, lowering, step
from paxpage.engine.batch import StepShape
from paxpage.models import registry

# The format of what follows these names is the kernels' own: the same version of JAX writes and reads it.
CUSTOM_CALLS = ("mosaic_gpu_v2", "__gpu$xla.gpu.triton", "triton_kernel_call")


def main() -> None:
    """Serves standard input. What libraries print goes to standard error, which nobody reads."""
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    for line in sys.stdin.buffer:
        answer(line, answers)


def answer(line: bytes, answers: BinaryIO) -> None:
    """Writes what one recipe gives."""
    try:
        module = export(from_json(line))
    except Exception as error:
        answers.write(json.dumps({"error": f"{type(error).__name__}: {error}"}).encode() + b"\n")
    else:
        answers.write(json.dumps({"num_bytes": len(module)}).encode() + b"\n" + module)
    answers.flush()


def from_json(line: bytes) -> lowering.Recipe:
    """The reverse of Recipe.to_json."""
    fields: dict[str, Any] = json.loads(line)
    config = fields["config"]
    scaling = config["rope_scaling"]
    config["rope_scaling"] = None if scaling is None else RopeScaling(**scaling)
    return lowering.Recipe(**fields | {"config": ModelConfig(**config), "shape": StepShape(*fields["shape"])})


def export(recipe: lowering.Recipe) -> bytes:
    """The step function's module, serialised. ValueError if JAX is set otherwise than where the recipe is from."""
    differing = {name for name, _ in _differing(recipe.options, lowering.traced_options())}
    if differing:
        raise ValueError(f"JAX has other options in processes that lower: {', '.join(sorted(differing))}")
    lowering.register_nodes()
    model = registry.abstract_model(recipe.config, recipe.dtype)
    cache = kv_cache.abstract_cache(model.kv_spec, recipe.num_blocks, recipe.block_size, recipe.cache_dtype)
    step_model = step.StepModel(*registry.split(model), cache, recipe.max_rows, recipe.vocab_size, recipe.backend)
    checks = [jax.export.DisabledSafetyCheck.custom_call(name) for name in CUSTOM_CALLS]
    jitted = step.jit_forward(step.flat_forward(step_model, recipe.shape), recipe.shape)
    exporting = jax.export.export(jitted, platforms=[recipe.platform], disabled_checks=checks)
    with _as_device(recipe.platform, recipe.device_kind):
        exported = exporting(*step.abstract_arguments(step_model, recipe.shape))
    return bytes(exported.serialize())


def _differing(left: list[list[str]], right: list[list[str]]) -> set[tuple[str, ...]]:
    return set(map(tuple, left)) ^ set(map(tuple, right))


@contextlib.contextmanager
def _as_device(platform: str, device_kind: str) -> Iterator[None]:
    """Within it kernels are chosen and lowered for this device, which is not there."""
    if platform == "cpu":
        yield
        return
    device = AbstractDevice(device_kind=device_kind, num_cores=None, platform="gpu")
    with use_abstract_mesh(AbstractMesh((), (), abstract_device=device)):
        yield


if __name__ == "__main__":
    main()
