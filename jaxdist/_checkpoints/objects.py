"""Converts the Flax NNX objects and variables in a state to plain pytrees, and back."""

from collections.abc import Sequence
from typing import Any

import jax
from flax import nnx

from jaxdist._typing import PyTree
from jaxdist._values import Stop, is_assignable, is_nnx_object, stops


def to_plain(state: PyTree) -> PyTree:
    """Return the state with a dict of arrays for each NNX object, and values for variables.

    If several objects share an array, only the dict of the first object contains it.
    """
    units, treedef = _flatten_to_units(state)
    objects = [x for x in units if is_nnx_object(x)]
    dicts = iter(_get_dicts(objects))
    found = [
        next(dicts) if is_nnx_object(x) else x.read_value() if is_assignable(x) else x
        for x in units
    ]
    return jax.tree.unflatten(treedef, found)


def rebuild_objects(like: PyTree, restored: PyTree) -> PyTree:
    """Return `restored` with new NNX objects where `like` has NNX objects."""
    units, treedef = _flatten_to_units(like)
    objects = [x for x in units if is_nnx_object(x)]
    if not objects:
        return restored
    parts = treedef.flatten_up_to(restored)
    # Clones have their own variables, so `_fill` does not write into the objects of `like`.
    copies = nnx.clone(tuple(objects))
    _fill(copies, [part for x, part in zip(units, parts, strict=True) if is_nnx_object(x)])
    new = iter(copies)
    found = [next(new) if is_nnx_object(x) else part for x, part in zip(units, parts, strict=True)]
    return jax.tree.unflatten(treedef, found)


def put_into(target: PyTree, restored: PyTree) -> PyTree:
    """Write `restored` into the NNX objects and variables of `target`.

    If a write fails, all objects and variables get their old values back.

    Returns:
        The target, with the same objects and with new arrays elsewhere.
    """
    units, treedef = _flatten_to_units(target)
    parts = treedef.flatten_up_to(restored)
    pairs = list(zip(units, parts, strict=True))
    objects = tuple(x for x in units if is_nnx_object(x))
    values = [(x, part, x.read_value()) for x, part in pairs if is_assignable(x)]
    before = _get_dicts(objects)
    # The assignment of a variable can fail (another shape, or Ctrl-C). `restore` promises to leave
    # the state unchanged then.
    try:
        _fill(objects, [part for x, part in pairs if is_nnx_object(x)])
        for variable, new, _ in values:
            variable.assign(new)
    except BaseException:
        _fill(objects, before)
        for variable, _, old in values:
            variable.assign(old)
        raise
    kept = [x if is_nnx_object(x) or is_assignable(x) else part for x, part in pairs]
    return jax.tree.unflatten(treedef, kept)


def find_plain_leaves(state: PyTree) -> list[str]:
    """Return the paths of leaves for which `put_into` returns new arrays, without writing."""
    units, _ = jax.tree.flatten_with_path(state, is_leaf=_is_unit)
    return [
        jax.tree_util.keystr(path)
        for path, x in units
        if not (is_nnx_object(x) or is_assignable(x))
    ]


def _flatten_to_units(state: PyTree) -> tuple[list[Any], Any]:
    return jax.tree.flatten(state, is_leaf=_is_unit)


# An `nnx.State` is a unit but not an object: `restore` returns a new state for it, as for any
# pytree, and does not write into its variables.
_is_unit = stops(Stop.SAVED)


def _get_dicts(objects: Sequence[Any]) -> list[Any]:
    # One call for all objects, so that NNX stores an array only once if several objects share it.
    found: dict[Any, Any] = nnx.to_pure_dict(nnx.state(tuple(objects))) if objects else {}
    # The value of an NNX variable on a parameter server is itself a variable.
    plain = jax.tree.map(
        lambda x: x.read_value() if is_assignable(x) else x,
        found,
        is_leaf=is_assignable,
    )
    return [plain.get(i, {}) for i in range(len(objects))]


def _fill(objects: Sequence[Any], dicts: Sequence[Any]) -> None:
    if not objects:
        return
    state = nnx.state(tuple(objects))
    # An object has no entry in the state if all its arrays belong to earlier objects.
    nnx.replace_by_pure_dict(state, {i: d for i, d in enumerate(dicts) if i in state})
    nnx.update(tuple(objects), state)
