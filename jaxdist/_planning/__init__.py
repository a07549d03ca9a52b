"""Plans a step for TPUs or GPUs that this machine does not have."""

from typing import TYPE_CHECKING

from jaxdist._late import open_late as _open_late

if TYPE_CHECKING:
    from jaxdist._planning.expected import predict_expected as predict_expected
    from jaxdist._planning.needs import get_roles as get_roles
    from jaxdist._planning.planner import Source as Source
    from jaxdist._planning.planner import compile_for as compile_for
    from jaxdist._planning.planner import plan as plan
    from jaxdist._planning.slice_axes import LOGICAL as LOGICAL
    from jaxdist._planning.slice_axes import assign_slices as assign_slices
    from jaxdist._planning.slice_axes import make_axes as make_axes
    from jaxdist._planning.slice_axes import put_on_axes as put_on_axes
    from jaxdist._planning.slices import find_logical_shape as find_logical_shape
    from jaxdist._planning.targets import count_slices as count_slices
    from jaxdist._planning.targets import list_logical_counts as list_logical_counts
    from jaxdist._planning.targets import make_target as make_target

_open_late(__name__)
