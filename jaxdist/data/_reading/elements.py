"""Reading one element of a dataset: which leaves it has, and whether they are what they were."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.tree_util import PyTreeDef, keystr

from jaxdist.errors import ArgumentTypeError, ContextError, ShapeError

Leaf = np.ndarray | jax.Array

MAX_LISTED = 10


@dataclasses.dataclass(frozen=True)
class Element:
    """One element: arrays, and the structure that they fill."""

    leaves: list[Leaf]
    treedef: PyTreeDef
    # Of all leaves but scalars; None where there are scalars alone.
    rows: int | None

    def names(self) -> list[str]:
        """What each leaf is called in messages."""
        index = self.treedef.unflatten(range(len(self.leaves)))
        return [leaf_name(path) for path, _ in jax.tree.leaves_with_path(index)]


class ElementReader:
    """Turns elements into arrays, and refuses one that is not built like those before it."""

    def __init__(self, caller: str) -> None:
        self._caller = caller
        self._treedef: PyTreeDef | None = None
        self._dtypes: list[Any] = []

    def __call__(self, raw: Any, index: int) -> Element:
        """The arrays of element number `index`."""
        leaves, treedef = jax.tree.flatten(raw)
        arrays = [x if type(x) is np.ndarray else as_array(x) for x in leaves]
        if any(isinstance(x, jax.core.Tracer) for x in arrays):
            start = f"{self._caller}: element {index} of the dataset holds"
            check_not_traced(start, "batch", raw)
        is_first = self._treedef is None
        if is_first or treedef != self._treedef or [a.dtype for a in arrays] != self._dtypes:
            self._check_structure(raw, arrays, treedef, index)
        counts = {a.shape[0] for a in arrays if a.ndim}
        element = Element(arrays, treedef, next(iter(counts), None))
        if len(counts) > 1:
            raise _rows_differ_error(self._caller, element, index)
        return element

    def _check_structure(self, raw: Any, arrays: list[Any], treedef: PyTreeDef, index: int) -> None:
        _check_numeric(self._caller, raw, arrays, index)
        dtypes = [a.dtype for a in arrays]
        if self._treedef is not None and not self._is_same_on_devices(treedef, dtypes):
            before = _describe_structure(self._treedef, self._dtypes)
            raise _changed_error(self._caller, before, _describe_structure(treedef, dtypes), index)
        if not arrays:
            raise ShapeError(
                f"{self._caller}: element {index} of the dataset holds no arrays: {raw!r}.\n\n"
                "Each element is a pytree with at least one array.\n\n"
                "Leave such elements out of the dataset."
            )
        self._treedef, self._dtypes = treedef, dtypes

    def _is_same_on_devices(self, treedef: PyTreeDef, dtypes: list[Any]) -> bool:
        """Whether only float64 and float32, or the like, differ that devices hold alike."""
        if treedef != self._treedef:
            return False
        return [device_dtype(d) for d in dtypes] == [device_dtype(d) for d in self._dtypes]


def device_dtype(dtype: Any) -> Any:
    """The dtype that JAX gives arrays of `dtype`: 32 bits for 64, unless x64 is on."""
    is_typed_key = jnp.issubdtype(dtype, jax.dtypes.extended)
    return dtype if is_typed_key else jax.dtypes.canonicalize_dtype(dtype)


def as_array(leaf: Any) -> Any:
    """A leaf as an array: JAX arrays stay where they are, the rest goes through NumPy.

    Tensors of other libraries have `__array__`, or `numpy()` alone; PyTorch's bfloat16 ones
    refuse both, and can be exchanged.
    """
    if isinstance(leaf, jax.Array):
        return leaf
    try:
        has_only_numpy = hasattr(leaf, "numpy") and not hasattr(leaf, "__array__")
        return np.asarray(leaf.numpy() if has_only_numpy else leaf)
    except Exception:
        return _copy_by_dlpack(leaf)


def _copy_by_dlpack(leaf: Any) -> np.ndarray:
    """A copy of a tensor through DLPack; an object array where that is not possible."""
    try:
        return np.array(jax.dlpack.from_dlpack(leaf))
    except Exception:  # what it is will be said with its name
        return np.asarray(None)


def leaf_name(path: tuple[Any, ...]) -> str:
    """How messages call a leaf."""
    return "batch" + keystr(path)


def describe_array(leaf: Any) -> str:
    """`float32[30, 4]`."""
    return f"{leaf.dtype}{[*leaf.shape]}"


def format_lines(lines: list[str]) -> str:
    """Lines of a message, at most ten of them."""
    more = len(lines) - MAX_LISTED
    shown = [f"  {line}" for line in lines[:MAX_LISTED]]
    return "\n".join(shown + ([f"  and {more} more"] if more > 0 else []))


@functools.lru_cache(maxsize=256)
def is_numeric(dtype: Any) -> bool:
    """Whether devices can hold arrays of `dtype`."""
    if jnp.issubdtype(dtype, jax.dtypes.extended):
        return True
    # NumPy's long doubles count as numbers and no device has them.
    if dtype.name in ("float128", "complex256") or dtype.kind in "mM":
        return False
    return bool(jnp.issubdtype(dtype, np.number)) or dtype == np.bool_


def _check_numeric(caller: str, raw: Any, arrays: list[Any], index: int) -> None:
    bad = []
    for (path, leaf), array in zip(jax.tree.leaves_with_path(raw), arrays, strict=True):
        if not is_numeric(array.dtype):
            held = f" of dtype {array.dtype}" if isinstance(leaf, np.ndarray) else ""
            shown = "" if isinstance(leaf, np.ndarray) else f": {leaf!r:.60}"
            bad.append(f"{leaf_name(path)} is a {type(leaf).__name__}{held}{shown}")
    if bad:
        raise ArgumentTypeError(
            f"{caller} cannot put element {index} of the dataset on devices.\n"
            f"{format_lines(bad)}\n\n"
            "Devices hold numbers: bool, int, float or complex arrays.\n\n"
            "Encode such leaves as numbers (np.unique(x, return_inverse=True) for names), or "
            "leave them out of the batch."
        )


def check_not_traced(start: str, name: str, tree: Any) -> None:
    """Refuse values that somebody traces or traced: a dataset needs the numbers.

    Raises:
        ContextError: Some leaf is one; the message starts with `start`.
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


