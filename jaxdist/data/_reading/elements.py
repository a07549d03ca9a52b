"""Reads one element of a dataset: checks its structure, and copies its arrays on the host."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.tree_util import PyTreeDef, keystr

from jaxdist._called import call_as, called, name_call, refuse_type
from jaxdist._integers import check_all_fit, has_unfit
from jaxdist._validate import check_keys, show
from jaxdist._values import allocate_aligned, is_per_replica
from jaxdist.errors import ArgumentTypeError, ContextError, ShapeError

Leaf = np.ndarray | jax.Array

MAX_LISTED = 10
# Stands for a leaf without numbers; `_check_numeric` raises an error that names the leaf.
_NO_NUMBERS = np.asarray(None)


@dataclasses.dataclass(frozen=True)
class Element:
    """One element of a dataset: its arrays and their pytree structure."""

    leaves: list[Leaf]
    treedef: PyTreeDef
    # Rows of all leaves that are not scalars; None if all leaves are scalars.
    rows: int | None

    def named_leaves(self) -> list[tuple[str, Leaf]]:
        """Return each leaf with its name in messages."""
        whole = self.treedef.unflatten(self.leaves)
        return [(leaf_name(path), leaf) for path, leaf in jax.tree.leaves_with_path(whole)]


class ElementReader:
    """A function that turns elements into arrays and checks that all have one structure."""

    def __init__(self) -> None:
        self._caller = name_call()
        self._treedef: PyTreeDef | None = None
        self._dtypes: list[Any] = []

    @called(lambda self: self._caller)
    def __call__(self, raw: Any, index: int) -> Element:
        """Return the arrays of element number `index`."""
        try:
            leaves, treedef = jax.tree.flatten(raw)
        except ValueError:
            start = f"{self._caller}: element {index} of the dataset holds"
            check_keys(start, "batch", raw)
            raise
        # This runs for every batch. So the common case is one comparison of `treedef` and dtypes,
        # and the slow checks run only for the first element and for elements that differ.
        arrays = [x if type(x) is np.ndarray else as_array(x) for x in leaves]
        if any(isinstance(x, jax.core.Tracer) for x in arrays):
            start = f"{self._caller}: element {index} of the dataset holds"
            check_not_traced(start, "batch", raw)
        is_first = self._treedef is None
        if is_first or treedef != self._treedef or [a.dtype for a in arrays] != self._dtypes:
            self._check_structure(raw, arrays, treedef, index)
        if has_unfit(arrays):
            start = f"{self._caller}: element {index} of the dataset"
            call_as(start, check_all_fit, "batch", treedef.unflatten(arrays))
        counts = {a.shape[0] for a in arrays if a.ndim}
        element = Element(arrays, treedef, next(iter(counts), None))
        if len(counts) > 1:
            raise _rows_differ_error(element, index)
        return element

    @called(lambda self: self._caller)
    def _check_structure(self, raw: Any, arrays: list[Any], treedef: PyTreeDef, index: int) -> None:
        if any(map(is_per_replica, jax.tree.leaves(raw, is_leaf=is_per_replica))):
            raise refuse_type(
                f"a dataset whose element {index} has a part for each replica: {show(raw)}.",
                "It divides batches of arrays, and this one is divided already: a distributed "
                "dataset or its iterator makes such batches.",
                "Loop over the distributed dataset itself, or pass the dataset that it was made "
                "from.",
            )
        _check_numeric(raw, arrays, index)
        dtypes = [a.dtype for a in arrays]
        if self._treedef is not None and not self._is_same_on_devices(treedef, dtypes):
            before = _describe_structure(self._treedef, self._dtypes)
            raise _changed_error(before, _describe_structure(treedef, dtypes), index)
        if not arrays:
            raise ShapeError(
                f"{self._caller}: element {index} of the dataset holds no arrays: {raw!r}.\n\n"
                "Each element is a pytree with at least one array.\n\n"
                "Leave such elements out of the dataset."
            )
        self._treedef, self._dtypes = treedef, dtypes

    def _is_same_on_devices(self, treedef: PyTreeDef, dtypes: list[Any]) -> bool:
        """Whether the structures are equal, and the dtypes are equal on devices.

        For instance, with x64 off, float64 and float32 are both float32 on devices.
        """
        if treedef != self._treedef:
            return False
        return [device_dtype(d) for d in dtypes] == [device_dtype(d) for d in self._dtypes]


def device_dtype(dtype: Any) -> Any:
    """Return JAX's dtype for arrays of `dtype`: 32 bits instead of 64, unless x64 is on."""
    # `canonicalize_dtype` rejects the dtypes of random keys.
    is_typed_key = jnp.issubdtype(dtype, jax.dtypes.extended)
    return dtype if is_typed_key else jax.dtypes.canonicalize_dtype(dtype)


