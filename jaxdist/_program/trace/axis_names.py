"""The error for a mesh axis that a step uses and the strategy does not have."""

import re
from typing import Any

from jaxdist._mesh import ReplicaMesh
from jaxdist.errors import AxisNameError

_UNBOUND = re.compile(r"unbound axis name:? '?(.+?)'?(?:\. |\.?$)", re.MULTILINE)


def unbound_axis_error(error: Exception, fn: Any, layout: ReplicaMesh) -> AxisNameError | None:
    """Return a better error for JAX's error about an unbound axis; None for other errors."""
    found = _UNBOUND.search(str(error)) if isinstance(error, NameError) else None
    if found is None or isinstance(error, AxisNameError):
        return None
    given = found.group(1)
    axes = layout.replica_axes
    written = repr(axes[0]) if len(axes) == 1 else repr(axes)
    if given in layout.logical_axes:
        return AxisNameError(
            f"The step {_name(fn)!r} uses the axis {given!r} in a collective.\n\n"
            f"{given!r} is an axis of logical devices: XLA splits values over it, and no "
            f"collective by hand can. The replica axes are {list(axes)}.\n\n"
            f"Write jax.lax.psum(x, {written}), or leave the collective out: "
            "jax.lax.with_sharding_constraint says how a value is split."
        )
    return AxisNameError(
        f"The step {_name(fn)!r} uses the axis {given!r}, which no mesh or jax.vmap around it "
        f"has.\n\nThe axes of the strategy's mesh are {dict(layout.mesh.shape)}, and its replicas "
        f"are along {list(axes)}.\n\n"
        f"Write {written} in the place of {given!r}, such as jax.lax.psum(x, {written}), or call "
        "jaxdist.get_replica_context().all_reduce('sum', x), which needs no name."
    )


def _name(fn: Any) -> str:
    return str(getattr(fn, "__name__", type(fn).__name__))
