"""How arrays are laid over an axis, also where axes of the mesh are Explicit."""

from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import PartitionSpec

from jaxdist._called import refuse
from jaxdist.errors import ContextError


def lay_over(array: jax.Array, axis: str, dim: int) -> jax.Array:
    """Return an array with `dim` divided over an axis of the mesh, and other dims as they are."""
    if axis in jax.sharding.get_abstract_mesh().explicit_axes:
        spec = [_without(entry, axis) for entry in jax.typeof(array).sharding.spec]
        spec[dim] = axis
        return jax.sharding.reshard(array, PartitionSpec(*spec))
    free: Any = PartitionSpec.UNCONSTRAINED
    entries = [axis if d == dim else free for d in range(array.ndim)]
    return jax.lax.with_sharding_constraint(array, PartitionSpec(*entries))


def lay_whole(array: jax.Array, dim: int) -> jax.Array:
    """Return an array whose `dim` is whole on each device, and other dims as they are.

    XLA would otherwise divide what a slice is taken from, and move the slices.
    """
    if jax.sharding.get_abstract_mesh().explicit_axes:
        return array
    free: Any = PartitionSpec.UNCONSTRAINED
    entries = [None if d == dim else free for d in range(array.ndim)]
    return jax.lax.with_sharding_constraint(array, PartitionSpec(*entries))


def _without(entry: Any, axis: str) -> Any:
    """Return the entry of a spec without an axis, which lays out one dim only."""
    names = (entry,) if isinstance(entry, str) else tuple(entry or ())
    return tuple(name for name in names if name != axis) or None


def call_auto(fn: Callable[..., jax.Array], *arrays: Any) -> jax.Array:
    """Call a function of arrays as if no axis of the mesh were Explicit.

    The result has the type of the first array: its shape, and its layout over Explicit axes.

    Raises:
        ContextError: JAX cannot do it. The error says how to make a mesh with other axis types.
    """
    explicit = jax.sharding.get_abstract_mesh().explicit_axes
    if not explicit:
        return fn(*arrays)
    spec = jax.typeof(arrays[0]).sharding.spec
    try:
        auto: Any = jax.sharding.auto_axes(fn, axes=explicit, out_sharding=spec)
        result: jax.Array = auto(*arrays)
    except (TypeError, ValueError, NotImplementedError) as error:
        raise refuse(
            f"arrays on a mesh whose axes {list(explicit)} are Explicit, where JAX says: "
            f"{str(error).splitlines()[0]}",
            "Its products and exchanges are laid out by XLA, over axes that are Auto.",
            "Make the mesh with axis_types=(jax.sharding.AxisType.Auto,) * number_of_axes.",
            kind=ContextError,
        ) from error
    return result
