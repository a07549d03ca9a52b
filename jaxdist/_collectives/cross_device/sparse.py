"""Reduction of `IndexedSlices` by `CrossDeviceOps`: the rows of all replicas are concatenated."""

from collections.abc import Callable
from typing import Any

from jaxdist._collectives.across.slices import scale_rows
from jaxdist._collectives.cross_device.values import as_per_replica, count_replicas
from jaxdist._collectives.options.reduce_op import ReduceOp
from jaxdist._values import IndexedSlices, PerReplica
from jaxdist.errors import ReplicaValueError

# A function that concatenates one part over the replicas, on the destinations.
Gather = Callable[[PerReplica], Any]


def read_slices(caller: str, name: str, value: Any) -> IndexedSlices | None:
    """Return `value` as slices with per-replica parts, or None if it is no slices.

    Raises:
        ReplicaValueError: Only some replicas have slices, or their whole arrays differ.
    """
    if isinstance(value, IndexedSlices):
        return value
    if not isinstance(value, PerReplica) or value.is_global:
        return None
    parts = value.values
    kinds = [isinstance(p, IndexedSlices) for p in parts]
    if not any(kinds):
        return None
    shapes = [p.dense_shape if isinstance(p, IndexedSlices) else p for p in parts]
    if not all(kinds) or len(set(shapes)) > 1:
        found = "\n".join(f"  replica {r}: {p!r}" for r, p in enumerate(parts))
        raise ReplicaValueError(
            f"{caller} was given {name} that is not of one kind:\n{found}\n\n"
            "Slices are reduced with slices, of one whole array (dense_shape).\n\n"
            "Give IndexedSlices on every replica, or slices.to_dense() on each."
        )
    first: IndexedSlices = parts[0]
    return first.with_parts(
        PerReplica([p.values for p in parts]), PerReplica([p.indices for p in parts])
    )


def reduce_slices(
    caller: str, name: str, op: ReduceOp, slices: IndexedSlices, gather: Gather
) -> IndexedSlices:
    """Return the rows of all replicas; for a mean, divided by the number of replicas."""
    values = as_per_replica(caller, f"{name}.values", slices.values)
    indices = as_per_replica(caller, f"{name}.indices", slices.indices)
    rows, numbers = gather(values), gather(indices)
    return slices.with_parts(scale_rows(op, rows, count_replicas(values)), numbers)
