"""Functions in a step: layouts of intermediate values, and gathering sharded parameters."""

from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.extend.core import Primitive
from jax.sharding import PartitionSpec

from jaxdist import _compat, _replica
from jaxdist._called import called, name_call, refuse, refuse_type
from jaxdist._validate import as_array, as_floating, check_has_arrays, check_instance, show
from jaxdist._values import (
    GATHERED,
    PerReplica,
    Sharded,
    Stop,
    gather_whole,
    is_sharded,
    stops,
    whole_array,
)
from jaxdist.errors import ShapeError
from jaxdist.partition._placements import Placement, Replicate, Split, has_axis


@called("partition.constrain")
def constrain(value: Any, placement: Placement | int) -> Any:
    """Return an intermediate value with a layout over the logical devices of a replica.

    XLA chooses the layouts of values from the layouts of the parameters. This function overrides
    XLA's choice, and keeps a layout in long programs. The gradient gets the same layout.

    Shapes:
        Unchanged: the shape that one replica sees.

    Cost:
        The communication that changes the layout; nothing with one logical device.

    Args:
        value: Pytree of arrays inside a step; outside of a step it is returned unchanged.
        placement: `Split(dim)`, or the number of the dim, or `Replicate()`. `Split(dim,
            axis="model")` splits it over one axis of the mesh.

    Returns:
        The same values.

    Raises:
        ArgumentTypeError: `placement` is another placement.
        ArgumentError: The mesh has no such axis, or it is one of replicas.
        ShapeError: The dim does not exist.

    Example:
        >>> mesh = jax.make_mesh((4, 2), ("data", "model"))
        >>> strategy = MirroredStrategy(mesh=mesh, replica_axes=("data",))
        >>> strategy.run(lambda x: partition.constrain(x * 2, partition.Split(1)), (np.eye(4),))[0]
        Array([2., 0., 0., 0.], dtype=float32)
    """
    if isinstance(placement, int) and not isinstance(placement, bool):
        placement = Split(placement)
    placement = check_activation(placement)
    check_has_arrays("value", value)
    frame = _replica.current_frame()
    # Outside of a step there is no mesh context, and a model must still work when tested alone.
    if frame is None or not frame.is_inside_step or frame.strategy.layout.num_logical == 1:
        return value
    layout = frame.strategy.layout
    # In a stage of a pipeline, the devices of its axis have different layers.
    manual = jax.sharding.get_abstract_mesh().manual_axes
    axes, dim = tuple(a for a in layout.logical_axes if a not in manual), None
    if isinstance(placement, Split):
        dim = placement.dim
        if placement.axis is not None:
            has_axis(name_call(), placement, placement.axis, axes, layout)
            axes = (placement.axis,)
    if not axes:
        return value
    return jax.tree.map(lambda x: _constrain_array(x, dim, axes), value)


def check_activation(placement: Any) -> Split | Replicate:
    """Check that `placement` is valid for intermediate values, and return it."""
    if isinstance(placement, (Split, Replicate)):
        return placement
    raise refuse_type(
        f"placement={show(placement)}.",
        "An intermediate value belongs to its replica, and is either split over the logical "
        "devices or not.",
        "Pass partition.Split(dim) or partition.Replicate().",
    )


@called("partition.constrain")
def _constrain_array(array: Any, dim: int | None, axes: tuple[str, ...]) -> Any:
    if not hasattr(array, "ndim"):
        array = as_array("value", array)
    spec: list[Any] = [None] * array.ndim
    if dim is not None:
        if not -array.ndim <= dim < array.ndim:
            raise refuse(
                f"placement=Split({dim}), and the value is {array.dtype}{list(array.shape)}.",
                "Split names a dim of the value.",
                (
                    f"Pass Split with one of {[*range(-array.ndim, array.ndim)]}."
                    if array.ndim
                    else "Pass partition.Replicate() for a scalar."
                ),
                kind=ShapeError,
            )
        spec[dim] = axes
    # A `PartitionSpec` alone: inside `shard_map` the mesh of the context has manual replica axes,
    # and a `NamedSharding` of the strategy's mesh would not fit it.
    explicit = frozenset(jax.sharding.get_abstract_mesh().explicit_axes)
    if explicit:
        array = jax.sharding.reshard(
            array, PartitionSpec(*_without(spec, frozenset(axes) - explicit))
        )
    if explicit >= frozenset(axes):
        return array
    return jax.lax.with_sharding_constraint(array, PartitionSpec(*_without(spec, explicit)))


def _without(spec: list[Any], axes: frozenset[str]) -> list[Any]:
    """Return the entries of a spec without these axes."""
    return [e and (tuple(a for a in e if a not in axes) or None) for e in spec]


