"""The plan of a step for a machine that need not be there."""

from jaxdist._hooks import COMPILE_FOR as _COMPILE_FOR
from jaxdist._planning.compile_for import compile_for as _compile_for
from jaxdist._planning.planner import Source as Source
from jaxdist._planning.planner import plan as plan
from jaxdist._planning.slice_axes import SLICES as SLICES
from jaxdist._planning.slice_axes import assignment_of_slices as assignment_of_slices
from jaxdist._planning.slice_axes import share_slices as share_slices
from jaxdist._planning.slice_shape import logical_shape as logical_shape
from jaxdist._planning.slices import boxes_of as boxes_of
from jaxdist._planning.slices import num_slices_of as num_slices_of
from jaxdist._planning.slices import place as place

_COMPILE_FOR.set(_compile_for)
