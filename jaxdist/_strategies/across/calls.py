"""`Strategy.reduce` and `Strategy.gather`.

# Note [Known calls]
Most calls of `reduce` and `gather` repeat an earlier one with other numbers. All checks of global
arrays, and the choice of the function that combines them, depend on structure, shapes, dtypes and
shardings only. So a strategy stores the functions of such calls under a key that contains all of
these, and the settings of JAX. A call with a known key only applies the stored functions. Calls
with options, with `CrossDeviceOps`, in merge functions, or with leaves that are not concrete global
arrays have no key: their errors may depend on the numbers.
"""

import dataclasses
from collections.abc import Callable, Mapping
from types import NoneType
from typing import Any

import jax
from jax.tree_util import keystr

from jaxdist import _collectives, _compat
from jaxdist._collectives import Communication, Planned, ReduceOp, Request, check_same_call
from jaxdist._integers import check_all_fit
from jaxdist._mesh import ReplicaMesh
from jaxdist._program import exact_structure, variables_as_values
from jaxdist._replica import Frame
from jaxdist._strategies.across import table
from jaxdist._strategies.across.table import Context, Table
from jaxdist._typing import PyTree
from jaxdist._values import (
    PerReplica,
    Stop,
    close_containers,
    is_container,
    open_containers,
    refuse_ref,
    stops,
)

_MOST_KNOWN = 256


@dataclasses.dataclass(frozen=True)
class Method:
    """A method of a strategy: its name, its functions, and a check of all leaves, by name."""

    caller: str
    table: Table
    refuse: Callable[[str, Any], None]
    check: Callable[[Mapping[str, Any], Any], None]


REDUCE = Method(
    "Strategy.reduce",
    table.REDUCE,
    lambda _, leaf: _collectives.refuse_sparse(leaf),
    _collectives.check_reducible,
)
GATHER = Method(
    "Strategy.gather", table.GATHER, _collectives.refuse_slices, _collectives.check_gatherable
)


class AcrossReplicas:
    """The methods of one strategy that combine the values of all replicas."""

    def __init__(self, layout: ReplicaMesh, communication: Communication) -> None:
        self._layout = layout
        self._communication = communication
        # See Note [Known calls]: the structure of the result, and a function for each array.
        self._known: dict[Any, tuple[Any, list[Callable[[Any], Any]]]] = {}

    def combine(
        self,
        method: Method,
        value: PyTree,
        axis: Any,
        options: tuple[Any, Any],
        frame: Frame | None,
        op: Any = None,
    ) -> PyTree:
        """Combine the values of all replicas.

        Args:
            method: The method that was called; `value` and `axis` are its arguments.
            value: A pytree.
            axis: The axis as the user passed it.
            options: The arguments `options` and `experimental_hints`, as the user passed them.
            frame: The context of the caller.
            op: The reduce op as the user passed it; None for a gather.
        """
        value = variables_as_values(value)
        in_merge = frame is not None and frame.in_merge
        has_options = options[0] is not None or options[1] is not None
        key: Any = None
        arrays: list[Any] = []
        if self._communication.ops is None and not has_options and not in_merge:
            key, arrays = _find_key(method, value, axis, op)
        known = None if key is None else self._known.get(key)
        if known is not None:
            return _apply_known(*known, arrays)
        request = self._read_request(method, axis, options, in_merge, op)
        value = value if in_merge else _collectives.join_slices(value)
        is_leaf = stops(Stop.REDUCED_IN_MERGE if in_merge else Stop.REDUCED)
        leaves, treedef = jax.tree.flatten_with_path(value, is_leaf=is_leaf)
        is_open = not in_merge and any(is_container(leaf) for _, leaf in leaves)
        if is_open:
            inner = open_containers(value, "value", is_leaf=is_leaf)
            leaves, treedef = jax.tree.flatten_with_path(inner, is_leaf=is_leaf)
        named = {"value" + keystr(path): _collectives.join_slices(leaf) for path, leaf in leaves}
        for name, leaf in named.items():
            method.refuse(name, leaf)
            refuse_ref(f"{method.caller} was given {name}", leaf)
            check_all_fit(name, leaf)
        if self._layout.is_shared and not in_merge:
            given = {"axis": axis, "reduce op": request.op}
            seconds = request.options.timeout_seconds
            check_same_call(given, named, self._layout, seconds)
        # All leaves are checked before the first one is combined, so that an error names all bad
        # ones. A single `PerReplica` is checked by its function.
        if not in_merge and (not isinstance(value, PerReplica) or request.ops is not None):
            method.check(named, axis)
        outside = Context.OUTSIDE if request.ops is None else Context.BY_OPS
        column = method.table[Context.IN_MERGE if in_merge else outside]
        found = {n: column[_collectives.find_kind(x, self._layout)] for n, x in named.items()}
        plans = {n: f.plan for n, f in found.items() if isinstance(f, Planned)}
        if key is None or len(plans) < len(found):
            result = treedef.unflatten(table.apply(found, request, named))
            return close_containers(result) if is_open else result
        functions = [plan(request, n, named[n]) for n, plan in plans.items()]
        if len(self._known) >= _MOST_KNOWN:
            self._known.clear()
        self._known[key] = treedef, functions
        return _apply_known(treedef, functions, arrays)

    def _read_request(
        self, method: Method, axis: Any, options: tuple[Any, Any], in_merge: bool, op: Any
    ) -> Request:
        ops, packs = self._communication.ops, False
        if method is REDUCE:
            op = _collectives.reduce_op(op)
            # Only a collective can pack leaves. Outside of a step the strategy runs no collective
            # of its own, so a hint to pack has no effect, which is logged.
            packs = in_merge or ops is not None
        elif not _collectives.has_override(ops, "gather_implementation"):
            # The classes of jaxdist gather as XLA does; only a user's own method is called.
            ops = None
        chosen = self._communication.asked(*options, packs=packs)
        return Request(axis, self._layout, op, chosen, ops)


def _find_key(method: Method, value: Any, axis: Any, op: Any) -> tuple[Any, list[Any]]:
    """Return the key of a call and the arrays of its value; None and [] if it has no key."""
    # `1 == True == 1.0`, but only an integer is an axis.
    axes = axis if type(axis) is tuple else (axis,)
    if not {int, NoneType}.issuperset(map(type, axes)) or type(op) not in _TYPES_OF_OPS:
        return None, []
    leaves, treedef = jax.tree.flatten(value)
    arrays = _compat.describe_arrays(leaves)
    if arrays is None:
        return None, []
    # JAX treats the structures of {1: x} and {True: x} as equal.
    exact = None if isinstance(value, PerReplica) else exact_structure(treedef)
    key = (method.caller, axis, op, treedef, exact, arrays)
    try:
        hash(key)
    except TypeError:
        return None, []
    return key, leaves


_TYPES_OF_OPS = (str, ReduceOp, NoneType)


def _apply_known(treedef: Any, functions: list[Callable[[Any], Any]], arrays: list[Any]) -> Any:
    """Apply a function to each array."""
    return treedef.unflatten(f(x) for f, x in zip(functions, arrays, strict=True))
