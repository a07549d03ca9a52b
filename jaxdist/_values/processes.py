"""Values of a job of several processes: digests, and comparison and waiting."""

import functools
import hashlib
import json
import logging
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxdist import _compat, _processes
from jaxdist._called import name_call
from jaxdist._mesh import ReplicaMesh, make_auto_sharding
from jaxdist.errors import ProgramMismatchError

# Of a larger array, every n-th row of bytes is read: enough to find accidental differences.
MOST_BYTES = 4 * 2**20


def is_of_this_process(value: Any) -> bool:
    """Whether a value is whole in this process: a number, an array of NumPy, or a local array."""
    if isinstance(value, jax.Array):
        return not isinstance(value, jax.core.Tracer) and value.is_fully_addressable
    return isinstance(value, (np.ndarray, np.generic, bool, int, float, complex))


def digest(value: Any, most_bytes: int | None = None) -> str:
    """Return a string that is equal for values with the same dtype, shape and bits.

    Cost:
        A copy from the device, and about 1 ms for each MiB.

    Args:
        value: A value of this process.
        most_bytes: Of a larger value, only this many bytes are read, evenly distributed.
    """
    if isinstance(value, jax.Array) and not isinstance(value.dtype, np.dtype):
        value = jax.random.key_data(value)
    array = np.asarray(value)
    data = np.ascontiguousarray(array).reshape(-1).view(np.uint8) if array.size else array
    if most_bytes is not None and data.nbytes > most_bytes:
        step = -(-data.nbytes // most_bytes)
        data = data[::step].copy()
    made = hashlib.blake2b(data.tobytes(), digest_size=12)
    made.update(f"{array.dtype}{array.shape}".encode())
    return made.hexdigest()


_LOG = logging.getLogger("jaxdist")
_CHANNEL = "equal"


def make_equal(
    named: Mapping[str, Any], layout: ReplicaMesh, seconds: float | None = None
) -> dict[str, jax.Array]:
    """Return the values of process 0 where those of the processes differ.

    Cost:
        One exchange over the key-value store; for each value that differs a copy to all devices.

    Args:
        named: Values of this process, by name; the same names in all processes.
        layout: The mesh of the strategy.
        seconds: How long to wait for the others; None means `timeout_seconds` of the mesh, and
            without it `collective_seconds`.

    Returns:
        For each name whose values differ, the value of process 0 on all devices.

    Raises:
        ProgramMismatchError: NumPy arrays or numbers differ: these are data, which would be the
            same for every replica; or names, shapes or dtypes differ.
    """
    caller = name_call()
    agreement = _processes.get_agreement() if layout.is_shared else None
    if agreement is None or not named:
        return {}
    own = {name: (_describe(x), digest(x), isinstance(x, jax.Array)) for name, x in named.items()}
    seconds = layout.timeout_seconds if seconds is None else seconds
    texts = agreement.gather(
        _CHANNEL, json.dumps(own), seconds, purpose=f"the plain values of {caller}"
    )
    reported: list[dict[str, Any]] = [json.loads(text) for text in texts]
    differ = [
        n
        for n in reported[0]
        if any(n not in one or one[n][1] != reported[0][n][1] for one in reported)
    ]
    extra = [n for one in reported for n in one if n not in reported[0]]
    _check(reported, [*differ, *dict.fromkeys(extra)])
    if differ:
        _LOG.warning(
            "%s: %d of %d values differ between processes, such as %s; every process now has those "
            "of process 0. Use the same seed and the same initial values in all processes.",
            caller,
            len(differ),
            len(named),
            ", ".join(differ[:5]),
        )
    return {name: _take_first(named[name], layout) for name in differ}


def _describe(value: Any) -> str:
    dtype = getattr(value, "dtype", type(value).__name__)
    return f"{dtype}{list(np.shape(value))}"


def _check(reported: list[dict[str, Any]], names: list[str]) -> None:
    """Raise for values that cannot be made equal."""
    for name in names:
        odd = [i for i, one in enumerate(reported) if one.get(name) != reported[0].get(name)]
        kinds = [one[name][0] if name in one else "nothing" for one in reported]
        state = all(name in one and one[name][2] for one in reported)
        if len(set(kinds)) == 1 and state:
            continue
        # The first line names the processes that differ from the first, and no other.
        there, here = kinds[odd[0]], kinds[0]
        what = "another value" if there == here else f"{there}, and the first one {here}"
        raise ProgramMismatchError(
            f"{name_call()}: {name} is {what} in process {odd[0]}.\n\n"
            "A plain array or number is the same for every replica, so it is equal in all "
            "processes.\n\n"
            "Pass the part of each replica as a distributed value "
            "(experimental_distribute_dataset, experimental_distribute_values_from_function), or "
            "the same value in all processes.",
            odd[:1],
        )


def _take_first(value: Any, layout: ReplicaMesh) -> jax.Array:
    """Return the value of process 0 on all devices."""
    if not isinstance(value.dtype, np.dtype):
        bits = _take_first(jax.random.key_data(value), layout)
        return jax.random.wrap_key_data(bits, impl=jax.random.key_impl(value))
    part = np.asarray(value)[None]
    own = [d for d, owner in layout.device_owners.items() if owner == layout.process.index]
    places = layout.num_places
    parts = [jax.device_put(part, device) for device in own]
    shape = (places, *part.shape[1:])
    rows = jax.make_array_from_single_device_arrays(
        shape, make_auto_sharding(layout.per_replica), parts
    )
    first = layout.replica_owners[:: layout.replicas_per_place].index(0)
    return _find_pick(layout, first)(rows)


@functools.lru_cache(maxsize=16)
def _find_pick(layout: ReplicaMesh, first: int) -> Callable[[jax.Array], jax.Array]:
    # The sum of one value and of zeros would turn -0.0 into 0.0.
    return jax.jit(lambda rows: jnp.take(rows, first, axis=0), out_shardings=layout.replicated)


_CALLS: "dict[str, _processes.CallOfAll]" = {}


def compute_together(call: str, layout: ReplicaMesh, compute: Callable[[], jax.Array]) -> jax.Array:
    """Return what all processes compute together; wait for it if the mesh has a time limit.

    Args:
        call: The user's call, for errors and reports.
        layout: The mesh of the strategy.
        compute: The computation. In a trace, and on a mesh of one process, it is just called.

    Raises:
        DeadlineExceededError: Another process did not arrive within the limit of the mesh.
        UnavailableError: Another process has ended.
    """
    if not layout.is_shared or _compat.is_inside_trace():
        return compute()
    place = _CALLS.setdefault(call, _processes.CallOfAll(call)).name_next()
    seconds = layout.timeout_seconds
    with _processes.Waiter(call, place, seconds) as waiter:
        result = compute()
        if seconds is not None:
            waiter.wait([result])
    return result
