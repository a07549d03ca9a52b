"""Reads batches of Keras, and places them, state and variables on the devices of a strategy."""

import functools
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from jaxdist._called import called, refuse
from jaxdist._integers import check_all_fit
from jaxdist._keras.source import keras_module
from jaxdist._mesh import ReplicaMesh
from jaxdist._values import PerReplica, copy_if_writable, make_equal, mark_with_shapes, put
from jaxdist.errors import MixedStrategyError, ShapeError, UnsupportedError

# Note [Layouts of variables]
# Keras keeps a variable on one device between the calls of `fit`. A variable that rules placed is
# then on the logical devices of one replica: the first replica of this process, with the mesh
# `mesh_of_one`. Keras knows this layout (`variable._layout`): assigned values get it, and an
# optimizer makes the slots of a variable with it. In a step, the same spec applies to the mesh of
# all replicas, so nothing is copied at the end of the step.

# Every mesh from `mesh_of_one`, so that layouts of other libraries are not an error.
_MADE: set[Mesh] = set()


@functools.lru_cache(maxsize=64)
@called("partition.place")
def mesh_of_one(layout: ReplicaMesh) -> Mesh:
    """Return the mesh of the logical devices of the first replica of this process.

    Raises:
        UnsupportedError: Some of them belong to other processes.
    """
    own = layout.local_replicas[:1]
    grid = layout.device_grid[own[0]] if own else layout.device_grid[0]
    owners = sorted({layout.device_owners[d] for d in grid})
    if owners != [layout.process.index]:
        raise refuse(
            "a Keras model and a strategy whose replicas span processes: replica "
            f"{own[0] if own else 0} has devices of the processes {owners}, and this is process "
            f"{layout.process.index}.",
            "Between the calls of fit, each process has the whole model, so that Keras can save "
            "it.",
            "Make a mesh whose replicas each have devices of one process.",
            kind=UnsupportedError,
        )
    axes = layout.logical_axes
    sizes = [layout.mesh.shape[a] for a in axes]
    mesh = Mesh(grid.reshape(sizes), axes, axis_types=(AxisType.Auto,) * len(axes))
    _MADE.add(mesh)
    return mesh


def is_placed(variable: Any) -> bool:
    """Whether partition rules placed a variable of Keras."""
    own = getattr(variable, "_layout", None)
    return isinstance(own, NamedSharding) and own.mesh in _MADE


def sharding_in_step(variable: Any, layout: ReplicaMesh) -> NamedSharding:
    """Return the sharding of a variable over the devices of all replicas.

    Raises:
        MixedStrategyError: The variable was placed for a strategy with other devices.
    """
    if not is_placed(variable):
        return layout.replicated
    own = variable._layout
    if own.mesh != mesh_of_one(layout):
        raise MixedStrategyError(
            f"The Keras variable {variable.path!r} is used by a strategy with the mesh "
            f"{layout.mesh}.\n\n"
            "partition.place has placed it for a strategy with other devices or axes.\n\n"
            "Place the model for the strategy that trains it: "
            "partition.place(strategy, model, rules)."
        )
    return NamedSharding(layout.mesh, own.spec)


def set_spec(variable: Any, spec: PartitionSpec, layout: ReplicaMesh) -> None:
    """Set the layout of a variable; with one logical device, to None."""
    one = layout.num_logical == 1
    variable._layout = None if one else NamedSharding(mesh_of_one(layout), spec)


def place_others(variables: Sequence[Sequence[Any]], layout: ReplicaMesh) -> None:
    """Give variables without a layout the devices of the others, if some were placed.

    JAX cannot compute with arrays on different devices, and user code may use both.
    """
    each = [v for group in variables for v in group]
    if any(map(is_placed, each)):
        for variable in each:
            if variable._layout is None:
                set_spec(variable, PartitionSpec(), layout)


