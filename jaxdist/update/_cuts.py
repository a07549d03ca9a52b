"""Which arrays are cut over the replicas, and along which dim."""

import math

from jaxdist.mesh import ReplicaMesh
from jaxdist.values import Cut

# Seconds that one more collective takes, and bytes per second that a device reads or writes in
# memory: measured on XLA's CPU backend with 8 devices in one process. On other platforms XLA puts
# the collectives of many leaves into one, so that a leaf of its own costs little.
_LATENCY = {"cpu": 24e-6}
_LATENCY_MERGED = 1e-6
_MEMORY_BANDWIDTH = {"cpu": 12.4 * 2**30}
_MEMORY_BANDWIDTH_OTHER = 800e9

# A dim is not cut where padding would make the array longer than this.
_MOST_PADDING = 1.5


def worth_cutting(layout: ReplicaMesh) -> float:
    """Bytes of float32 from which a leaf is updated in pieces.

    A leaf that is updated in pieces takes a reduce-scatter and an all-gather of its own, where a
    small one rides in an all-reduce with others; in return each replica reads and writes a part
    of it. So it pays from `latency * bandwidth / 2`.
    """
    latency = _LATENCY.get(layout.platform, _LATENCY_MERGED)
    return latency * _MEMORY_BANDWIDTH.get(layout.platform, _MEMORY_BANDWIDTH_OTHER) / 2


class Cuts:
    """The rule of one strategy. It looks at shapes alone.

    So a parameter and all that an optimizer keeps for it, in whatever dtype, are cut alike.
    """

    def __init__(self, layout: ReplicaMesh, min_bytes: float | None) -> None:
        self.num_replicas = layout.num_replicas
        self._least = worth_cutting(layout) if min_bytes is None else min_bytes

    def of(self, shape: tuple[int, ...]) -> Cut | None:
        """How an array of this shape is cut, or None where every replica has it whole."""
        count = self.num_replicas
        size = math.prod(shape)
        if count == 1 or not shape or not size or 4 * size < self._least:
            return None
        longer = [math.ceil(n / count) * count / n for n in shape]
        dim = longer.index(min(longer))
        return Cut(dim, shape[dim]) if longer[dim] <= _MOST_PADDING else None
