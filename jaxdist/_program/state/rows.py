"""The replicas that have rows in a step."""

import math
from collections.abc import Iterable

import numpy as np

from jaxdist._mesh import ReplicaMesh
from jaxdist._program.trace.trace import Signature
from jaxdist._values import Kind


def replicas_with_rows(signature: Signature, num_replicas: int) -> tuple[bool, ...] | None:
    """Return for each replica whether any per-replica argument has elements; None if all have.

    Variables with a copy on each replica do not count as rows.
    """
    uneven = dict(signature.uneven)
    given = [
        uneven.get(i) or (slot.local_shape(num_replicas),) * num_replicas
        for i, slot in enumerate(signature.inputs)
        if slot.kind is Kind.PER_REPLICA and not slot.is_scalar and not slot.is_variable
    ]
    if not given:
        return None
    has = tuple(map(_has_rows, zip(*given, strict=True)))
    return None if all(has) else has


def _has_rows(shapes: Iterable[tuple[int, ...]]) -> bool:
    return any(math.prod(s) > 0 for s in shapes)


def place_of(replica: int, layout: ReplicaMesh) -> dict[str, int]:
    """Return the index of a replica along each replica axis."""
    sizes = [layout.traced_mesh.shape[a] for a in layout.replica_axes]
    found = np.unravel_index(replica, sizes)
    return {a: int(i) for a, i in zip(layout.replica_axes, found, strict=True)}


def find_places_with_rows(signature: Signature, layout: ReplicaMesh) -> list[dict[str, int]]:
    """Return the position of one replica with rows for each group with the same trace."""
    # Replicas with the same shapes of uneven inputs share a trace. Reversed, so that the first
    # replica of a group is the one that stays in the dict.
    has = replicas_with_rows(signature, layout.num_replicas)
    columns = zip(*(shapes for _, shapes in signature.uneven), strict=True)
    groups = list(columns) or [()] * layout.num_replicas
    first = {group: r for r, group in reversed(list(enumerate(groups))) if has is None or has[r]}
    return [place_of(r, layout) for r in first.values()]
