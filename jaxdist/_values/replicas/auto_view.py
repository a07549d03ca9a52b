"""Arrays on a mesh with Explicit axes, as arrays on the same mesh with Auto axes."""

from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import PartitionSpec

from jaxdist import _compat
from jaxdist._mesh import make_auto_sharding


def view_auto(array: Any) -> Any:
    """Return the same buffers as an array on a mesh with Auto axes; other values as they are.

    The type of an array on Explicit axes contains its sharding, and JAX refuses operations that
    have no rule for it. See Note [Explicit axes].
    """
    if not isinstance(array, jax.Array) or isinstance(array, jax.core.Tracer):
        return array
    sharding = make_auto_sharding(array.sharding)
    return array if sharding is array.sharding else view_on(array, sharding)


def view_on(array: jax.Array, sharding: Any) -> jax.Array:
    """Return the same buffers with an equivalent sharding, on another mesh of the same devices."""
    buffers = [s.data for s in array.addressable_shards]
    return jax.make_array_from_single_device_arrays(
        array.shape, sharding, buffers, dtype=array.dtype
    )


def compute_auto(fn: Callable[[Any], Any], array: Any) -> Any:
    """Return `fn(array)`, computed where no axis is Explicit.

    In a function that JAX traces, the result is whole on all devices of the mesh.
    """
    if not isinstance(array, jax.core.Tracer):
        return fn(view_auto(array))
    mesh = _compat.get_explicit_mesh(array)
    if mesh is None:
        return fn(array)
    [result] = _compat.call_with_auto_types(lambda x: [fn(x)], [array], [PartitionSpec()], mesh)
    return result
