"""`Weight`: an array of a weight file, and where it is in memory after views of NumPy.

# Note [Views without memory]
A slice of a model's array is read from the bytes of the file that hold it, and from no others.
Indexing, transposing and most reshapes of NumPy are views: they change an offset, a shape and
strides. So they are applied to an array of the file's shape that has no memory behind it
(`as_strided`), and the result says which bytes to read. Nothing may read its elements. A reshape
that would copy raises an error there, because of `copy=False`.
"""

import math
from collections.abc import Sequence
from types import EllipsisType
from typing import Any, TypeAlias, final

import numpy as np
from numpy.lib.stride_tricks import as_strided

from jaxdist._called import called, refuse, refuse_type
from jaxdist._validate import check_text, show

_Index: TypeAlias = int | slice | EllipsisType | None


@final
class Weight:
    """An array of a weight file, for the `mapping` of `load_weights` and `export_weights`.

    It is indexed, transposed and reshaped as an array of NumPy. Nothing is read before the model's
    array is loaded, and then only the bytes of this process's slices.

    Args:
        name: The name in the file. Each `*` in it stands for what the next `*` or `{a,b}` of the
            pattern matched.

    Raises:
        ArgumentError: An index is neither an integer nor a slice with a positive step.

    Example:
        Keys of a fused projection of GPT-2, `[width, 3 * width]`, and a kernel of torch, which has
        `[out, in]`:

        >>> mapping = {
        ...     "layers/*/key/kernel": training.Weight("h.*.attn.c_attn.weight")[:, 768:1536],
        ...     "layers/*/up/kernel": training.Weight("h.*.mlp.up.weight").T,
        ... }
        >>> mapping["layers/*/up/kernel"]
        Weight('h.*.mlp.up.weight').T
    """

    __slots__ = ("_changes", "name")

    # Its length is not known, so a loop over it would not end.
    __iter__: None = None

    @called("training.Weight")
    def __init__(self, name: str) -> None:
        check_text("name", name, "h.*.mlp.up.weight")
        self.name = name
        self._changes: tuple[_Change, ...] = ()

    @called("training.Weight[...]")
    def __getitem__(self, index: Any) -> "Weight":
        """Return a part, as NumPy does for integers, slices, `...` and `None`."""
        entries = index if isinstance(index, tuple) else (index,)
        for entry in entries:
            if not _is_index(entry):
                raise refuse(
                    f"index={show(entry)}.",
                    "A part is chosen by integers and slices with positive steps.",
                    "Pass for instance [:, 768:1536]. Other changes are made with NumPy, on the "
                    "arrays of safetensors.numpy.load_file(path).",
                )
        return self._with("index", entries)

    @property
    def T(self) -> "Weight":
        """The array with its dims in reverse order."""
        return self._with("transpose", ())

    @called("training.Weight.transpose")
    def transpose(self, *dims: int | Sequence[int]) -> "Weight":
        """Return the array with its dims in another order, as `np.transpose`."""
        return self._with("transpose", _as_integers("dims", dims))

    @called("training.Weight.reshape")
    def reshape(self, *shape: int | Sequence[int]) -> "Weight":
        """Return the array with another shape, as `np.reshape`; one length may be -1."""
        return self._with("reshape", _as_integers("shape", shape))

    def _with(self, kind: str, values: tuple[Any, ...]) -> "Weight":
        made = Weight(self.name)
        made._changes = (*self._changes, (kind, values))
        return made

    def __repr__(self) -> str:
        return f"Weight({self.name!r}){''.join(map(_show_change, self._changes))}"


_Change: TypeAlias = tuple[str, tuple[Any, ...]]


def rename(weight: Weight, name: str) -> Weight:
    """Return the same part of another array."""
    made = Weight(name)
    made._changes = weight._changes
    return made


def apply(weight: Weight, array: np.ndarray, copy: bool | None = False) -> np.ndarray:
    """Return the view of an array that a weight is.

    Args:
        weight: The weight.
        array: The array of the file, or one of its shape.
        copy: Whether a reshape may copy: False for never, None for where it must.

    Raises:
        ValueError: The shape does not allow a change.
        IndexError: The same, for an index.
    """
    for kind, values in weight._changes:
        if kind == "index":
            # With "..." the result is a view, also of one element.
            array = array[values if Ellipsis in values else (*values, ...)]
        elif kind == "transpose":
            array = np.transpose(array, values or None)
        else:
            array = np.reshape(array, values, copy=copy)
    return array


def list_transposes(weight: Weight) -> list[tuple[int, ...]] | None:
    """Return the orders of dims that a weight consists of; None if it has other changes."""
    if any(kind != "transpose" for kind, _ in weight._changes):
        return None
    return [values for _, values in weight._changes]


def make_unread(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """Return an array without memory behind it; see Note [Views without memory].

    Its elements have the size of the dtype's. `as_strided` does not know all dtypes of JAX.
    """
    strides = [dtype.itemsize * math.prod(shape[k + 1 :]) for k in range(len(shape))]
    return as_strided(np.empty(1, f"V{dtype.itemsize}"), shape, strides)


def _is_index(entry: Any) -> bool:
    if isinstance(entry, slice):
        return all(_is_integer(x) or x is None for x in (entry.start, entry.stop)) and (
            entry.step is None or (_is_integer(entry.step) and entry.step > 0)
        )
    return entry is None or entry is Ellipsis or _is_integer(entry)


def _is_integer(value: Any) -> bool:
    return isinstance(value, (int, np.integer)) and not isinstance(value, bool)


def _as_integers(name: str, values: tuple[Any, ...]) -> tuple[int, ...]:
    # As in NumPy, they may also be one tuple.
    if len(values) == 1 and isinstance(values[0], (tuple, list)):
        values = tuple(values[0])
    for value in values:
        if not _is_integer(value):
            raise refuse_type(
                f"{name} with {show(value)}.",
                f"{name} are integers.",
                "Pass for instance 768, 12, 64.",
            )
    return tuple(int(value) for value in values)


def _show_change(change: _Change) -> str:
    kind, values = change
    if kind != "index":
        return ".T" if change == ("transpose", ()) else f".{kind}({', '.join(map(str, values))})"
    return f"[{', '.join(map(_show_index, values))}]"


def _show_index(entry: _Index) -> str:
    if not isinstance(entry, slice):
        return "..." if entry is Ellipsis else str(entry)
    ends = [entry.start, entry.stop, *([] if entry.step is None else [entry.step])]
    return ":".join("" if x is None else str(x) for x in ends)
