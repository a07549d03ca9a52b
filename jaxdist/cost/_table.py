"""The known links, and the fractions of published peaks, each with its source.

If a source gives the sum of both directions, the table has half of it: `bytes_per_second` is the
bytes that leave a device. The links of TPUs come from the table of chips. On TPU v2, v3 and 7x, a
device of JAX is one of two cores, so it has half of the chip's figures. Few latencies are
published; the source says if one is assumed.
"""

import dataclasses
from collections.abc import Iterator

from jaxdist._called import called
from jaxdist._validate import check_instance
from jaxdist.cost._chip import CHIPS, Chip
from jaxdist.cost._curve import CURVES
from jaxdist.cost._link import Link, Medium

_NVLINK = "https://www.nvidia.com/en-us/data-center/nvlink"
_NCCL = "latency of a step in NCCL's model, https://github.com/NVIDIA/nccl src/graph/tuning.cc"

# One hop over ICI.
_ICI_ALPHA = 1e-6
_ICI = "; about 1 us for each hop, https://jax-ml.github.io/scaling-book/sharding"
# No figure is published. This is about one round trip between machines of a datacenter.
_DCN_ALPHA = 50e-6
_DCN = "; 50 us for a message is assumed"

_NVLINK_ALPHA, _PCIE_ALPHA, _NET_ALPHA = 3.4e-6, 5.7e-6, 9.6e-6


def _make_links(chip: Chip) -> Iterator[Link]:
    """Yield the links of one device of a chip, inside a slice and between slices."""
    device = chip.per_device(chip.devices)
    ends = (
        ("ici", _ICI_ALPHA, device.inner_bytes_per_second, chip.inner_source + _ICI),
        ("dcn", _DCN_ALPHA, device.outer_bytes_per_second, chip.outer_source + _DCN),
    )
    for end, alpha, rate, source in ends:
        yield Link(f"tpu-{chip.name}-{end}", alpha, rate, device.hbm_bytes_per_second, source)


_ROWS = (
    # CPU. One more device adds alpha for each device: 400 operands of 1 KiB take 4.7, 22.3 and
    # 76.3 ms on 2, 4 and 8 devices, which is 3 us x devices x devices for each operand.
    Link(
        "cpu-threads",
        3e-6,
        5.8e9,
        13.3e9,
        "PERF §3: measured, 400 x 1 KiB and 4 x 16 MiB on 2, 4 and 8 devices of 2 cores",
        Medium.MEMORY,
        scatter_gather=1.4,
    ),
    Link(
        "cpu-processes",
        67e-6,
        1.6e9,
        13.3e9,
        "PERF §6: measured, gloo over loopback, 4 KiB to 64 MiB, 2 processes of 1 and 2 devices",
        Medium.HOST,
        scatter_gather=1.6,
    ),
    # TPU: per device, one direction, all its links.
    *(link for chip in CHIPS.values() if chip.platform == "tpu" for link in _make_links(chip)),
    # GPU, inside a machine.
    Link("nvlink-1", _NVLINK_ALPHA, 80e9, 732e9, f"160 GB/s (P100), {_NVLINK}; {_NCCL}"),
    Link("nvlink-2", _NVLINK_ALPHA, 150e9, 900e9, f"300 GB/s (V100), {_NVLINK}; {_NCCL}"),
    Link("nvlink-3", _NVLINK_ALPHA, 300e9, 1555e9, f"600 GB/s (A100), {_NVLINK}; {_NCCL}"),
    Link("nvlink-4", _NVLINK_ALPHA, 450e9, 3350e9, f"900 GB/s (H100), {_NVLINK}; {_NCCL}"),
    Link("nvlink-5", _NVLINK_ALPHA, 900e9, 8000e9, f"1800 GB/s (B200), {_NVLINK}; {_NCCL}"),
    Link("pcie-3", _PCIE_ALPHA, 15.8e9, 320e9, f"x16, 8 GT/s a lane (PCI-SIG); {_NCCL}"),
    Link("pcie-4", _PCIE_ALPHA, 31.5e9, 600e9, f"x16, 16 GT/s a lane (PCI-SIG); {_NCCL}"),
    Link("pcie-5", _PCIE_ALPHA, 63e9, 2000e9, f"x16, 32 GT/s a lane (PCI-SIG); {_NCCL}"),
    # Between machines: one port for each device.
    Link("ethernet-10", _DCN_ALPHA, 1.25e9, 13.3e9, f"10 Gbit/s (IEEE 802.3){_DCN}"),
    Link("ethernet-25", _DCN_ALPHA, 3.125e9, 320e9, f"25 Gbit/s (IEEE 802.3){_DCN}"),
    Link("ethernet-100", _DCN_ALPHA, 12.5e9, 600e9, f"100 Gbit/s (IEEE 802.3){_DCN}"),
    Link("infiniband-edr", _NET_ALPHA, 12.5e9, 900e9, f"100 Gbit/s (IBTA); {_NCCL}"),
    Link("infiniband-hdr", _NET_ALPHA, 25e9, 1555e9, f"200 Gbit/s (IBTA); {_NCCL}"),
    Link("infiniband-ndr", _NET_ALPHA, 50e9, 3350e9, f"400 Gbit/s (IBTA); {_NCCL}"),
    Link("infiniband-xdr", _NET_ALPHA, 100e9, 8000e9, f"800 Gbit/s (IBTA); {_NCCL}"),
)

