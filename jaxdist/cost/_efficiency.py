"""The fractions of published peaks that programs reach, each with its source."""

import dataclasses

from jaxdist._called import called
from jaxdist._validate import check_instance
from jaxdist.cost._chip import Chip

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
