"""Compiles the sampler for an H200 on a machine without a GPU; prints a line of JSON. As compile_step.py is, a process.

python -m tests.gpu_code.compile_sampler NUM_ROWS NUM_TOP VOCAB_SIZE

NUM_TOP: how many of the most likely tokens it reports; null: it computes no log-probabilities.
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

MAX_ROWS = 256
OPERATION = re.compile(r" = .* (while|sort|conditional|fusion|custom-call)\(")
SORT = re.compile(r" = .* sort\(")


def compile_for_h200(num_rows: int, num_top: int | None, vocab_size: int) -> jax.stages.Compiled:
    """The sampler as an engine with MAX_ROWS rows has it."""
    topology = topologies.get_topology_desc(platform="cuda", target_config=target_config(), topology="1x1x1")
    like = functools.partial(jax.ShapeDtypeStruct, sharding=SingleDeviceSharding(topology.devices[0]))
    logits = like((num_rows, vocab_size), jnp.float32)
    packed = like((num_rows, batches.NUM_SAMPLING_INTS), jnp.int32)
    run = functools.partial(sample_padded, num_top=num_top, max_rows=MAX_ROWS)
    with as_h200():
        lowered = jax.jit(run).trace(logits, logits, packed).lower(lowering_platforms=("cuda",))
    return lowered.compile(compiler_options=step.UNTIMED_OPTIONS)


def main() -> None:
    """Of what runs one after another how many operations there are and how many of them are loops; sorts, wherever."""
    compiled = compile_for_h200(*map(json.loads, sys.argv[1:]))
    text = compiled.as_text()
    entry = text.partition("\nENTRY ")[2]
    kinds = OPERATION.findall(entry)
    num_other = sum(kind not in ("fusion", "custom-call") for kind in kinds)
    analysis = compiled.memory_analysis()
    stats = {"num": len(kinds), "num_other": num_other, "num_sorts": len(SORT.findall(text))}
    print(json.dumps(stats | {"temp_bytes": analysis.temp_size_in_bytes}))


if __name__ == "__main__":
    main()
