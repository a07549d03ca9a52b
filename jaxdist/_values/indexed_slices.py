"""`IndexedSlices`: some rows of an array."""

import functools
from collections.abc import Callable, Sequence
from typing import Any, final

import jax
import jax.numpy as jnp
import numpy as np
from jax.tree_util import GetAttrKey, register_pytree_with_keys

from jaxdist._called import call_as, called, name_call, refuse, refuse_type
from jaxdist._compat import are_row_numbers, unwrap_row_numbers, wrap_row_numbers
from jaxdist._integers import check_fits
from jaxdist._validate import as_array, as_integer, as_list, is_array, show
from jaxdist._values.arrays import copy_if_writable, refuse_ref
from jaxdist._values.items import Instead, NoItemAssignment
from jaxdist.errors import ArgumentError, ArgumentTypeError, ShapeError, UnsupportedError


@final
class IndexedSlices(NoItemAssignment):
    """Rows of an array and their indices, such as the gradient of an embedding table.

    An index may occur more than once; its rows are then added up, or applied one after the other.

    A registered pytree node. Its leaves are the rows and the indices. JAX's transformations,
    control flow and `strategy.run` take it as it is. Arithmetic on its leaves, as
    `jax.tree.map(lambda x: x * 2, slices)` and most functions of optax do, is an
    `UnsupportedError`, because it would change the indices too: use `with_parts`. In a `jax.jit`
    outside of a step, and for a few functions outside of a trace, it is JAX's own `TypeError` or
    `ValueError` about "row numbers of IndexedSlices". Functions that only move rows, such as
    `lambda x: x[:1]` and `jnp.flip`, move a row together with its index.

    Shapes:
        `values` `[n, ...]`, `indices` `[n]`, for an array `[rows, ...]`.

    Args:
        values: The rows.
        indices: The index of each row; integers.
        dense_shape: Shape of the whole array, if it is known.

    Raises:
        ShapeError: The numbers of values and indices differ.
        ArgumentTypeError: The indices are not integers.

    Example:
        >>> rows = IndexedSlices([[10.0], [20.0], [1.0]], [2, 0, 2], dense_shape=(3, 1))
        >>> rows.to_dense().ravel().tolist()
        [20.0, 0.0, 11.0]

    Source:
        `tf.IndexedSlices`.
    """

    __slots__ = ("_indices", "_leaf", "dense_shape", "values")

    _instead = Instead(
        "Its rows are an array of JAX, whose elements do not change.",
        "Make other rows from an array: slices.with_parts(rows, slices.indices).",
    )

    @called("IndexedSlices")
    def __init__(self, values: Any, indices: Any, dense_shape: Sequence[int] | None = None) -> None:
        # Copied where the caller could overwrite them; see Note [Who owns host memory].
        self.values: Any = _as_own_array("values", values)
        self._indices: Any = _as_own_array("indices", indices)
        self._leaf: Any = None
        self.dense_shape = None if dense_shape is None else _check_dense_shape(dense_shape)
        found = f"values {_describe(self.values)} and indices {_describe(self.indices)}"
        if not jnp.issubdtype(self.indices.dtype, np.integer):
            raise refuse_type(
                f"{found}.",
                "Indices are numbers of rows.",
                "Pass integers: indices.astype('int32').",
            )
        if self.indices.ndim != 1 or self.values.shape[:1] != self.indices.shape:
            raise refuse(
                f"{found}.",
                "There is one index for each row: values [n, ...] and indices [n].",
                "Flatten the indices: indices.ravel(), values.reshape(-1, *row_shape).",
                kind=ShapeError,
            )

        whole = self.dense_shape
        if whole is not None and (not whole or whole[1:] != tuple(self.values.shape[1:])):
            raise refuse(
                f"{found}, and dense_shape={list(whole)}.",
                "The rows have the dims of the whole array after its first one: values [n, ...] "
                "and dense_shape [rows, ...].",
                f"Pass dense_shape={[whole[0] if whole else 1, *self.values.shape[1:]]}.",
                kind=ShapeError,
            )

    @property
    def indices(self) -> Any:
        """The index of each row; integers."""
        # See Note [Indices as leaves].
        indices = _map_parts(unwrap_row_numbers, self._indices)
        if not _is_traced(indices):
            self._indices = indices
        return indices

    @property
    def dtype(self) -> Any:
        """Dtype of the rows."""
        return self.values.dtype

    def to_dense(self) -> jax.Array:
        """Return the whole array, with zeros for missing rows; rows of the same index are added up.

        A row whose index the array does not have, such as -1, is left out.

        Raises:
            ArgumentError: `dense_shape` is not known.
            ArgumentTypeError: A function of pytrees has replaced the indices by something else.

        Example:
            >>> IndexedSlices([1.0], [1], dense_shape=(2,)).to_dense().tolist()
            [0.0, 1.0]
        """
        if self.dense_shape is None:
            raise ArgumentError(
                f"IndexedSlices.to_dense was called on {self!r}, which has no dense_shape.\n\n"
                "dense_shape is the shape of the whole array, which the rows are part of.\n\n"
                "Pass it when you make the slices: IndexedSlices(values, indices, "
                "dense_shape=table.shape)."
            )
        indices = self.indices
        if not jnp.issubdtype(indices.dtype, np.integer):
            raise ArgumentTypeError(
                f"IndexedSlices.to_dense was called on {self!r}.\n\n"
                "Indices are numbers of rows. A function of pytrees has put something else in "
                "their place: such as jax.grad, whose result has no indices, or jnp.isnan.\n\n"
                "Use the function on the rows: slices.with_parts(fn(slices.values), "
                "slices.indices)."
            )
        return (
            jnp.zeros(self.dense_shape, self.dtype)
            .at[indices]
            .add(self.values, mode="drop", wrap_negative_indices=False)
        )

    def with_parts(self, values: Any, indices: Any) -> "IndexedSlices":
        """Return slices of the same whole array; values and indices may be `PerReplica`.

        Example:
            >>> rows = IndexedSlices([[10.0], [20.0]], [2, 0], dense_shape=(3, 1))
            >>> rows.with_parts(rows.values * 2, rows.indices).to_dense().ravel().tolist()
            [40.0, 0.0, 20.0]
        """
        return _rebuild(self.dense_shape, (values, indices))

    def __reduce__(self) -> Any:
        return _rebuild, (self.dense_shape, (self.values, self.indices))

    def __repr__(self) -> str:
        indices = self._indices
        if are_row_numbers(indices):
            # Only the type, so that one process may print an array that all processes hold.
            indices = unwrap_row_numbers(jax.ShapeDtypeStruct(indices.shape, indices.dtype))
        return f"IndexedSlices({_describe(self.values)} at {_describe(indices)})"


