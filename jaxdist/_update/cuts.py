"""Chooses which arrays to shard over the replicas, and along which dim."""

import math
from typing import Any

import jax

from jaxdist import cost
from jaxdist._mesh import ReplicaMesh
from jaxdist._update.leaves import Leaves
from jaxdist._values import Cut, Sharded

# A dim is not sharded if padding would make it longer than this factor.
_MOST_PADDING = 1.5


def min_bytes_to_cut(layout: ReplicaMesh) -> float:
    """Return the number of bytes (in float32) from which a leaf is updated in pieces.

    A leaf in pieces needs its own reduce-scatter and all-gather, but each replica reads and writes
    only a part of it. A small leaf shares one all-reduce with others. Pieces are faster from the
    size at which packing a leaf into an all-reduce becomes slower: `latency * bandwidth / 2`.
    """
    return cost.pack_below(cost.links_of(layout).inner)


class Cuts:
    """The rule of one strategy, which depends only on shapes.

    So a parameter and its optimizer state are sharded in the same way, whatever their dtypes are.
    The state of a `Sharded` parameter is sharded like the parameter.
    """

    def __init__(
        self, layout: ReplicaMesh, min_bytes: float | None, params: Leaves | None = None
    ) -> None:
        self.num_replicas = layout.num_replicas
        self._least = min_bytes_to_cut(layout) if min_bytes is None else min_bytes
        self._known_cuts: list[tuple[str, tuple[int, ...], Cut]] = []
        if params is not None:
            for array, path in zip(params.arrays, params.paths, strict=True):
                if isinstance(array, Sharded):
                    self._known_cuts.append((path, array.shape, array.cut))
            # Try longer paths first: a path may end with the paths of several parameters.
            self._known_cuts.sort(key=lambda known: -len(known[0]))

    def cut_of_leaf(self, array: Any, path: str) -> Cut | None:
        """Return the `Cut` of a leaf of gradients or state at this path; None if it stays whole."""
        # Random keys have trailing dims that are not in their shape, so they stay whole.
        if jax.dtypes.issubdtype(array.dtype, jax.dtypes.extended):
            return None
        shape = tuple(array.shape)
        for tail, wanted, cut in self._known_cuts:
            if path.endswith(tail) and shape == wanted:
                return cut
        return self.cut_of_shape(shape)

    def cut_of_shape(self, shape: tuple[int, ...]) -> Cut | None:
        """Return the `Cut` of an array of this shape; None if it stays whole."""
        count = self.num_replicas
        size = math.prod(shape)
        if count == 1 or not shape or not size or 4 * size < self._least:
            return None
        longer = [math.ceil(n / count) * count / n for n in shape]
        dim = longer.index(min(longer))
        return Cut(dim, shape[dim]) if longer[dim] <= _MOST_PADDING else None
