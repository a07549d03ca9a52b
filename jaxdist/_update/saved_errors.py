"""Rounding errors of `compressed_update` that were kept for other replicas.

What they stand for is one vector of the size of the gradients: what is still to be added to the
next ones. It is the sum of what all replicas hold, each at its place of the vector, and it does
not depend on how many there are. So it is put together, and cut anew.
"""

from collections.abc import Sequence

import numpy as np

Shapes = tuple[tuple[int, ...], tuple[int, ...]]


def are_errors(shapes: Sequence[tuple[int, ...]]) -> bool:
    """Whether two arrays of these shapes can be `given` and `summed` of some replicas."""
    if not all(len(s) == 2 and min(s) > 0 for s in shapes) or shapes[0][0] != shapes[1][0]:
        return False
    (replicas, part), (_, chunk) = shapes
    return part % chunk == 0 and replicas % (part // chunk) == 0


def moved_errors(
    given: np.ndarray, summed: np.ndarray, wanted: Shapes
) -> tuple[np.ndarray, np.ndarray]:
    """The errors of all replicas, as other replicas and workers hold them.

    Shapes:
        `given` `[R, P]` and `summed` `[R, P/W]` for `R` replicas of `W` workers, as
        `CompressedSum` makes them. The whole of it goes into `summed`, which covers the vector
        once; `given` is 0.
    """
    replicas, part = given.shape
    workers = part // summed.shape[1]
    within = (workers, replicas // workers)
    total = given.reshape(*within, part).sum(0).ravel()
    total = total + summed.reshape(*within, -1).transpose(1, 0, 2).ravel()
    (replicas, part), (_, chunk) = wanted
    workers = part // chunk
    local = replicas // workers
    # What is behind the gradients is padding, on which nothing is lost.
    vector = np.zeros(local * part, total.dtype)
    kept = min(vector.size, total.size)
    vector[:kept] = total[:kept]
    anew = vector.reshape(local, workers, chunk).transpose(1, 0, 2).reshape(wanted[1])
    return np.zeros(wanted[0], given.dtype), anew.astype(summed.dtype)