TABLE: dict[str, Link] = {
    row.name: dataclasses.replace(row, curve=CURVES.get(row.name)) for row in _ROWS
}


_BOOK = "https://jax-ml.github.io/scaling-book/tpus"


@dataclasses.dataclass(frozen=True)
class Efficiency:
    """The fractions of the published peaks of a chip that a program reaches.

    Args:
        matrix: Fraction of the peak of matrix products.
        hbm: Fraction of the bandwidth of the memory.
        ici: Fraction of the bandwidth of all links inside a slice.
        dcn: Fraction of the bandwidth between slices. For GPUs this and `ici` are 1: the size curve
            of a link (`Link.curve`) has the part that NCCL reaches.
        fp8: Fraction of the peak of products of 8-bit floats.
        sources: The source of each number, by its name.
        kernel_seconds: The seconds that each kernel takes besides its products and its traffic: its
            start, and its end, when only a part of the chip still computes. 0 for TPUs, whose
            estimates do not include it.

    Example:
        >>> from jaxdist import cost
        >>> cost.EFFICIENCY.ici, cost.EFFICIENCY.sources["ici"][:20]
        (0.9, '45 of 50 GB/s a link')
    """

    matrix: float
    hbm: float
    ici: float
    dcn: float
    fp8: float
    sources: dict[str, str]
    kernel_seconds: float = 0.0


EFFICIENCY = Efficiency(
    matrix=0.855,
    hbm=0.8,
    ici=0.9,
    dcn=0.94,
    fp8=0.855,
    sources={
        "matrix": "fitted once, on the runs of MaxText on one slice of v5e (16B and 64B)",
        "hbm": "estimates of libtpu 0.0.52 for element-wise fusions on v5e: 646 of 819 GB/s",
        "ici": f"45 of 50 GB/s a link of v5e, and 90 of 100 GB/s of v5p: {_BOOK}",
        "fp8": "assumed: as for bfloat16",
        "dcn": "TCP over Ethernet with 1,460 bytes in a packet: 1,408 of 1,498 bytes are data",
    },
)

_STAS = (
    "the most of many shapes, https://github.com/stas00/ml-engineering, compute/accelerator, "
    "Maximum Achievable Matmul FLOPS"
)
_IN_CURVE = "in the size curve of the link"
_COPIES = "assumed: about what kernels that only copy reach"


def _make_gpu(
    matrix: float,
    fp8: float,
    of_matrix: str,
    of_fp8: str,
    *,
    hbm: float = 0.9,
    of_hbm: str = _COPIES,
    of_kernels: str = "assumed: as H100",
) -> Efficiency:
    sources = {
        "matrix": of_matrix,
        "fp8": of_fp8,
        "hbm": of_hbm,
        "ici": _IN_CURVE,
        "dcn": _IN_CURVE,
        "kernel_seconds": of_kernels,
    }
    return Efficiency(matrix, hbm, 1.0, 1.0, fp8, sources, kernel_seconds=2e-6)


_AMPERE = _make_gpu(0.869, 0.869, f"271.2 of 312 TFLOP/s: {_STAS}", "A100 has no fp8")
_H100 = _make_gpu(
    0.803,
    0.709,
    f"794.5 of 989 TFLOP/s: {_STAS}",
    f"1402.6 of 1979 TFLOP/s: {_STAS}",
    hbm=0.89,
    of_hbm="measured on one H100 SXM: 2,980 of 3,352 GB/s, for x * 2 + 1 of 1 GiB",
    of_kernels=(
        "fitted once, on an H100 SXM (JAX 0.11.2, CUDA graphs): 1.6 to 2.7 us in three training "
        "steps of 31 to 438 kernels"
    ),
)
_LIKE_H100 = _make_gpu(0.803, 0.709, "assumed: as H100", "assumed: as H100")
_OF_GPUS = {
    "a100-40": _AMPERE,
    "a100": _AMPERE,
    "h100": _H100,
    "h200": _LIKE_H100,
    "b200": _LIKE_H100,
    "gb200": _LIKE_H100,
}


@called("cost.efficiency_of")
def efficiency_of(chip: Chip) -> Efficiency:
    """Return the fractions of a chip's peaks that a program reaches.

    Example:
        >>> from jaxdist import cost
        >>> cost.efficiency_of(cost.CHIPS["h100"]).matrix
        0.803
        >>> cost.efficiency_of(cost.CHIPS["v5p"]) is cost.EFFICIENCY
        True
    """
    remedy = "Pass for instance cost.CHIPS['h100']."
    check_instance("chip", chip, Chip, "a cost.Chip", remedy)
    return _OF_GPUS.get(chip.name, EFFICIENCY)
