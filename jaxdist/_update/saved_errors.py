"""Converts the rounding errors of `compressed_update` for another number of replicas.

`compressed_update` keeps the errors that it has not sent yet in two arrays, `given` and `summed`,
whose shapes depend on the number of replicas. The errors of all replicas represent one vector of
the size of the gradients, which must be added to the next gradients: the sum of the errors of all
replicas, each at its position. This vector does not depend on the number of replicas. So a
checkpoint is restored by computing it and splitting it again. See Note [Error feedback].
"""

import logging
from collections.abc import Mapping
from typing import Any

import numpy as np

_LOG = logging.getLogger("jaxdist")
_GIVEN, _SUMMED = "given", "summed"

Shape = tuple[int, ...]


def find_moved_pairs(
    saved: Mapping[str, Shape], wanted: Mapping[str, Shape]
) -> list[tuple[str, str]]:
    """Return the names of each pair of error arrays that was saved for other replicas.

    Args:
        saved: The shape of each saved leaf, by path.
        wanted: The shape of each leaf in this run, by path.
    """
    found = []
    for given in wanted:
        parts = given.split(".")
        # Try every part of the path that is called "given": it may be a module, not the field.
        for place in (i for i, part in enumerate(parts) if part == _GIVEN):
            pair = (given, ".".join([*parts[:place], _SUMMED, *parts[place + 1 :]]))
            if all(n in saved and n in wanted for n in pair):
                old, new = ([shapes[n] for n in pair] for shapes in (saved, wanted))
                if old != new and _can_be_errors(*old) and _can_be_errors(*new):
                    found.append(pair)
    return found


def divide_errors(
    arrays: dict[str, Any], pairs: list[tuple[str, str]], wanted: Mapping[str, Shape]
) -> None:
    """Divide the errors in `arrays`, in place, among the replicas of this run."""
    for pair in pairs:
        given, summed = (np.asarray(arrays[n]) for n in pair)
        shapes = (wanted[pair[0]], wanted[pair[1]])
        arrays.update(zip(pair, _move_errors(given, summed, shapes), strict=True))
        _LOG.info(
            "%s: errors that compressed_update had not sent yet were saved by %d replicas, and are "
            "divided among %d",
            pair[0],
            given.shape[0],
            shapes[0][0],
        )


def _can_be_errors(*shapes: Shape) -> bool:
    """Whether arrays of these two shapes can be the `given` and `summed` errors."""
    if not all(len(s) == 2 and min(s) > 0 for s in shapes) or shapes[0][0] != shapes[1][0]:
        return False
    (replicas, part), (_, chunk) = shapes
    return part % chunk == 0 and replicas % (part // chunk) == 0


def _move_errors(
    given: np.ndarray, summed: np.ndarray, wanted: tuple[Shape, Shape]
) -> tuple[np.ndarray, np.ndarray]:
    """Return the errors of all replicas in the shapes for other numbers of replicas and workers.

    Shapes:
        `given` `[R, P]` and `summed` `[R, P/W]` for `R` replicas of `W` workers, as
        `CompressedSum` makes them. In the result, `summed` holds the whole vector once, and `given`
        is zero.
    """
    replicas, part = given.shape
    workers = part // summed.shape[1]
    within = (workers, replicas // workers)
    total = given.reshape(*within, part).sum(0).ravel()
    total = total + summed.reshape(*within, -1).transpose(1, 0, 2).ravel()
    (replicas, part), (_, chunk) = wanted
    workers = part // chunk
    local = replicas // workers
    # Elements after the gradients are padding, whose errors are 0, so they may be dropped.
    vector = np.zeros(local * part, total.dtype)
    kept = min(vector.size, total.size)
    vector[:kept] = total[:kept]
    new_summed = vector.reshape(local, workers, chunk).transpose(1, 0, 2).reshape(wanted[1])
    return np.zeros(wanted[0], given.dtype), new_summed.astype(summed.dtype)
