"""Finds the arrays of a pytree or of NNX objects, with their paths and placements."""

import functools
import math
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxdist import _compat
from jaxdist._explain.shards import Leaf, list_axes, list_shards
from jaxdist._keras import is_keras_object, list_variables
from jaxdist._mesh import ReplicaMesh
from jaxdist._typing import PyTree
from jaxdist._values import (
    PerReplica,
    Sharded,
    Stop,
    Variable,
    is_optax_state,
    is_sharded,
    placement_of,
    sharded_placement,
    stops,
)

_ARRAYS = (jax.Array, np.ndarray, np.generic, jax.ShapeDtypeStruct)

Found = tuple[Leaf, Any]  # the description, and the value itself


def collect_leaves(value: PyTree, layout: ReplicaMesh | None) -> list[Found]:
    """Return every array of a pytree with its value; an array at two places counts once.

    Args:
        value: A pytree, which may contain NNX objects and values of jaxdist.
        layout: The mesh of a strategy. Shapes without devices are shown where `run` would place
            them.
    """
    seen: set[int] = set()
    found: list[Found] = []
    for name, role, use, node in _iterate(value):
        held = _get_held(node)
        if id(held) in seen:
            continue
        # An array with two names needs memory once.
        seen.add(id(held))
        found += _read(name, role, use, node, layout)
    return found


def _iterate(value: PyTree) -> Iterator[tuple[str, str, str, Any]]:
    """Yield the name, the role, the use (see `Leaf`) and the value of each leaf."""
    leaves, _ = jax.tree_util.tree_flatten_with_path(value, is_leaf=stops(Stop.NODES))
    for path, node in leaves:
        name = jax.tree_util.keystr(path)
        if isinstance(node, nnx.Pytree):
            yield from _iterate_graph(name, node)
        elif (objects := getattr(type(node), "_explained_objects", None)) is not None:
            # A `fit.Model`, which this room cannot import, lists its objects itself.
            for prefix, inside in objects(node).items():
                yield from _iterate_graph("/".join(filter(None, (name, prefix))), inside)
        elif is_keras_object(node):
            yield from _iterate_keras(name, node)
        elif is_optax_state(node):
            inner, _ = jax.tree_util.tree_flatten_with_path(node, is_leaf=stops(Stop.REPORTED))
            for more, leaf in inner:
                full = f"{name}{jax.tree_util.keystr(more)}"
                yield full, "optimizer", "optimizer", _unbox(leaf)
        else:
            role = _find_role(node, path)
            use = name_outermost(path) if role == "other" else role
            yield name, role, use or role, _unbox(node)


def name_outermost(path: tuple[Any, ...]) -> str:
    """Return the first name of a path, such as `params`, or `[0]` in a list; empty if it has none.

    Example:
        >>> [(path, _)] = jax.tree_util.tree_flatten_with_path({"params": {"w": 1}})[0]
        >>> name_outermost(path), name_outermost(path[1:]), name_outermost(())
        ('params', 'w', '')
    """
    is_named = path and not isinstance(path[0], jax.tree_util.SequenceKey)
    return jax.tree_util.keystr(path[:1], simple=bool(is_named))


def _iterate_graph(name: str, node: Any) -> Iterator[tuple[str, str, str, Any]]:
    """Yield the variables of an NNX object."""
    # A variable that the object holds twice is one array.
    seen: set[int] = set()
    for path, variable in nnx.iter_graph(node):
        if isinstance(variable, nnx.Variable) and id(variable) not in seen:
            seen.add(id(variable))
            full = "/".join(map(str, path))
            role = _find_role(variable, path)
            yield f"{name}/{full}" if name else full, role, role, _unbox(variable)


def _iterate_keras(name: str, node: Any) -> Iterator[tuple[str, str, str, Any]]:
    """Yield the variables of an object of Keras that have a value."""
    for found in list_variables(node):
        # While a model trains, `fit` has the values.
        if found.array is not None:
            role = "parameters" if found.role == "parameter" else found.role
            path = found.variable.path
            yield f"{name}/{path}" if name else path, role, role, found.array