def _rows_differ_error(caller: str, element: Element, index: int) -> ShapeError:
    named = [
        (name, leaf)
        for name, leaf in zip(element.names(), element.leaves, strict=True)
        if leaf.ndim
    ]
    (first, like), count = named[0], named[0][1].shape[0]
    others = [(name, leaf) for name, leaf in named if leaf.shape[0] != count]
    lines = [
        f"{name} is {describe_array(x)}: {x.shape[0]} rows" for name, x in [(first, like), *others]
    ]
    other, rows = others[0][0], others[0][1].shape[0]
    longer, shorter = (first, other) if count > rows else (other, first)
    fewer, more = sorted((count, rows))
    return ShapeError(
        f"{caller}: the leaves of element {index} of the dataset have different numbers of "
        f"rows.\n{format_lines(lines)}\n\n"
        "Row i of every leaf is example i, so all leaves have the same dim 0.\n\n"
        f"Give {shorter} {more} rows, or cut {longer} to {fewer}. What is no example (a table, a "
        "weight of each class) is an argument of the step: strategy.run(step, (batch, table)). "
        "In a batch of one example every leaf has a dim 0 of 1."
    )


def _describe_structure(treedef: PyTreeDef, dtypes: list[Any]) -> str:
    return repr(treedef.unflatten([_DtypeLabel(str(d)) for d in dtypes]))


class _DtypeLabel:
    """A leaf of a structure that is printed."""

    def __init__(self, text: str) -> None:
        self.text = text

    def __repr__(self) -> str:
        return self.text


def _changed_error(caller: str, before: str, now: str, index: int) -> ShapeError:
    return ShapeError(
        f"{caller}: element {index} of the dataset is not built like the elements before it.\n"
        f"  before:       {before}\n"
        f"  element {index}: {now}\n\n"
        "One step function takes them all, so every element has the same structure and the same "
        "dtypes (shapes may change).\n\n"
        "Give the same keys each time, and arrays of a fixed dtype: np.asarray(x, dtype)."
    )
