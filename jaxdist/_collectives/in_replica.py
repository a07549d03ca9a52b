"""Collectives inside a step: every replica calls them with its own value."""

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp

from jaxdist._called import name_call, refuse
from jaxdist._collectives.algorithms.one_level import hide_complex_constant
from jaxdist._collectives.marks import assume_replicated
from jaxdist._collectives.options import CommunicationOptions
from jaxdist._collectives.reduction import (
    ReduceOp,
    check_integer,
    check_numeric,
    check_supported,
    finish_sum,
    prepare_summands,
    result_dtype,
)
from jaxdist._collectives.sums.default_sum import sum_by_default
from jaxdist._collectives.uneven_gather import current_log, note_collective, uneven_all_gather
from jaxdist._mesh import ReplicaMesh
from jaxdist._typing import AxisNames, PyTree
from jaxdist._validate import as_integer
from jaxdist._values import (
    REDUCED_PIECES,
    Handle,
    PerReplica,
    Sharded,
    Stop,
    close_containers,
    is_container,
    is_sharded,
    make_undeclared,
    mean_of_shares,
    open_containers,
    share_of_mean,
    stops,
)
from jaxdist.errors import (
    ArgumentTypeError,
    ContextError,
    JaxdistError,
    ReplicaValueError,
    ShapeError,
)


@contextlib.contextmanager
def annotate_errors(what: str, given: str) -> Iterator[None]:
    """Add to every error of the block that `what` was called with values `given`.

    Errors keep their type. JAX's errors about traced values become one that gives the remedy.
    """
    try:
        yield
    except (jax.errors.JAXTypeError, jax.errors.JAXIndexError) as error:
        # JAX's messages have many lines about tracers; the first one has the cause.
        first = str(error).partition("\n")[0]
        raise ArgumentTypeError(
            f"{what}, called for {given}, used the number of a traced value: {first}"
            "\n\nIt is called once, while the program is traced. Values have no numbers then.\n\n"
            "Use jax.numpy instead of numpy, jnp.where instead of if, and no float(), int() or "
            ".item()."
        ) from error
    # Our own errors already name the cause and the remedy.
    except JaxdistError:
        raise
    except Exception as error:
        error.add_note(f"Raised in {what}, called for {given}.")
        raise


T = TypeVar("T")

_DEFAULT = CommunicationOptions()


def all_reduce(
    op: ReduceOp,
    value: PyTree,
    layout: ReplicaMesh,
    options: CommunicationOptions = _DEFAULT,
    ops: Any = None,
) -> PyTree:
    """Return the sum or the mean over the replicas of every leaf.

    `ops` is the `CrossDeviceOps` of the strategy. With None, XLA reduces.
    """
    leaves, treedef = jax.tree.flatten_with_path(value, is_leaf=stops(Stop.DISTRIBUTED))
    # A `Sharded` is one array for all replicas, so it needs no communication. The other leaves are
    # reduced by a second call of this function, and are then merged back in order.
    pieces = [leaf if is_sharded(leaf) else None for _, leaf in leaves]
    if any(p is not None for p in pieces):
        rest = [leaf for (_, leaf), p in zip(leaves, pieces, strict=True) if p is None]
        sums = iter(all_reduce(op, rest, layout, options, ops))
        return treedef.unflatten(
            next(sums) if p is None else _reduce_sharded(op, path, p, layout)
            for (path, _), p in zip(leaves, pieces, strict=True)
        )
    arrays = [_as_reducible(path, leaf) for path, leaf in leaves]
    if not arrays:
        return value
    # Only the traces of uneven steps have a log. It lets the error for shapes that do not fit name
    # the leaves. Other traces do not pay for the names.
    if current_log() is not None:
        names = ("value" + jax.tree_util.keystr(path) for path, _ in leaves)
        note_collective(dict(zip(names, arrays, strict=True)))
    # A class of the user also sees a mesh of one replica: it may do more than a sum.
    if ops is not None:
        return jax.tree.unflatten(treedef, reduce_by_ops(ops, op, arrays, layout, options))
    # With one replica the sum is the value. XLA for CPU does not remove an all-reduce over one
    # replica, so jaxdist emits none.
    if layout.num_replicas > 1:
        # `prepare_summands` may change the dtype (float16 is added in float32), and `finish_sum`
        # needs the original one.
        dtypes = [x.dtype for x in arrays]
        shares = [prepare_summands(op, x, layout.num_replicas) for x in arrays]
        sums = sum_by_default(shares, layout, options)
        pairs = zip(sums, dtypes, strict=True)
        return treedef.unflatten(finish_sum(op, s, d, layout.num_replicas) for s, d in pairs)
    return treedef.unflatten(x.astype(result_dtype(op, x.dtype)) for x in arrays)