def take_own(variable: Any, array: Any) -> Any:
    """Return the part of an array that Keras keeps between calls. Copies nothing.

    Args:
        variable: The variable of Keras.
        array: Its value, usually over the devices of all replicas.
    """
    is_spread = isinstance(array, jax.Array) and len(array.sharding.device_set) > 1
    if not is_spread:
        return array
    if not is_placed(variable):
        return array.addressable_data(0)
    own = variable._layout
    if array.sharding.device_set == own.device_set:
        return array
    on = {shard.device: shard.data for shard in array.addressable_shards}
    parts = [on[device] for device in own.mesh.devices.flat]
    return jax.make_array_from_single_device_arrays(array.shape, own, parts)


def count_rows(batch: Any) -> int:
    """Return the number of rows of a batch, which is the same in all its arrays.

    Raises:
        UnsupportedError: A leaf is not a dense array.
        ShapeError: The arrays have different numbers of rows, or there are none.
    """
    # A fast path for the usual batch, without the names of its leaves: this runs at each step.
    counts = {leaf.shape[0] if _is_dense(leaf) else None for leaf in jax.tree.leaves(batch)}
    if len(counts) == 1 and (count := counts.pop()):
        return int(count)
    rows: dict[str, int] = {}
    for path, leaf in jax.tree_util.tree_flatten_with_path(batch)[0]:
        name = "data" + jax.tree_util.keystr(path)
        if not hasattr(leaf, "shape") or not hasattr(leaf, "dtype"):
            raise UnsupportedError(
                f"Keras passed {name} of type {type(leaf).__name__} to a model of a strategy.\n\n"
                "A strategy splits the rows of dense arrays over its replicas.\n\n"
                "Convert it to a dense NumPy array before fit, evaluate or predict."
            )
        if not leaf.shape:
            raise ShapeError(
                f"Keras passed {name}, a scalar, to a model of a strategy.\n\n"
                "A strategy splits the rows of a batch over its replicas.\n\n"
                "Give it one row for each example: np.full(num_rows, value)."
            )
        rows[name] = leaf.shape[0]
    if len({*rows.values()}) != 1:
        raise ShapeError(
            f"Keras passed a batch with these numbers of rows to a model of a strategy: {rows}.\n\n"
            "Row i of each array belongs to example i.\n\n"
            "Pass arrays with equal numbers of rows."
        )
    return next(iter(rows.values()))


def _is_dense(leaf: Any) -> bool:
    return isinstance(leaf, (np.ndarray, jax.Array)) and leaf.ndim > 0


@called("fit, evaluate or predict of Keras")
def place_batch(batch: Any, rows: int, layout: ReplicaMesh) -> Any:
    """Return a batch whose rows are split over the replicas.

    Every process has the whole batch, and places the rows of its own replicas. If the replicas
    have several devices each and do not divide a batch, every replica gets the whole batch.
    """
    check_all_fit("data", batch)
    if is_whole(rows, layout):
        return jax.tree.map(lambda leaf: put(copy_if_writable(leaf), layout.replicated), batch)
    return jax.tree.map(lambda leaf: _place_rows(leaf, rows, layout), batch)


def is_whole(rows: int, layout: ReplicaMesh) -> bool:
    """Whether every replica computes the whole batch; see Note [Whole batches]."""
    return layout.num_logical > 1 and rows % layout.num_replicas != 0


