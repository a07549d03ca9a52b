"""Converts a state to named leaves, as checkpoints store them, and back."""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.tree_util import keystr, tree_flatten_with_path

from jaxdist import _compat
from jaxdist._called import refuse, refuse_type
from jaxdist._typing import PyTree
from jaxdist._validate import show
from jaxdist._values import refuse_ref


def name_leaves(tree: PyTree, is_leaf: Callable[[Any], bool] | None = None) -> dict[str, Any]:
    """Return the leaves by name. Random keys and indices of slices become integer arrays."""
    flat, _ = tree_flatten_with_path(tree, is_leaf)
    # A state that is one array has an empty path.
    return {keystr(path, simple=True, separator=".") or "value": _to_array(x) for path, x in flat}


def check_leaves(tree: PyTree) -> None:
    """Check that all leaves are arrays or numbers, and that the state has elements.

    Raises:
        ArgumentTypeError: A leaf is neither an array nor a number. The error names its path.
        ArgumentError: No array has an element; Orbax does not write such a state.
    """
    flat = tree_flatten_with_path(tree)[0]
    for path, leaf in flat:
        refuse_ref(f"Checkpoints.save was given state{keystr(path)}", leaf)
    if not any(np.size(leaf) for _, leaf in flat):
        raise refuse(
            f"state={show(tree)}, which has no elements.",
            "state is a pytree of arrays with elements in it.",
            "Pass what is trained, such as (model, optimizer).",
        )
    for path, leaf in flat:
        kind = getattr(getattr(_to_array(leaf), "dtype", None), "kind", "O")
        # Objects, bytes, strings, and times: NumPy has arrays of these, JAX and Orbax do not.
        if kind in "OSUMm":
            raise refuse_type(
                f"{_shorten(leaf)} at state{keystr(path)}, which is neither an array nor a number.",
                "A checkpoint has arrays and numbers as leaves.",
                "Put text and other plain values into the notes: save(step, state, notes={...}). "
                "Of objects with arrays in them, give the arrays.",
            )


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
        return _wrap_key(data, wanted)
    return np.asarray(data).item() if isinstance(wanted, (bool, int, float, complex)) else data


def _wrap_key(data: Any, wanted: Any) -> Any:
    return jax.random.wrap_key_data(data, impl=jax.random.key_impl(wanted))
