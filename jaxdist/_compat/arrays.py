"""What arrays hold, beyond their public names."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from flax import nnx
from jax._src import core as _core
from jax._src.interpreters import pxla as _pxla
from jax._src.lib import xla_client as _xla_client

# JAX 0.10 on several CPU devices starts a program before it looks whether its buffers are there.
DELETED_ARE_REFUSED = tuple(int(n) for n in jax.__version__.split(".")[:2]) >= (0, 11)


def any_deleted(leaves: Sequence[Any]) -> bool:
    """Whether one of these is an array whose buffer is gone; 60 ns an array."""
    try:
        return any(map(_is_deleted, leaves))
    except TypeError:
        return any(isinstance(x, _xla_client.ArrayImpl) and x.is_deleted() for x in leaves)


_is_deleted: Callable[[Any], bool] = _xla_client.ArrayImpl.is_deleted


def is_committed(array: jax.Array) -> bool:
    """Whether the array is tied to its devices. Waits for JAX to make `committed` public API."""
    committed: Any = array
    return bool(committed._committed)


def as_uncommitted(array: jax.Array) -> jax.Array:
    """The same single-device buffer, free to follow the arrays that it is combined with."""
    buffers = [array.addressable_data(0)]
    return _xla_client.ArrayImpl(array.aval, array.sharding, buffers, committed=False)


def put_uncommitted(array: np.ndarray) -> jax.Array:
    """A host array on the default device, tied to none; a sixth of the time of `device_put`.

    The array must not be written to afterwards: the CPU backend may use its memory as it is.
    """
    config: Any = jax.config
    device = config.jax_default_device or jax.local_devices()[0]
    if isinstance(device, str):
        return jax.device_put(array)
    aval, layout = _on_one_device(array.shape, array.dtype, device)
    placed: jax.Array = _pxla.batched_device_put(aval, layout, [array], [device], committed=False)
    return placed


def pieces_of(array: jax.Array) -> list[Any]:
    """The single-device pieces of an array of this process, in the order of its devices.

    `addressable_data(i)` gives them one by one, each with checks that cost more than the reading.
    """
    if array.is_deleted():
        raise RuntimeError(f"Array has been deleted with shape={array.dtype}{list(array.shape)}.")
    held: Any = array
    return list(held._arrays)


@functools.lru_cache(maxsize=256)
def _on_one_device(shape: tuple[int, ...], dtype: Any, device: jax.Device) -> tuple[Any, Any]:
    return _core.ShapedArray(shape, dtype), jax.sharding.SingleDeviceSharding(device)


def set_variables(variables: Sequence[nnx.Variable[Any]], values: Sequence[Any]) -> None:
    """Give NNX variables new values, a tenth of the time of `set_raw_value` on each.

    `set_raw_value` compares the trace of the caller with that of the variable every time; one
    variable is checked here for all. Waits for a way to set many variables at once.
    """
    plain = nnx.Variable.set_raw_value
    checked = False
    for variable, value in zip(variables, values, strict=True):
        if checked and type(variable).set_raw_value is plain:
            object.__setattr__(variable, "_raw_value", value)
        else:
            variable.set_raw_value(value)
            checked = True
