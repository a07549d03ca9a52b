"""The parts of a plan: memory, traffic, times, and the calls that divide their work."""

import dataclasses
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from jaxdist._reports.words import shorten_source
from jaxdist.cost import Chip


@dataclasses.dataclass(frozen=True)
class Memory:
    """Bytes of one device.

    `parameters`, `optimizer`, `other_state` and `batch` are arguments of the step. `padding` is
    added by the layout of the arguments. `results` is new state and other results that do not
    reuse the memory of arguments. `temporaries` are activations, gradients and buffers, which
    exist only during the step. `program` is the code. `peak` is the sum; on GPUs it is XLA's own
    peak if that is larger. `capacity` is the published memory. If the compiler refused the program,
    `results` and `temporaries` are None, and `peak` and `available` are from its message. On GPUs,
    `available` is the part of the memory that JAX allocates.
    """

    parameters: int
    optimizer: int
    other_state: int
    batch: int
    padding: int
    results: int | None
    temporaries: int | None
    program: int
    peak: int | None
    capacity: int
    fits: bool
    available: int | None = None

    @property
    def arguments(self) -> int:
        """The bytes of state and batch."""
        return self.parameters + self.optimizer + self.other_state + self.batch

    @property
    def limit(self) -> int:
        """The bytes that a program can use: as the compiler reports, or else as published."""
        return self.capacity if self.available is None else self.available


@dataclasses.dataclass(frozen=True)
class Traffic:
    """Collectives of one kind over one link.

    Args:
        link: `"ICI"` inside a slice, `"DCN"` between slices; `"NVLink"` inside an NVLink domain,
            `"network"` between domains.
        kind: The name in HLO.
        runs: The number of runs in a step.
        num_bytes: The bytes of their operands on one device, or of their results if these are
            larger, for all runs together.
        bytes_sent: The least bytes that one device sends over this link, for all runs together.
        devices: The number of devices in a group.
        groups: The number of groups.
        seconds: The predicted time if the runs do not overlap.
        bytes_inside: The least bytes that one device sends over the link inside a domain, for a
            collective between domains of GPUs, which uses both.
        axes: The axes of the mesh along which the devices of a group differ.
    """

    link: str
    kind: str
    runs: int
    num_bytes: int
    bytes_sent: float
    devices: int
    groups: int
    seconds: float
    bytes_inside: float = 0.0
    axes: tuple[str, ...] = ()


class DividedWork(NamedTuple):
    """A call that divides its work over an axis: its name, its line, and what it does, by name."""

    call: str
    line: str
    facts: tuple[tuple[str, str], ...]

    def lines(self) -> Iterator[str]:
        """Yield the lines of a report."""
        width = max(len(name) for name, _ in self.facts)
        yield f"{self.call}, {shorten_source(self.line)}"
        yield from (f"  {name:<{width}}  {value}" for name, value in self.facts)


def sum_bytes(traffic: Iterable[Traffic], link: str, chip: Chip) -> float:
    """Return the least bytes that one device sends in a step over a link of a chip."""
    own = sum(row.bytes_sent for row in traffic if row.link == link)
    return own + (sum(row.bytes_inside for row in traffic) if link == chip.links[0] else 0.0)


@dataclasses.dataclass(frozen=True)
class Times:
    """Seconds of a step: lower bounds, and a prediction.

    `compute`, `hbm`, `inner` and `outer` are work divided by published peaks. Even if everything
    overlaps, a step takes at least the largest of them. `predicted` is the larger of `compute` and
    `hbm`, plus the collectives with their latencies. `links` are the names of the links inside a
    slice or NVLink domain, and between them.
    """

    compute: float
    hbm: float
    inner: float
    outer: float
    collectives: float
    links: tuple[str, str] = ("ICI", "DCN")

    @property
    def bound(self) -> float:
        """The least time of the step."""
        return max(self.compute, self.hbm, self.inner, self.outer)

    @property
    def bound_by(self) -> str:
        """The resource that decides the bound: `"compute"`, `"HBM"`, or one of `links`."""
        names = ("compute", "HBM", *self.links)
        values = (self.compute, self.hbm, self.inner, self.outer)
        named = dict(zip(names, values, strict=True))
        return max(named, key=lambda name: named[name])

    @property
    def predicted(self) -> float:
        """The time if communication and work do not overlap."""
        return max(self.compute, self.hbm) + self.collectives


@dataclasses.dataclass(frozen=True)
class Expected:
    """Seconds of a step at the efficiencies of the chip, with what its schedule overlaps.

    `work` is the time in which a device computes. `inner` and `outer` are the times in which it
    only waits for collectives, inside a slice or NVLink domain and between them.
    """

    work: float
    inner: float
    outer: float

    @property
    def seconds(self) -> float:
        """The time of the step."""
        return self.work + self.inner + self.outer
