"""Which arrays are cut over the replicas, and along which dim."""

import math
from typing import Any

import jax

from jaxdist import cost
from jaxdist._mesh import ReplicaMesh
from jaxdist._update.leaves import Leaves
from jaxdist._values import Cut, Sharded

# A dim is not cut where padding would make the array longer than this.
_MOST_PADDING = 1.5


def min_bytes_to_cut(layout: ReplicaMesh) -> float:
    """Bytes of float32 from which a leaf is updated in pieces.

    A leaf that is updated in pieces takes a reduce-scatter and an all-gather of its own, where a
    small one rides in an all-reduce with others; in return each replica reads and writes a part
    of it. So it pays from where it does not pay to pack a leaf: `latency * bandwidth / 2`.
    """
    return cost.pack_below(cost.links_of(layout).inner)


class Cuts:
    """The rule of one strategy. It looks at shapes alone.

    So a parameter and all that an optimizer keeps for it, in whatever dtype, are cut alike. What
    is kept for a parameter that is in pieces itself is cut as the parameter is.
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
            self._known_cuts.sort(key=lambda known: -len(known[0]))

    def cut_of_leaf(self, array: Any, path: str) -> Cut | None:
        """How a leaf of gradients or state at this path is cut; random keys are not."""
        if jax.dtypes.issubdtype(array.dtype, jax.dtypes.extended):
            return None
        shape = tuple(array.shape)
        for tail, wanted, cut in self._known_cuts:
            if path.endswith(tail) and shape == wanted:
                return cut
        return self.cut_of_shape(shape)

    def cut_of_shape(self, shape: tuple[int, ...]) -> Cut | None:
        """How an array of this shape is cut, or None where every replica has it whole."""
        count = self.num_replicas
        size = math.prod(shape)
        if count == 1 or not shape or not size or 4 * size < self._least:
            return None
        longer = [math.ceil(n / count) * count / n for n in shape]
        dim = longer.index(min(longer))
        return Cut(dim, shape[dim]) if longer[dim] <= _MOST_PADDING else None
