"""Containers that JAX treats as leaves: subclasses of mappings, lists and tuples.

`tf.distribute` maps over such containers and returns them in their own type. So jaxdist opens them
(turns them into pytree nodes) before a step or a collective, and closes them again in its results.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
from jax.tree_util import DictKey, SequenceKey, keystr, register_pytree_with_keys

from jaxdist._values.sharded.sharded import is_sharded
from jaxdist.errors import ArgumentTypeError


@dataclasses.dataclass(eq=False, slots=True)
class Opened:
    """A container as a pytree node.

    Unflattening returns another `Opened`, or the container itself if `rebuilds` is set.
    """

    kind: type
    keys: tuple[Any, ...] | None
    values: Sequence[Any]
    rebuilds: bool

    def close(self) -> Any:
        """Return the container in its own type."""
        if self.keys is None:
            return self.kind(self.values)
        return self.kind(dict(zip(self.keys, self.values, strict=True)))


def is_container(leaf: Any) -> bool:
    """Whether a leaf of a pytree is a container that JAX does not flatten."""
    return isinstance(leaf, (Mapping, list, tuple))


def open_containers(
    tree: Any,
    name: str,
    *,
    is_leaf: Callable[[Any], bool] | None = None,
    must_open: Callable[[Any], bool] | None = None,
    rebuilds: bool = False,
) -> Any:
    """Return `tree` with `Opened` in place of its containers, or `tree` itself if it has none.

    Args:
        tree: Any pytree.
        name: Its name in error messages.
        is_leaf: Stops flattening, as for `jax.tree.flatten`.
        must_open: Which containers to open; None means all.
        rebuilds: Whether unflattening returns the containers themselves.

    Raises:
        ArgumentTypeError: The class of a container cannot be called with a dict or a list.
    """
    leaves, treedef = jax.tree.flatten_with_path(tree, is_leaf=is_leaf)
    # The usual case: without containers, the caller must get the same object, not a copy.
    if not any(is_container(leaf) for _, leaf in leaves):
        return tree

    def open_one(leaf: Any, own: str) -> Any:
        # `is_leaf` also stops at mappings and lists of NNX, which a step updates in place.
        if not is_container(leaf) or (is_leaf is not None and is_leaf(leaf)):
            return leaf
        if must_open is not None and not must_open(leaf):
            return leaf
        is_mapping = isinstance(leaf, Mapping)
        again = functools.partial(
            open_containers, is_leaf=is_leaf, must_open=must_open, rebuilds=rebuilds
        )
        pairs = list(leaf.items() if is_mapping else enumerate(leaf))
        inner = tuple(again(v, f"{own}[{k!r}]") for k, v in pairs)
        keys = tuple(k for k, _ in pairs) if is_mapping else None
        _check_rebuilds(leaf, own)
        return Opened(type(leaf), keys, inner, rebuilds)

    return treedef.unflatten([open_one(leaf, name + keystr(path)) for path, leaf in leaves])


def close_containers(tree: Any) -> Any:
    """Return `tree` with its containers in their own types again."""
    return jax.tree.map(_close, tree, is_leaf=lambda x: isinstance(x, Opened) or is_sharded(x))


def rebuild_on_unflatten(tree: Any, whole: type) -> Any:
    """Return the same pytree, but unflattening its treedef returns the containers themselves.

    Nodes of the class `whole` do not change.
    """

    def of_leaf(leaf: Any) -> Any:
        if not isinstance(leaf, Opened):
            return leaf
        values = tuple(rebuild_on_unflatten(v, whole) for v in leaf.values)
        return Opened(leaf.kind, leaf.keys, values, rebuilds=True)

    return jax.tree.map(of_leaf, tree, is_leaf=lambda x: isinstance(x, (Opened, whole)))


def _close(leaf: Any) -> Any:
    if not isinstance(leaf, Opened):
        return leaf
    values = tuple(map(close_containers, leaf.values))
    return dataclasses.replace(leaf, values=values).close()


def _check_rebuilds(container: Any, name: str) -> None:
    # Tried before the step, since its result could not be returned after the devices did the work.
    # A constructor of a user's class may raise anything.
    kind = type(container)
    given = dict(container) if isinstance(container, Mapping) else list(container)
    builtin, cause = type(given).__name__, None
    try:
        count = len(kind(given))
        found = f"it has {count} entries, not {len(container)}"
    except Exception as error:
        count, found, cause = None, repr(error), error
    if count == len(container):
        return
    raise ArgumentTypeError(
        f"{name} is a {kind.__name__}, which cannot be rebuilt from its values: "
        f"{kind.__name__}({builtin}) gave {found}.\n\n"
        "JAX does not know the class. A mapping, list or tuple of another class goes through a "
        f"step as its own type: {kind.__name__} is called with a {builtin} of the values.\n\n"
        f"Use {builtin}(value), or register the class: "
        f"jax.tree_util.register_pytree_node({kind.__name__}, flatten, unflatten)."
    ) from cause


def _flatten(node: Opened) -> tuple[Sequence[Any], Any]:
    return node.values, (node.kind, node.keys, node.rebuilds)


def _flatten_with_keys(node: Opened) -> tuple[list[tuple[Any, Any]], Any]:
    values, how = _flatten(node)
    if node.keys is None:
        return [(SequenceKey(i), v) for i, v in enumerate(values)], how
    return [(DictKey(k), v) for k, v in zip(node.keys, values, strict=True)], how


def _rebuild(how: Any, values: Any) -> Any:
    kind, keys, rebuilds = how
    node = Opened(kind, keys, tuple(values), rebuilds)
    return node.close() if rebuilds else node


register_pytree_with_keys(Opened, _flatten_with_keys, _rebuild, _flatten)
