"""`Strategy.reduce` and `Strategy.gather`: a function for each context and kind of value.

# Note [Known calls]
Most calls of `reduce` and `gather` repeat an earlier one with other numbers. All checks of global
arrays, and the choice of the function that combines them, depend on structure, shapes, dtypes and
shardings only. So a strategy stores the functions of such calls under a key that contains all of
these, and the settings of JAX. A call with a known key only applies the stored functions. Calls
with options, with `CrossDeviceOps`, in merge functions, or with leaves that are not concrete global
arrays have no key: their errors may depend on the numbers.
"""

import dataclasses
import enum
import functools
import math
from collections.abc import Callable, Mapping
from types import NoneType
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax.tree_util import GetAttrKey, keystr

from jaxdist import _collectives, _compat
from jaxdist._called import call_as
from jaxdist._collectives import (
    Communication,
    Function,
    Planned,
    ReduceOp,
    Request,
    ValueKind,
    check_same_call,
)
from jaxdist._integers import check_all_fit
from jaxdist._mesh import ReplicaMesh
from jaxdist._program import exact_structure, variables_as_values
from jaxdist._replica import Frame
from jaxdist._strategies.across import in_merge
from jaxdist._typing import PyTree
from jaxdist._values import (
    Form,
    PerReplica,
    Stop,
    as_per_replica,
    close_containers,
    is_container,
    make_deleted_error,
    open_containers,
    place_per_replica,
    refuse_ref,
    stops,
    view_auto,
)
from jaxdist.errors import DonationError

_MOST_KNOWN = 256


def _reduce_by_ops(request: Request, named: dict[str, Any]) -> list[Any]:
    """Reduce leaves, given by name, in one batch."""
    op, axis, layout, ops = request.op, request.axis, request.layout, request.ops
    given = {name: as_per_replica(v) for name, v in named.items()}
    values = list(given.values())
    counts: list[int] = [1] * len(values)
    # `CrossDeviceOps` can only sum over replicas. So the dims of each local value are summed first,
    # and a mean divides by the total number of elements, since replicas may have different numbers.
    if axis is not None:
        pairs = zip(named, values, strict=True)
        sums = [_sum_locally(request, name, v) for name, v in pairs]
        values, counts = [s for s, _ in sums], [c for _, c in sums]
    placed = [place_per_replica(name, v, layout) for name, v in zip(named, values, strict=True)]
    for name, v in zip(named, placed, strict=True):
        _collectives.check_numeric(name, v.array)
    # The classes of jaxdist work on the global array of all replicas. A user's class gets one
    # uncommitted array per replica: JAX refuses to combine arrays on different devices.
    own_sums = isinstance(ops, _collectives.AlgorithmicOps)
    # XLA wraps integers around without an error, so sums of Python integers are checked first.
    if op is ReduceOp.SUM and own_sums:
        for name, v in given.items():
            call_as("Strategy.reduce", _collectives.check_sum, name, v, axis)
    if not own_sums:
        placed = [_make_uncommitted(v) for v in placed]
    across = op if axis is None else ReduceOp.SUM
    shapes = [_collectives.local_shape(v) for v in placed]
    results = ops.batch_reduce(across, [(v, v) for v in placed], request.options)
    results = _collectives.check_results(ops, results, shapes)
    settled = [_collectives.take_plain_array(r) for r in results]
    if axis is None or op is ReduceOp.SUM:
        return settled
    return [r / jnp.asarray(c, r.dtype) for r, c in zip(settled, counts, strict=True)]


def _gather_by_ops(request: Request, name: str, leaf: Any) -> Any:
    """Gather one leaf with the user's `gather_implementation`."""
    value = as_per_replica(leaf)
    value = _make_uncommitted(value) if value.is_global else value
    found = _collectives.gather_by_ops(
        request.ops, name, value, request.axis, request.layout, request.options
    )
    return _collectives.take_plain_array(found)


