"""The kinds of values: at which of them functions of pytrees stop, and why that differs."""

import enum
import functools
from collections.abc import Callable
from typing import Any

import jax
from flax import nnx

from jaxdist._values.access import Assignable
from jaxdist._values.indexed_slices import IndexedSlices, is_sparse
from jaxdist._values.replicas.per_replica import PerReplica
from jaxdist._values.sharded.node import HeldPieces
from jaxdist._values.sharded.sharded import Sharded, is_sharded
from jaxdist._values.variable.variable import Variable


def is_optax_state(x: Any) -> bool:
    """Whether a value is a state of optax: a named tuple of one of its modules."""
    # They have no common base class.
    is_named = isinstance(x, tuple) and hasattr(x, "_fields")
    return is_named and type(x).__module__.split(".")[0] == "optax"


# Whoever adds a kind of value decides about each column; `tests/values/test_stops.py` lists the
# columns of each kind.
@enum.unique
class Stop(enum.Enum):
    """A column of the table: a use of pytrees, with the kinds of values that stay whole for it.

    Nearly all values of jaxdist are pytree nodes. Flattening them is right for one use and wrong
    for another: unflattening makes new objects, and it removes the padding of a `Sharded`. A kind
    is a class with its subclasses, or a predicate where there is no class to import.
    """

    def __init__(self, *kinds: type | Callable[[Any], bool]) -> None:
        self.kinds = kinds

    # Uses that concern one kind. All other values are left to JAX.
    PER_REPLICA = (PerReplica,)
    VARIABLE = (Variable,)
    ASSIGNABLE = (Assignable,)  # also the sharded variables of parameter servers
    SLICES = (IndexedSlices,)
    # Modules and variables of NNX; a state has no identity, so it is left to JAX.
    NNX = (nnx.Pytree, nnx.Variable)

    # Arguments of a step. It updates objects in place, so each must stay the same object.
    ARGUMENTS = (PerReplica, Sharded, HeldPieces, Assignable, nnx.Pytree)
    # Results of a step. Modules and optimizers are refused, so they must be seen. Other objects of
    # NNX, such as `nnx.Rngs`, are returned as pytrees. There are no `HeldPieces` in results yet.
    RESULTS = (PerReplica, Sharded, Assignable, nnx.Module, nnx.Optimizer)
    # Results of `jaxdist.function`, at the end of its trace. The structure of the result keeps each
    # `PerReplica` and `Sharded`, so only the arrays in them are looked at.
    RESULTS_OF_FUNCTIONS = (Assignable, nnx.Module, nnx.Optimizer)
    # Arguments in which a step might write to an `nnx.Variable` that is in no module: the search
    # does not enter objects and states. A `Sharded` and a variable of jaxdist hold none.
    BARE_VARIABLES = (Sharded, Assignable, nnx.Pytree, nnx.Variable, nnx.State)
    # Arguments of `reduce` and `gather`, before variables are replaced by their values.
    READ = (PerReplica, Variable)

    # Values that `Strategy.reduce` and `gather` combine outside of a step.
    REDUCED = (PerReplica, Sharded, IndexedSlices, is_sparse)
    # The same in a merge function, where the piece of a `Sharded` is an array of this replica.
    REDUCED_IN_MERGE = (PerReplica, IndexedSlices, is_sparse)
    # `ReplicaContext.all_reduce` first reduces rows of `IndexedSlices`, then everything else.
    REDUCED_IN_STEP = (Sharded, IndexedSlices, is_sparse)
    # Values that `ReplicaContext.all_gather` refuses.
    SPARSE = (IndexedSlices, is_sparse)
    # Values of all replicas: `experimental_local_results` lists them, and collectives in a step
    # keep or refuse them as a whole.
    DISTRIBUTED = (PerReplica, Sharded)

    # Values that are laid out over logical devices.
    LAID_OUT = (PerReplica, Sharded, Variable)
    # State that `partition.gather` makes whole, or that is prepared for a strategy of one replica.
    GATHERED = (PerReplica, Sharded, nnx.Pytree)
    # State that is compared between replicas, or with the result on one replica.
    COMPARED = (PerReplica, nnx.Pytree)
    # State that `partition.place` and reports read node by node. Inside a node, `place` takes
    # ARRAYS_OF_NODES, and reports take REPORTED.
    NODES = (PerReplica, Sharded, Variable, nnx.Pytree, nnx.Variable, is_optax_state)
    ARRAYS_OF_NODES = (Sharded, nnx.Variable)
    REPORTED = (PerReplica, Sharded, Variable, nnx.Variable)
    # State that a checkpoint saves as one object.
    SAVED = (Assignable, nnx.Pytree, nnx.Variable, nnx.State)


@functools.cache
def stops(at: Stop, *more: type) -> Callable[[Any], bool]:
    """Return the predicate of a column, for `is_leaf`: whether a value stays whole.

    Args:
        at: The column.
        more: Classes of the caller's room that stay whole too.
    """
    # One `isinstance` for each node of each pytree.
    kinds = (*(kind for kind in at.kinds if isinstance(kind, type)), *more)
    tests = [kind for kind in at.kinds if not isinstance(kind, type)]
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
    if not has_padding(tree):
        return tree
    return jax.tree.map(
        lambda x: HeldPieces(x.held, x.cut) if is_sharded(x) and x.has_padding else x,
        tree,
        is_leaf=_is_argument,
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
