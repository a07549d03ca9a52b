"""Arrays of all replicas as plain arrays: on the host, or uncommitted on one device."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from jaxdist import _compat
from jaxdist._mesh import ReplicaMesh
from jaxdist._values import Sharded, put


def choose_fetch(array: Any, layout: ReplicaMesh) -> Callable[[Any], np.ndarray]:
    """Return the fastest function that fetches global arrays with the layout of this one."""
    # `np.asarray` gives the same result for every layout, but takes twice the time.
    is_split = isinstance(array, jax.Array) and array.sharding == layout.per_replica
    return _fetch_shards if is_split and layout.has_shard_per_replica else fetch_bits


def _fetch_shards(array: jax.Array) -> np.ndarray:
    """Return an array with one shard for each replica, shard by shard."""
    return np.concatenate(list(map(np.asarray, _compat.get_shards(array))))


def fetch_bits(array: Any) -> np.ndarray:
    """Return an array as a NumPy array; for random keys, their bits."""
    if jax.dtypes.issubdtype(array.dtype, jax.dtypes.prng_key):
        array = jax.random.key_data(array)
    return np.asarray(array)


def is_addressable(array: jax.Array) -> bool:
    """Whether this process can read the whole array now."""
    return not isinstance(array, jax.core.Tracer) and array.is_fully_addressable


def put_on_default_device(array: np.ndarray, like: Any = None) -> jax.Array:
    """Return an uncommitted array on this process's default device.

    It has random keys if `like` has.
    """
    # `put_uncommitted` skips JAX's conversion of dtypes, which float64 needs where x64 is off.
    dtype = array.dtype
    is_kept = dtype.itemsize < 8 or dtype == jax.dtypes.canonicalize_dtype(dtype)
    placed = _compat.put_uncommitted(array) if is_kept else jnp.asarray(array)
    if like is not None and not isinstance(like.dtype, np.dtype):
        return jax.random.wrap_key_data(placed, impl=jax.random.key_impl(like))
    return placed


def take_plain_array(array: jax.Array) -> jax.Array:
    """Return a result on the mesh as one uncommitted array: the shard on its first device."""
    # A tracer has no buffers.
    if isinstance(array, jax.core.Tracer):
        return array
    if not array.is_fully_replicated and is_addressable(array):
        return put_on_default_device(np.asarray(array))
    if not array.is_fully_replicated:
        # Several processes: no process has the whole array, so a program brings it to all of them.
        sharding: Any = array.sharding
        array = put(array, NamedSharding(sharding.mesh, PartitionSpec()))
    if not isinstance(array.dtype, np.dtype):  # random keys
        bits = take_plain_array(jax.random.key_data(array))
        return jax.random.wrap_key_data(bits, impl=jax.random.key_impl(array))
    # A committed array could not be combined with arrays on other devices.
    return _compat.make_uncommitted(array.addressable_data(0))


def gather_whole(value: Sharded) -> Any:
    """Return a sharded array whole, uncommitted if this process can read all of it."""
    # Through the host: the shards are on several devices, and an uncommitted array has one buffer.
    whole = value.whole()
    return jnp.asarray(np.asarray(whole)) if is_addressable(whole) else take_plain_array(whole)
