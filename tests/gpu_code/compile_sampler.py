"""Compiles the sampler for an H200 on a machine without a GPU; prints a line of JSON. As compile_step.py is, a process.

python -m tests.gpu_code.compile_sampler NUM_ROWS
"""

import functools
import json
import re
import sys

import jax
import jax.numpy as jnp
from jax.experimental import topologies
from jax.sharding import SingleDeviceSharding

from paxpage.engine import batch as batches
from paxpage.engine import step
from paxpage.engine.model_runner import sample_padded
from tests.gpu_code.h200 import target_config
from tests.gpu_code.lowering import as_h200

MAX_ROWS, VOCAB_SIZE = 256, 128256
OPERATION = re.compile(r" = .* (while|sort|conditional|fusion|custom-call)\(")


def compile_for_h200(num_rows: int) -> jax.stages.Compiled:
    """The sampler without log-probabilities."""
    topology = topologies.get_topology_desc(platform="cuda", target_config=target_config(), topology="1x1x1")
    like = functools.partial(jax.ShapeDtypeStruct, sharding=SingleDeviceSharding(topology.devices[0]))
    logits = like((num_rows, VOCAB_SIZE), jnp.float32)
    packed = like((num_rows, batches.NUM_SAMPLING_INTS), jnp.int32)
    run = functools.partial(sample_padded, num_top=None, max_rows=MAX_ROWS)
    with as_h200():
        lowered = jax.jit(run).trace(logits, logits, packed).lower(lowering_platforms=("cuda",))
    return lowered.compile(compiler_options=step.UNTIMED_OPTIONS)


def main() -> None:
    """Of what runs one after another: how many operations, and how many of them are loops or sorts."""
    compiled = compile_for_h200(int(sys.argv[1]))
    entry = compiled.as_text().partition("\nENTRY ")[2]
    kinds = OPERATION.findall(entry)
    num_other = sum(kind not in ("fusion", "custom-call") for kind in kinds)
    analysis = compiled.memory_analysis()
    print(json.dumps({"num": len(kinds), "num_other": num_other, "temp_bytes": analysis.temp_size_in_bytes}))


if __name__ == "__main__":
    main()
