"""Functions that list the values of single replicas, and make per-replica values."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from jaxdist import _collectives, _compat, data
from jaxdist._called import called, refuse
from jaxdist._mesh import ReplicaMesh
from jaxdist._replica import current_frame
from jaxdist._typing import PyTree
from jaxdist._values import (
    Handle,
    Kind,
    PerReplica,
    Sharded,
    Stop,
    close_containers,
    copy_if_writable,
    find_shapes,
    is_container,
    open_containers,
    place_per_replica,
    placement_of,
    put,
    refuse_leaked,
    stops,
    take_own,
    whole_array,
)
from jaxdist.errors import ReplicaValueError


def list_results(value: PyTree, layout: ReplicaMesh) -> tuple[Any, ...]:
    """Return one entry for each replica of this process; in a merge function for all replicas."""
    frame = current_frame()
    # See Note [Merge functions]: the program is the same in all processes.
    takes_all = layout.is_shared and frame is not None and frame.in_merge
    count = layout.num_replicas if takes_all else len(layout.local_replicas)
    leaves, treedef = jax.tree.flatten(value, is_leaf=stops(Stop.DISTRIBUTED))
    if any(map(is_container, leaves)):
        # JAX treats a container of an unregistered type as a leaf. It is opened here, so that each
        # replica gets its own container.
        inner = open_containers(value, "value", is_leaf=stops(Stop.DISTRIBUTED))
        return tuple(close_containers(x) for x in list_results(inner, layout))
    is_leaf = treedef == jax.tree.structure(0)
    if is_leaf and isinstance(value, Sharded):
        return (value.whole(),)
    if (is_leaf and not _is_distributed(value, layout)) or value is None:
        return (value,)
    get_values = _get_values_of_all if takes_all else _get_values
    columns = [get_values(leaf, layout, count) for leaf in leaves]
    return tuple(jax.tree.unflatten(treedef, [c[i] for c in columns]) for i in range(count))


def _is_distributed(leaf: Any, layout: ReplicaMesh) -> bool:
    if isinstance(leaf, PerReplica):
        return True
    if not isinstance(leaf, jax.Array) or isinstance(leaf, jax.core.Tracer):
        return False
    return len(leaf.sharding.device_set) == len(layout.devices) and _compat.is_committed(leaf)


@called("experimental_local_results")
def _get_values(leaf: Any, layout: ReplicaMesh, count: int) -> tuple[Any, ...]:
    if isinstance(leaf, Sharded):
        # The shards of all replicas form one array; no replica has its own value.
        return (leaf.whole(),) * count
    if not isinstance(leaf, PerReplica):
        if not _is_distributed(leaf, layout):
            return (leaf,) * count
        found = placement_of(leaf, layout)
        if found.kind is Kind.PER_REPLICA:
            # `PerReplica` has one shard per replica on dim 0. If dim 0 is also split over logical
            # devices, the array is resharded.
            lead, *rest = tuple(found.sharding.spec)
            if lead != layout.replica_spec[0]:
                rows = PartitionSpec(layout.replica_spec[0], *rest)
                leaf = put(leaf, NamedSharding(found.sharding.mesh, rows))
            leaf = PerReplica.of_global(leaf, replicas_per_shard=layout.replicas_per_place)
        else:
            return tuple(_get_copy(leaf, layout, r) for r in layout.local_replicas)
    values: tuple[Any, ...] = take_own(leaf, layout).values
    _collectives.check_count("value", values, layout)
    return values


@called("experimental_local_results")
def _get_values_of_all(leaf: Any, layout: ReplicaMesh, count: int) -> tuple[Any, ...]:
    """Return the values of the replicas of all processes, in a merge function."""
    if isinstance(leaf, Handle):
        return leaf.values
    is_split = isinstance(leaf, jax.Array) and placement_of(leaf, layout).kind is Kind.PER_REPLICA
    if not isinstance(leaf, PerReplica) and not is_split:
        return (whole_array(leaf),) * count
    values: tuple[Any, ...] = ()
    if isinstance(leaf, PerReplica) and not leaf.is_global:
        values = leaf.values
    if len(values) != count:
        held = f"{len(values)} values" if values else "values on the devices of other processes"
        raise refuse(
            f"a value in a merge function that has {held}, and the strategy has {count} replicas.",
            "A merge function is traced once for all replicas, and lists the values of all.",
            "Pass the value as an argument of the step and of merge_call.",
            kind=ReplicaValueError,
        )
    return values


def _get_copy(array: jax.Array, layout: ReplicaMesh, replica: int) -> jax.Array:
    """Return one replica's copy of a mirrored array, over its logical devices."""
    on = {s.device: s.data for s in array.addressable_shards}
    sharding = array.sharding
    if array.is_fully_replicated or not isinstance(sharding, NamedSharding):
        return on[layout.device_grid[replica, 0]]
    # An array that is split over several dims has a mesh with one logical axis per dim.
    mesh: Any = sharding.mesh
    own = ReplicaMesh(mesh, layout.replica_axes)
    here = NamedSharding(own.replica_mesh(replica), sharding.spec)
    parts = [on[d] for d in layout.device_grid[replica]]
    return jax.make_array_from_single_device_arrays(array.shape, here, parts)


