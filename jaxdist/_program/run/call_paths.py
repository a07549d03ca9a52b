"""Decides what calls need around the C++ dispatcher, and mirrors arrays; see Note [Call paths]."""

import weakref
from collections.abc import Collection
from typing import Any

import jax
import numpy as np

from jaxdist import _compat
from jaxdist._mesh import ReplicaMesh
from jaxdist._program.arguments.arguments import is_unit
from jaxdist._program.compile.program import Program
from jaxdist._program.run.call import Call
from jaxdist._values import put


def must_count(program: Program) -> bool:
    """Whether steps of this program may wait for each other's threads; see `CPU_STEPS`."""
    layout = program.layout
    if layout.platform != "cpu" or len(layout.devices) < 2:
        return False
    # Only collectives wait for other devices. With several logical devices XLA may add some.
    return bool(program.traced_collectives) or layout.num_logical > 1


def has_host_arrays(call: Call) -> bool:
    """Whether some leaf came from NumPy. Later calls may then pass arrays that can change.

    NumPy scalars count too: JAX's call path does not tell them from arrays without dims.
    """
    return any(isinstance(x, (np.ndarray, np.generic)) for x in call.leaves)


def is_elsewhere(leaf: Any, layout: ReplicaMesh) -> bool:
    """Whether an array is uncommitted and on devices other than the strategy's."""
    if not isinstance(leaf, jax.Array) or isinstance(leaf, jax.core.Tracer):
        return False
    # JAX copies an uncommitted array to the devices of a program at every call. That copy is saved.
    return not _compat.is_committed(leaf) and leaf.sharding.device_set != layout.device_set


Arguments = tuple[tuple[Any, ...], dict[str, Any]]


class MirrorCache:
    """A cache of mirrored copies, for the next call with the same arrays.

    The n-th entry is the last copy of the n-th such array in a call. An entry is dropped when its
    array is garbage-collected.
    """

    def __init__(self, layout: ReplicaMesh) -> None:
        self._layout = layout
        self._kept: dict[int, tuple[weakref.ref[Any], jax.Array]] = {}

    def replace_arguments(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], donated: Collection[int] = ()
    ) -> Arguments | None:
        """Return the arguments with copies instead of such arrays; None if it replaced nothing.

        Donated arguments are not replaced: the call would delete the cached copy.
        """
        # A step updates NNX objects and variables in place, so they stay whole and are not copied.
        others = [a for i, a in enumerate(args) if i not in donated]
        leaves, treedef = jax.tree.flatten((others, kwargs), is_leaf=is_unit)
        numbers = [i for i, leaf in enumerate(leaves) if is_elsewhere(leaf, self._layout)]
        if not numbers:
            return None
        # By position, so that the copy of a new batch replaces the copy of the last batch.
        for place, i in enumerate(numbers):
            leaves[i] = self._find_or_copy(place, leaves[i])
        others, kwargs = jax.tree.unflatten(treedef, leaves)
        rest = iter(others)
        return tuple(a if i in donated else next(rest) for i, a in enumerate(args)), kwargs

    def _find_or_copy(self, place: int, array: Any) -> jax.Array:
        known = self._kept.get(place)
        if known is not None and known[0]() is array and not known[1].is_deleted():
            return known[1]
        copy: jax.Array = put(array, self._layout.replicated)
        kept = self._kept

        def forget(dead: Any) -> None:
            if place in kept and kept[place][0] is dead:
                del kept[place]

        kept[place] = (weakref.ref(array, forget), copy)
        return copy
