"""What joins two devices, as numbers."""

import dataclasses
import enum

from jaxdist._validate import check_instance, check_text
from jaxdist.cost._checks import check_positive


class Medium(enum.Enum):
    """What the devices of a link have to themselves, and what they share."""

    WIRE = "wire"  # every device has a link of its own
    HOST = "host"  # processes of one machine, over its loopback
    MEMORY = "memory"  # threads of one process: what is sent is read where it lies

    @property
    def is_shared(self) -> bool:
        """Whether all devices wait for the same processor cores and memory."""
        return self is not Medium.WIRE


@dataclasses.dataclass(frozen=True)
class Link:
    """The latency and the bandwidth between devices.

    Args:
        name: Its row in the table.
        alpha: Seconds that one message takes however small it is. Between CPU devices, for each
            operand of a collective and each device; it grows with the number of devices.
        bytes_per_second: What one device sends; of a shared medium, what all send together.
        memory_bytes_per_second: What a copy reads, or writes, on one device; of a shared medium,
            on all together.
        source: Where the numbers are from.
        medium: What the devices share.
        scatter_gather: How many times as long as one all-reduce a reduce-scatter and an
            all-gather of the same bytes take together.

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

    def __post_init__(self) -> None:
        check_text("cost.Link", "name", self.name, "nvlink-4")
        source = "Pass for instance source='measured'."
        check_instance("cost.Link", "source", self.source, str, "a text", source)
        check_positive("cost.Link", "alpha", self.alpha, or_zero=True)
        for name in ("bytes_per_second", "memory_bytes_per_second", "scatter_gather"):
            check_positive("cost.Link", name, getattr(self, name))
        remedy = "Pass for instance medium=cost.Medium.WIRE."
        check_instance("cost.Link", "medium", self.medium, Medium, "a cost.Medium", remedy)


@dataclasses.dataclass(frozen=True)
class Links:
    """What joins the replicas of one worker, and what joins workers; None if there is one."""

    inner: Link
    outer: Link | None = None

    def __post_init__(self) -> None:
        remedy = "Pass for instance cost.TABLE['nvlink-4']."
        check_instance("cost.Links", "inner", self.inner, Link, "a cost.Link", remedy)
        if self.outer is not None:
            check_instance("cost.Links", "outer", self.outer, Link, "a cost.Link or None", remedy)

    @property
    def across(self) -> Link:
        """The link between workers; the inner one where workers are parts of one."""
        return self.inner if self.outer is None else self.outer