def make_from_function(
    value_fn: Callable[[Any], PyTree], layout: ReplicaMesh, *, unwrap: bool
) -> PyTree:
    """Call `value_fn` for each replica of this process, and join the results leaf by leaf."""
    if unwrap:
        made = value_fn(_make_context(layout, layout.local_replicas[0]))
        return jax.tree.map(lambda x: _make_per_replica([x], layout).values[0], made)
    flat = []
    for r in layout.local_replicas:
        made = value_fn(_make_context(layout, r))
        leaves, structure = jax.tree.flatten(made, is_leaf=lambda x: x is None)
        # See Note [Who owns host memory]: the next call may fill and return the same arrays.
        flat.append(([copy_if_writable(x) for x in leaves], structure))
    treedef = flat[0][1]
    for r, (_, other) in enumerate(flat):
        if other != treedef:
            raise ReplicaValueError(
                "experimental_distribute_values_from_function: value_fn returned different "
                f"structures.\nReplica 0: {treedef}\nReplica {r}: {other}\n\n"
                "The values of all replicas become one pytree, leaf by leaf.\n\n"
                "Return the same structure for every replica."
            )
    columns = zip(*[leaves for leaves, _ in flat], strict=True)
    return jax.tree.unflatten(treedef, [_make_per_replica(c, layout) for c in columns])


def _make_context(layout: ReplicaMesh, replica: int) -> data.ValueContext:
    return data.ValueContext(
        replica_id_in_sync_group=replica, num_replicas_in_sync=layout.num_replicas
    )


@called("experimental_distribute_values_from_function")
def _make_per_replica(values: Sequence[Any], layout: ReplicaMesh) -> PerReplica:
    """Make a `PerReplica`; arrays of one shape and dtype are placed on the devices.

    Python numbers stay Python numbers, since `Strategy.reduce` adds them exactly. Values of
    different shapes stay separate, and are padded when a step takes them.
    """
    value = PerReplica(values)
    for v in values:
        refuse_leaked("a result of value_fn", v)
    are_arrays = all(isinstance(v, (jax.Array, np.ndarray, np.generic)) for v in values)
    if not are_arrays or any(isinstance(v, jax.core.Tracer) for v in values):
        return value
    are_numbers = all(isinstance(v, jax.Array) or v.dtype.kind not in "OSUMm" for v in values)
    are_alike = len({(v.shape, v.dtype) for v in values}) == 1
    if layout.is_shared:
        # Shapes in other processes may differ, and all processes must decide the same.
        are_alike = len({*(find_shapes("a result of value_fn", value, layout) or ())}) == 1
    if not are_numbers or not are_alike or layout.described is not None:
        return value
    return place_per_replica("value", value, layout)
