"""Brings the values of all replicas of several processes to each process, one by one."""

import json
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from jaxdist import _processes
from jaxdist._called import name_call
from jaxdist._collectives.across.kinds import Request, check_count
from jaxdist._collectives.across.plain import fetch_bits
from jaxdist._values import (
    PerReplica,
    find_shapes,
    is_python_number,
    mark_with_shapes,
    place_per_replica,
    put,
)

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
    said = [json.loads(text) for text in texts]
    if None not in said:
        # Exact for integers of any size, which a sum has to compare with the dtype's bounds.
        left = {p: iter(values) for p, values in enumerate(said)}
        return PerReplica([next(left[p]) for p in layout.replica_owners])
    arrays = [x if hasattr(x, "dtype") else jax.numpy.asarray(x) for x in value.values]
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


def _as_keys(bits: np.ndarray, like: Any) -> Any:
    if isinstance(like.dtype, np.dtype):
        return bits
    return jax.random.wrap_key_data(jax.numpy.asarray(bits), impl=jax.random.key_impl(like))
