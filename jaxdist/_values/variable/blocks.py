"""`VariableSlice`, and the methods of a variable that read and change elements and blocks."""

from typing import Any, final

import jax

from jaxdist._called import call_as, called
from jaxdist._validate import as_array
from jaxdist._values.items import Instead
from jaxdist._values.variable.arguments import check_name, get_elements
from jaxdist._values.variable.documented import ValueOperators
from jaxdist._values.variable.nd import (
    check_blocks,
    gather_blocks,
    locate_batch_rows,
    locate_elements,
)
from jaxdist._values.variable.scatter import Scatter

_KINDS = {"add": Scatter.ADD, "sub": Scatter.SUBTRACT, "update": Scatter.UPDATE}


class BlockChanges:
    """A base class with the methods of a variable that address elements and blocks by index."""

    __slots__ = ()

    @property
    def label(self) -> str:
        """The name that the user gave."""
        raise NotImplementedError

    def _apply_blocks(self, kind: Scatter, blocks: Any) -> jax.Array:
        raise NotImplementedError

    def _scatter_blocks(self, kind: Scatter, indices: Any, updates: Any) -> jax.Array:
        return self._apply_blocks(kind, check_blocks(self, indices, updates))

    def _scatter_nd(self, kind: Scatter, indices: Any, updates: Any, name: Any) -> jax.Array:
        check_name(self.label, name)
        return self._scatter_blocks(kind, indices, updates)

    def _change_elements(self, change: str, index: Any, value: Any, name: Any) -> jax.Array:
        """Implement `variable[index].assign`, `assign_add` and `assign_sub`."""
        caller = "assign" if change == "update" else f"assign_{change}"
        call_as(f"[...].{caller}", check_name, self.label, name)
        places, given = call_as(caller, locate_elements, self, index, value)
        return call_as(f"[...].{caller}", self._scatter_blocks, _KINDS[change], places, given)

    @called("sparse_read")
    def sparse_read(self, indices: Any, name: str | None = None) -> jax.Array:
        """Return the rows with these indices.

        Shapes:
            `indices` `[...]` gives `[..., *shape[1:]]`.

        Args:
            indices: Integers from 0.
            name: Without effect; TensorFlow names the operation by it.

        Raises:
            ArgumentError: An index is out of bounds. In a step, where indices are not known yet,
                such a row is nan, or of integers the smallest value.
            ShapeError: The variable is a scalar.

        Example:
            >>> Variable([1.0, 2.0, 3.0]).sparse_read([2, 0]).tolist()
            [3.0, 1.0]

        Source:
            `tf.Variable.sparse_read`.
        """
        check_name(self.label, name)
        rows = indices
        if not hasattr(rows, "dtype"):
            rows = call_as(f"Variable {self.label!r}.sparse_read", as_array, "indices", indices)
        return gather_blocks(self, rows[..., None])

    @called("gather_nd")
    def gather_nd(self, indices: Any, name: str | None = None) -> jax.Array:
        """Return the elements or blocks at these indices.

        Shapes:
            `indices` `[..., k]` gives `[..., *shape[k:]]`.

        Args:
            indices: Integers from 0.
            name: Without effect; TensorFlow names the operation by it.

        Raises:
            ArgumentError: An index is out of bounds.
            ShapeError: The indices have more dims than the variable.

        Example:
            >>> Variable([[1.0, 2.0], [3.0, 4.0]]).gather_nd([[0, 1], [1, 0]]).tolist()
            [2.0, 3.0]

        Source:
            `tf.Variable.gather_nd`.
        """
        check_name(self.label, name)
        return gather_blocks(self, indices)

    @called("scatter_nd_add")
    def scatter_nd_add(self, indices: Any, updates: Any, name: str | None = None) -> jax.Array:
        """Add blocks to elements or blocks, addressed by index.

        In a step it combines replicas as `scatter_add` does for rows.

        Shapes:
            `indices` `[..., k]`: index of the first `k` dims; `updates` `[..., *shape[k:]]`.

        Args:
            indices: Integers from 0.
            updates: The blocks.
            name: Without effect; TensorFlow names the operation by it.

        Returns:
            The new value as the caller sees it.

        Raises:
            ShapeError: The indices or the blocks do not fit.
            ArgumentError: An index is out of bounds; inside a step such blocks are dropped.
            NotImplementedError: The variable is `ON_READ`.

        Example:
            >>> Variable([1.0, 2.0]).scatter_nd_add([[1]], [10.0]).tolist()
            [1.0, 12.0]

        Source:
            `tf.Variable.scatter_nd_add`.
        """
        return self._scatter_nd(Scatter.ADD, indices, updates, name)

    @called("scatter_nd_sub")
    def scatter_nd_sub(self, indices: Any, updates: Any, name: str | None = None) -> jax.Array:
        """Subtract blocks from elements or blocks, addressed by index.

        In a step it combines replicas as `scatter_sub` does for rows.

        Shapes:
            `indices` `[..., k]`: index of the first `k` dims; `updates` `[..., *shape[k:]]`.

        Args:
            indices: Integers from 0.
            updates: The blocks.
            name: Without effect; TensorFlow names the operation by it.

        Returns:
            The new value as the caller sees it.

        Raises:
            ShapeError: The indices or the blocks do not fit.
            ArgumentError: An index is out of bounds; inside a step such blocks are dropped.
            NotImplementedError: The variable is `ON_READ`.

        Example:
            >>> Variable([1.0, 2.0]).scatter_nd_sub([[1]], [10.0]).tolist()
            [1.0, -8.0]

        Source:
            `tf.Variable.scatter_nd_sub`.
        """
        return self._scatter_nd(Scatter.SUBTRACT, indices, updates, name)

    @called("scatter_nd_update")
    def scatter_nd_update(self, indices: Any, updates: Any, name: str | None = None) -> jax.Array:
        """Replace elements or blocks, addressed by index.

        In a step it combines replicas as `scatter_update` does for rows.

        Shapes:
            `indices` `[..., k]`: index of the first `k` dims; `updates` `[..., *shape[k:]]`.

        Args:
            indices: Integers from 0.
            updates: The blocks.
            name: Without effect; TensorFlow names the operation by it.

        Returns:
            The new value as the caller sees it.

        Raises:
            ShapeError: The indices or the blocks do not fit.
            ArgumentError: An index is out of bounds; inside a step such blocks are dropped.
            NotImplementedError: The variable is `ON_READ`.

        Example:
            >>> Variable([1.0, 2.0]).scatter_nd_update([[1]], [10.0]).tolist()
            [1.0, 10.0]

        Source:
            `tf.Variable.scatter_nd_update`.
        """
        return self._scatter_nd(Scatter.UPDATE, indices, updates, name)

    @called("scatter_nd_min")
    def scatter_nd_min(self, indices: Any, updates: Any, name: str | None = None) -> jax.Array:
        """Take the minimum of elements or blocks and the given ones, addressed by index.

        In a step it combines replicas as `scatter_min` does for rows.

        Shapes:
            `indices` `[..., k]`: index of the first `k` dims; `updates` `[..., *shape[k:]]`.

        Args:
            indices: Integers from 0.
            updates: The blocks.
            name: Without effect; TensorFlow names the operation by it.

        Returns:
            The new value as the caller sees it.

        Raises:
            ShapeError: The indices or the blocks do not fit.
            ArgumentError: An index is out of bounds; inside a step such blocks are dropped.
            NotImplementedError: The variable is `ON_READ`.

        Example:
            >>> Variable([1.0, 2.0]).scatter_nd_min([[1]], [10.0]).tolist()
            [1.0, 2.0]

        Source:
            `tf.Variable.scatter_nd_min`.
        """
        return self._scatter_nd(Scatter.MIN, indices, updates, name)

    @called("scatter_nd_max")
    def scatter_nd_max(self, indices: Any, updates: Any, name: str | None = None) -> jax.Array:
        """Take the maximum of elements or blocks and the given ones, addressed by index.

        In a step it combines replicas as `scatter_max` does for rows.

        Shapes:
            `indices` `[..., k]`: index of the first `k` dims; `updates` `[..., *shape[k:]]`.

        Args:
            indices: Integers from 0.
            updates: The blocks.
            name: Without effect; TensorFlow names the operation by it.

        Returns:
            The new value as the caller sees it.

        Raises:
            ShapeError: The indices or the blocks do not fit.
            ArgumentError: An index is out of bounds; inside a step such blocks are dropped.
            NotImplementedError: The variable is `ON_READ`.

        Example:
            >>> Variable([1.0, 2.0]).scatter_nd_max([[1]], [10.0]).tolist()
            [1.0, 10.0]

        Source:
            `tf.Variable.scatter_nd_max`.
        """
        return self._scatter_nd(Scatter.MAX, indices, updates, name)

    @called("batch_scatter_update")
    def batch_scatter_update(
        self, sparse_delta: Any, use_locking: bool = False, name: str | None = None
    ) -> jax.Array:
        """Replace rows within each batch; everything else is as for `scatter_update`.

        Shapes:
            Indices `[..., n]` count rows of the dim after `...`; values are `[..., n, *rest]`.

        Args:
            sparse_delta: `IndexedSlices`, or a pair of values and indices if the indices have
                several dims.
            use_locking: Without effect: an update changes all copies or none.
            name: Without effect; TensorFlow names the operation by it.

        Example:
            >>> v = Variable([[1.0, 2.0], [3.0, 4.0]])
            >>> v.batch_scatter_update(([[10.0], [20.0]], [[0], [1]])).tolist()
            [[10.0, 2.0], [3.0, 20.0]]

        Source:
            `tf.Variable.batch_scatter_update`.
        """
        check_name(self.label, name, use_locking)
        indices, values = locate_batch_rows(self, sparse_delta)
        return self._scatter_blocks(Scatter.UPDATE, indices, values)


