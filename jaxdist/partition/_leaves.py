"""Collects the leaves that `place` places, from pytrees and NNX objects, with their paths."""

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import numpy as np
from flax import nnx
from flax.core.meta import Partitioned

from jaxdist import _compat
from jaxdist._called import refuse_type
from jaxdist._hooks import KERAS_VARIABLES
from jaxdist._typing import PyTree
from jaxdist._values import (
    PerReplica,
    Stop,
    Variable,
    is_optax_state,
    is_sharded,
    refuse_ref,
    stops,
)
from jaxdist.partition._resolve import Leaf

# The metadata keys under which versions of Flax store the names of a variable's dims.
_NAMES = ("out_sharding", "sharding_names", "sharding")
# The metadata key of a variable whose dim 0 runs over the layers of a scan.
STACKED = "stacked_layers"


@dataclasses.dataclass
class Entry:
    """One array that `place` places."""

    leaf: Leaf
    value: Any
    # "parameter", "optimizer" or "other". See Note [Optimizer state follows its parameter].
    role: str
    assign: Callable[[Any], None]  # puts the placed array into the tree
    is_of_keras: bool = False  # if so, it stays an ordinary array, whole on each replica


def collect_entries(
    strategy: Any, tree: PyTree, is_param: Callable[[Any, Any], bool]
) -> tuple[list[Entry], Callable[[], PyTree]]:
    """Return every array of a pytree, and a function that rebuilds the pytree.

    `is_param` takes a path and an NNX variable, and returns whether it is a parameter. The pytree
    may contain NNX and Keras objects, which are changed in place. A variable that two objects
    share is returned once.
    """
    states, treedef = jax.tree_util.tree_flatten_with_path(tree, is_leaf=_is_node)
    entries: list[Entry] = []
    rebuilt: list[Any] = []
    seen: set[int] = set()
    for path, node in states:
        prefix = _join_path(_key_name(k) for k in path)
        if isinstance(node, (PerReplica, Variable)):
            raise refuse_type(
                f"a tree with a {type(node).__name__} at {prefix or 'the root'}.",
                "A PerReplica and a Variable are on the devices of a strategy already.",
                "Leave it out of the tree, and place arrays and NNX objects.",
            )
        # Optax's named tuples mark optimizer state; a `TrainState` of Flax Linen keeps it in a
        # field `opt_state`.
        in_optimizer = is_optax_state(node) or "opt_state" in prefix.split("/")
        if isinstance(node, nnx.Pytree):
            entries += _collect_from_graph(node, is_param, seen)
            rebuilt.append(lambda node=node: node)
            continue
        # Flatten the node again, into a list of its arrays, which the setters change before the
        # pytree is rebuilt.
        inner, shape = jax.tree_util.tree_flatten_with_path(node, is_leaf=_is_array_node)
        values = [x for _, x in inner]
        for i, (more, value) in enumerate(inner):
            name = _join_path([prefix, *(_key_name(k) for k in more)])
            array, names = _unbox(value)
            refuse_ref(f"partition.place was given {name or 'tree'}", array)
            if _is_array(array):
                role = "optimizer" if in_optimizer else "parameter"
                if isinstance(value, nnx.Variable) and not in_optimizer:
                    role = "parameter" if is_param((), value) else "other"
                leaf = Leaf(name, tuple(array.shape), array.dtype, names)
                entries.append(Entry(leaf, array, role, _make_setter(values, i, value)))
            elif getattr(type(array), "_jaxdist_is_lifted", False):
                entries += _collect_from_keras(strategy, array, seen)
        rebuilt.append(lambda values=values, shape=shape: jax.tree.unflatten(shape, values))
    return entries, lambda: jax.tree.unflatten(treedef, [make() for make in rebuilt])


def _collect_from_keras(strategy: Any, node: Any, seen: set[int]) -> Iterator[Entry]:
    """Yield the variables of a Keras object, which is changed in place."""
    for path, role, value, assign in KERAS_VARIABLES.call(strategy, node, seen):
        leaf = Leaf(path, tuple(value.shape), value.dtype)
        yield Entry(leaf, value, role, assign, is_of_keras=True)


def name_entries(entries: Sequence[Entry]) -> dict[str, Entry]:
    """Return the entries by path; equal paths of two modules of a pytree get numbers."""
    named: dict[str, Entry] = {}
    for entry in entries:
        path, count = entry.leaf.path, 1
        while path in named:
            count += 1
            path = f"{entry.leaf.path} (number {count})"
        named[path] = entry
    return named


def _make_setter(values: list[Any], index: int, old: Any) -> Callable[[Any], None]:
    def assign(value: Any) -> None:
        # Keep the box around the array, with its metadata.
        if isinstance(old, (nnx.Variable, Partitioned)):
            value = jax.tree.unflatten(jax.tree.structure(old, is_leaf=is_sharded), [value])
        values[index] = value

    return assign


def _collect_from_graph(
    node: Any, is_param: Callable[[Any, Any], bool], seen: set[int]
) -> Iterator[Entry]:
    """Yield the variables of an NNX object that hold arrays."""
    for path, variable in nnx.iter_graph(node):
        if not isinstance(variable, nnx.Variable) or id(variable) in seen:
            continue
        value = _compat.get_held(variable)
        if not _is_array(value):
            continue
        # Two NNX objects of the tree may share a variable (tied embeddings); place it once.
        seen.add(id(variable))
        role = "other"
        if isinstance(variable, nnx.OptState) or "opt_state" in map(str, path):
            role = "optimizer"
        elif is_param(path, variable):
            role = "parameter"
        leaf = Leaf(
            _join_path(map(str, path)),
            tuple(value.shape),
            value.dtype,
            _names_of(variable, value),
            bool(variable.get_metadata().get(STACKED)),
        )
        yield Entry(leaf, value, role, variable.set_raw_value)


def _names_of(variable: Any, value: Any) -> tuple[str | None, ...] | None:
    metadata = variable.get_metadata()
    for key in _NAMES:
        found = metadata.get(key)
        if found is not None and not isinstance(found, jax.sharding.Sharding):
            # As in a `PartitionSpec`, the last dims may have no entries.
            names = tuple(found)
            return (*names, *[None] * (len(value.shape) - len(names)))
    return None


def _unbox(value: Any) -> tuple[Any, tuple[str | None, ...] | None]:
    """Return the array in a box of Flax Linen or a variable of NNX, and the names of its dims."""
    if isinstance(value, nnx.Variable):
        array = value.get_raw_value()
        return array, _names_of(value, array) if _is_array(array) else None
    if isinstance(value, Partitioned):
        names = [n if n is None or isinstance(n, str) else "/".join(n) for n in value.names]
        return value.value, tuple(names)
    return value, None


_is_node = stops(Stop.NODES, Partitioned)
_is_array_node = stops(Stop.ARRAYS_OF_NODES, Partitioned)


def _is_array(value: Any) -> bool:
    return is_sharded(value) or isinstance(
        value, (jax.Array, np.ndarray, np.generic, jax.ShapeDtypeStruct)
    )


def _join_path(parts: Any) -> str:
    return "/".join(p for p in parts if p)


def _key_name(key: Any) -> str:
    for attribute in ("key", "idx", "name"):
        if hasattr(key, attribute):
            return str(getattr(key, attribute))
    return str(key)
