"""The links between devices, as numbers.

# Note [Shared media]
Each GPU or TPU has its own links: `Medium.WIRE`. All messages of a step run at the same time, and
the time depends on the busiest device. CPU devices share the processor's cores and its memory:
`Medium.HOST` and `Medium.MEMORY`. There every device waits for all others at every message, so the
latency counts for each device and each operand, and the time depends on the bytes of all devices
together.
"""

import dataclasses
import enum

from jaxdist._called import called
from jaxdist._validate import check_instance, check_text
from jaxdist.cost._curve import SizeCurve, check_positive


class Medium(enum.Enum):
    """The resource that the devices of a link share. See Note [Shared media]."""

    WIRE = "wire"  # every device has its own link
    HOST = "host"  # processes of one machine, over its loopback
    MEMORY = "memory"  # threads of one process, which read each other's memory

    @property
    def is_shared(self) -> bool:
        """Whether all devices wait for the same processor cores and memory."""
        return self is not Medium.WIRE


@dataclasses.dataclass(frozen=True)
class Link:
    """The latency and the bandwidth between devices.

    Args:
        name: The name of its row in the table.
        alpha: The latency in seconds, which is the time of a message without bytes. Between CPU
            devices it counts for each operand of a collective and each device, and it grows with
            the number of devices.
        bytes_per_second: Bytes per second that one device sends; on a shared medium, that all
            devices send together.
        memory_bytes_per_second: Bytes per second that a copy reads, or writes, on one device; on a
            shared medium, on all devices together.
        source: The source of the numbers.
        medium: The resource that the devices share.
        scatter_gather: The time of a reduce-scatter and an all-gather together, divided by the time
            of one all-reduce of the same bytes.
        curve: The latency and the efficiency of NCCL over the link; None for links without NCCL,
            and for measured links, whose numbers are already what a program reaches.

    Example:
        >>> from jaxdist import cost
        >>> cost.TABLE["tpu-v5e-ici"].bytes_per_second
        200000000000.0
    """

    name: str
    alpha: float
    bytes_per_second: float
    memory_bytes_per_second: float
    source: str
    medium: Medium = Medium.WIRE
    scatter_gather: float = 1.0
    curve: SizeCurve | None = None

    @called("cost.Link")
    def __post_init__(self) -> None:
        check_text("name", self.name, "nvlink-4")
        source = "Pass for instance source='measured'."
        check_instance("source", self.source, str, "a string", source)
        check_positive("alpha", self.alpha, or_zero=True)
        for name in ("bytes_per_second", "memory_bytes_per_second", "scatter_gather"):
            check_positive(name, getattr(self, name))
        remedy = "Pass for instance medium=cost.Medium.WIRE."
        check_instance("medium", self.medium, Medium, "a cost.Medium", remedy)
        if self.curve is not None:
            remedy = "Pass for instance cost.TABLE['nvlink-4'].curve."
            what = "a cost.SizeCurve or None"
            check_instance("curve", self.curve, SizeCurve, what, remedy)


@dataclasses.dataclass(frozen=True)
class Links:
    """The link between the replicas of one worker, and the link between workers.

    `outer` is None if there is one worker.
    """

    inner: Link
    outer: Link | None = None

    @called("cost.Links")
    def __post_init__(self) -> None:
        remedy = "Pass for instance cost.TABLE['nvlink-4']."
        check_instance("inner", self.inner, Link, "a cost.Link", remedy)
        if self.outer is not None:
            check_instance("outer", self.outer, Link, "a cost.Link or None", remedy)

    @property
    def across(self) -> Link:
        """The link between workers, or the inner link if there is one worker."""
        return self.inner if self.outer is None else self.outer
