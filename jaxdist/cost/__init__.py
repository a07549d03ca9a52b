"""Predicts the cost of collectives from the links between devices and the algorithm."""

from typing import TYPE_CHECKING

from jaxdist._late import open_late as _open_late

if TYPE_CHECKING:
    from jaxdist.cost._chip import CHIPS as CHIPS
    from jaxdist.cost._chip import Chip as Chip
    from jaxdist.cost._chip import chip_of as chip_of
    from jaxdist.cost._chip import devices_per_chip as devices_per_chip
    from jaxdist.cost._chip import generation_of as generation_of
    from jaxdist.cost._collective import collective_seconds as collective_seconds
    from jaxdist.cost._collective import exchange_factor as exchange_factor
    from jaxdist.cost._curve import SizeCurve as SizeCurve
    from jaxdist.cost._fit import Fit as Fit
    from jaxdist.cost._fit import Sample as Sample
    from jaxdist.cost._fit import fitted as fitted
    from jaxdist.cost._gpu_rows import Target as Target
    from jaxdist.cost._link import Link as Link
    from jaxdist.cost._link import Links as Links
    from jaxdist.cost._link import Medium as Medium
    from jaxdist.cost._links_of import for_devices as for_devices
    from jaxdist.cost._links_of import links_of as links_of
    from jaxdist.cost._links_of import worker_of as worker_of
    from jaxdist.cost._measured import links as links
    from jaxdist.cost._measured import load_links as load_links
    from jaxdist.cost._measured import save_links as save_links
    from jaxdist.cost._model import ALGORITHMS as ALGORITHMS
    from jaxdist.cost._model import cheapest as cheapest
    from jaxdist.cost._model import pack_below as pack_below
    from jaxdist.cost._model import seconds as seconds
    from jaxdist.cost._table import EFFICIENCY as EFFICIENCY
    from jaxdist.cost._table import TABLE as TABLE
    from jaxdist.cost._table import Efficiency as Efficiency
    from jaxdist.cost._table import efficiency_of as efficiency_of

_open_late(__name__)
