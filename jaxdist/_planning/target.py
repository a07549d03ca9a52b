"""`Target`: the machine of a plan, with a strategy that can only compile."""

import dataclasses

from jaxdist._reports import Places
from jaxdist._strategies import Strategy
from jaxdist.cost import Chip


@dataclasses.dataclass(frozen=True)
class Target:
    """The machine of a plan, with a strategy that can only compile, and its chips.

    `num_slices` is the number of slices, or of NVLink domains.
    """

    name: str
    strategy: Strategy
    places: Places
    chip: Chip
    devices_per_chip: int
    num_slices: int

    @property
    def device(self) -> Chip:
        """The resources of one device, its share of a chip."""
        return self.chip.per_device(self.devices_per_chip)
