"""The collective settings of a strategy: its default options and its `CrossDeviceOps`.

A user's `CrossDeviceOps` may override the gather or the broadcast.
"""

import dataclasses
from typing import Any

from jaxdist._called import call_as, refuse_type
from jaxdist._collectives.cross_device.base import CrossDeviceOps
from jaxdist._collectives.in_replica import annotate_errors
from jaxdist._collectives.marks import note_limit
from jaxdist._collectives.options import (
    CommunicationOptions,
    choose_options,
    read_options,
    report_ignored,
)
from jaxdist._mesh import ReplicaMesh
from jaxdist._values import Handle, PerReplica
from jaxdist.errors import ReplicaValueError


@dataclasses.dataclass(frozen=True)
class Communication:
    """The `CrossDeviceOps` of a strategy (None: XLA reduces) and its default options."""

    ops: CrossDeviceOps | None = None
    options: CommunicationOptions = dataclasses.field(default_factory=CommunicationOptions)
    # Whether other processes have a part of the mesh, so that time limits have an effect.
    is_shared: bool = False

    def read_call(
        self, options: Any, experimental_hints: Any, *, packs: bool = False
    ) -> CommunicationOptions:
        """Return the options of one call. Fields that the call leaves out are the strategy's."""
        given = choose_options(options, experimental_hints)
        report_ignored(given, packs=packs, waits=self.is_shared)
        # The strategy's options apply to every call. Some calls use `bytes_per_pack`, so it is
        # never reported as ignored here.
        call_as("the strategy", report_ignored, self.options, packs=True, waits=self.is_shared)
        if self.is_shared and given.timeout_seconds is not None:
            note_limit(given.timeout_seconds)
        # `merged` copies the options. Most calls give none, and need no copy.
        asks_nothing = options is None and experimental_hints is None
        return self.options if asks_nothing else self.options.merged(given)


def read_communication(
    cross_device_ops: Any,
    options: Any,
    experimental_hints: Any,
    name: str = "options",
) -> Communication:
    """Check the arguments of a strategy's constructor, and return them as a `Communication`.

    `name` is the name of its parameter of `options`.

    Raises:
        ArgumentTypeError: `cross_device_ops` is not a `CrossDeviceOps`.
        ArgumentError: Both options and hints are given.
    """
    if cross_device_ops is not None and not isinstance(cross_device_ops, CrossDeviceOps):
        raise refuse_type(
            f"cross_device_ops={cross_device_ops!r}, of type {type(cross_device_ops).__name__}.",
            "cross_device_ops is a jaxdist.CrossDeviceOps, or an object of a subclass.",
            "Pass for instance jaxdist.NcclAllReduce(num_packs=2), or leave it out.",
        )
    return Communication(cross_device_ops, read_options(options, experimental_hints, name))


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
            f"{what} returned {result!r}, of type {type(result).__name__}, for {name}.\n\n"
            "It returns one array for all replicas: their values, concatenated on dim "
            f"{axis}.\n\nReturn an array of rank {rank}."
        )
    return result
