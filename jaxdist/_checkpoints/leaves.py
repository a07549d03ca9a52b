"""Converts a state to named arrays as checkpoints store it, and back: objects, pieces, keys."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import NamedSharding, Sharding
from jax.tree_util import keystr, tree_flatten_with_path

from jaxdist import _compat
from jaxdist._called import refuse, refuse_type
from jaxdist._typing import PyTree
from jaxdist._validate import check_of_jax, show
from jaxdist._values import (
    Sharded,
    Stop,
    from_state,
    is_assignable,
    is_nnx_object,
    is_sharded,
    is_sharded_leaf,
    pad_dim,
    put,
    refuse_ref,
    stops,
)
from jaxdist.errors import ContextError


def to_plain(state: PyTree) -> PyTree:
    """Return the state with a dict of arrays for each NNX object, and values for variables.

    If several objects share an array, only the dict of the first object contains it.
    """
    units, treedef = jax.tree.flatten(state, is_leaf=_is_unit)
    objects = [x for x in units if is_nnx_object(x)]
    dicts = iter(_get_dicts(objects))
    found = [
        next(dicts) if is_nnx_object(x) else x.read_value() if is_assignable(x) else x
        for x in units
    ]
    return jax.tree.unflatten(treedef, found)


def rebuild_objects(like: PyTree, restored: PyTree) -> PyTree:
    """Return `restored` with new NNX objects where `like` has NNX objects."""
    units, treedef = jax.tree.flatten(like, is_leaf=_is_unit)
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
    units, treedef = jax.tree.flatten(target, is_leaf=_is_unit)
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


def name_leaves(tree: PyTree, is_leaf: Callable[[Any], bool] | None = None) -> dict[str, Any]:
    """Return the leaves by name. Random keys and indices of slices become integer arrays.

    Raises:
        ArgumentError: Two leaves have the same name, so one of them would be lost.
    """
    flat, _ = tree_flatten_with_path(tree, is_leaf)
    # A state that is one array has an empty path.
    names = [keystr(path, simple=True, separator=".") or "value" for path, _ in flat]
    found = {name: _to_array(leaf) for name, (_, leaf) in zip(names, flat, strict=True)}
    if len(found) < len(flat):
        twice = next(name for name in names if names.count(name) > 1)
        paths = [
            f"state{keystr(p)}" for name, (p, _) in zip(names, flat, strict=True) if name == twice
        ]
        raise refuse(
            f"{' and '.join(paths)}, which have the same name in the checkpoint: {twice!r}.",
            "A leaf has the keys of its path as its name, with dots between them, and each name "
            "is one leaf.",
            "Give one of these keys another name, for instance without a dot.",
        )
    return found


def check_leaves(tree: PyTree) -> None:
    """Check that all leaves are arrays or numbers, and that the state has elements.

    Raises:
        ArgumentTypeError: A leaf is neither an array nor a number. The error names its path.
        ArgumentError: No array has an element; Orbax does not write such a state.
        ContextError: A leaf is traced.
    """
    flat = tree_flatten_with_path(tree)[0]
    for path, leaf in flat:
        if isinstance(leaf, jax.core.Tracer):
            raise refuse(
                f"state{keystr(path)}, a traced value: it was called in a step or under jax.jit.",
                "A traced value has a number only while the compiled function runs.",
                "Return the state from the step, and save what it returns.",
                kind=ContextError,
            )
        refuse_ref(f"Checkpoints.save was given state{keystr(path)}", leaf)
    if not any(np.size(leaf) for _, leaf in flat):
        raise refuse(
            f"state={show(tree)}, which has no elements.",
            "state is a pytree of arrays with elements in it.",
            "Pass what is trained, such as (model, optimizer).",
        )
    for path, leaf in flat:
        array = _to_array(leaf)
        kind = getattr(getattr(array, "dtype", None), "kind", "O")
        # Objects, bytes, strings, and times: NumPy has arrays of these, JAX and Orbax do not.
        if kind in "OSUTMm":
            raise refuse_type(
                f"{_shorten(leaf)} at state{keystr(path)}, which is neither an array nor a number.",
                "A checkpoint has arrays and numbers as leaves.",
                "Put text and other plain values into the notes: save(step, state, notes={...}). "
                "For objects that contain arrays, pass the arrays.",
            )
        check_of_jax(f"state{keystr(path)}", array)


def _shorten(leaf: Any) -> str:
    text = repr(leaf)
    return text if len(text) <= 60 else f"{text[:60]}..."


def rebuild_tree(leaves: Mapping[str, Any], like: PyTree) -> PyTree:
    """Return the tree `like` with other leaves; the inverse of `name_leaves`."""
    wanted, treedef = jax.tree.flatten(like)
    pairs = zip(leaves.values(), wanted, strict=True)
    return jax.tree.unflatten(treedef, [_convert_like(x, w) for x, w in pairs])


def list_differences(saved: Mapping[str, Any], wanted: Mapping[str, Any]) -> list[str]:
    """Describe the leaves whose saved shape or dtype differs from the requested one."""
    before = {name: f"{r['dtype']}{list(r['shape'])}" for name, r in saved.items()}
    now = {name: f"{x.dtype}{list(x.shape)}" for name, x in wanted.items()}
    return [
        f"{name}: saved {before.get(name, 'nothing')}, wanted {now.get(name, 'nothing')}"
        for name in sorted(before.keys() | now.keys())
        if before.get(name) != now.get(name)
    ]


def _is_key(leaf: Any) -> bool:
    return hasattr(leaf, "dtype") and bool(jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key))


def _to_array(leaf: Any) -> Any:
    leaf = _compat.unwrap_row_numbers(leaf)
    if not _is_key(leaf):
        return leaf if hasattr(leaf, "dtype") else np.asarray(leaf)
    if isinstance(leaf, jax.ShapeDtypeStruct):
        return jax.eval_shape(jax.random.key_data, leaf)
    return jax.random.key_data(leaf)


def _convert_like(data: Any, wanted: Any) -> Any:
    """Return the leaf as a random key or a Python number if `wanted` is one."""
    if _is_key(wanted) and not _compat.are_row_numbers(wanted):
        return jax.random.wrap_key_data(data, impl=jax.random.key_impl(wanted))
    return np.asarray(data).item() if isinstance(wanted, (bool, int, float, complex)) else data


def gather_whole_arrays(state: PyTree) -> PyTree:
    """Return the state with a whole array for each `Sharded` value, for saving."""
    return jax.tree.map(
        lambda x: from_state(x).whole() if is_sharded_leaf(x) else x,
        state,
        is_leaf=is_sharded_leaf,
    )


def get_whole_shapes(like: PyTree) -> PyTree:
    """Return `like` with the shape and dtype of the whole array for each `Sharded` value."""
    return jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype) if is_sharded(x) else x,
        like,
        is_leaf=is_sharded,
    )


def get_layouts_of_pieces(like: PyTree) -> dict[str, Sharding]:
    """Return, by name, the sharding with which Orbax reads each `Sharded` value of `like`.

    This is the sharding of the value, or a replicated sharding if the value has padding.
    """
    found: dict[str, Sharding] = {}
    for name, value in name_leaves(like, is_leaf=is_sharded).items():
        if isinstance(value, Sharded) and isinstance(layout := _get_layout(value), NamedSharding):
            # Orbax reads the array without padding, which the sharding of the padded array does not
            # divide. `cut_like` pads and shards such an array later.
            is_even = value.array.shape[value.dim] == value.size
            found[name] = layout if is_even else NamedSharding(layout.mesh, jax.P())
    return found


def cut_like(state: PyTree, like: PyTree) -> PyTree:
    """Return the state with arrays sharded again where `like` has `Sharded` values."""

    def cut(wanted: Any, array: Any) -> Any:
        if not isinstance(wanted, Sharded):
            return array
        more = wanted.array.shape[wanted.dim] - wanted.size
        padded = pad_dim(array, wanted.dim, more)
        layout = _get_layout(wanted)
        placed = padded if layout is None else put(padded, layout)
        return Sharded(placed, *wanted.cut)

    return jax.tree.map(cut, like, state, is_leaf=is_sharded)


def _get_layout(value: Sharded) -> Sharding | None:
    return getattr(value.array, "sharding", None)
