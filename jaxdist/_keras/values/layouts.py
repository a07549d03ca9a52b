"""Layouts of Keras variables that partition rules placed.

# Note [Layouts of variables]
Keras keeps a variable on one device between the calls of `fit`. A variable that rules placed is
then on the logical devices of one replica: the first replica of this process, with the mesh
`mesh_of_one`. Keras knows this layout (`variable._layout`): assigned values get it, and an
optimizer makes the slots of a variable with it. In a step, the same spec applies to the mesh of
all replicas, so nothing is copied at the end of the step.
"""

import functools
from collections.abc import Sequence
from typing import Any

import jax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from jaxdist._called import called, refuse
from jaxdist._mesh import ReplicaMesh
from jaxdist.errors import MixedStrategyError, UnsupportedError

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
