"""Weights of a model as a file of safetensors: written by name, and read in slices."""

from typing import TYPE_CHECKING

from jaxdist._late import open_late as _open_late

if TYPE_CHECKING:
    from jaxdist._weights.export import export_weights as export_weights
    from jaxdist._weights.leaves import NO_WEIGHTS as NO_WEIGHTS
    from jaxdist._weights.leaves import fetch_weight as fetch_weight
    from jaxdist._weights.leaves import list_weights as list_weights
    from jaxdist._weights.load import load_weights as load_weights
    from jaxdist._weights.mapping import Mapped as Mapped
    from jaxdist._weights.weight import Weight as Weight

_open_late(__name__)
