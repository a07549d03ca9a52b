"""The parts of published peaks that programs reach: four numbers, each with its source."""

import dataclasses

_BOOK = "https://jax-ml.github.io/scaling-book/tpus"


@dataclasses.dataclass(frozen=True)
class Efficiency:
    """The parts of the published peaks of a chip that a program reaches.

    Args:
        matrix: Of the peak of matrix products.
        hbm: Of the bandwidth of the memory.
        ici: Of the bandwidth of all links inside a slice.
        dcn: Of the bandwidth between slices.
        sources: The source of each number, by its name.

    Example:
        >>> from jaxdist import cost
        >>> cost.EFFICIENCY.ici, cost.EFFICIENCY.sources["ici"][:20]
        (0.9, '45 of 50 GB/s a link')
    """

    matrix: float
    hbm: float
    ici: float
    dcn: float
    sources: dict[str, str]


EFFICIENCY = Efficiency(
    matrix=0.9,
    hbm=0.8,
    ici=0.9,
    dcn=0.94,
    sources={
        "matrix": "fitted once, on the runs of MaxText on one slice of v5e (16B and 64B)",
        "hbm": "estimates of libtpu 0.0.52 for element-wise fusions on v5e: 646 of 819 GB/s",
        "ici": f"45 of 50 GB/s a link of v5e, and 90 of 100 GB/s of v5p: {_BOOK}",
        "dcn": "TCP over Ethernet with 1,460 bytes in a packet: 1,408 of 1,498 bytes are data",
    },
)