def _place_rows(leaf: Any, rows: int, layout: ReplicaMesh) -> Any:
    count = layout.num_replicas
    if count == 1:
        # So that `run` has no arrays to copy, which costs more with more variables.
        return copy_if_writable(leaf)
    if not isinstance(leaf, jax.Array):
        dtype = jax.dtypes.canonicalize_dtype(leaf.dtype)
        # See Note [Who owns host memory]
        leaf = copy_if_writable(leaf) if leaf.dtype == dtype else leaf.astype(dtype)
    if rows % count == 0:
        if isinstance(leaf, jax.Array):
            array = put(leaf, layout.per_replica)
        else:
            array = jax.make_array_from_callback(leaf.shape, layout.per_replica, leaf.__getitem__)
        return PerReplica.of_global(array, replicas_per_shard=layout.replicas_per_place)
    most = -(-rows // count)
    ends = [min(n * most, rows) for n in range(count + 1)]
    value = PerReplica([leaf[ends[n] : ends[n + 1]] for n in layout.local_replicas])
    if layout.is_shared:
        shapes = tuple((ends[n + 1] - ends[n], *leaf.shape[1:]) for n in range(count))
        mark_with_shapes(value, shapes)
    return value


@called("fit, evaluate or predict of Keras")
def place_state(state: Any, variables: Sequence[Sequence[Any]], layout: ReplicaMesh) -> Any:
    """Return state of Keras on all devices; that of process 0 where processes differ.

    Args:
        state: For each group of variables, a list of their values.
        variables: The variables.
        layout: The mesh of the strategy.
    """
    pairs = [(v, x) for p in zip(variables, state, strict=True) for v, x in zip(*p, strict=True)]
    leaves = [_find_copies(v, x) for v, x in pairs]
    wanted = [sharding_in_step(v, layout) for v, _ in pairs]
    missing = [n for n, x in enumerate(leaves) if x.sharding != wanted[n]]
    # Every process compares all variables, since another process may have to place others.
    named = {f"variable {n}": x for n, x in enumerate(leaves)} if layout.is_shared else {}
    equal = make_equal(named, layout) if missing else {}
    for n in missing:
        leaves[n] = put(equal.get(f"variable {n}", leaves[n]), wanted[n])
    return jax.tree.structure(state).unflatten(leaves)


# Note [Copies of variables between calls]
# Between calls of `fit`, a variable of Keras is an array on one device, as without a strategy, or
# on the devices of one replica (Note [Layouts of variables]). Its copies on the other devices stay
# in an attribute of the variable, so that the next call copies nothing. They are valid only while
# the variable has the array that is a part of them.
_COPIES = "_jaxdist_copies"


def keep_copies(variables: Sequence[Any], arrays: Sequence[Any]) -> None:
    """Keep the copies of variables that were just assigned their parts on one device."""
    for variable, array in zip(variables, arrays, strict=True):
        if isinstance(array, jax.Array) and array.is_fully_addressable:
            setattr(variable, _COPIES, (variable._value, array))


def drop_copies(variable: Any) -> None:
    """Drop the copies of a variable that is being assigned."""
    variable.__dict__.pop(_COPIES, None)


def read_copies(variable: Any) -> Any:
    """Return the value of a variable with all its copies; None while `fit` holds it."""
    local, copies = variable.__dict__.get(_COPIES, (None, None))
    value = variable._value
    is_whole = local is not None and local is value and not copies.is_deleted()
    return copies if is_whole else value


def _find_copies(variable: Any, value: Any) -> Any:
    """Return an array with a copy on each device, if the variable still has one."""
    local, copies = variable.__dict__.pop(_COPIES, (None, None))
    return copies if local is value and not copies.is_deleted() else value


def read_batches(adapter: Any) -> Iterator[Any]:
    """Return the batches of a data adapter of Keras, on the host.

    Keras would copy each batch to the default device first.

    Cost:
        Shuffled rows of NumPy arrays: one copy on the host, and no further copy before the step.
        Other batches: as in Keras.
    """
    adapters = keras_module("trainers.data_adapters")
    if type(adapter) is not adapters.array_data_adapter.ArrayDataAdapter:
        batches: Iterator[Any] = adapter.get_jax_iterator()
        return batches
    slicing = keras_module("trainers.data_adapters.array_slicing")
    arrays = slicing.convert_to_sliceable(adapter._inputs, target_backend="jax")
    sources, structure = jax.tree.flatten(arrays)
    # A number instead of the arrays: Keras' handling of structures costs more than the rows.
    places = adapter._get_iterator(_return_indices, 0)
    return (structure.unflatten([_take_rows(s, i) for s in sources]) for i in places)


def _return_indices(_: Any, *, indices: Any) -> Any:
    return indices


def _take_rows(source: Any, indices: Any) -> Any:
    array = source.array
    if type(array) is not np.ndarray or isinstance(indices, slice):
        return source.convert_to_jax_compatible(source[indices])
    # For short rows, `take` needs a third of the time of `array[indices]`, which Keras uses.
    rows = array.take(indices, 0)
    # No one else uses this array. See Note [Who owns host memory]
    rows.flags.writeable = False
    return rows
