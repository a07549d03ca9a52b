"""The changes of a variable that need no program: whole arrays, and rows."""

from collections.abc import Callable
from typing import Any

import numpy as np

from jaxdist._parameter_server.server.stored import StagedVariable
from jaxdist._parameter_server.transport.layout import make_empty

Step = Callable[..., np.ndarray]

# Operations on the whole variable. None stands for the operand itself.
DENSE: dict[str, Step | None] = {"assign": None, "add": np.add, "sub": np.subtract}
# Operations on rows. With `scatter_update` the last of several rows with one id is taken.
ROWS: dict[str, Any] = {
    "scatter_add": np.add,
    "scatter_sub": np.subtract,
    "scatter_mul": np.multiply,
    "scatter_div": np.divide,
    "scatter_min": np.minimum,
    "scatter_max": np.maximum,
    "scatter_update": None,
}


def stage_dense(staged: StagedVariable, op: str, operand: np.ndarray) -> None:
    """Compute the next value of a whole variable."""
    step = DENSE[op]
    if step is None:
        # The operand may be the caller's own array, which a later change of rows must not write
        # into. A value is not written into before `make_table` copies it.
        staged.set_dense(operand)
        return
    before = np.asarray(staged.get_dense())
    value = make_empty(before.shape, before.dtype)
    step(before, operand, out=value)
    staged.set_dense(value)


def stage_rows(staged: StagedVariable, op: str, ids: np.ndarray, rows: np.ndarray) -> None:
    """Compute the next values of rows. Rows with one id are put together as TensorFlow does."""
    step = ROWS[op]
    unique, place = np.unique(ids, return_inverse=True)
    if step is None:
        last = np.zeros(len(unique), np.intp)
        last[place] = np.arange(len(ids))
        staged.set_rows(unique, rows[last])
        return
    found = staged.get_rows(unique)
    if len(unique) == len(ids):
        order = np.argsort(ids, kind="stable")
        found = np.asarray(step(found, rows[order]), dtype=found.dtype)
    elif step in (np.add, np.subtract):
        # The sum of rows with one id is one operand, in the order in which they came.
        order = np.argsort(place, kind="stable")
        starts = np.searchsorted(place[order], np.arange(len(unique)))
        summed = np.add.reduceat(rows[order], starts, axis=0, dtype=rows.dtype)
        found = np.asarray(step(found, summed), dtype=found.dtype)
    else:
        step.at(found, place, rows)
    staged.set_rows(unique, found)
