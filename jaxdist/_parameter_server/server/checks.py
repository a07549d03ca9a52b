"""Checks of what a caller sends, before anything is changed."""

from collections.abc import Collection, Sequence
from typing import Any

import jax
import numpy as np

from jaxdist._called import refuse, refuse_type
from jaxdist._parameter_server.protocol import Change
from jaxdist._parameter_server.server.stored import DENSE, ROWS, StoredVariable
from jaxdist._validate import show
from jaxdist.errors import ArgumentError, NotFoundError, ShapeError

PROGRAM = "program:"
_LONGEST_NAME = 512


def check_name(what: str, name: Any) -> str:
    """Check that a name is a text of printable characters."""
    if not isinstance(name, str) or not 0 < len(name) <= _LONGEST_NAME or not name.isprintable():
        raise refuse(
            f"{what}={show(name)}.",
            f"{what} is a text of 1 to {_LONGEST_NAME} printable characters.",
            "Pass for instance 'dense/kernel'.",
        )
    return name


def check_array(what: str, array: Any) -> np.ndarray:
    """Check that a value is an array of NumPy whose dtype JAX has too."""
    if not isinstance(array, np.ndarray) or not _is_valid_dtype(array.dtype):
        raise refuse_type(
            f"{what}={show(array)}.",
            f"{what} is an array of NumPy, of bools, numbers, or a dtype of ml_dtypes.",
            "Pass np.asarray(value).",
        )
    return array


def _is_valid_dtype(dtype: np.dtype[Any]) -> bool:
    # bfloat16 and its like have the kind "V", as structured arrays and raw bytes do.
    return dtype.kind in "biufc" or jax.dtypes.issubdtype(dtype, np.number)


def find_variable(stored: dict[str, StoredVariable], name: str) -> StoredVariable:
    """Return a variable by its name."""
    found = stored.get(name) if isinstance(name, str) else None
    if found is None:
        there = ", ".join(map(repr, list(stored)[:10])) or "none"
        more = f" and {len(stored) - 10} more" if len(stored) > 10 else ""
        raise refuse(
            f"name={show(name)}, and this server has no such variable.",
            f"It has {there}{more}.",
            "Create it first, or ask the server on which it is.",
            kind=NotFoundError,
        )
    return found


def check_ids(variable: StoredVariable, ids: Any) -> np.ndarray:
    """Check that ids are a list of rows of a variable."""
    what = f"ids of {variable.name!r}"
    ids = check_array(what, ids)
    if ids.dtype.kind not in "iu" or ids.ndim != 1:
        raise refuse_type(
            f"{what} of {ids.dtype}{list(ids.shape)}.",
            "ids are a list of integers: an array with one dim.",
            "Pass np.ravel(ids).astype(np.int64).",
        )
    if not variable.shape:
        raise refuse(
            f"{what}, which is {variable.describe()}.",
            "Rows are along the first dim, and this variable has no dims.",
            "Read or change it as a whole.",
            kind=ShapeError,
        )
    wrong = ids[(ids < 0) | (ids >= variable.shape[0])]
    if wrong.size:
        raise refuse(
            f"{wrong.size} {what} out of range, the first is {wrong[0]}.",
            f"{variable.name!r} has {variable.shape[0]} rows: ids are from 0 to "
            f"{variable.shape[0] - 1}.",
            "Clip the ids, or create the variable with more rows.",
        )
    return ids


def check_change(variable: StoredVariable, change: Change, programs: Collection[str]) -> None:
    """Check the operation, the number of operands, shapes, dtypes and ids of a change.

    Operands of an update program are checked by the program itself.
    """
    operands: Sequence[Any] = change.operands
    if change.op in DENSE:
        _check_count(change, 1)
        value = check_array(f"the operand of {change.op}", operands[0])
        _check_like(variable, change, value, variable.shape)
        if change.op != "assign" and variable.dtype == np.bool_:
            raise _make_bool_error(variable, change)
    elif change.op in ROWS:
        _check_count(change, 2)
        ids = check_ids(variable, operands[0])
        rows = check_array(f"the rows of {change.op}", operands[1])
        _check_like(variable, change, rows, (len(ids), *variable.shape[1:]))
        if change.op != "scatter_update" and variable.dtype == np.bool_:
            raise _make_bool_error(variable, change)
        if change.op == "scatter_div" and not jax.dtypes.issubdtype(variable.dtype, np.inexact):
            raise refuse(
                f"op='scatter_div' for {variable.name!r}, which is {variable.describe()}.",
                "A division gives fractions, which integers cannot hold.",
                "Create the variable with a float dtype.",
            )
    elif not change.op.startswith(PROGRAM) or change.op.removeprefix(PROGRAM) not in programs:
        known = ", ".join([*DENSE, *ROWS, *(PROGRAM + key for key in programs)])
        raise refuse(
            f"op={show(change.op)} for {change.name!r}.",
            f"The operations of this server are {known}.",
            "Register an update program first: register_update(key, ...).",
        )


def _check_count(change: Change, wanted: int) -> None:
    if len(change.operands) != wanted:
        raise refuse(
            f"{len(change.operands)} operands of {change.op} for {change.name!r}.",
            f"{change.op} has {wanted}: {'the value' if wanted == 1 else 'the ids and the rows'}.",
            f"Pass {wanted}.",
        )


def _check_like(
    variable: StoredVariable, change: Change, array: np.ndarray, shape: Sequence[int]
) -> None:
    if array.shape != tuple(shape) or array.dtype != variable.dtype:
        raise refuse(
            f"{change.op} of {variable.name!r} with {array.dtype}{list(array.shape)}.",
            f"The variable is {variable.describe()}, so {change.op} takes {variable.dtype}"
            f"{list(shape)}.",
            f"Convert the operand: np.asarray(value, {str(variable.dtype)!r}).",
            kind=ShapeError,
        )


def _make_bool_error(variable: StoredVariable, change: Change) -> ArgumentError:
    return refuse(
        f"op={change.op!r} for {variable.name!r}, which is {variable.describe()}.",
        "There is no arithmetic with bools.",
        "Assign the new value, or create the variable with an integer dtype.",
    )
