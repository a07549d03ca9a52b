"""GPUs that are only described: the CUDA plugin compiles for them, and there is none."""

from typing import Any

# The fields that every version of the compiler reads.
H100 = """
gpu_device_info { cuda_compute_capability { major: 9 feature_extension: ACCELERATED_FEATURES }
  threads_per_warp: 32 threads_per_block_limit: 1024 threads_per_core_limit: 2048
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  shared_memory_per_block: 49152 shared_memory_per_block_optin: 232448
  shared_memory_per_core: 233472 registers_per_core_limit: 65536 registers_per_block_limit: 65536
  core_count: 132 fpus_per_core: 128 clock_rate_ghz: 1.98 memory_bandwidth: 3352320000000
  l2_cache_size: 52428800 device_memory_size: 84942979072 }
platform_name: "CUDA" dnn_version_info { major: 9 minor: 10 }
runtime_version { major: 12 minor: 8 } device_description_str: "NVIDIA H100 80GB HBM3"
"""


def described_gpus(text: str, topology: str) -> Any:
    """The devices of `<NVLink domains>x<hosts of one>x<GPUs of a host>`; JAX's plugin is needed."""
    from jax.experimental import topologies

    return topologies.get_topology_desc(
        platform="cuda", target_config=text, topology=topology
    ).devices