@final
class VariableSlice(ValueOperators):
    """The result of `variable[index]`: the current elements, with `assign`.

    Operators, `jax.numpy` and JAX's transformations treat it as the array that it holds.

    Example:
        >>> v = Variable([1.0, 2.0, 3.0])
        >>> v[1].assign(5.0).tolist(), float(v[0] + v[1])
        ([1.0, 5.0, 3.0], 6.0)

    Source:
        `tf.Variable.__getitem__`.
    """

    __slots__ = ("_held", "_index", "_variable")

    _instead = Instead(
        "Its elements are those of the variable when it was made, and do not change.",
        "Use one index: variable[i, j].assign(value).",
    )

    def _name_with_items(self) -> str:
        return f"Variable {self._variable.label!r}[...]"

    def __init__(self, variable: BlockChanges, index: Any, held: jax.Array) -> None:
        # Only the index is kept: `assign` computes the indices of the elements when it is called.
        self._variable, self._index, self._held = variable, index, held

    def value(self) -> jax.Array:
        """Return the elements at the time when the slice was made."""
        return self._held

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the elements."""
        return tuple(self._held.shape)

    @property
    def dtype(self) -> Any:
        """Dtype of the elements."""
        return self._held.dtype

    @property
    def ndim(self) -> int:
        """Number of dims."""
        return self._held.ndim

    @property
    def size(self) -> int:
        """Number of elements."""
        return self._held.size

    @called(lambda self: f"Variable {self._variable.label!r}[...][index]")
    def __getitem__(self, index: Any) -> jax.Array:
        return get_elements(self._held, index)

    def assign(self, value: Any, name: str | None = None) -> jax.Array:
        """Replace these elements; the variable changes as by `scatter_nd_update`.

        Args:
            value: An array or number with the shape of the slice; nothing is broadcast.
            name: Without effect; TensorFlow names the operation by it.

        Returns:
            The new value of the whole variable.
        """
        return self._variable._change_elements("update", self._index, value, name)

    def assign_add(self, delta: Any, name: str | None = None) -> jax.Array:
        """Add to these elements; the variable changes as by `scatter_nd_add`."""
        return self._variable._change_elements("add", self._index, delta, name)

    def assign_sub(self, delta: Any, name: str | None = None) -> jax.Array:
        """Subtract from these elements; the variable changes as by `scatter_nd_sub`."""
        return self._variable._change_elements("sub", self._index, delta, name)

    def __repr__(self) -> str:
        return repr(self._held)

    def __format__(self, spec: str) -> str:
        return format(self._held, spec)


# Functions of JAX get its array, and what they rebuild is an array, not a slice.
jax.tree_util.register_pytree_with_keys(
    VariableSlice,
    lambda s: (((jax.tree_util.GetAttrKey("value"), s.value()),), None),
    lambda _, values: next(iter(values)),
)
