"""The kinds of values: at which of them functions of pytrees stop, and why that differs."""

import enum
import functools
from collections.abc import Callable
from typing import Any

import jax
from flax import nnx

from jaxdist._values.indexed_slices import IndexedSlices, is_sparse
from jaxdist._values.replicas.per_replica import PerReplica
from jaxdist._values.sharded.node import HeldPieces
from jaxdist._values.sharded.sharded import Sharded, is_sharded
from jaxdist._values.variable.assignable import Assignable
from jaxdist._values.variable.variable import Variable


class Stop(enum.Flag):
    """A column of the table: a use of pytrees for which some values stay whole.

    Nearly all values of jaxdist are pytree nodes. Flattening them is right for one use and wrong
    for another: unflattening makes new objects, and it removes the padding of a `Sharded`.
    """

    # Uses that concern one kind. All other values are left to JAX.
    PER_REPLICA = enum.auto()
    VARIABLE = enum.auto()
    ASSIGNABLE = enum.auto()
    SLICES = enum.auto()
    NNX = enum.auto()  # modules and variables of NNX; a state has no identity, so it is left to JAX

    # Arguments of a step. It updates objects in place, so each must stay the same object.
    ARGUMENTS = enum.auto()
    # Results of a step. Modules and optimizers are refused, so they must be seen. Other objects of
    # NNX, such as `nnx.Rngs`, are returned as pytrees. There are no `HeldPieces` in results yet.
    RESULTS = enum.auto()
    # Results of `jaxdist.function`, at the end of its trace. The structure of the result keeps each
    # `PerReplica` and `Sharded`, so only the arrays in them are looked at.
    RESULTS_OF_FUNCTIONS = enum.auto()
    # Arguments in which a step might write to an `nnx.Variable` that is in no module: the search
    # does not enter objects and states. There is none in a `Sharded` or a variable of jaxdist.
    BARE_VARIABLES = enum.auto()
    # Arguments of `reduce` and `gather`, before variables are replaced by their values.
    READ = enum.auto()

    # Values that `Strategy.reduce` and `gather` combine outside of a step.
    REDUCED = enum.auto()
    # The same in a merge function, where the piece of a `Sharded` is an array of this replica.
    REDUCED_IN_MERGE = enum.auto()
    # `ReplicaContext.all_reduce` first reduces rows of `IndexedSlices`, then all else. A
    # `PerReplica` is refused there, by name, among the dense arrays.
    REDUCED_IN_STEP = enum.auto()
    REDUCED_DENSE = enum.auto()
    # Values that `ReplicaContext.all_gather` refuses.
    SPARSE = enum.auto()

    # Values that `experimental_local_results` lists for each replica.
    LISTED = enum.auto()
    # Values that are laid out over logical devices.
    LAID_OUT = enum.auto()
    # State that `partition.gather` makes whole, or that is prepared for a strategy of one replica.
    GATHERED = enum.auto()
    # State that is compared between replicas, or with the result on one replica.
    COMPARED = enum.auto()
    # State that `partition.place` and reports read node by node. Inside a node, `place` takes
    # ARRAYS_OF_NODES, and reports take REPORTED.
    NODES = enum.auto()
    ARRAYS_OF_NODES = enum.auto()
    REPORTED = enum.auto()
    # State that a checkpoint saves as one object.
    SAVED = enum.auto()


def is_optax_state(x: Any) -> bool:
    """Whether a value is a state of optax: a named tuple of one of its modules."""
    # They have no common base class.
    is_named = isinstance(x, tuple) and hasattr(x, "_fields")
    return is_named and type(x).__module__.split(".")[0] == "optax"


_OBJECTS = Stop.NNX | Stop.NODES | Stop.BARE_VARIABLES | Stop.SAVED