def as_array(leaf: Any) -> Any:
    """Return a leaf as an array: a JAX array unchanged, anything else as a NumPy array.

    Tensors of other libraries have `__array__`, or only `numpy()`.
    """
    if isinstance(leaf, jax.Array):
        return leaf
    if isinstance(leaf, np.ma.MaskedArray):
        return _NO_NUMBERS
    # PyTorch's bfloat16 tensors raise in both methods, but they can be copied by DLPack.
    try:
        has_only_numpy = hasattr(leaf, "numpy") and not hasattr(leaf, "__array__")
        return np.asarray(leaf.numpy() if has_only_numpy else leaf)
    except Exception:
        return _copy_by_dlpack(leaf)


def _copy_by_dlpack(leaf: Any) -> np.ndarray:
    """Return a copy of a tensor by DLPack; an object array if that is not possible."""
    try:
        return np.array(jax.dlpack.from_dlpack(leaf))
    except Exception:
        return _NO_NUMBERS


def leaf_name(path: tuple[Any, ...]) -> str:
    """Return the name of a leaf in messages."""
    return "batch" + keystr(path)


def describe_array(leaf: Any) -> str:
    """Return the dtype and the shape of an array as a string: `float32[30, 4]`."""
    return f"{leaf.dtype}{[*leaf.shape]}"


def format_lines(lines: list[str]) -> str:
    """Return at most ten indented lines for a message, and the number of lines left out."""
    more = len(lines) - MAX_LISTED
    shown = [f"  {line}" for line in lines[:MAX_LISTED]]
    return "\n".join(shown + ([f"  and {more} more"] if more > 0 else []))


@functools.lru_cache(maxsize=256)
def is_numeric(dtype: Any) -> bool:
    """Whether devices can hold arrays of `dtype`."""
    if jnp.issubdtype(dtype, jax.dtypes.extended):
        return True
    # NumPy counts long doubles as numbers, but no device supports them, nor other byte orders.
    if dtype.name in ("float128", "complex256") or dtype.kind in "mM" or not dtype.isnative:
        return False
    return bool(jnp.issubdtype(dtype, np.number)) or dtype == np.bool_


def _check_numeric(raw: Any, arrays: list[Any], index: int) -> None:
    bad: list[str] = []
    remedies: set[str] = set()
    for (path, leaf), array in zip(jax.tree.leaves_with_path(raw), arrays, strict=True):
        if not is_numeric(array.dtype):
            held = f" of dtype {leaf.dtype}" if isinstance(leaf, np.ndarray) else ""
            shown = "" if isinstance(leaf, np.ndarray) else f": {leaf!r:.60}"
            bad.append(f"{leaf_name(path)} is a {type(leaf).__name__}{held}{shown}")
            remedies.add(_find_remedy(leaf, array))
    if bad:
        raise ArgumentTypeError(
            f"{name_call()} cannot put element {index} of the dataset on devices.\n"
            f"{format_lines(bad)}\n\n"
            "Devices hold numbers: bool, int, float or complex arrays, in the byte order of the "
            "machine and without a mask.\n\n"
            f"{' '.join(sorted(remedies))}"
        )


def _find_remedy(leaf: Any, array: Any) -> str:
    if isinstance(leaf, np.ma.MaskedArray):
        return "Pass x.filled(0) instead of a masked array, and the mask as an array beside it."
    if array.dtype.kind in "iufc" and not array.dtype.isnative:
        return "Convert the byte order: x.astype(x.dtype.newbyteorder('='))."
    return (
        "Encode such leaves as numbers (np.unique(x, return_inverse=True) for names), or leave "
        "them out of the batch."
    )


