"""Reduce-scatters over all chips of a TPU slice, in two stages.

# Note [Scatter in two stages]
XLA for TPU turns a reduce-scatter over all chips of a square slice or of a 3D torus into an
all-reduce, of which each chip keeps its piece: twice the bytes. Over a part of the slice it stays a
reduce-scatter. So a large one runs first within parts of the slice, and then across them: within
the halves of a square, and within the planes of a torus. The second stage has a small part of the
bytes. `docs/machines/tpu.md` lists what XLA compiled.

Consecutive replicas are in different parts (Note [Order of chips]). So the two stages give the same
pieces as one operation; only the order of the sums differs. The stages are inserted when a program
is lowered, after all proofs about it.
"""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from jaxdist import cost
from jaxdist._mesh import ReplicaMesh
from jaxdist._program.jaxprs import primitives as known

# Below this size start-up dominates the time of a collective.
_LEAST_BYTES = 1 << 20
_LEAST_CHIPS = 4  # along each dim


@dataclasses.dataclass(frozen=True)
class ScatterStages:
    """How the replicas of a slice reduce-scatter: within groups, then across them.

    Consecutive replicas are in different parts.

    Attributes:
        axes: The replica axes of one slice that have more than one device.
        parts: The number of parts of a slice.
        size: The number of replicas of a part.
        trivial: The replica axes of one device.
    """

    axes: tuple[str, ...]
    parts: int
    size: int
    trivial: frozenset[str] = frozenset()

    def fits(self, eqn: Any) -> bool:
        """Whether an operation is a large reduce-scatter over all replicas of each slice."""
        if eqn.primitive.name not in known.SCATTERS:
            return False
        names, [given] = eqn.params["axis_name"], eqn.invars
        over = names if isinstance(names, tuple) else (names,)
        is_whole = eqn.params["axis_index_groups"] is None and eqn.params["tiled"]
        is_over_slice = tuple(name for name in over if name not in self.trivial) == self.axes
        size = given.aval.size * given.aval.dtype.itemsize
        return is_whole and is_over_slice and size >= _LEAST_BYTES

    def scatter(self, array: jax.Array, dim: int) -> jax.Array:
        """Return this replica's result of a reduce-scatter along `dim` over all replicas."""
        name = self.axes[0] if len(self.axes) == 1 else self.axes
        count, parts = self.parts * self.size, self.parts
        within = [list(range(first, count, parts)) for first in range(parts)]
        across = [list(range(first, first + parts)) for first in range(0, count, parts)]
        for groups in (within, across):
            array = jax.lax.psum_scatter(
                array, name, scatter_dimension=dim, axis_index_groups=groups, tiled=True
            )
        return array


def find_stages(layout: ReplicaMesh) -> ScatterStages | None:
    """Return the stages of a layout whose replicas are the chips of TPU slices, or None.

    Also None for slices and orders of chips on which one operation is no worse.
    """
    if layout.platform != "tpu" or layout.num_logical > 1 or layout.num_virtual is not None:
        return None
    sizes = {name: layout.mesh.shape[name] for name in layout.replica_axes}
    long = [name for name in sizes if sizes[name] > 1]
    trivial = frozenset(sizes) - set(long)
    # The last axes are those within a slice.
    for first in range(len(long)):
        slices = np.array(layout.devices).reshape(-1, math.prod(sizes[n] for n in long[first:]))
        if all(len({cost.worker_of(d) for d in devices}) == 1 for devices in slices):
            [found, *others] = {_find_parts(list(devices)) for devices in slices}
            if found is None or others:
                return None
            return ScatterStages(tuple(long[first:]), *found, trivial)
    return None


def _find_parts(devices: Sequence[Any]) -> tuple[int, int] | None:
    """Return the number of parts of a slice, and the replicas of each."""
    coords: list[Any] = [getattr(d, "coords", None) for d in devices]
    if None in coords or len(set(map(tuple, coords))) < len(devices):
        return None  # two cores of a chip are two replicas
    lengths = _measure(coords)
    longer = [n for n in lengths if n > 1]
    if math.prod(lengths) != len(devices) or min(longer, default=0) < _LEAST_CHIPS:
        return None
    if len(longer) == 3:
        parts = lengths[0]
    elif len(longer) == 2 and longer[0] == longer[1]:
        parts = 2
    else:
        return None
    size = len(devices) // parts
    are_boxes = all(math.prod(_measure(coords[i::parts])) == size for i in range(parts))
    return (parts, size) if are_boxes else None


def _measure(coords: Sequence[Any]) -> list[int]:
    """Return the number of different coordinates along each dim."""
    return [len(set(along)) for along in zip(*coords, strict=True)]
