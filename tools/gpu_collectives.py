"""Predicted all-reduces beside published ones: `python -m tools.gpu_collectives`.

It writes the table of `docs/machines/gpu-collectives.md`.
"""

import dataclasses
from pathlib import Path

from jaxdist import cost

PAGE = Path(__file__).parents[1] / "docs" / "machines" / "gpu-collectives.md"
BEGIN, END = "<!-- table: python -m tools.gpu_collectives -->", "<!-- end of the table -->"
_MIB = 1 << 20


@dataclasses.dataclass(frozen=True)
class Published:
    """A published all-reduce of NCCL.

    Attributes:
        where: The GPUs, in words.
        links: The links between them.
        domains: The number of NVLink domains.
        local: The number of GPUs in each domain.
        num_bytes: The bytes on one GPU.
        bus_bandwidth: GB/s, as nccl-tests counts them: 2 (n - 1) / n times the bytes, by the time.
        fitted: Whether the size curve was fitted to it.
    """

    where: str
    links: cost.Links
    domains: int
    local: int
    num_bytes: int
    bus_bandwidth: float
    fitted: bool = False

    @property
    def num_gpus(self) -> int:
        """The number of GPUs."""
        return self.domains * self.local

    @property
    def bytes_on_bus(self) -> float:
        """The bytes that nccl-tests divides by the time."""
        return 2 * (self.num_gpus - 1) / self.num_gpus * self.num_bytes

    @property
    def seconds(self) -> float:
        """The published time."""
        return self.bytes_on_bus / self.bus_bandwidth / 1e9

    @property
    def predicted_seconds(self) -> float:
        """The predicted time."""
        return cost.seconds("xla", self.num_gpus, self.num_bytes, self.links, self.local)


def _list_sizes(
    where: str,
    links: cost.Links,
    domains: int,
    local: int,
    figures: dict[int, float],
    fitted: bool = False,
) -> list[Published]:
    return [
        Published(where, links, domains, local, mib * _MIB, bandwidth, fitted)
        for mib, bandwidth in figures.items()
    ]


_HOPPER = cost.Links(cost.TABLE["nvlink-4"])
_BLACKWELL = cost.Links(cost.TABLE["nvlink-5"])
_HOSTS = cost.Links(cost.TABLE["nvlink-5"], cost.TABLE["infiniband-ndr"])
_GIB = 1024  # in MiB

# github.com/stas00/ml-engineering network/benchmarks; the rack: coreweave/nccl-tests, pull 43.
PUBLISHED: tuple[Published, ...] = (
    *_list_sizes(
        "8 H200, one host",
        _HOPPER,
        1,
        8,
        {1: 75, 16: 256, 64: 369, 256: 442, 16 * _GIB: 482},
        fitted=True,
    ),
    *_list_sizes("8 B200, one host", _BLACKWELL, 1, 8, {16 * _GIB: 839}),
    *_list_sizes(
        "4 hosts of 8 B200",
        _HOSTS,
        4,
        8,
        {1: 12.5, 16: 71.8, 64: 197.8, 256: 283, 16 * _GIB: 377},
    ),
    *_list_sizes(
        "72 GB200, one rack",
        _BLACKWELL,
        1,
        72,
        {512: 586, 1 * _GIB: 681, 2 * _GIB: 758, 4 * _GIB: 839, 8 * _GIB: 835},
    ),
)


def make_table() -> list[str]:
    """Return the lines of the table."""
    lines = [
        "| GPUs | bytes | GB/s, published | predicted | time, published | predicted | error |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in PUBLISHED:
        predicted = row.predicted_seconds
        error = f"{predicted / row.seconds - 1:+.1%}"
        cells = (
            row.where,
            _format_size(row.num_bytes),
            f"{row.bus_bandwidth:g}",
            f"{row.bytes_on_bus / predicted / 1e9:.1f}",
            _format_seconds(row.seconds),
            _format_seconds(predicted),
            f"{error} (fitted)" if row.fitted else error,
        )
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def _format_size(num_bytes: int) -> str:
    mib = num_bytes // _MIB
    return f"{mib // _GIB} GiB" if mib >= _GIB else f"{mib} MiB"


def _format_seconds(seconds: float) -> str:
    return f"{seconds * 1e3:.3g} ms" if seconds >= 1e-3 else f"{seconds * 1e6:.1f} us"


def main() -> None:
    """Write the table into the page."""
    text = PAGE.read_text()
    before, rest = text.split(BEGIN)
    after = rest.split(END)[1]
    PAGE.write_text("\n".join([before + BEGIN, *make_table(), END + after]))


if __name__ == "__main__":
    main()
