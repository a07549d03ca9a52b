"""Arrays as jaxdist holds them: copies of its own, on Auto axes, and on shared meshes."""

import functools
from collections.abc import Callable
from typing import Any, TypeVar

import jax
import numpy as np
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec, Sharding

from jaxdist import _compat
from jaxdist._called import called
from jaxdist._integers import check_fits
from jaxdist._mesh import make_auto_sharding
from jaxdist.errors import ArgumentTypeError, DonationError

T = TypeVar("T")

# Note [Who owns host memory]
# On CPU, JAX uses a NumPy buffer without a copy if its address is divisible by 64, whatever
# `may_alias` says (jaxlib, `kImmutableZeroCopy`). On accelerators, the transfer still runs when
# `device_put` or a jitted call returns. In both cases a caller who reuses the NumPy array would
# change a value of jaxdist. So everything that jaxdist keeps, and everything that a step in flight
# reads, is a copy of its own.
_ALIGNMENT_BYTES = 64
# From here on a second copy, by JAX, costs more than it takes to allocate an aligned array.
_LARGE_BYTES = 1 << 18


def allocate_aligned(shape: tuple[int, ...], dtype: np.dtype[Any]) -> np.ndarray:
    """Return an uninitialised array that CPU devices can use without a copy."""
    if dtype.hasobject:
        # Raw bytes are not valid references: Python would crash when it reads or replaces one.
        return np.empty(shape, dtype)
    size_bytes = dtype.itemsize
    for rows in shape:
        size_bytes *= rows
    raw = np.empty(size_bytes + _ALIGNMENT_BYTES, np.uint8)
    # `__array_interface__` takes a third of the time of `.ctypes`.
    start = -raw.__array_interface__["data"][0] % _ALIGNMENT_BYTES
    return np.ndarray(shape, dtype, raw, start)


def copy_if_writable(value: Any) -> Any:
    """Return `value`, or a read-only copy if it is a NumPy array that is not immutable.

    Cost:
        A copy on the host for a writable array; else nothing.
    """
    if not isinstance(value, np.ndarray) or is_immutable(value) or not _is_of_numbers(value):
        return value
    if value.nbytes < _LARGE_BYTES:
        small = np.array(value, order="C")
        small.flags.writeable = False
        return small
    copy = allocate_aligned(value.shape, value.dtype)
    np.copyto(copy, value)
    # The base, too: a view of it with the flag set would be writable.
    for part in (copy, copy.base):
        if isinstance(part, np.ndarray):
            part.flags.writeable = False
    return copy


def copy_writable_leaves(tree: T) -> T:
    """Return `tree` with read-only copies of its NumPy arrays; `tree` itself if it needs none."""
    if not any(isinstance(x, np.ndarray) and not is_immutable(x) for x in jax.tree.leaves(tree)):
        return tree
    # Not through NNX modules: unflattening makes another module, and updates of it would be lost.
    leaves, treedef = jax.tree.flatten(tree, is_leaf=lambda x: isinstance(x, nnx.Pytree))
    return jax.tree.unflatten(treedef, map(copy_if_writable, leaves))


def is_immutable(array: np.ndarray) -> bool:
    """Whether the memory of an array is read-only, also through the arrays that it views."""
    part: Any = array
    while isinstance(part, np.ndarray):
        if part.flags.writeable:
            return False
        part = part.base
    # Any other owner of the memory, such as an mmap or another library, may still write to it.
    return part is None or isinstance(part, bytes)


def _is_of_numbers(array: np.ndarray) -> bool:
    """Whether JAX accepts an array; it raises for masked arrays, objects, strings and dates."""
    return array.dtype.kind not in "OSUMm" and not isinstance(array, np.ma.MaskedArray)


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


def make_deleted_error(what: str, array: Any) -> DonationError:
    """Return the error about an array whose buffer was donated or deleted.

    On several CPU devices XLA would end the process at a program that gets such an array.

    Args:
        what: The beginning of the message: what was done with which value.
        array: The array.
    """
    return DonationError(
        f"{what}, whose buffer is gone: {array.dtype}{list(array.shape)}.\n\n"
        "delete() and a step with donate_argnums take the buffers of arrays, so these hold nothing "
        "afterwards, and neither does what shares them: a Variable and its read_value(), a "
        "PerReplica and its values.\n\n"
        "Use what that step returned, or pass it a copy: jax.tree.map(jnp.copy, state)."
    )


def refuse_ref(what: str, value: Any) -> None:
    """Raise if a value is a `jax.Ref`: JAX would read it element by element, without end.

    Args:
        what: The beginning of the message: who was given what.
        value: Anything.
    """
    if _compat.is_mutable(value):
        raise ArgumentTypeError(
            f"{what}, a jax.Ref (a mutable array of jax.new_ref).\n\n"
            "An array or a number is expected. A jax.Ref is neither, since it can change.\n\n"
            "Pass its value: ref[...]. For state that steps change use jaxdist.Variable."
        )


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