T = TypeVar("T")


@_compat.outside_of_meshes
@called("partition.gather")
def gather(tree: T, *, dtype: Any = None) -> T:
    """Return a copy of `tree` with a whole array instead of each `Sharded` value.

    In a step each layer gathers the sharded parameters that it uses, even in a scan over stacked
    layers. This function is for other code that needs arrays: functions of `jax.lax`, or sums over
    all parameters.

    Shapes:
        A `Sharded` of shape `[...]` gives the array `[...]`, without padding.

    Cost:
        One all-gather for each `Sharded` value; outside a step none.

    Guarantees:
        The gradient is `Sharded` again: a reduce-scatter gives the mean over all replicas (with
        `axes`, and an all-reduce over the other axes).

    Args:
        tree: A pytree, or an NNX object, which is copied.
        dtype: The dtype in which floating-point arrays are gathered and returned; None keeps their
            own. The gradient has the dtype of the parameter, and is scattered in `dtype`.

    Returns:
        The same tree with plain arrays.

    Raises:
        ArgumentTypeError: `dtype` is not a floating-point dtype.
        ReplicaValueError: The dims of a `Sharded` value changed after it was sharded.

    Example:
        >>> strategy = MirroredStrategy()
        >>> params = partition.place(strategy, {"w": np.eye(8)}, partition.fsdp(min_bytes=0))
        >>> strategy.run(lambda p: jnp.linalg.det(partition.gather(p)["w"]), (params,))
        Array(1., dtype=float32)
    """
    if dtype is not None:
        dtype = as_floating("dtype", dtype)
    check_has_arrays("tree", tree, "a pytree of arrays, or an NNX object")
    frame = _replica.current_frame()
    layout = None if frame is None or not frame.is_inside_step else frame.strategy.layout

    @called("partition.gather")
    def gather_leaf(x: Any) -> Any:
        if isinstance(x, PerReplica):
            raise refuse_type(
                f"tree with {show(x)}.",
                "It joins the pieces of one array; a PerReplica has a separate value for each "
                "replica.",
                "Pass the parameters that partition.place returned.",
            )
        to = dtype if jnp.issubdtype(getattr(x, "dtype", np.int32), jnp.floating) else None
        # A step may also close over a concrete `Sharded` value, which holds the whole array.
        if isinstance(x, Sharded) and layout is not None and isinstance(x.held, jax.core.Tracer):
            return gather_whole(x, layout, to)
        whole = whole_array(x)
        return whole if to is None else jnp.asarray(whole, to)

    def gather_node(x: Any) -> Any:
        if not isinstance(x, nnx.Pytree):
            return gather_leaf(x)
        # `jax.tree.map` does not enter NNX objects. The copy leaves the user's object sharded.
        graphdef, state = nnx.split(x)
        return nnx.merge(graphdef, jax.tree.map(gather_leaf, state, is_leaf=is_sharded))

    return jax.tree.map(gather_node, tree, is_leaf=stops(Stop.GATHERED))


# `jax.checkpoint` must not keep the results of these operations either. They only copy a gathered
# parameter, so a kept result would take as much memory as the parameter itself.
_DATA_MOVEMENT = frozenset(
    "all_gather slice reshape squeeze transpose broadcast_in_dim convert_element_type copy rev "
    "expand_dims sharding_constraint".split()
)


@called("partition.remat_policy")
def remat_policy(primitive: Any, *_: Any, **params: Any) -> bool:
    """Policy for `jax.checkpoint` that keeps all results except gathered parameters.

    Without it, every device holds each whole parameter from its use until its gradient. With it,
    the backward pass gathers again, layer by layer, and keeps every computed value.

    Cost:
        One more all-gather of each parameter in a step.

    Args:
        primitive: The operation whose result might be kept; JAX calls this function.
        params: The parameters of the operation.

    Returns:
        Whether to keep the result.

    Example:
        >>> def loss(params, x):
        ...     return jnp.mean((x @ params["w"]) ** 2)
        >>> saving = jax.checkpoint(loss, policy=partition.remat_policy)
        >>> float(jax.grad(saving)({"w": jnp.ones((1, 1))}, jnp.ones((1, 1)))["w"][0, 0])
        2.0

    Source:
        `jax.checkpoint_policies`; ZeRO-3, arXiv:1910.02054.
    """
    check_instance(
        "primitive",
        primitive,
        Primitive,
        "an operation of JAX",
        "Do not call it: pass it on, jax.checkpoint(fn, policy=partition.remat_policy).",
    )
    if primitive.name == "name":
        return bool(params.get("name") != GATHERED)
    return primitive.name not in _DATA_MOVEMENT
