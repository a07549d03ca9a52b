"""Checks `donate_argnums`, and donated buffers before and after they are donated.

XLA refuses wrong buffers too, but only while it starts the program. With several devices that may
end the process.
"""

from collections.abc import Sequence
from typing import Any

import jax

from jaxdist import _compat
from jaxdist._called import called, name_call, refuse
from jaxdist._mesh import ReplicaMesh
from jaxdist._program.arguments.arguments import Flat, GraphNode, Static, argument_name
from jaxdist._program.compile.program import Program
from jaxdist._program.nnx.graph import CachedGraph, GraphShape
from jaxdist._validate import format_lines
from jaxdist._values import PerReplica
from jaxdist.errors import ArgumentError, DonationError


def may_crash(layout: ReplicaMesh) -> bool:
    """Whether a deleted buffer in a call ends the process; see `_compat.REJECTS_DELETED_ARRAYS`."""
    is_late = not _compat.REJECTS_DELETED_ARRAYS and layout.platform == "cpu"
    return is_late and len(layout.devices) > 1


def has_repeats(tree: Any) -> bool:
    """Whether a pytree contains one array twice."""
    leaves = jax.tree.leaves(tree)
    return len(set(map(id, leaves))) != len(leaves)


class BufferCheck:
    """Finds arrays that a donating call has twice, and deleted ones if JAX does not.

    Without keyword arguments it does not flatten arrays, or flat dicts and sequences of arrays.
    For 100 leaves that takes a fifth of the time.
    """

    def __init__(self, *, finds_deleted: bool) -> None:
        self._finds_deleted = finds_deleted
        self._all_flat = True

    def register_structure(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Register the structure of a call's arguments before the C++ path takes over."""
        whole = [*args, *kwargs.values()]
        # From one nested argument on, all calls are flattened: `_parts` would miss its arrays.
        self._all_flat = self._all_flat and all(
            isinstance(x, (jax.Array, PerReplica)) or jax.tree_util.all_leaves(_parts(x))
            for x in whole
        )

    def needs_slow_path(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Whether a call may have such arrays, so that the slow path must look at it."""
        # Plain loops over flat arguments, since this runs at every step; see the class.
        finds_deleted = self._finds_deleted
        if self._all_flat and not kwargs:
            count = 0
            seen: set[int] = set()
            for argument in args:
                parts = _parts(argument)
                count += len(parts)
                seen.update(map(id, parts))
                if finds_deleted and _compat.has_deleted(parts):
                    return True
            if len(seen) == count:
                return False
        elif finds_deleted and _compat.has_deleted(jax.tree.leaves((args, kwargs))):
            return True
        return has_repeats((args, kwargs))


def _parts(argument: Any) -> Any:
    kind = type(argument)
    if kind is dict:
        return argument.values()
    if kind is list or kind is tuple:
        return argument
    return (argument._data,) if kind is PerReplica else (argument,)


def check_positions(donated: Sequence[int], args: Sequence[Any]) -> None:
    """Raise if `donate_argnums` contains a position that the call does not have.

    Raises:
        ArgumentError: Some position is out of range.
    """
    out_of_range = [n for n in donated if not 0 <= n < len(args)]
    if out_of_range:
        kept = tuple(n for n in donated if n not in out_of_range)
        remedy = f"Pass RunOptions(donate_argnums={kept})." if kept else "Leave donate_argnums out."
        raise ArgumentError(
            f"RunOptions(donate_argnums={tuple(donated)}) has {out_of_range}, and the step was "
            f"called with {len(args)} positional argument(s).\n\n"
            "donate_argnums are positions of arguments, from 0. Keyword arguments cannot be "
            f"donated.\n\n{remedy}"
        )


def find_donated_leaves(donated: Sequence[int], flat: Flat, graph: GraphShape | None) -> list[int]:
    """Return the numbers of the program's inputs that these arguments contain.

    Variables of NNX objects come first.
    """
    if not donated:
        return []
    offset = len(graph.paths) if graph else 0
    leaves: list[int] = []
    for path, slot in zip(flat.paths(), flat.slots, strict=True):
        # The first key of a path is 0 for `args` and 1 for `kwargs`, which cannot be donated.
        if path[0].idx != 0 or path[1].idx not in donated:
            continue
        if isinstance(slot, GraphNode) and graph is not None:
            leaves += [i for i, p in enumerate(graph.paths) if p[0] == slot.index]
        elif not isinstance(slot, Static):
            leaves.append(offset + slot)
    return leaves


@called("strategy.run")
def check_not_repeated(donated: Sequence[int], leaves: Sequence[Any], program: Program) -> None:
    """Raise if the call contains one buffer twice and donates it.

    Raises:
        DonationError: The error names both places.
    """
    if not program.donated:
        return
    names = program.input_names
    seen: dict[int, int] = {}
    for i, leaf in enumerate(leaves):
        # NumPy arrays and numbers are copied to the devices, so they are never donated.
        if not isinstance(leaf, jax.Array):
            continue
        first = seen.setdefault(id(leaf), i)
        if first != i and (i in program.donated or first in program.donated):
            raise DonationError(
                f"{name_call()} would donate one array twice: {names[first]} and {names[i]} are "
                "the same buffer.\n\n"
                "A donated buffer is given to the results, so nothing else may use it.\n\n"
                "Copy one of them first (jnp.copy), or leave it out of donate_argnums "
                f"{donated}."
            )


# JAX refuses such arguments too, but does not say which ones. JAX 0.10 starts a program on all CPU
# devices before it checks, and then the process ends with a signal. There jaxdist checks first.


def is_about_deleted(error: Exception) -> bool:
    """Whether an error is JAX's error about a deleted buffer."""
    # JAX has no exception class for it, and its messages for arrays and for buffers differ.
    text = str(error)
    return "has been deleted" in text and ("Array" in text or "Buffer" in text)


@called(lambda step: f"strategy.run({step})")
def check_deleted(
    step: str, flat: Flat, cached_graph: CachedGraph | None, donated: tuple[int, ...]
) -> None:
    """Raise an error that names the arguments with deleted buffers, if there are any.

    Raises:
        DonationError: A leaf or an NNX variable of the call is deleted.
    """
    named: list[tuple[str, Any]] = []
    if cached_graph is not None:
        named += [(cached_graph.shape.name(i), x) for i, x in enumerate(cached_graph.read())]
    for path, slot in zip(flat.paths(), flat.slots, strict=True):
        if isinstance(slot, int):
            named += [(argument_name(path), x) for x in jax.tree.leaves(flat.dynamic[slot])]
    names = [f"{n}: {x.dtype}{list(x.shape)}" for n, x in named if _compat.has_deleted([x])]
    if not names:
        return
    numbers = donated or (0,)
    raise refuse(
        f"{len(names)} array(s) whose buffers are gone:\n{format_lines(names, 4)}",
        "A step with donate_argnums gives the buffers of those arguments to its results, so they "
        "hold nothing afterwards.",
        "Pass what the step returned: state = strategy.run(step, (state, batch), options). To use "
        "the old arrays again, copy them before (jax.tree.map(jnp.copy, state)), or leave the "
        f"argument out of RunOptions(donate_argnums={numbers}).",
        kind=DonationError,
    )