def _find_role(node: Any, path: tuple[Any, ...]) -> str:
    """Return the role of a leaf. Arrays with an unknown role are `other`."""
    if isinstance(node, nnx.OptState) or "opt_state" in map(str, path):
        return "optimizer"
    if isinstance(node, PerReplica):
        return "batch"
    return "parameters" if isinstance(node, nnx.Param) else "other"


def _unbox(node: Any) -> Any:
    return _compat.get_held(node) if isinstance(node, nnx.Variable) else node


def _get_held(node: Any) -> Any:
    """Return the array that a value of jaxdist holds, or the value itself."""
    if isinstance(node, Variable):
        return node._held
    if isinstance(node, Sharded):
        return node.held
    return node.array if isinstance(node, PerReplica) and node.is_global else node


def _read(name: str, role: str, use: str, node: Any, layout: ReplicaMesh | None) -> Iterator[Found]:
    """Yield the leaf of a value; if it stores the values of replicas separately, one for each."""
    if isinstance(node, PerReplica) and not node.is_global:
        for number, value in enumerate(node.values):
            yield from _read(f"{name}.values[{number}]", role, use, value, layout)
        return
    array = _get_held(node)
    if not _is_array(array):
        return  # A number or a string needs no memory of a device.
    shape, sharding = tuple(array.shape), getattr(array, "sharding", None)
    if sharding is None and layout is not None and isinstance(array, jax.ShapeDtypeStruct):
        # Where `run` would place it.
        find = sharded_placement if isinstance(node, Sharded) else placement_of
        sharding = find(node, layout).sharding
    size = find_itemsize(array.dtype)
    make = functools.partial(
        Leaf,
        name or "the array",
        role,
        str(array.dtype),
        tuple(node.shape) if isinstance(node, Sharded) else shape,
        shape,
        size,
        use=use,
    )
    if isinstance(array, jax.Array) and array.is_deleted():
        yield make("donated or deleted"), node
        return
    if sharding is None:
        host = isinstance(array, (np.ndarray, np.generic))
        yield make("on the host" if host else "abstract"), node
        return
    shards = tuple(list_shards(sharding, shape, size))
    kind = _find_kind(node, array, sharding, layout)
    memory = sharding.memory_kind or "device"
    yield make(kind, shards, list_axes(sharding, len(shape)), memory), node


def _find_kind(node: Any, array: Any, sharding: Any, layout: ReplicaMesh | None) -> str:
    """Return a word for how the value is placed."""
    if isinstance(node, Sharded):
        return "sharded"
    if isinstance(node, PerReplica):
        return "per replica"
    if len(sharding.device_set) == 1:
        return "on one device"
    if layout is not None and isinstance(array, jax.Array):
        return placement_of(array, layout).kind.value.replace("-", " ")
    return "mirrored" if sharding.is_fully_replicated else "sharded"


def find_itemsize(dtype: Any) -> int:
    """Return the bytes of one element. A random key consists of several numbers."""
    if not jnp.issubdtype(dtype, jax.dtypes.prng_key):
        return int(dtype.itemsize)
    # A sharding of keys does not split a key: each key is whole on its device.
    key = jax.eval_shape(jax.random.key_data, jax.ShapeDtypeStruct((), dtype))
    return math.prod(key.shape) * int(key.dtype.itemsize)


def has_arrays(value: PyTree) -> bool:
    """Whether a pytree has an array, or an NNX object with one."""
    return any(
        _is_array(_get_held(node)) or isinstance(node, PerReplica) or is_sharded(node)
        for _, _, _, node in _iterate(value)
    )


def find_tracer(value: PyTree) -> str | None:
    """Return the name of a traced leaf, or None."""
    for name, _, _, node in _iterate(value):
        if isinstance(_get_held(node), jax.core.Tracer):
            return name or "the array"
    return None


def _is_array(value: Any) -> bool:
    # Arrays of strings and of Python objects cannot be on a device.
    return isinstance(value, _ARRAYS) and getattr(value.dtype, "kind", "V") not in "OSUMm"
