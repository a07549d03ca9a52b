"""`put`: copies of arrays to shardings that may span several processes."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec, Sharding

from jaxdist import _compat
from jaxdist._called import called
from jaxdist._integers import check_fits


@called("A copy to devices")
def put(array: Any, sharding: Any) -> jax.Array:
    """Return a copy of an array with a sharding that may span other processes.

    For a sharding of this process it is `jax.device_put`. For a shared one, each process copies the
    parts of its own devices; nothing is exchanged or compared, whereas `jax.device_put` would
    gather the whole array from all processes to compare it.

    Cost:
        The copies to the devices of this process. An array that already spans several processes is
        moved by a program on all of them.

    Args:
        array: The whole array, equal in all processes, or an array over several processes.
        sharding: A sharding, or a device of this process.
    """
    check_fits("an array", array)
    is_local = not isinstance(sharding, Sharding) or sharding.is_fully_addressable
    if is_local and isinstance(array, jax.Array) and not isinstance(array, jax.core.Tracer):
        array = _take_here(array)
    if is_local or isinstance(array, jax.core.Tracer):
        copy: jax.Array = jax.device_put(array, sharding)
        return copy
    if isinstance(array, jax.Array) and not array.is_fully_addressable:
        return array if array.sharding == sharding else _find_move(sharding)(array)
    if _compat.is_inside_trace():
        # A constant of the program, which all processes share.
        constant: jax.Array = jax.device_put(array, sharding)
        return constant
    if not hasattr(array, "dtype"):
        array = jax.numpy.asarray(array)
    if isinstance(array.dtype, np.dtype) and not isinstance(array, jax.Array):
        array = np.asarray(array, jax.dtypes.canonicalize_dtype(array.dtype))
    if isinstance(array, jax.Array) and len(array.sharding.device_set) > 1:
        # Slices of an array over several devices would be on several devices, too.
        array = _fetch(array)
    parts = [
        jax.device_put(array[index], device)
        for device, index in sharding.addressable_devices_indices_map(array.shape).items()
    ]
    return jax.make_array_from_single_device_arrays(array.shape, sharding, parts, dtype=array.dtype)


def _take_here(array: jax.Array) -> jax.Array:
    """Return an array of this process alone."""
    if array.is_fully_addressable:
        return array
    if not array.is_fully_replicated and isinstance(array.sharding, NamedSharding):
        array = _find_move(NamedSharding(array.sharding.mesh, PartitionSpec()))(array)
    return array.addressable_data(0) if array.is_fully_replicated else array


def _fetch(array: jax.Array) -> Any:
    """Return an array of this process on one device, or in host memory."""
    if array.is_fully_replicated:
        return array.addressable_data(0)
    if isinstance(array.dtype, np.dtype):
        return np.asarray(array)
    keys = np.asarray(jax.random.key_data(array))
    return jax.random.wrap_key_data(jax.numpy.asarray(keys), impl=jax.random.key_impl(array))


@functools.lru_cache(maxsize=256)
def _find_move(sharding: Any) -> Callable[[Any], Any]:
    return jax.jit(lambda x: x, out_shardings=sharding)
