"""Stores states of callbacks in checkpoints: arrays beside other arrays, the rest as JSON."""

import base64
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxdist._validate import show
from jaxdist.errors import ArgumentTypeError

# The only keys of the dicts that stand for arrays and bytes.
_ARRAY, _BYTES = "jaxdist.array", "jaxdist.bytes"


def split_state(what: str, state: Any, arrays: list[np.ndarray]) -> Any:
    """Return a state as JSON, which refers to its arrays by their numbers.

    Args:
        what: The object that returned this state, for messages.
        state: Numbers, strings, bytes, None, arrays, and dicts, lists and tuples of these.
        arrays: Its arrays are added to this list.

    Raises:
        ArgumentTypeError: The state contains anything else.
    """

    def split(value: Any, path: str) -> Any:
        if value is None or isinstance(value, (bool, int, float, str)):
            return value
        if isinstance(value, np.generic):
            return split(np.asarray(value), path)
        if isinstance(value, bytes):
            return {_BYTES: base64.b64encode(value).decode()}
        if isinstance(value, (np.ndarray, jax.Array)) and _is_of_numbers(value):
            arrays.append(np.array(value))
            entry = [len(arrays) - 1, list(value.shape), jnp.dtype(value.dtype).name]
            return {_ARRAY: entry}
        if isinstance(value, Mapping) and all(isinstance(key, str) for key in value):
            return {key: split(x, f"{path}[{key!r}]") for key, x in value.items()}
        if isinstance(value, (list, tuple)):
            return [split(x, f"{path}[{i}]") for i, x in enumerate(value)]
        raise ArgumentTypeError(
            f"{what} returned a state with state{path}={show(value)}.\n\n"
            "A checkpoint holds numbers, strings, bytes, None, arrays, and dicts with string keys, "
            "lists and tuples of these.\n\nReturn the values that set_state needs."
        )

    return split(state, "")


def join_state(state: Any, arrays: Sequence[Any]) -> Any:
    """Undo `split_state`. Tuples come back as lists, and arrays as NumPy arrays."""
    return _replace(state, lambda entry: np.array(arrays[entry[0]]))


def make_empty_arrays(states: Any) -> list[np.ndarray]:
    """Return arrays of the shapes and dtypes that the states refer to, in their order."""
    found: dict[int, np.ndarray] = {}

    def make(entry: Any) -> None:
        number, shape, dtype = entry
        found[number] = np.empty(shape, jnp.dtype(dtype))

    _replace(states, make)
    return [found[number] for number in sorted(found)]


def _is_of_numbers(array: Any) -> bool:
    # "V" is the kind of bfloat16. NumPy has no kind for keys of `jax.random.key`.
    return isinstance(array.dtype, np.dtype) and array.dtype.kind in "bfiucV"


def _replace(state: Any, read: Callable[[Any], Any]) -> Any:
    if isinstance(state, Mapping):
        if _ARRAY in state:
            return read(state[_ARRAY])
        if _BYTES in state:
            return base64.b64decode(state[_BYTES])
        return {key: _replace(x, read) for key, x in state.items()}
    if isinstance(state, list):
        return [_replace(x, read) for x in state]
    return state