def _as_own_array(name: str, value: Any) -> Any:
    refuse_ref(f"IndexedSlices was given {name}", value)
    has_dtype = hasattr(value, "dtype") and is_array(value)
    check_fits(name, value)
    return copy_if_writable(value) if has_dtype else as_array(name, value)


def _check_dense_shape(dense_shape: Any) -> tuple[int, ...]:
    remedy, most = "Pass dense_shape=table.shape.", (1 << 31) - 1
    dims = as_list("dense_shape", dense_shape, "the shape of the whole array", remedy)
    return tuple(
        as_integer(f"dense_shape[{i}]", d, least=0, most=most, remedy=remedy)
        for i, d in enumerate(dims)
    )


def as_indexed_slices(name: str, value: Any) -> IndexedSlices:
    """Return `value` as `IndexedSlices`; a `BCOO` matrix of whole rows is converted."""
    if isinstance(value, IndexedSlices):
        return value
    # `jax.experimental.sparse` is not imported for an `isinstance`: few programs use it.
    if getattr(value, "n_sparse", None) == 1 and value.n_batch == 0:
        return IndexedSlices(value.data, value.indices[:, 0], value.shape)
    raise call_as(
        f"Variable {name!r}.{name_call()}",
        refuse_type,
        f"sparse_delta={show(value)}.",
        "It takes rows and their numbers.",
        "Pass jaxdist.IndexedSlices(values, indices), or a jax.experimental.sparse.BCOO with "
        "n_sparse=1 and n_batch=0.",
    )