def _reduce_sharded(op: ReduceOp, path: Any, value: Sharded, layout: ReplicaMesh) -> Sharded:
    """Return the reduction of one sharded array that all replicas share.

    The mean over R replicas is the array itself, and the sum is R times the array.
    """
    check_numeric("value" + jax.tree_util.keystr(path), value.held)
    held = REDUCED_PIECES.bind(value.held.astype(result_dtype(op, value.held.dtype)))
    return make_undeclared(held if op is ReduceOp.MEAN else held * layout.num_replicas, value.cut)


def reduce_by_ops(
    ops: Any,
    op: ReduceOp,
    local: list[jax.Array],
    layout: ReplicaMesh,
    options: CommunicationOptions,
) -> list[jax.Array]:
    """Return the leaves of this replica as reduced by the `CrossDeviceOps`, after checking them."""
    # A handle is a `PerReplica` while the step is traced. So a class of the user is called with the
    # same types inside and outside of a step.
    handles = [Handle(x, layout) for x in local]
    kinds = ", ".join(f"{x.dtype}{list(x.shape)}" for x in local[:4]) + ", ..." * (len(local) > 4)
    with annotate_errors(_method_name(ops), f"{len(local)} value(s) of replicas, {kinds}"):
        results = ops.batch_reduce(op, [(h, h) for h in handles], options)
    return check_results(ops, results, local)


def check_results(ops: Any, results: Any, shapes: Sequence[Any]) -> list[jax.Array]:
    """Check the results of `batch_reduce` against these shapes and dtypes, and return them."""
    name = _method_name(ops)
    if not isinstance(results, (list, tuple)) or len(results) != len(shapes):
        raise ReplicaValueError(
            f"{name} returned {_describe(results)} for {len(shapes)} (value, destinations) pairs."
            "\n\nIt returns a list with one array for each pair.\n\n"
            f"Return a list of {len(shapes)} array(s)."
        )
    pairs = zip(results, shapes, strict=True)
    return [_check_result(name, i, r, x) for i, (r, x) in enumerate(pairs)]


def _method_name(ops: Any) -> str:
    """Return the name of the method with which the class of `ops` reduces values."""
    methods = ("batch_reduce", "batch_reduce_implementation", "reduce_implementation")
    # The most derived class that defines one of the three methods decides. That is the method that
    # the user wrote, so the error names it.
    own = next(m for cls in type(ops).__mro__ for m in methods if m in vars(cls))
    return f"{type(ops).__name__}.{own}"


def _check_result(name: str, number: int, result: Any, given: Any) -> jax.Array:
    """Return one result as an array, after checking its shape."""
    own = result
    # A Python number is a valid result for a scalar. `given.shape` decides below.
    if isinstance(own, (int, float, complex)):
        own = jnp.asarray(own)
    fits = getattr(own, "shape", None) == given.shape and hasattr(own, "dtype")
    if isinstance(own, PerReplica) or not fits:
        raise ReplicaValueError(
            f"{name} returned {_describe(result)} for value {number}, which is "
            f"{given.dtype}{list(given.shape)} on each replica.\n\n"
            "It returns one array of that shape, the same for all replicas.\n\n"
            f"Return an array of shape {list(given.shape)}."
        )
    return jnp.asarray(own)


def _describe(value: Any) -> str:
    """Return a short description of a result for an error message."""
    if isinstance(value, PerReplica):
        return "a PerReplica, which is a value for each replica"
    if hasattr(value, "dtype") and hasattr(value, "shape"):
        return f"an array {value.dtype}{list(value.shape)}"
    if isinstance(value, (list, tuple)):
        return f"a {type(value).__name__} of {len(value)}"
    return f"{value!r}, of type {type(value).__name__}"


