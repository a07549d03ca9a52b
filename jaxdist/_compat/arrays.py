"""Arrays and NNX variables, beyond their public interface."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from flax import nnx
from jax._src import config as _config
from jax._src import core as _core
from jax._src.interpreters import pxla as _pxla
from jax._src.lib import xla_client as _xla_client

from jaxdist._compat.nnx import offer_to_distant

# JAX 0.10 on several CPU devices starts a program before it checks that its buffers exist, and
# then crashes the process. So steps check their arguments themselves there.
REJECTS_DELETED_ARRAYS = jax.__version_info__ >= (0, 11)


def has_deleted(leaves: Sequence[Any]) -> bool:
    """Whether any leaf is an array with a deleted buffer; costs 60 ns per array."""
    # The unbound C++ method raises TypeError for a leaf that is not an array. Such leaves are
    # rare, so types are checked only then.
    try:
        return any(map(_is_deleted, leaves))
    except TypeError:
        return any(is_concrete(x) and x.is_deleted() for x in leaves)


def is_concrete(leaf: Any) -> bool:
    """Whether a leaf is an array of JAX, and not a tracer."""
    # Arrays of random keys have another class. The plain ones are many, so they are tested first.
    return type(leaf) is _xla_client.ArrayImpl or (
        isinstance(leaf, jax.Array) and not isinstance(leaf, jax.core.Tracer)
    )


_is_deleted: Callable[[Any], bool] = _xla_client.ArrayImpl.is_deleted


def is_ready(array: jax.Array) -> bool:
    """Whether an array is computed. Waits for a public `is_ready` of arrays of random keys."""
    plain: Any = getattr(array, "_base_array", array)
    return bool(plain.is_ready())


def is_committed(array: jax.Array) -> bool:
    """Whether the array is committed to its devices. Waits for a public `committed`."""
    committed: Any = array
    return bool(committed._committed)


def describe_arrays(leaves: Sequence[Any]) -> tuple[Any, ...] | None:
    """Return shapes, dtypes, shardings and JAX's settings as a key; None if not all are arrays.

    Tracers have no shardings, and deleted arrays no buffers, so they do not count as arrays here.
    """
    key = [_config.trace_context()]
    for leaf in leaves:
        if type(leaf) is not _xla_client.ArrayImpl or _is_deleted(leaf):
            return None
        key += leaf.aval, leaf.sharding, leaf._committed
    return tuple(key)


def make_uncommitted(array: jax.Array) -> jax.Array:
    """Return the same single-device buffer as an uncommitted array, which follows its operands."""
    buffers = [array.addressable_data(0)]
    return _xla_client.ArrayImpl(array.aval, array.sharding, buffers, committed=False)


def put_uncommitted(array: np.ndarray) -> jax.Array:
    """Put a host array on the default device, uncommitted; a sixth of the time of `device_put`.

    The caller must not write to the array afterwards: the CPU backend may use its memory without a
    copy.
    """
    config: Any = jax.config
    device = config.jax_default_device or jax.local_devices()[0]
    # `jax_default_device` may be the name of a platform, which only `device_put` resolves.
    if isinstance(device, str):
        return jax.device_put(array)
    aval, layout = _get_aval_and_sharding(array.shape, array.dtype, device)
    return _pxla.batched_device_put(aval, layout, [array], [device], committed=False)


def get_shards(array: jax.Array) -> list[Any]:
    """Return the single-device shards of an array in this process, in device order.

    `addressable_data(i)` returns them one by one; its checks cost more than the access.
    """
    if array.is_deleted():
        raise RuntimeError(f"Array has been deleted with shape={array.dtype}{list(array.shape)}.")
    held: Any = array
    return list(held._arrays)


@functools.lru_cache(maxsize=256)
def _get_aval_and_sharding(
    shape: tuple[int, ...], dtype: Any, device: jax.Device
) -> tuple[Any, Any]:
    return _core.ShapedArray(shape, dtype), jax.sharding.SingleDeviceSharding(device)


def set_variables(variables: Sequence[nnx.Variable[Any]], values: Sequence[Any]) -> None:
    """Set the values of NNX variables, in a tenth of the time of `set_raw_value` on each.

    A value in another place is not set, but written back; see Note [Distant values].

    `set_raw_value` compares the trace of the caller with that of the variable at every call. Here
    one variable is checked for all. Waits for a way to set many variables at once.
    """
    plain = nnx.Variable.set_raw_value
    checked = False
    for variable, value in offer_to_distant(variables, values):
        if checked and type(variable).set_raw_value is plain:
            object.__setattr__(variable, "_raw_value", value)
        else:
            variable.set_raw_value(value)
            checked = True
