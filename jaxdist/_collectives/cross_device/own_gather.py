"""`CrossDeviceOps` of users that override the gather or the broadcast."""

from typing import Any

from jaxdist._collectives.cross_device.base import CrossDeviceOps
from jaxdist._collectives.options import CommunicationOptions
from jaxdist._collectives.users_code import annotate_errors
from jaxdist._mesh import ReplicaMesh
from jaxdist._values import Handle, PerReplica
from jaxdist.errors import ReplicaValueError


def has_override(ops: CrossDeviceOps | None, method: str) -> bool:
    """Whether the class of `ops` overrides a method of `CrossDeviceOps`."""
    return ops is not None and getattr(type(ops), method) is not getattr(CrossDeviceOps, method)


def gather_by_ops(
    ops: CrossDeviceOps,
    name: str,
    value: PerReplica,
    axis: int,
    layout: ReplicaMesh,
    options: CommunicationOptions,
) -> Any:
    """Return one value as gathered by the user's class, on all devices of the strategy.

    Raises:
        ReplicaValueError: The result is not an array of the value's rank.
    """
    what = f"{type(ops).__name__}.gather_implementation"
    first = value.local if isinstance(value, Handle) else value.values[0]
    rank = len(first.shape) if hasattr(first, "shape") else 0
    everywhere = value if isinstance(value, Handle) else list(layout.devices)
    with annotate_errors(what, name):
        result = ops.gather(value, everywhere, axis, options)
    if isinstance(result, PerReplica) or len(getattr(result, "shape", ())) != rank:
        raise ReplicaValueError(
            f"{what} gave {result!r}, of type {type(result).__name__}, for {name}.\n\n"
            "It returns one array for all replicas: their values, concatenated on dim "
            f"{axis}.\n\nReturn an array of rank {rank}."
        )
    return result
