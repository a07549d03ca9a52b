"""Arrays of all replicas as plain arrays: on the host, or uncommitted on one device."""

import json
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from jaxdist import _compat, _processes
from jaxdist._called import name_call
from jaxdist._collectives.across.kinds import Request, check_count
from jaxdist._mesh import ReplicaMesh
from jaxdist._values import (
    PerReplica,
    Sharded,
    find_shapes,
    is_python_number,
    mark_with_shapes,
    place_per_replica,
    put,
)


def choose_fetch(array: Any, layout: ReplicaMesh) -> Callable[[Any], np.ndarray]:
    """Return the fastest function that fetches global arrays with the layout of this one."""
    # `np.asarray` gives the same result for every layout, but takes twice the time.
    is_split = isinstance(array, jax.Array) and array.sharding == layout.per_replica
    return _fetch_shards if is_split and layout.has_shard_per_replica else fetch_bits


def _fetch_shards(array: jax.Array) -> np.ndarray:
    """Return an array with one shard for each replica, shard by shard."""
    if not array.size:
        return _as_numpy(array)
    return np.concatenate(list(map(np.asarray, _compat.get_shards(array))))


def _as_numpy(array: Any) -> np.ndarray:
    # XLA does not split an array without elements: each of its shards has the shape of the whole,
    # and NumPy would get another shape than the array has, or JAX raises.
    return np.asarray(array) if array.size else np.zeros(array.shape, array.dtype)


def fetch_bits(array: Any) -> np.ndarray:
    """Return an array as a NumPy array; for random keys, their bits."""
    if jax.dtypes.issubdtype(array.dtype, jax.dtypes.prng_key):
        array = jax.random.key_data(array)
    return _as_numpy(array)


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
    has_keys = like is not None and not isinstance(like.dtype, np.dtype)
    return _as_keys(placed, like) if has_keys else placed


def take_plain_array(array: jax.Array) -> jax.Array:
    """Return a result on the mesh as one uncommitted array: the shard on its first device."""
    # A tracer has no buffers.
    if isinstance(array, jax.core.Tracer):
        return array
    if not array.is_fully_replicated and is_addressable(array):
        return put_on_default_device(_as_numpy(array))
    if not array.is_fully_replicated:
        # Several processes: no process has the whole array, so a program brings it to all of them.
        sharding: Any = array.sharding
        array = put(array, NamedSharding(sharding.mesh, PartitionSpec()))
    if not isinstance(array.dtype, np.dtype):  # random keys
        return _as_keys(take_plain_array(jax.random.key_data(array)), like=array)
    # A committed array could not be combined with arrays on other devices.
    return _compat.make_uncommitted(array.addressable_data(0))


def gather_whole(value: Sharded) -> Any:
    """Return a sharded array whole, uncommitted if this process can read all of it."""
    # Through the host: the shards are on several devices, and an uncommitted array has one buffer.
    whole = value.whole()
    return jnp.asarray(_as_numpy(whole)) if is_addressable(whole) else take_plain_array(whole)


_CHANNEL = "numbers"


def bring_all(request: Request, name: str, value: PerReplica) -> PerReplica:
    """Return the values of all replicas, where a process has only those of its own.

    Cost:
        For a strategy of one process none. Else an exchange of numbers or of shapes over the
        key-value store, and for arrays one all-gather of the largest shape.

    Raises:
        ReplicaValueError: The number of values is not that of the replicas of this process.
        ContextError: This process has not joined any others.
        ProgramMismatchError: Values have another rank or dtype in another process.
    """
    layout = request.layout
    if layout.is_shared and len(value.values) == layout.num_replicas:
        # The program lists the values of all replicas in every process.
        return value
    check_count(name, value.values, layout)
    if not layout.is_shared:
        return value
    numbers = [x for x in value.values if is_python_number(x) and not isinstance(x, complex)]
    own = numbers if len(numbers) == len(value.values) else None
    purpose = f"the numbers of {name}"
    seconds = request.options.timeout_seconds
    texts = _processes.exchange(name_call(), _CHANNEL, json.dumps(own), seconds, purpose)
    of_all = [json.loads(text) for text in texts]
    if None not in of_all:
        # Exact for integers of any size, which a sum has to compare with the dtype's bounds.
        left = {p: iter(values) for p, values in enumerate(of_all)}
        return PerReplica([next(left[p]) for p in layout.replica_owners])
    arrays = [x if hasattr(x, "dtype") else jnp.asarray(x) for x in value.values]
    if any(not hasattr(x, "dtype") for x in value.values):
        value = PerReplica(arrays)  # lists of numbers
    shapes: Any = find_shapes(name, value, layout)  # not None: all values are arrays
    largest = tuple(map(max, zip(*shapes, strict=True)))
    bits = [fetch_bits(x) for x in arrays]
    rest = bits[0].shape[arrays[0].ndim :]
    padded = [_pad(x, (*largest, *rest)) for x in bits]
    rows = PerReplica([x[None] for x in padded])
    mark_with_shapes(rows, ((1, *largest, *rest),) * layout.num_replicas)
    placed = place_per_replica(name, rows, layout).array
    whole = put(placed, NamedSharding(layout.mesh, PartitionSpec()))
    every = np.asarray(whole.addressable_data(0))
    cut = [every[r][tuple(slice(n) for n in shape)] for r, shape in enumerate(shapes)]
    return PerReplica([_as_keys(x, arrays[0]) for x in cut])


def _pad(array: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    return np.pad(array, [(0, n - m) for n, m in zip(shape, array.shape, strict=True)])


def _as_keys(bits: Any, like: Any) -> Any:
    """Return random keys with these bits if `like` has keys, else the array unchanged."""
    if isinstance(like.dtype, np.dtype):
        return bits
    return jax.random.wrap_key_data(jnp.asarray(bits), impl=jax.random.key_impl(like))