def _describe(array: Any) -> str:
    has_shape = hasattr(array, "dtype") and hasattr(array, "shape")
    return f"{array.dtype}{list(array.shape)}" if has_shape else repr(array)


def _rebuild(dense_shape: tuple[int, ...] | None, parts: Any) -> IndexedSlices:
    # Without the checks of `__init__`: JAX's transformations put other objects in place of arrays.
    slices = object.__new__(IndexedSlices)
    slices.values, slices._indices = parts
    slices._leaf = None
    slices.dense_shape = dense_shape
    return slices


# Note [Indices as leaves]
# jax.tree.map and optax compute with all leaves of a pytree. They would scale the indices too, and
# a rebuild by JAX looks like one by such a function. So the leaf of the indices has a
# dtype on which JAX refuses arithmetic, and outside of a trace it raises an error of jaxdist.
# Functions that only move rows, such as jnp.flip, look like what jax.vmap and
# jax.lax.scan do with a leaf. They move a row and its index together.
def make_arithmetic_error(what: str) -> UnsupportedError:
    """Return the error for an operation on the indices of slices."""
    return UnsupportedError(
        f"{what} was used on the indices of IndexedSlices, as on a leaf of a pytree.\n\n"
        "Functions of pytrees, such as jax.tree.map and those of optax, are called with values and "
        "indices. Indices are numbers of rows, with which nothing can be computed.\n\n"
        "Compute with the rows, slices.with_parts(fn(slices.values), slices.indices), or with the "
        "dense array, slices.to_dense()."
    )


def _map_parts(fn: Callable[[Any], Any], indices: Any) -> Any:
    """Apply `fn` to an array, or to those in a `PerReplica`."""
    return fn(indices) if isinstance(indices, jax.Array) else jax.tree.map(fn, indices)


def _is_traced(indices: Any) -> bool:
    """Whether `indices` belong to one trace, so that a later use needs its own."""
    arrays = [indices] if isinstance(indices, jax.Array) else jax.tree.leaves(indices)
    return any(isinstance(x, jax.core.Tracer) for x in arrays)


def _flatten(slices: IndexedSlices) -> tuple[tuple[Any, Any], Any]:
    leaf = slices._leaf
    if leaf is None:
        leaf = _map_parts(lambda x: wrap_row_numbers(x, make_arithmetic_error), slices._indices)
        if not _is_traced(leaf):
            slices._leaf = leaf
    return (slices.values, leaf), slices.dense_shape


def _flatten_with_keys(slices: IndexedSlices) -> tuple[Any, Any]:
    (values, leaf), dense_shape = _flatten(slices)
    return ((GetAttrKey("values"), values), (GetAttrKey("indices"), leaf)), dense_shape


register_pytree_with_keys(IndexedSlices, _flatten_with_keys, _rebuild, _flatten)


def is_sparse(value: Any) -> bool:
    """Whether `value` is a sparse matrix of JAX, whose parts are leaves of pytrees."""
    return _is_sparse_kind(type(value))


# Every leaf of every collective is checked. The cache makes that one lookup of its type. The module
# is compared by name, so that jaxdist need not import `jax.experimental.sparse`.
@functools.lru_cache(maxsize=256)
def _is_sparse_kind(kind: type) -> bool:
    """Whether a type is one of `jax.experimental.sparse`."""
    return kind.__module__.startswith("jax.experimental.sparse") and hasattr(kind, "todense")
