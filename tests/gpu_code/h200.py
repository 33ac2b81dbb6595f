"""What XLA wants to know of an NVIDIA H200 to compile for it without one."""

MIB = 1 << 20
KIB = 1 << 10

DEVICE = {
    "threads_per_block_limit": 1024,
    "threads_per_warp": 32,
    "shared_memory_per_block": 48 * KIB,
    "shared_memory_per_core": 228 * KIB,
    "threads_per_core_limit": 2048,
    "core_count": 132,
    "fpus_per_core": 128,
    "block_dim_limit_x": 2**31 - 1,
    "block_dim_limit_y": 65535,
    "block_dim_limit_z": 65535,
    "memory_bandwidth": 4_800_000_000_000,
    "l2_cache_size": 50 * MIB,
    "clock_rate_ghz": 1.98,
    "device_memory_size": 151_397_597_184,
    "shared_memory_per_block_optin": 227 * KIB,
    "registers_per_core_limit": 65536,
    "registers_per_block_limit": 65536,
    "thread_dim_limit_x": 1024,
    "thread_dim_limit_y": 1024,
    "thread_dim_limit_z": 64,
    "device_address_bits": 64,
    "pcie_bandwidth": 32 << 30,
    "ecc_enabled": True,
}
TEXTS = {
    "device_vendor": "NVIDIA Corporation",
    "platform_version": "Compute Capability 9.0a",
    "name": "NVIDIA H200 141GB HBM3e",
    "driver_version": "13.0.0",
    "runtime_version": "12.8.0",
    "compile_time_toolkit_version": "12.8.0",
    "dnn_version": "9.10.0",
}


def target_config() -> str:
    """XLA's GpuTargetConfigProto as text, for jax.experimental.topologies.get_topology_desc."""
    lines = [f"  {name}: {str(value).lower()}" for name, value in DEVICE.items()]
    lines += [f'  {name}: "{value}"' for name, value in TEXTS.items()]
    lines.append("  cuda_compute_capability { major: 9 feature_extension: ACCELERATED_FEATURES }")
    head = ["gpu_device_info {", *lines, "}", 'platform_name: "CUDA"', "dnn_version_info { major: 9 minor: 10 }"]
    return "\n".join([*head, f'device_description_str: "{TEXTS["name"]}"'])