def check_not_traced(start: str, name: str, tree: Any) -> None:
    """Check that no leaf is a tracer, since a dataset needs the numbers.

    Raises:
        ContextError: A leaf is a tracer; the message starts with `start`.
    """
    found = [
        f"{name}{keystr(path)} is {leaf.aval.str_short()}"
        for path, leaf in jax.tree.leaves_with_path(tree)
        if isinstance(leaf, jax.core.Tracer)
    ]
    if found:
        raise ContextError(
            f"{start} traced values.\n{format_lines(found)}\n\n"
            "A traced value has a number only while the compiled function runs; a dataset needs "
            "the numbers. A step, or a function under jax.jit, kept it in a list, an attribute or "
            "a global, or made the dataset.\n\n"
            "Return the value from that function, and put what it returns into the dataset."
        )


def _rows_differ_error(element: Element, index: int) -> ShapeError:
    named = [(name, leaf) for name, leaf in element.named_leaves() if leaf.ndim]
    (first, like), count = named[0], named[0][1].shape[0]
    others = [(name, leaf) for name, leaf in named if leaf.shape[0] != count]
    lines = [
        f"{name} is {describe_array(x)}: {x.shape[0]} rows" for name, x in [(first, like), *others]
    ]
    other, rows = others[0][0], others[0][1].shape[0]
    longer, shorter = (first, other) if count > rows else (other, first)
    fewer, more = sorted((count, rows))
    return ShapeError(
        f"{name_call()}: the leaves of element {index} of the dataset have different numbers of "
        f"rows.\n{format_lines(lines)}\n\n"
        "Row i of every leaf is example i, so all leaves have the same dim 0.\n\n"
        f"Give {shorter} {more} rows, or cut {longer} to {fewer}. Pass anything that is not an "
        "example (a table, a weight of each class) to the step as another argument: "
        "strategy.run(step, (batch, table)). In a batch of one example every leaf has a dim 0 of 1."
    )


def _describe_structure(treedef: PyTreeDef, dtypes: list[Any]) -> str:
    return repr(treedef.unflatten([_DtypeLabel(str(d)) for d in dtypes]))


class _DtypeLabel(str):
    """A dtype that prints without the quotes of a string, inside a printed structure."""

    __slots__ = ()
    __repr__ = str.__str__


def _changed_error(before: str, now: str, index: int) -> ShapeError:
    return ShapeError(
        f"{name_call()}: element {index} of the dataset has another structure than the elements "
        "before it.\n"
        f"  before:       {before}\n"
        f"  element {index}: {now}\n\n"
        "One step function takes them all, so every element has the same structure and the same "
        "dtypes (shapes may change).\n\n"
        "Give the same keys each time, and arrays of a fixed dtype: np.asarray(x, dtype)."
    )


def copy_aligned(array: np.ndarray, dtype: np.dtype[Any]) -> np.ndarray:
    """Return an aligned copy of the array, with `dtype`. See Note [Who owns host memory]."""
    copy = allocate_aligned(array.shape, dtype)
    # `unsafe` allows float64 to become float32, as JAX converts it.
    np.copyto(copy, array, casting="unsafe")
    return copy


def copy_padded(array: np.ndarray, dtype: np.dtype[Any], rows: int) -> np.ndarray:
    """Return an aligned copy with `rows` rows and `dtype`; the added rows are zero."""
    copy = allocate_aligned((rows, *array.shape[1:]), dtype)
    copy[array.shape[0] :] = np.zeros((), dtype)
    np.copyto(copy[: array.shape[0]], array, casting="unsafe")
    return copy


def copy_rows(array: np.ndarray, rows: np.ndarray | slice) -> np.ndarray:
    """Return an aligned copy of some rows."""
    if isinstance(rows, slice):
        return copy_aligned(array[rows], array.dtype)
    copy = allocate_aligned((len(rows), *array.shape[1:]), array.dtype)
    # With 'clip' NumPy writes into `copy` directly; with 'raise' it uses a second buffer.
    np.take(array, rows, axis=0, out=copy, mode="clip")
    return copy
