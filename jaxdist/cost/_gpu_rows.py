"""The rows of GPUs in the table of chips: published peaks, and descriptions for XLA's compiler.

`Target` has the fields that the GPU compilers of JAX 0.10 and 0.12 both read. XLA has such
descriptions for its own tests, but not in files that Python could read, and older compilers refuse
their newer fields.
"""

import dataclasses
from typing import TypeAlias

from jaxdist._called import called
from jaxdist._validate import as_integer

_XLA = "https://github.com/openxla/xla, xla/backends/gpu/target_config/specs"
_STAS = "https://github.com/stas00/ml-engineering, compute/accelerator"
_KILO = "https://glennklockwood.com/garden/processors/B200"
_BOOK = "https://jax-ml.github.io/scaling-book/gpus"
_MLPERF = "https://github.com/mlcommons, inference_results (186 GB)"
_NVLINK = "https://www.nvidia.com/en-us/data-center/nvlink"
_NDR = f"400 Gbit/s a GPU (NDR), {_BOOK}"
_HDR = "200 Gbit/s a GPU (HDR): assumed, the usual network of DGX A100"

# Limits of CUDA that all these GPUs share.
_COMMON = (
    "threads_per_warp: 32 threads_per_block_limit: 1024 threads_per_core_limit: 2048 "
    "block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535 "
    "shared_memory_per_block: 49152 registers_per_core_limit: 65536 "
    "registers_per_block_limit: 65536"
)


@dataclasses.dataclass(frozen=True)
class Target:
    """The description of a GPU for XLA's compiler.

    Args:
        kind: The `device_kind` that JAX shows.
        capability: The compute capability.
        is_accelerated: Whether the features of exactly this capability may be used, as in `sm_90a`.
        cores: The number of streaming multiprocessors (SMs).
        fpus_per_core: The number of float32 units of an SM.
        shared_memory: Bytes of shared memory of an SM.
        shared_memory_of_block: Bytes of shared memory that one block may use.
        l2_bytes: Bytes of the L2 cache.
        clock_ghz: The clock.
        memory_bytes: Bytes of memory that the driver reports.
        memory_bytes_per_second: The bandwidth of the memory.
        source: The source of the numbers.

    Example:
        >>> from jaxdist import cost
        >>> cost.CHIPS["h100"].target.kind
        'NVIDIA H100 80GB HBM3'
    """

    kind: str
    capability: tuple[int, int]
    is_accelerated: bool
    cores: int
    fpus_per_core: int
    shared_memory: int
    shared_memory_of_block: int
    l2_bytes: int
    clock_ghz: float
    memory_bytes: int
    memory_bytes_per_second: float
    source: str = _XLA

    @called("Target.to_text")
    def to_text(self, cuda: int = 12) -> str:
        """Return the description as text of the protocol buffer `GpuTargetConfigProto`.

        Args:
            cuda: The major version of CUDA that the described machine has.

        Example:
            >>> from jaxdist import cost
            >>> "core_count: 132 " in cost.CHIPS["h100"].target.to_text()
            True

        Source:
            `stream_executor.GpuTargetConfigProto` of XLA.
        """
        cuda = as_integer("cuda", cuda, least=11, most=99, example=12)
        runtime_minor = 8 if cuda == 12 else 0
        major, minor = self.capability
        features = " feature_extension: ACCELERATED_FEATURES" if self.is_accelerated else ""
        of_minor = f" minor: {minor}" if minor else ""
        return (
            f"gpu_device_info {{ cuda_compute_capability {{ major: {major}{of_minor}{features} }} "
            f"{_COMMON} shared_memory_per_block_optin: {self.shared_memory_of_block} "
            f"shared_memory_per_core: {self.shared_memory} core_count: {self.cores} "
            f"fpus_per_core: {self.fpus_per_core} clock_rate_ghz: {self.clock_ghz} "
            f"memory_bandwidth: {round(self.memory_bytes_per_second)} "
            f"l2_cache_size: {self.l2_bytes} device_memory_size: {self.memory_bytes} }} "
            f'platform_name: "CUDA" '
            f"dnn_version_info {{ major: 9 minor: 10 }} "
            f"runtime_version {{ major: {cuda} minor: {runtime_minor} }} "
            f'device_description_str: "{self.kind}"'
        )


# FLOP/s of dense products in bfloat16 and in 8 bits (None if it has none); bytes/s that leave a GPU
# over NVLink and over the network; hosts of the largest NVLink domain, and GPUs of a host; the
# description; sources of the peaks, of NVLink, of the network.
GpuRow: TypeAlias = tuple[
    float, float | None, float, float, tuple[int, int], Target, tuple[str, str, str]
]

_HOPPER = (233_472, 232_448)
_AMPERE = (167_936, 166_912)
_HGX, _NVL72 = (1, 8), (18, 4)

GPU_ROWS: dict[str, GpuRow] = {
    "a100-40": (
        312e12, None, 300e9, 25e9, _HGX,
        Target("NVIDIA A100-SXM4-40GB", (8, 0), False, 108, 64, *_AMPERE, 41_943_040, 1.41,
               42_331_013_120, 1555.2e9),
        (f"{_STAS}; memory {_XLA}", f"600 GB/s in both directions, {_NVLINK}", _HDR),
    ),
    "a100": (
        312e12, None, 300e9, 25e9, _HGX,
        Target("NVIDIA A100-SXM4-80GB", (8, 0), False, 108, 64, *_AMPERE, 41_943_040, 1.41,
               85_100_068_864, 2039.04e9),
        (f"{_STAS}; memory {_XLA}", f"600 GB/s in both directions, {_NVLINK}", _HDR),
    ),
    "h100": (
        989e12, 1979e12, 450e9, 50e9, _HGX,
        Target("NVIDIA H100 80GB HBM3", (9, 0), True, 132, 128, *_HOPPER, 52_428_800, 1.98,
               84_942_979_072, 3352.32e9),
        (f"{_STAS}; memory {_XLA}", f"900 GB/s in both directions, {_NVLINK}", _NDR),
    ),
    "h200": (
        989e12, 1979e12, 450e9, 50e9, _HGX,
        Target("NVIDIA H200", (9, 0), True, 132, 128, *_HOPPER, 52_428_800, 1.98,
               151_397_597_184, 4800e9),
        (f"{_STAS}; memory {_XLA}", f"900 GB/s in both directions, {_NVLINK}", _NDR),
    ),
    "b200": (
        2250e12, 4500e12, 900e9, 50e9, _HGX,
        Target("NVIDIA B200", (10, 0), False, 148, 128, *_HOPPER, 132_644_864, 1.965,
               191_514_411_008, 7672.32e9),
        (f"{_STAS}; {_KILO}; memory {_XLA}", f"1800 GB/s in both directions, {_NVLINK}", _NDR),
    ),
    "gb200": (
        2500e12, 5000e12, 900e9, 50e9, _NVL72,
        Target("NVIDIA GB200", (10, 0), False, 152, 128, *_HOPPER, 135_528_448, 2.062,
               197_897_748_480, 7928.064e9),
        (f"{_STAS}; memory {_XLA}; {_MLPERF}", f"1800 GB/s in both directions, {_NVLINK}", _NDR),
    ),
}  # fmt: skip
