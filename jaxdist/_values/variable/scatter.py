"""The operations that change some rows of a variable, and their checks."""

import enum
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxdist._called import called, refuse
from jaxdist._values.access import VariableAggregation
from jaxdist._values.indexed_slices import IndexedSlices, as_indexed_slices
from jaxdist._values.variable.checks import check_value
from jaxdist._values.variable.division import divide_rows
from jaxdist._values.variable.nd import Blocks
from jaxdist.errors import ArgumentError, UnsupportedError


class Scatter(enum.Enum):
    """How given rows change those of a variable; repeated indices apply one after the other."""

    ADD = "scatter_add"
    SUBTRACT = "scatter_sub"
    MULTIPLY = "scatter_mul"
    DIVIDE = "scatter_div"
    MIN = "scatter_min"
    MAX = "scatter_max"
    UPDATE = "scatter_update"

    @property
    def is_choice(self) -> bool:
        """Whether the result is one of several values instead of their combination."""
        return self in (Scatter.MIN, Scatter.MAX, Scatter.UPDATE)

    def apply(self, before: jax.Array, slices: IndexedSlices | Blocks) -> jax.Array:
        """Return the array after the change, which leaves out rows that the array does not have."""
        is_nd = isinstance(slices, Blocks)
        places = tuple(jnp.moveaxis(slices.indices, -1, 0)) if is_nd else (slices.indices,)
        if self is Scatter.DIVIDE:
            return divide_rows(before, places, slices.values)
        at = before.at[places]
        # JAX names its methods like the members, except for one.
        change = at.set if self is Scatter.UPDATE else getattr(at, self.name.lower())
        after: jax.Array = change(slices.values, mode="drop", wrap_negative_indices=False)
        return after


_OF_SCALARS = {"scatter_add": "assign_add", "scatter_sub": "assign_sub"}


@called(lambda kind: kind.value)
def check_slices(variable: Any, kind: Scatter, given: Any) -> IndexedSlices:
    """Check rows for a variable, and return them in its dtype."""
    slices = as_indexed_slices(variable.label, given)
    if not variable.shape:
        raise ArgumentError(
            f"Variable {variable.label!r}.{kind.value} was called, and the variable is a scalar."
            "\n\nIt changes rows of an array, and a scalar has no rows.\n\n"
            f"Use variable.{_OF_SCALARS.get(kind.value, 'assign')}."
        )
    check_value(
        variable.label,
        "sparse_delta",
        slices.values,
        (int(slices.indices.shape[0]), *variable.shape[1:]),
        variable.dtype,
    )
    _check_rows(variable, kind, slices.indices)
    return IndexedSlices(slices.values.astype(variable.dtype), slices.indices)


def check_can_scatter(variable: Any, kind: Scatter, *, of_replicas: bool) -> None:
    """Raise if a scatter has no meaning for this variable, or not the meaning of a dense change."""
    if variable.home.per_replica:
        raise UnsupportedError(
            f"Variable {variable.label!r}.{kind.value}: the variable has its own value on each "
            "replica (VariableSynchronization.ON_READ).\n\n"
            "Rows of such variables are not changed in place.\n\n"
            "Assign the whole value: variable.assign(variable.value().at[indices].add(rows))."
        )
    combines = variable.aggregation in (VariableAggregation.SUM, VariableAggregation.MEAN)
    if of_replicas and kind.is_choice and combines:
        raise UnsupportedError(
            f"Variable {variable.label!r}.{kind.value} was called inside a replica, and the "
            f"variable has VariableAggregation.{variable.aggregation.name}.\n\n"
            "It takes one of several values for a row, which has no sum or mean.\n\n"
            "Use VariableAggregation.NONE or ONLY_FIRST_REPLICA."
        )


@called(lambda variable, kind: f"Variable {variable.label!r}.{kind.value}")
def _check_rows(variable: Any, kind: Scatter, indices: Any) -> None:
    """Raise if an index is out of bounds. Traced ones are unknown; those rows are left out."""
    if isinstance(indices, jax.core.Tracer):
        return
    count = variable.shape[0]
    found = np.asarray(indices)
    wrong = found[(found < 0) | (found >= count)]
    if wrong.size:
        raise refuse(
            f"the row {int(wrong[0])}, and the variable has {count} rows: {variable.dtype}"
            f"{list(variable.shape)}.",
            "Rows are numbered from 0.",
            (
                f"Pass indices from 0 to {count - 1}."
                if count
                else "Leave the call out: the variable has no rows."
            ),
        )


