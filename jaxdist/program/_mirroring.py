"""Arrays that lie on one device, and are arguments again and again: copied to the others once."""

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import jax

from jaxdist import _compat
from jaxdist.mesh import ReplicaMesh


def is_elsewhere(leaf: Any, layout: ReplicaMesh) -> bool:
    """Whether an array follows where it is used, and lies on other devices than the strategy's."""
    if not isinstance(leaf, jax.Array) or isinstance(leaf, jax.core.Tracer):
        return False
    return not _compat.is_committed(leaf) and leaf.sharding.device_set != layout.device_set


def has_arrays_elsewhere(leaves: Sequence[Any], layout: ReplicaMesh) -> bool:
    """Whether each call with these leaves copies some of them to the devices of the strategy."""
    return any(is_elsewhere(leaf, layout) for leaf in leaves)


class MirroringCall:
    """A call path that keeps the mirrored copy of an array for the next call with the same one.

    For each argument it keeps the last copy, and only as long as the array itself lives. A call
    without such arrays ends it, since results of a step are mirrored already.
    """

    dispatch: Callable[..., Any]

    def __init__(self, layout: ReplicaMesh, end: Callable[[], None]) -> None:
        self._layout = layout
        self._end = end
        self._kept: dict[int, tuple[weakref.ref[Any], jax.Array]] = {}

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        leaves, treedef = jax.tree.flatten((args, kwargs))
        numbers = [i for i, leaf in enumerate(leaves) if is_elsewhere(leaf, self._layout)]
        if not numbers:
            self._end()
            return self.dispatch(*args, **kwargs)
        for i in numbers:
            leaves[i] = self._mirrored(i, leaves[i])
        args, kwargs = jax.tree.unflatten(treedef, leaves)
        return self.dispatch(*args, **kwargs)

    def _mirrored(self, number: int, array: Any) -> jax.Array:
        known = self._kept.get(number)
        if known is not None and known[0]() is array and not known[1].is_deleted():
            return known[1]
        copy: jax.Array = jax.device_put(array, self._layout.replicated)
        kept = self._kept

        def forget(dead: Any) -> None:
            if number in kept and kept[number][0] is dead:
                del kept[number]

        kept[number] = (weakref.ref(array, forget), copy)
        return copy
