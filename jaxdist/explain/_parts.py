"""The numbers of a plan, in parts."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class Memory:
    """Bytes of one device.

    `parameters`, `optimizer`, `other_state` and `batch` are arguments of the step, and `padding` is
    what the layout of arguments adds; `results` is new state and other results that do not take the
    place of arguments, `temporaries` what the step makes and drops: activations, gradients and
    buffers; `program` is its code. `peak` is all of them together, and `capacity` the published
    memory. Where the compiler refused the program, `results` and `temporaries` are None, and `peak`
    and `available` are what it said.
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
        """State and batch."""
        return self.parameters + self.optimizer + self.other_state + self.batch

    @property
    def limit(self) -> int:
        """What a program can have: as the compiler said, or as published."""
        return self.capacity if self.available is None else self.available


@dataclasses.dataclass(frozen=True)
class Traffic:
    """Collectives of one kind over one link.

    Args:
        link: `"ICI"` inside a slice, `"DCN"` between slices.
        kind: As HLO names it.
        runs: How many a step runs.
        num_bytes: What one device holds of their operands, or results where these are larger, all
            runs together.
        bytes_sent: The least that one device sends, all runs together.
        devices: Devices that take part together.
        groups: Groups of them.
        seconds: Predicted, one run after the other.
    """

    link: str
    kind: str
    runs: int
    num_bytes: int
    bytes_sent: float
    devices: int
    groups: int
    seconds: float


@dataclasses.dataclass(frozen=True)
class Times:
    """Seconds of a step: bounds that no step beats, and what is predicted.

    `compute`, `hbm`, `ici` and `dcn` are work over published peaks; whatever overlaps, a step takes
    the largest of them at least. `predicted` has the collectives, with latencies, after the larger
    of `compute` and `hbm`.
    """

    compute: float
    hbm: float
    ici: float
    dcn: float
    collectives: float

    @property
    def bound(self) -> float:
        """The time that the step takes at least."""
        return max(self.compute, self.hbm, self.ici, self.dcn)

    @property
    def bound_by(self) -> str:
        """What decides it: `"compute"`, `"HBM"`, `"ICI"` or `"DCN"`."""
        named = {"compute": self.compute, "HBM": self.hbm, "ICI": self.ici, "DCN": self.dcn}
        return max(named, key=lambda name: named[name])

    @property
    def predicted(self) -> float:
        """The time without overlap of communication and work."""
        return max(self.compute, self.hbm) + self.collectives