# A kind of value is a row: a class with its subclasses, or a predicate where there is no class to
# import. Whoever adds a row decides about each column.
TABLE: dict[type | Callable[[Any], bool], Stop] = {
    PerReplica: (
        Stop.PER_REPLICA
        | Stop.ARGUMENTS
        | Stop.RESULTS
        | Stop.READ
        | Stop.REDUCED
        | Stop.REDUCED_IN_MERGE
        | Stop.REDUCED_DENSE
        | Stop.LISTED
        | Stop.LAID_OUT
        | Stop.GATHERED
        | Stop.COMPARED
        | Stop.NODES
        | Stop.REPORTED
    ),
    Sharded: (
        Stop.ARGUMENTS
        | Stop.RESULTS
        | Stop.BARE_VARIABLES
        | Stop.REDUCED
        | Stop.REDUCED_IN_STEP
        | Stop.REDUCED_DENSE
        | Stop.LISTED
        | Stop.LAID_OUT
        | Stop.GATHERED
        | Stop.NODES
        | Stop.ARRAYS_OF_NODES
        | Stop.REPORTED
    ),
    HeldPieces: Stop.ARGUMENTS,
    Variable: Stop.VARIABLE | Stop.READ | Stop.LAID_OUT | Stop.NODES | Stop.REPORTED,
    # Also `Variable`, which is one, and the sharded variables of parameter servers.
    Assignable: (
        Stop.ASSIGNABLE
        | Stop.ARGUMENTS
        | Stop.RESULTS
        | Stop.RESULTS_OF_FUNCTIONS
        | Stop.BARE_VARIABLES
        | Stop.SAVED
    ),
    IndexedSlices: (
        Stop.SLICES | Stop.SPARSE | Stop.REDUCED | Stop.REDUCED_IN_MERGE | Stop.REDUCED_IN_STEP
    ),
    is_sparse: Stop.SPARSE | Stop.REDUCED | Stop.REDUCED_IN_MERGE | Stop.REDUCED_IN_STEP,
    nnx.Pytree: _OBJECTS | Stop.ARGUMENTS | Stop.GATHERED | Stop.COMPARED,
    # Modules and optimizers are `nnx.Pytree`s too.
    nnx.Module: Stop.RESULTS | Stop.RESULTS_OF_FUNCTIONS,
    nnx.Optimizer: Stop.RESULTS | Stop.RESULTS_OF_FUNCTIONS,
    nnx.Variable: _OBJECTS | Stop.ARRAYS_OF_NODES | Stop.REPORTED,
    is_optax_state: Stop.NODES,
    nnx.State: Stop.BARE_VARIABLES | Stop.SAVED,
}


@functools.cache
def stops(at: Stop, *more: type) -> Callable[[Any], bool]:
    """Return the predicate of a column, for `is_leaf`: whether a value stays whole.

    Args:
        at: The column.
        more: Classes of the caller's room that stay whole too.
    """
    rows = [row for row, columns in TABLE.items() if at in columns]
    # One `isinstance` for each node of each pytree.
    kinds = (*(row for row in rows if isinstance(row, type)), *more)
    tests = [row for row in rows if not isinstance(row, type)]
    if not tests:
        return lambda x: isinstance(x, kinds)
    [test] = tests
    return lambda x: isinstance(x, kinds) or test(x)


is_per_replica = stops(Stop.PER_REPLICA)
is_variable = stops(Stop.VARIABLE)
is_assignable = stops(Stop.ASSIGNABLE)
is_slices = stops(Stop.SLICES)
is_nnx_object = stops(Stop.NNX)
_is_argument = stops(Stop.ARGUMENTS)


def as_held(tree: Any) -> Any:
    """Replace padded `Sharded` nodes by `HeldPieces`; return `tree` itself if it has none."""
    leaves, treedef = jax.tree.flatten(tree, is_leaf=_is_argument)
    if not any(is_sharded(x) and x.has_padding for x in leaves):
        return tree
    return treedef.unflatten(
        HeldPieces(x.held, x.cut) if is_sharded(x) and x.has_padding else x for x in leaves
    )


def as_sharded(tree: Any) -> Any:
    """Replace `HeldPieces` by `Sharded` nodes; return `tree` itself if it has none."""
    leaves, treedef = jax.tree.flatten(tree, is_leaf=_is_argument)
    if not any(isinstance(x, HeldPieces) for x in leaves):
        return tree
    return treedef.unflatten(x.sharded() if isinstance(x, HeldPieces) else x for x in leaves)


def list_arrays(tree: Any) -> list[Any]:
    """List the arrays of a pytree; for a `Sharded`, the padded array that it holds."""
    leaves = jax.tree.leaves(tree, is_leaf=is_sharded)
    return [x.held if is_sharded(x) else x for x in leaves]


def has_padding(tree: Any) -> bool:
    """Whether JAX's call path would remove the padding of some array; see Note [Padding in nodes].

    See `_values/sharded/node.py`.
    """
    leaves = jax.tree.leaves(tree, is_leaf=_is_argument)
    return any(is_sharded(x) and x.has_padding for x in leaves)


def array_of(x: Any) -> Any:
    """Return the global array of a `PerReplica`; any other value unchanged."""
    return x.array if isinstance(x, PerReplica) else x


def first_value(x: Any) -> Any:
    """Return the value of the first replica of a `PerReplica`; any other value unchanged."""
    return x.values[0] if isinstance(x, PerReplica) else x


def as_per_replica(x: Any) -> PerReplica:
    """Return a `PerReplica`, made of a global array if `x` is one."""
    return x if isinstance(x, PerReplica) else PerReplica.of_global(x)


def whole_array(x: Any) -> Any:
    """Return the whole array of a `Sharded`; any other value unchanged."""
    return x.whole() if isinstance(x, Sharded) else x
