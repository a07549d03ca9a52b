"""Rounding errors of `compressed_update`, converted for another number of replicas.

The errors of all replicas represent one vector of the size of the gradients: the rest that has to
be added to the next gradients. The vector is the sum of the errors of all replicas, each at its
place. It does not depend on the number of replicas. So a checkpoint is restored by computing the
vector and splitting it again. See Note [Error feedback].
"""

from collections.abc import Sequence

import numpy as np

Shapes = tuple[tuple[int, ...], tuple[int, ...]]


def can_be_errors(shapes: Sequence[tuple[int, ...]]) -> bool:
    """Whether arrays of these two shapes can be the `given` and `summed` errors of replicas."""
    if not all(len(s) == 2 and min(s) > 0 for s in shapes) or shapes[0][0] != shapes[1][0]:
        return False
    (replicas, part), (_, chunk) = shapes
    return part % chunk == 0 and replicas % (part // chunk) == 0


def move_errors(
    given: np.ndarray, summed: np.ndarray, wanted: Shapes
) -> tuple[np.ndarray, np.ndarray]:
    """Return the errors of all replicas in the shapes of other replicas and workers.

    Shapes:
        `given` `[R, P]` and `summed` `[R, P/W]` for `R` replicas of `W` workers, as
        `CompressedSum` makes them. The result has the whole vector in `summed`, which covers it
        once, and zeros in `given`.
    """
    replicas, part = given.shape
    workers = part // summed.shape[1]
    within = (workers, replicas // workers)
    total = given.reshape(*within, part).sum(0).ravel()
    total = total + summed.reshape(*within, -1).transpose(1, 0, 2).ravel()
    (replicas, part), (_, chunk) = wanted
    workers = part // chunk
    local = replicas // workers
    # Elements behind the gradients are padding, whose errors are 0, so they may be dropped.
    vector = np.zeros(local * part, total.dtype)
    kept = min(vector.size, total.size)
    vector[:kept] = total[:kept]
    new_summed = vector.reshape(local, workers, chunk).transpose(1, 0, 2).reshape(wanted[1])
    return np.zeros(wanted[0], given.dtype), new_summed.astype(summed.dtype)
