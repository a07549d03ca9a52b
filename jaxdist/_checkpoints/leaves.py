"""The leaves of a state by name, as checkpoints hold them, with a checksum for each."""

import json
import zlib
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.tree_util import keystr, tree_flatten_with_path

from jaxdist._typing import PyTree
from jaxdist._validate import show
from jaxdist.errors import ArgumentError, ArgumentTypeError


def named_leaves(tree: PyTree) -> dict[str, Any]:
    """The leaves by name; typed random keys as the integers behind them."""
    flat, _ = tree_flatten_with_path(tree)
    return {keystr(path, simple=True, separator=".") or "value": _raw(x) for path, x in flat}


def check_leaves(tree: PyTree) -> None:
    """Refuse leaves that are neither arrays nor numbers, and a state without elements.

    Raises:
        ArgumentTypeError: There is one; its path is named.
        ArgumentError: No array has an element, which Orbax does not write.
    """
    flat = tree_flatten_with_path(tree)[0]
    if not any(np.size(leaf) for _, leaf in flat):
        raise ArgumentError(
            f"Checkpoints.save was given state={show(tree)}, which has no elements.\n\n"
            "state is a pytree of arrays with elements in it.\n\n"
            "Pass what is trained, such as (model, optimizer)."
        )
    for path, leaf in flat:
        kind = getattr(getattr(_raw(leaf), "dtype", None), "kind", "O")
        if kind in "OSUMm":
            raise ArgumentTypeError(
                f"Checkpoints.save was given {_shown(leaf)} at state{keystr(path)}, which is "
                "neither "
                "an array nor a number.\n\nA checkpoint has arrays and numbers as leaves.\n\nPut "
                "text and other plain values into the notes: "
                "save(step, state, notes={...}). Of objects with arrays in them, give the arrays."
            )


def _shown(leaf: Any) -> str:
    text = repr(leaf)
    return text if len(text) <= 60 else f"{text[:60]}..."


def rebuilt(leaves: Mapping[str, Any], like: PyTree) -> PyTree:
    """The tree `like` with its leaves replaced; the reverse of `named_leaves`."""
    wanted, treedef = jax.tree.flatten(like)
    pairs = zip(leaves.values(), wanted, strict=True)
    return jax.tree.unflatten(treedef, [_as_wanted(x, w) for x, w in pairs])


def record_of(leaf: Any) -> dict[str, Any]:
    """Shape, dtype and checksum of an array."""
    host = np.asarray(leaf)
    return {
        "shape": list(host.shape),
        "dtype": str(host.dtype),
        "crc32": zlib.crc32(host.tobytes()),
    }


def json_checksum(value: Any) -> int:
    """Checksum of what JSON can hold, whatever the order of keys."""
    return zlib.crc32(json.dumps(value, sort_keys=True).encode())


def differences(saved: Mapping[str, Any], wanted: Mapping[str, Any]) -> list[str]:
    """Leaves whose saved record differs in shape or dtype from what is wanted, in words."""
    return [
        f"{name}: saved {_described(saved.get(name))}, wanted {_described(_shape(wanted, name))}"
        for name in sorted(saved.keys() | wanted.keys())
        if _described(saved.get(name)) != _described(_shape(wanted, name))
    ]


def _is_key(leaf: Any) -> bool:
    return hasattr(leaf, "dtype") and bool(jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key))


def _raw(leaf: Any) -> Any:
    if not _is_key(leaf):
        return leaf if hasattr(leaf, "dtype") else np.asarray(leaf)
    if isinstance(leaf, jax.ShapeDtypeStruct):
        return jax.eval_shape(jax.random.key_data, leaf)
    return jax.random.key_data(leaf)


def _as_wanted(data: Any, wanted: Any) -> Any:
    """The leaf as a random key or as a Python number, where one is wanted."""
    if _is_key(wanted):
        return _as_key(data, wanted)
    return np.asarray(data).item() if isinstance(wanted, (bool, int, float, complex)) else data


def _as_key(data: Any, wanted: Any) -> Any:
    return jax.random.wrap_key_data(data, impl=jax.random.key_impl(wanted))


def _shape(wanted: Mapping[str, Any], name: str) -> dict[str, Any] | None:
    leaf = wanted.get(name)
    return None if leaf is None else {"shape": list(leaf.shape), "dtype": str(leaf.dtype)}


def _described(record: Mapping[str, Any] | None) -> str:
    return "nothing" if record is None else f"{record['dtype']}{list(record['shape'])}"