class RowChanges:
    """A base class with the methods of a variable that change some of its rows."""

    __slots__ = ()

    def _scatter(self, kind: Scatter, given: Any, use_locking: Any, name: Any) -> jax.Array:
        raise NotImplementedError

    def scatter_add(
        self, sparse_delta: Any, use_locking: bool = False, name: str | None = None
    ) -> jax.Array:
        """Add rows to some rows of the variable.

        In a step, the aggregation decides which rows are applied. SUM: the rows of all replicas,
        one after the other. MEAN: the same rows, divided by the number of replicas.
        ONLY_FIRST_REPLICA: the rows of the first replica. NONE: the rows of all replicas must be
        proved equal.

        Cost:
            In a step with SUM or MEAN, an all-gather of the rows.

        Args:
            sparse_delta: `IndexedSlices`, or a `BCOO` of whole rows.
            use_locking: Without effect: an update changes all copies or none.
            name: Without effect; TensorFlow names the operation by it.

        Returns:
            The new value as the caller sees it.

        Raises:
            ShapeError: The rows have another shape.
            ArgumentError: An index is out of bounds; inside a step such rows are dropped.
            NotImplementedError: The variable is `ON_READ`.

        Example:
            >>> Variable([1.0, 2.0]).scatter_add(IndexedSlices([10.0], [1])).tolist()
            [1.0, 12.0]
        """
        return self._scatter(Scatter.ADD, sparse_delta, use_locking, name)

    def scatter_sub(
        self, sparse_delta: Any, use_locking: bool = False, name: str | None = None
    ) -> jax.Array:
        """Subtract rows from some rows of the variable.

        Everything else is as for `scatter_add`.

        Example:
            >>> Variable([1.0, 2.0]).scatter_sub(IndexedSlices([10.0], [1])).tolist()
            [1.0, -8.0]
        """
        return self._scatter(Scatter.SUBTRACT, sparse_delta, use_locking, name)

    def scatter_mul(
        self, sparse_delta: Any, use_locking: bool = False, name: str | None = None
    ) -> jax.Array:
        """Multiply some rows of the variable.

        Everything else is as for `scatter_add`.

        Example:
            >>> Variable([1.0, 2.0]).scatter_mul(IndexedSlices([10.0], [1])).tolist()
            [1.0, 20.0]
        """
        return self._scatter(Scatter.MULTIPLY, sparse_delta, use_locking, name)

    def scatter_div(
        self, sparse_delta: Any, use_locking: bool = False, name: str | None = None
    ) -> jax.Array:
        """Divide some rows of the variable.

        Everything else is as for `scatter_add`.

        Example:
            >>> Variable([1.0, 2.0]).scatter_div(IndexedSlices([4.0], [1])).tolist()
            [1.0, 0.5]
        """
        return self._scatter(Scatter.DIVIDE, sparse_delta, use_locking, name)

    def scatter_min(
        self, sparse_delta: Any, use_locking: bool = False, name: str | None = None
    ) -> jax.Array:
        """Take the minimum of some rows of the variable and the given ones.

        Everything else is as for `scatter_add`; SUM and MEAN are refused in a step.

        Example:
            >>> Variable([1.0, 2.0]).scatter_min(IndexedSlices([10.0], [1])).tolist()
            [1.0, 2.0]
        """
        return self._scatter(Scatter.MIN, sparse_delta, use_locking, name)

    def scatter_max(
        self, sparse_delta: Any, use_locking: bool = False, name: str | None = None
    ) -> jax.Array:
        """Take the maximum of some rows of the variable and the given ones.

        Everything else is as for `scatter_add`; SUM and MEAN are refused in a step.

        Example:
            >>> Variable([1.0, 2.0]).scatter_max(IndexedSlices([10.0], [1])).tolist()
            [1.0, 10.0]
        """
        return self._scatter(Scatter.MAX, sparse_delta, use_locking, name)

    def scatter_update(
        self, sparse_delta: Any, use_locking: bool = False, name: str | None = None
    ) -> jax.Array:
        """Replace some rows of the variable.

        Everything else is as for `scatter_add`; SUM and MEAN are refused in a step.

        Example:
            >>> Variable([1.0, 2.0]).scatter_update(IndexedSlices([10.0], [1])).tolist()
            [1.0, 10.0]
        """
        return self._scatter(Scatter.UPDATE, sparse_delta, use_locking, name)
