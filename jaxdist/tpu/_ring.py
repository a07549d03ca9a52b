"""Orders of places in a box in which neighbours are neighbours, and the last meets the first."""

import itertools
import logging
from typing import TypeAlias

_LOG = logging.getLogger("jaxdist")

Place: TypeAlias = tuple[int, int, int]


def ring(width: int, height: int, depth: int) -> list[Place]:
    """Every `(x, y, z)` of a box once, each one step from the one before, the last from the first.

    With an odd size above 1 there may be no such order; then x runs fastest, which is logged.

    Example:
        >>> ring(2, 2, 1)
        [(0, 0, 0), (1, 0, 0), (1, 1, 0), (0, 1, 0)]

    Source:
        `DeviceOrderMode.RING` of `tf.tpu.experimental`.
    """
    sizes = (width, height, depth)
    longer = [size for size in sizes if size > 1]
    if len(longer) <= 1:
        return _x_fastest(*sizes)
    if any(size % 2 for size in longer):
        _LOG.warning("No ring in a %dx%dx%d box, since a size is odd; x runs fastest.", *sizes)
        return _x_fastest(*sizes)
    if depth == 1:
        return [(0, 0, 0), *((x, y, 0) for x, y in _loop(width, height))]
    if width == 1:
        return [(0, 0, 0), *((0, y, z) for y, z in _loop(height, depth))]
    if height == 1:
        return [(0, 0, 0), *((x, 0, z) for x, z in _loop(width, depth))]
    plane = _loop(width, height)
    path = [(0, 0, 0)]
    for z in range(depth):
        path += [(x, y, z) for x, y in (plane[::-1] if z % 2 else plane)]
    return [*path, *((0, 0, z) for z in range(depth - 1, 0, -1))]


def _loop(width: int, height: int) -> list[tuple[int, int]]:
    """A ring through a plane of even sizes from (0, 0), which is left out, and back next to it."""
    path: list[tuple[int, int]] = []
    for y in range(0, height, 2):
        path += [(x, y) for x in range(1, width)]
        path += [(x, y + 1) for x in range(width - 1, 0, -1)]
    return [*path, *((0, y) for y in range(height - 1, 0, -1))]


def _x_fastest(width: int, height: int, depth: int) -> list[Place]:
    zyx = itertools.product(range(depth), range(height), range(width))
    return [(x, y, z) for z, y, x in zyx]
