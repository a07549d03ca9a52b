"""Arrays that lie on one device, and are arguments again and again: copied to the others once."""

import weakref
from collections.abc import Callable, Collection, Sequence
from typing import Any

import jax

from jaxdist import _compat
from jaxdist._mesh import ReplicaMesh
from jaxdist._program.arguments.arguments import is_unit


def is_elsewhere(leaf: Any, layout: ReplicaMesh) -> bool:
    """Whether an array follows where it is used, and lies on other devices than the strategy's."""
    if not isinstance(leaf, jax.Array) or isinstance(leaf, jax.core.Tracer):
        return False
    return not _compat.is_committed(leaf) and leaf.sharding.device_set != layout.device_set


def has_arrays_elsewhere(leaves: Sequence[Any], layout: ReplicaMesh) -> bool:
    """Whether each call with these leaves copies some of them to the devices of the strategy."""
    return any(is_elsewhere(leaf, layout) for leaf in leaves)


Arguments = tuple[tuple[Any, ...], dict[str, Any]]


class Mirror:
    """Keeps the mirrored copy of an array for the next call with the same one.

    Of the arrays of a call that are elsewhere it keeps the last copy of the first, of the second
    and so on, and only as long as the array itself lives.
    """

    def __init__(self, layout: ReplicaMesh) -> None:
        self._layout = layout
        self._kept: dict[int, tuple[weakref.ref[Any], jax.Array]] = {}

    def arguments(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], donated: Collection[int] = ()
    ) -> Arguments | None:
        """The arguments with copies in the place of such arrays; None where there are none.

        What is donated is left as it is: its copy is used up by the call.
        """
        given = tuple(Donated(a) if i in donated else a for i, a in enumerate(args))
        leaves, treedef = jax.tree.flatten((given, kwargs), is_leaf=_is_whole)
        numbers = [i for i, leaf in enumerate(leaves) if is_elsewhere(leaf, self._layout)]
        if not numbers:
            return None
        for place, i in enumerate(numbers):
            leaves[i] = self._mirrored(place, leaves[i])
        given, kwargs = jax.tree.unflatten(treedef, leaves)
        return tuple(a.value if isinstance(a, Donated) else a for a in given), kwargs

    def _mirrored(self, place: int, array: Any) -> jax.Array:
        known = self._kept.get(place)
        if known is not None and known[0]() is array and not known[1].is_deleted():
            return known[1]
        copy: jax.Array = jax.device_put(array, self._layout.replicated)
        kept = self._kept

        def forget(dead: Any) -> None:
            if place in kept and kept[place][0] is dead:
                del kept[place]

        kept[place] = (weakref.ref(array, forget), copy)
        return copy


class Donated:
    """An argument that is donated: a leaf, whatever is in it."""

    def __init__(self, value: Any) -> None:
        self.value = value


def _is_whole(x: Any) -> bool:
    # What a step updates in place has to be the object that was given.
    return is_unit(x) or isinstance(x, Donated)


class MirroringCall:
    """A call path that keeps mirrored copies of arrays on one device.

    A call without such arrays ends it, since results of a step are mirrored already.
    """

    dispatch: Callable[..., Any]

    def __init__(self, mirror: Mirror, donated: Collection[int], end: Callable[[], None]) -> None:
        self._mirror = mirror
        self._donated = donated
        self._end = end

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        copied = self._mirror.arguments(args, kwargs, self._donated)
        if copied is None:
            self._end()
            return self.dispatch(*args, **kwargs)
        args, kwargs = copied
        return self.dispatch(*args, **kwargs)