def _as_reducible(path: Any, leaf: Any) -> Any:
    """Return a leaf as an array, after checking that it can be reduced."""
    name = "value" + jax.tree_util.keystr(path)
    _refuse_per_replica(name, leaf)
    # Before `jnp.asarray`: it would raise an `OverflowError` that names no leaf.
    check_integer(f"cannot reduce {name}", leaf)
    check_numeric(name, leaf)
    return jnp.asarray(leaf)


def _refuse_per_replica(name: str, leaf: Any) -> None:
    """Refuse a `PerReplica` in a step, where each replica passes its own value."""
    if isinstance(leaf, PerReplica):
        raise refuse(
            f"{name}, a PerReplica, in a step.",
            "In a step each replica has its own value, and a PerReplica has the values of all.",
            "Pass it to the step, strategy.run(step, args=(value, ...)), and use the value that "
            "the step gets for it.",
            kind=ContextError,
        )


def sum_over_replicas(value: T, axes: AxisNames) -> T:
    """Return the sum over the replicas of every array of a pytree."""
    leaves, treedef = jax.tree.flatten(value)
    return jax.tree.unflatten(
        treedef, jax.lax.psum([hide_complex_constant(x) for x in leaves], axes)
    )


def mean_over_replicas(array: jax.Array, axes: AxisNames) -> jax.Array:
    """Return the mean over the replicas of one array, by the rule of `_values/mean.py`."""
    count = jax.lax.axis_size(axes)
    total = jax.lax.psum(hide_complex_constant(share_of_mean(array, count)), axes)
    return mean_of_shares(total, array.dtype, count)


def all_gather(value: PyTree, axis: int, axes: AxisNames) -> PyTree:
    """Return every leaf of all replicas, concatenated on `axis` in replica order."""
    leaves, treedef = jax.tree.flatten_with_path(value, is_leaf=stops(Stop.DISTRIBUTED))
    if any(is_container(leaf) for _, leaf in leaves):
        inner = open_containers(value, "value", is_leaf=stops(Stop.DISTRIBUTED))
        return close_containers(all_gather(inner, axis, axes))
    named = {"value" + jax.tree_util.keystr(path): leaf for path, leaf in leaves}
    for name, leaf in named.items():
        _refuse_per_replica(name, leaf)
        check_integer(f"cannot concatenate {name}", leaf)
        check_supported(f"cannot concatenate {name}", leaf)
    named = {name: jnp.asarray(leaf) for name, leaf in named.items()}
    dims = [gather_dim(name, array, axis) for name, array in named.items()]
    note_collective(named, tuple(sorted(set(dims))))
    pairs = zip(named.values(), dims, strict=True)
    return jax.tree.unflatten(
        treedef, [gather_over_replicas(array, dim, axes) for array, dim in pairs]
    )


def gather_over_replicas(array: jax.Array, dim: int, axes: AxisNames) -> jax.Array:
    """Return `array` of all replicas, concatenated on `dim`."""
    log = current_log()
    if log is not None:
        return uneven_all_gather(array, dim, axes, log.next(array.shape[dim]))
    if not array.size:
        # JAX cannot lower an all-gather of an array without elements. The result depends on no
        # values, so it is equal on all replicas; the replication analysis cannot see that.
        return assume_replicated(jnp.concatenate([array] * jax.lax.axis_size(axes), axis=dim))
    return jax.lax.all_gather(array, axes, axis=dim, tiled=True)


def gather_dim(name: str, array: Any, axis: Any) -> int:
    """Return `axis` as a dim of `array`, counted from the front, or raise a named error."""
    dim = as_integer("axis", axis, remedy="Pass axis=0 to concatenate rows.", wrong_type=ShapeError)
    if not array.ndim:
        raise ShapeError(
            f"{name_call()} cannot concatenate {name}: it is a scalar, {array.dtype}[].\n\n"
            "Only arrays with a dim can be concatenated.\n\n"
            "Pass value[None], an array of one row, or use reduce."
        )
    if not -array.ndim <= dim < array.ndim:
        raise refuse(
            f"axis={dim}, and {name} is {array.dtype}{list(array.shape)} of rank {array.ndim}.",
            f"axis is a dim of {name}.",
            f"Pass one of {list(range(-array.ndim, array.ndim))}.",
            kind=ShapeError,
        )
    return dim % array.ndim
