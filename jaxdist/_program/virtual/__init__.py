"""Steps with `deterministic=True`: several virtual replicas run on each device."""

from typing import TYPE_CHECKING

from jaxdist._late import open_late as _open_late

if TYPE_CHECKING:
    from jaxdist._program.virtual.device import VirtualDevice as VirtualDevice
    from jaxdist._program.virtual.limits import check_compiled as check_compiled
    from jaxdist._program.virtual.limits import check_inside_trace as check_inside_trace
    from jaxdist._program.virtual.limits import not_differentiable as not_differentiable
    from jaxdist._program.virtual.program import call_virtually as call_virtually

_open_late(__name__)
