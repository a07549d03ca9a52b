"""Layouts of intermediate values within a replica."""

from typing import Any

import jax
from jax.sharding import PartitionSpec

from jaxdist import _replica
from jaxdist._called import called, refuse, refuse_type
from jaxdist._validate import as_array, check_has_arrays, show
from jaxdist.errors import ShapeError
from jaxdist.partition._placements import Placement, Replicate, Split


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
        placement: `Split(dim)`, or the number of the dim, or `Replicate()`.

    Returns:
        The same values.

    Raises:
        ArgumentTypeError: `placement` is another placement.
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
    axes = frame.strategy.layout.logical_axes
    dim = placement.dim if isinstance(placement, Split) else None
    return jax.tree.map(lambda x: _constrain_array(x, dim, axes), value)


def check_activation(placement: Any) -> Split | Replicate:
    """Check that `placement` is valid for intermediate values, and return it."""
    if isinstance(placement, (Split, Replicate)):
        return placement
    raise refuse_type(
        f"placement={show(placement)}.",
        "An intermediate value belongs to its replica, and is split over the logical devices or "
        "not.",
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
