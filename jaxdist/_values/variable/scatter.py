"""The operations that change some rows of a variable, and their checks."""

import enum
from typing import Any

import jax
import numpy as np

from jaxdist._called import called, refuse
from jaxdist._values.indexed_slices import IndexedSlices, as_indexed_slices
from jaxdist._values.variable.checks import check_fits
from jaxdist._values.variable.enums import VariableAggregation
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
        places = slices.indices
        is_nd = isinstance(slices, Blocks)
        at = before.at[tuple(places[:, k] for k in range(places.shape[1])) if is_nd else places]
        change = {
            Scatter.ADD: at.add,
            Scatter.SUBTRACT: at.subtract,
            Scatter.MULTIPLY: at.multiply,
            Scatter.DIVIDE: at.divide,
            Scatter.MIN: at.min,
            Scatter.MAX: at.max,
            Scatter.UPDATE: at.set,
        }[self]
        # The division of integers gives floats; a variable keeps its dtype.
        after: jax.Array = change(slices.values, mode="drop", wrap_negative_indices=False)
        return after.astype(before.dtype)


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
    check_fits(
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
            "replica (VariableSynchronization.ON_READ).\n\nRows of such variables are not changed "
            "in place.\n\nAssign the whole: variable.assign(variable.value().at[indices].add(rows))"
        )
    combines = variable.aggregation in (VariableAggregation.SUM, VariableAggregation.MEAN)
    if of_replicas and kind.is_choice and combines:
        raise UnsupportedError(
            f"Variable {variable.label!r}.{kind.value} was called inside a replica, and the "
            f"variable has VariableAggregation.{variable.aggregation.name}.\n\n"
            "Of several values for one row it takes one; there is no sum or mean of that.\n\n"
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
                else "Leave the call out, since there is no row to change."
            ),
        )
