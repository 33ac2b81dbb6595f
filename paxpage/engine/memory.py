"""How many blocks fit: the device's memory, less what is in use and what a step needs."""

import jax

CPU_CACHE_BYTES = 1 << 29  # the cache's budget on a CPU, whose memory belongs to others too
MIB = 1 << 20
ROUNDING_BITS = 10


def num_blocks_that_fit(
    bytes_per_block: int, temporary_bytes: int, utilization: float, most_useful: int, coming_bytes: int = 0
) -> int:
    """Blocks (the null block included) for the default device.

    On a GPU: utilization of the allocator's limit, less the bytes in use (the weights, and whatever else this process
    holds) and a step's temporaries. On a CPU: CPU_CACHE_BYTES, and no more than most_useful blocks. coming_bytes: of
    weights that are not there yet. ValueError with all the numbers when not even one block for tokens fits.
    """
    stats = jax.local_devices()[0].memory_stats()
    if stats is None:
        return max(2, min(CPU_CACHE_BYTES // bytes_per_block, most_useful))
    limit, in_use = stats["bytes_limit"], stats["bytes_in_use"] + coming_bytes
    budget = int(utilization * limit) - in_use - temporary_bytes
    if budget < 2 * bytes_per_block:
        raise ValueError(
            f"no memory is left for the KV cache: {utilization:g} (gpu_memory_utilization) of the device's "
            f"{limit // MIB} MiB, less {in_use // MIB} MiB in use (weights included), less {temporary_bytes // MIB} "
            f"MiB for a step, leaves {budget // MIB} MiB, and a block takes {bytes_per_block / MIB:.2f} MiB. "
            "Allowed: a larger gpu_memory_utilization, a smaller max_num_batched_tokens, or a smaller model"
        )
    num_blocks = budget // bytes_per_block
    # Compiled steps have this number in them: rounded (by 0.1% on average), so that a start finds those of the last
    # one, when something else took some MiB more or less.
    return num_blocks - num_blocks % max(1, 2 ** (num_blocks.bit_length() - ROUNDING_BITS))
