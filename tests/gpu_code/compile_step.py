"""Compiles a step for an H200 on a machine without a GPU; prints what the compiler made of it as a line of JSON.

Run by test_deviceless.py as a process of its own, with the CUDA wheels of `scripts/test.sh` on PYTHONPATH and XLA told
to dump into FOLDER: XLA reads its flags once, and the CUDA plugin must not be seen by the other tests.

    python -m tests.gpu_code.compile_step NUM_TOKENS NUM_ROWS MAX_PIECES FOLDER NUM_LAYERS[sent]...

With several numbers of layers there are as many lines. One that is followed by "sent" is lowered by another process,
and its kernels are compiled ahead, as a paxpage.engine.lowering.LoweringPool has it done.
"""

import contextlib
import functools
import json
import os
import pathlib
import re
import sys

import jax
from jax.experimental import topologies
from jax.sharding import SingleDeviceSharding

from pallas_kernels import backends
from paxpage.config import ModelConfig
from paxpage.engine import kv_cache, step
from paxpage.engine.batch import StepShape
from paxpage.engine.build import step_bytes_at_most
from paxpage.engine.executables import Program, step_program
from paxpage.engine.lowering import LoweringPool, Recipe
from paxpage.engine.mosaic_kernels import compile_kernels
from paxpage.models import registry
from tests.gpu_code.h200 import target_config
from tests.gpu_code.lowering import as_h200

NUM_BLOCKS, BLOCK_SIZE, MAX_ROWS, BLOCKS_PER_ROW, VOCAB_SIZE = 4000, 16, 256, 272, 128256


def llama8b(num_layers: int) -> ModelConfig:
    """Llama-3-8B's shape, with fewer layers."""
    return ModelConfig("LlamaForCausalLM", VOCAB_SIZE, 4096, 14336, num_layers, 32, 8, 128, 8192, rope_theta=5e5)


class PoolForH200(LoweringPool):
    """Its process believes that the device is an H200."""

    def _recipe(self, model: step.StepModel, shape: StepShape) -> Recipe:
        return super()._recipe(model, shape)._replace(platform="cuda", device_kind="NVIDIA H200")


def compile_step(program: Program, folder: pathlib.Path) -> tuple[jax.stages.Compiled, int]:
    """The compiled program, and how often LLVM was given other options meanwhile: for a kernel of Mosaic, and back."""
    log, usual = folder / "log", os.dup(sys.stderr.fileno())
    with log.open("wb") as file:
        os.dup2(file.fileno(), sys.stderr.fileno())
    try:
        compiled = program.compile()
    finally:
        os.dup2(usual, sys.stderr.fileno())
    text = log.read_text()
    sys.stderr.write(text)
    return compiled, text.count("(re)initializing LLVM")


def compile_for_h200(
    num_layers: int, shape: StepShape, folder: pathlib.Path, *, is_sent: bool
) -> tuple[jax.stages.Compiled, int, int]:
    """The compiled step, what compile_step counts, and the bytes of the step's cache."""
    topology = topologies.get_topology_desc(platform="cuda", target_config=target_config(), topology="1x1x1")
    sharding = SingleDeviceSharding(topology.devices[0])
    place = functools.partial(
        jax.tree.map, lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)
    )
    model = registry.abstract_model(llama8b(num_layers), "bfloat16")
    graphdef, params = registry.split(model)
    cache = kv_cache.abstract_cache(model.kv_spec, NUM_BLOCKS, BLOCK_SIZE, "bfloat16")
    step_model = step.StepModel(graphdef, *place((params, cache)), MAX_ROWS, VOCAB_SIZE)
    if is_sent:
        backends.load_runtime()
        with contextlib.closing(PoolForH200(llama8b(num_layers), "bfloat16", 1)) as pool:
            lowered = pool.lower(step_model, shape)
        compile_kernels(lowered, sharding)
        program = step_program(step_model, shape)._replace(lower=lambda: lowered)
        compiled, num_changes = compile_step(program, folder)
    else:
        with as_h200():
            compiled, num_changes = compile_step(step_program(step_model, shape), folder)
    return compiled, num_changes, sum(leaf.size * leaf.dtype.itemsize for leaf in cache)


def thunks(folder: pathlib.Path, name: str) -> list[str]:
    """Lines of a dumped thunk sequence: what the device is given to do, one entry a line, nested ones indented."""
    paths = list(folder.glob(f"*jit_forward_flat.{name}.txt"))
    assert len(paths) <= 1
    return [line for path in paths for line in path.read_text().splitlines() if re.match(r"\s*\d+: k", line)]


def result_of(layers: str, shape: StepShape, folder: pathlib.Path) -> dict[str, int]:
    """Compiles, and reads what was dumped; leaves the folder empty for the next one's dump."""
    num_layers, is_sent = int(layers.removesuffix("sent")), layers.endswith("sent")
    compiled, num_changes, cache_bytes = compile_for_h200(num_layers, shape, folder, is_sent=is_sent)
    stats = compiled.memory_analysis()
    assert stats is not None
    before = thunks(folder, "thunk_sequence")
    after = thunks(folder, "thunk_sequence_after_thunk_passes") or before  # not dumped if it is the same
    for path in folder.iterdir():
        path.unlink()
    return {
        "cache_bytes": cache_bytes,
        "packed_bytes": 4 * shape.num_ints,
        "alias_bytes": stats.alias_size_in_bytes,
        "temp_bytes": stats.temp_size_in_bytes,
        "step_bytes": step.temporary_bytes(compiled),
        "step_bytes_at_most": step_bytes_at_most(llama8b(num_layers), "bfloat16", shape),
        "num_changes_of_options": num_changes,
        "num_kernels": sum("kCopy " not in line for line in before),
        "num_command_buffers": sum("kCommandBuffer" in line for line in after),
        "num_outside": sum(not line.startswith(" ") and "kCommandBuffer" not in line for line in after),
    }


def main() -> None:
    """Command line."""
    shape_sizes, folder, all_layers = sys.argv[1:4], pathlib.Path(sys.argv[4]), sys.argv[5:]
    num_tokens, num_rows, max_pieces = map(int, shape_sizes)
    shape = StepShape(num_tokens, num_rows, BLOCKS_PER_ROW, max_pieces)
    for layers in all_layers:
        print(json.dumps(result_of(layers, shape, folder)))


if __name__ == "__main__":
    main()
