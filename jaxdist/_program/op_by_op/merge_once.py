"""Merge functions of steps that run op by op.

Replica 0 calls and traces the merge function. All replicas replay the trace, each with its own
values, so that the collectives of the merge function meet and gradients flow through it on every
replica. Its Python inputs must be equal on all replicas; if they are not (other shapes, other
numbers), each replica calls the function itself.
"""

import dataclasses
import functools
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
from jax.extend.core import jaxpr_as_fun

from jaxdist import _compat
from jaxdist._collectives import GatherLog, record_gathers
from jaxdist._program.arguments.arguments import Static
from jaxdist._program.jaxprs.primitives import PLACEHOLDER
from jaxdist._program.jaxprs.subprograms import aval_of
from jaxdist._program.nnx.closures import iterate_cells
from jaxdist._program.uneven.joined_ops import is_equal
from jaxdist._program.variables.step_variables import Lifting
from jaxdist._values import Variable, is_variable

# The functions of a closure may have closures of their own; deeper ones are not searched.
MAX_DEPTH = 4


@dataclasses.dataclass(frozen=True)
class MergeCall:
    """A replica's `merge_call`: everything that its merge function can see as Python."""

    treedef: Any
    seen: list[Any]  # shapes and dtypes of arrays, and other values as they are
    source: str

    def is_like(self, other: "MergeCall") -> bool:
        """Whether a merge function would see the same Python values."""
        return is_equal([self.treedef, self.seen], [other.treedef, other.seen])

    def __str__(self) -> str:
        return f"merge_call at {self.source}"


@dataclasses.dataclass(frozen=True)
class MergeAnswer:
    """The message of replica 0 to the others: the trace of the merge function, if it has one."""

    done: "MergeTrace | None"
    source: str

    def __str__(self) -> str:
        return f"merge_call at {self.source}"


@dataclasses.dataclass(frozen=True, eq=False)
class MergeTrace:
    """A traced merge function, as a function of the values of one replica."""

    program: Callable[..., Any]
    # Each constant: the number of an array of the closure, or a value that no replica computed.
    closed_over: tuple[Any, ...]
    touched: tuple[Variable, ...]
    written: tuple[Variable, ...]
    treedef: Any

    def replay(
        self, reached: Sequence[Any], given: Sequence[Any], variables: Sequence[Any]
    ) -> tuple[list[Any], Any]:
        """Run the trace for one replica; return the new values of variables, and the result."""
        held = [reached[c] if type(c) is ClosureArray else c for c in self.closed_over]
        results = self.program(*held, *given, *variables)
        count = len(self.written)
        return results[:count], self.treedef.unflatten(results[count:])


class ClosureArray(int):
    """The number of an array among those in the closure of a merge function."""


def make_merge_call(fn: Callable[..., Any], given: Any) -> tuple[MergeCall, list[Any], list[Any]]:
    """Return the `MergeCall` of a replica, the arrays it passes, and the arrays of its closure."""
    leaves, treedef = jax.tree.flatten(given, is_leaf=is_variable)
    reached = jax.tree.leaves(list(_iterate_closure(fn, MAX_DEPTH)), is_leaf=is_variable)
    every = [*leaves, *reached]
    seen = [jax.typeof(x) if _is_array(x) else x for x in every]
    arrays = [x for x in leaves if _is_array(x)]
    call = MergeCall((treedef, len(leaves)), seen, _compat.find_callers_line())
    return call, arrays, [x for x in reached if _is_array(x)]


def trace_merge(
    merged: Callable[..., Any], given: Any, reached: Sequence[Any], layout: Any
) -> MergeTrace | None:
    """Trace the merge function; return None if it uses values that its closure does not show."""
    leaves, treedef = jax.tree.flatten(given, is_leaf=is_variable)
    arrays = [x for x in leaves if _is_array(x)]
    access = Lifting(layout).begin()
    made: list[Any] = []

    @_compat.check_constants()
    def run_merge(*own: Any) -> list[Any]:
        values = iter(own)
        filled = treedef.unflatten([next(values) if _is_array(x) else x for x in leaves])
        with access.body():
            result = merged(filled, access)
            marked = jax.tree.map(
                lambda x: x if _is_array(x) else Static(x), result, is_leaf=is_variable
            )
            found, out = jax.tree.flatten(marked)
            made.append(out)
            return [*access.results(), *found]

    with _compat.enable_jit(), record_gathers(GatherLog((), layout.num_replicas)):
        closed = jax.make_jaxpr(run_merge)(*(aval_of(x) for x in arrays))
    numbers = {id(x): ClosureArray(n) for n, x in enumerate(reached)}
    # A tracer of replica 0 that no closure shows has no counterpart on the other replicas.
    is_unknown = [isinstance(c, jax.core.Tracer) and id(c) not in numbers for c in closed.consts]
    if any(is_unknown) or access.holds_refs:
        return None
    jaxpr, marks = _compat.remove_placeholders(closed, PLACEHOLDER)
    jaxpr = _compat.append_inputs(jaxpr, [marks[n] for n in range(len(access.touched))])
    return MergeTrace(
        jaxpr_as_fun(_compat.move_constants_to_inputs(jaxpr)),
        tuple(numbers.get(id(c), c) for c in closed.consts),
        access.touched,
        access.written,
        made[-1],
    )


def _is_array(x: Any) -> bool:
    return hasattr(x, "dtype") and hasattr(x, "shape") and not is_variable(x)


def _iterate_closure(fn: Any, depth: int) -> Iterator[Any]:
    """Return the values of a function's closure, and of the closures of the functions in it."""
    held: list[Any]
    if isinstance(fn, functools.partial):
        held = [*fn.args, *fn.keywords.values(), fn.func]
    elif isinstance(fn, types.MethodType):
        held = [fn.__func__]
    elif isinstance(fn, types.FunctionType):
        in_cells = (value for _, value in iterate_cells(fn))
        held = [*(fn.__defaults__ or ()), *(fn.__kwdefaults__ or {}).values(), *in_cells]
    else:
        return
    for value in held:
        if isinstance(value, (functools.partial, types.MethodType, types.FunctionType)):
            if depth:
                yield from _iterate_closure(value, depth - 1)
        else:
            yield value