def _sum_locally(request: Request, name: str, value: PerReplica) -> tuple[PerReplica, int]:
    """Sum dims of the value on each replica; return the sums and the total number of summands."""
    op, axis, layout = request.op, request.axis, request.layout
    if not value.is_global:
        # Values of different shapes do not form a global array, so the host sums them one by one.
        rows = [np.asarray(v) for v in value.values]
        dims = [_collectives.find_reduced_dims(name, r, axis) for r in rows]
        dtype = _collectives.result_dtype(op, jnp.asarray(rows[0]).dtype)
        sums = [np.sum(r, axis=d, dtype=dtype) for r, d in zip(rows, dims, strict=True)]
        count = sum(math.prod(r.shape[i] for i in d) for r, d in zip(rows, dims, strict=True))
        return PerReplica(sums), count
    whole = place_per_replica(name, value, layout).array
    scalars = value.form is Form.SCALARS
    replicas = layout.num_replicas
    local = () if scalars else (whole.shape[0] // replicas, *whole.shape[1:])
    on = _collectives.find_reduced_dims(name, jax.ShapeDtypeStruct(local, whole.dtype), axis)
    dtype = _collectives.result_dtype(op, whole.dtype)
    sums = _make_local_sums(layout)(
        view_auto(whole), (replicas, *local), tuple(d + 1 for d in on), dtype
    )
    count = replicas * math.prod(local[d] for d in on)
    return _as_per_replica(sums, replicas), count


def _make_uncommitted(value: PerReplica) -> PerReplica:
    """Return the values as uncommitted arrays, which JAX can combine."""
    return PerReplica([_collectives.take_plain_array(x) for x in value.values])


def _as_per_replica(sums: jax.Array, replicas: int) -> PerReplica:
    """Convert an array `[replicas, ...]` to a `PerReplica`."""
    if sums.ndim == 1:
        return PerReplica.of_global(sums, scalars=True)
    flat = (replicas * sums.shape[1], *sums.shape[2:])
    return PerReplica.of_global(sums.reshape(flat))


@functools.lru_cache(maxsize=64)
def _make_local_sums(layout: ReplicaMesh) -> Any:
    def sums(whole: Any, shape: tuple[int, ...], over: tuple[int, ...], dtype: Any) -> Any:
        return jnp.sum(whole.reshape(shape), axis=over, dtype=dtype)

    return jax.jit(sums, static_argnums=(1, 2, 3), out_shardings=layout.per_replica)


class Context(enum.Enum):
    """The context in which a strategy combines values. See Note [Kinds and contexts]."""

    OUTSIDE = "outside of a step"
    BY_OPS = "outside of a step, by the user's CrossDeviceOps"
    IN_MERGE = "in a merge function, while a step is traced"


@dataclasses.dataclass(frozen=True)
class Together:
    """A function that combines several leaves, given by name, in one call."""

    function: Callable[[Request, dict[str, Any]], list[Any]]


Table: TypeAlias = Mapping[Context, Mapping[ValueKind, Function | Together]]

_OF_REPLICAS = (ValueKind.HELD, ValueKind.LIST)

_REDUCE: Table = {
    Context.OUTSIDE: _collectives.REDUCE,
    Context.BY_OPS: {
        **_collectives.REDUCE,
        **dict.fromkeys((*_OF_REPLICAS, ValueKind.ROWS), Together(_reduce_by_ops)),
    },
    # A concrete array is equal on all replicas. A traced value that the function closes over may
    # differ between them, so it is reduced like a handle.
    Context.IN_MERGE: {
        **_collectives.REDUCE,
        **dict.fromkeys(
            (*_OF_REPLICAS, ValueKind.TRACED_VALUES, ValueKind.TRACED),
            Together(in_merge.reduce_own_values),
        ),
        ValueKind.SLICES: in_merge.reduce_slices,
    },
}
_GATHER: Table = {
    Context.OUTSIDE: _collectives.GATHER,
    Context.BY_OPS: {
        **_collectives.GATHER,
        **dict.fromkeys((*_OF_REPLICAS, ValueKind.ROWS), _gather_by_ops),
    },
    Context.IN_MERGE: {
        **_collectives.GATHER,
        **dict.fromkeys((*_OF_REPLICAS, ValueKind.TRACED_VALUES), in_merge.gather_own_value),
        **dict.fromkeys(
            (ValueKind.ROWS, ValueKind.TRACED, ValueKind.SHARDED, ValueKind.ONE), in_merge.keep
        ),
    },
}


@dataclasses.dataclass(frozen=True)
class Method:
    """A method of a strategy: its name, its functions, and a check of all leaves, by name."""

    caller: str
    table: Table
    refuse: Callable[[str, Any], None]
    check: Callable[[Mapping[str, Any], Any], None]


REDUCE = Method(
    "Strategy.reduce",
    _REDUCE,
    lambda _, leaf: _collectives.refuse_sparse(leaf),
    _collectives.check_reducible,
)
GATHER = Method(
    "Strategy.gather", _GATHER, _collectives.refuse_slices, _collectives.check_gatherable
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
        if key is None and _compat.has_deleted(jax.tree.leaves(value)):
            raise _make_deleted_error(method, value)
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
            result = treedef.unflatten(_apply(found, request, named))
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
        chosen = self._communication.read_call(*options, packs=packs)
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


def _make_deleted_error(method: Method, value: Any) -> DonationError:
    named = jax.tree.flatten_with_path(value)[0]
    path, array = next((path, x) for path, x in named if _compat.has_deleted([x]))
    # The last key of an array in a `PerReplica` is no part of the user's value.
    name = "value" + keystr(tuple(k for k in path if k != GetAttrKey("array")))
    return make_deleted_error(f"{method.caller} was given {name}", array)


_TYPES_OF_OPS = (str, ReduceOp, NoneType)


def _apply_known(treedef: Any, functions: list[Callable[[Any], Any]], arrays: list[Any]) -> Any:
    """Apply a function to each array."""
    return treedef.unflatten(f(x) for f, x in zip(functions, arrays, strict=True))


def _apply(
    found: Mapping[str, Function | Together], request: Request, named: dict[str, Any]
) -> list[Any]:
    """Apply to each leaf the function found for its name; return the results in order."""
    results = dict(named)
    for together in dict.fromkeys(f for f in found.values() if isinstance(f, Together)):
        own = {name: named[name] for name, f in found.items() if f == together}
        results.update(zip(own, together.function(request, own), strict=True))
    for name, function in found.items():
        if not isinstance(function, Together):
            results[name] = function(request, name, named[name])
    return list(results.values())
