"""The axis of logical devices over which a function of `nn` divides its work."""

import difflib
from typing import NamedTuple

import jax

from jaxdist import _replica
from jaxdist._called import name_call, refuse, refuse_type
from jaxdist._validate import show
from jaxdist.errors import ContextError


class Axis(NamedTuple):
    """An axis of the mesh, of several devices, over which nothing is divided yet.

    Attributes:
        name: The name.
        size: The number of devices, or of replicas.
        frame: The context of the step.
        is_of_replicas: Whether it is an axis of replicas, which is manual in a compiled step. The
            other axes are not manual.
    """

    name: str
    size: int
    frame: _replica.Frame
    is_of_replicas: bool = False


def find_axis(axis: str, default: str, *, allows_replicas: bool = False) -> Axis | None:
    """Return the axis over which to divide the work, or None where one device does all of it.

    One device does it outside of a step, op by op, on a mesh without the default axis, and where a
    replica has one device.

    Args:
        axis: The argument `axis` of the call.
        default: The value of `axis` where the user passes none.
        allows_replicas: Whether the axis may be one of replicas.

    Raises:
        ArgumentTypeError: `axis` is not a string.
        ArgumentError: The axis is one of replicas, or the mesh does not have it.
        ContextError: The axis is manual already: a `jax.shard_map`, or the stages of a pipeline.
            Or the axis is one of replicas, and another one is manual.
    """
    if not isinstance(axis, str):
        raise refuse_type(
            f"axis={show(axis)}.",
            "axis is the name of an axis of the strategy's mesh.",
            f"Pass a string, such as {default!r}.",
        )
    frame = _replica.current_frame()
    if frame is None or not frame.is_inside_step:
        return None
    layout = frame.strategy.layout
    if axis in layout.replica_axes:
        if allows_replicas:
            return _find_replicas(axis, frame)
        others = f"one of {list(layout.logical_axes)}" if layout.num_logical > 1 else "another one"
        raise refuse(
            f"axis={axis!r}, over which the replicas are.",
            "A replica holds its own rows, and divides its work over its own devices.",
            f"Pass {others}: replica_axes={layout.replica_axes} of the strategy are for replicas.",
        )
    if layout.num_logical == 1:
        return None
    if axis not in layout.logical_axes:
        if axis == default:
            return None
        known = [*layout.logical_axes, *(layout.replica_axes if allows_replicas else ())]
        near = difflib.get_close_matches(axis, known, n=1, cutoff=0.0)
        which = "its axes" if allows_replicas else "its axes that are not for replicas"
        raise refuse(
            f"axis={axis!r}, and the mesh of the strategy has {dict(layout.mesh.shape)}.",
            f"axis is one of {which}: {known}.",
            f"Pass axis={(near or known)[0]!r}.",
        )
    around = jax.sharding.get_abstract_mesh()
    # Op by op a replica has whole arrays on one device, and no axis is manual.
    if not frozenset(layout.replica_axes) <= frozenset(around.manual_axes):
        return None
    if axis in around.manual_axes:
        raise refuse(
            f"axis={axis!r}, inside a function whose work is divided over this axis already.",
            "An axis divides the work once: between the stages of a pipeline, or by a "
            "jax.shard_map.",
            "Use another axis of the mesh, or make the call outside of that function.",
            kind=ContextError,
        )
    size = layout.mesh.shape[axis]
    return Axis(axis, size, frame) if size > 1 else None


def _find_replicas(axis: str, frame: _replica.Frame) -> Axis | None:
    """Return an axis of replicas; None if it has one, or if the replicas are virtual."""
    layout = frame.strategy.layout
    if layout.num_virtual is not None or layout.mesh.shape[axis] == 1:
        return None
    layout.check_axes_are_free(name_call())
    around = jax.sharding.get_abstract_mesh()
    divided = [a for a in layout.logical_axes if a in around.manual_axes]
    if any(layout.mesh.shape[a] > 1 for a in divided):
        free = [a for a in layout.logical_axes if a not in divided]
        over = "".join(
            f" Or divide the work over the devices of a replica: axis={a!r}." for a in free[:1]
        )
        raise refuse(
            f"axis={axis!r}, an axis of replicas, inside a function whose work is divided over "
            f"{divided}.",
            "Replicas exchange rows where a replica computes as a whole, with parameters in "
            "pieces.",
            f"Make the call outside of that function.{over}",
            kind=ContextError,
        )
    return Axis(axis, layout.mesh.shape[axis], frame, is_of_replicas=True)
