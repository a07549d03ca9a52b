"""Checks of what a caller sends, before anything is changed."""

from collections.abc import Collection, Sequence
from typing import Any

import jax
import numpy as np

from jaxdist._parameter_server.protocol import Change
from jaxdist._parameter_server.server.stored import DENSE, ROWS, StoredVariable
from jaxdist._validate import show
from jaxdist.errors import ArgumentError, ArgumentTypeError, NotFoundError, ShapeError

PROGRAM = "program:"
_LONGEST_NAME = 512


def check_name(caller: str, what: str, name: Any) -> str:
    """Check that a name is a text of printable characters."""
    if not isinstance(name, str) or not 0 < len(name) <= _LONGEST_NAME or not name.isprintable():
        raise ArgumentError(
            f"{caller} was given {what}={show(name)}.\n\n"
            f"{what} is a text of 1 to {_LONGEST_NAME} printable characters.\n\n"
            "Pass for instance 'dense/kernel'."
        )
    return name


def check_array(caller: str, what: str, array: Any) -> np.ndarray:
    """Check that a value is an array of NumPy whose dtype JAX has too."""
    if not isinstance(array, np.ndarray) or not _is_valid_dtype(array.dtype):
        raise ArgumentTypeError(
            f"{caller} was given {what}={show(array)}.\n\n"
            f"{what} is an array of NumPy, of bools, numbers, or a dtype of ml_dtypes.\n\n"
            "Pass np.asarray(value)."
        )
    return array


def _is_valid_dtype(dtype: np.dtype[Any]) -> bool:
    # bfloat16 and its like have the kind "V", as structured arrays and raw bytes do.
    return dtype.kind in "biufc" or jax.dtypes.issubdtype(dtype, np.number)


def find_variable(caller: str, stored: dict[str, StoredVariable], name: str) -> StoredVariable:
    """Return a variable by its name."""
    found = stored.get(name) if isinstance(name, str) else None
    if found is None:
        there = ", ".join(map(repr, list(stored)[:10])) or "none"
        more = f" and {len(stored) - 10} more" if len(stored) > 10 else ""
        raise NotFoundError(
            f"{caller} was given name={show(name)}, and this server has no such variable.\n\n"
            f"It has {there}{more}.\n\n"
            "Create it first, or ask the server on which it is."
        )
    return found


def check_ids(caller: str, variable: StoredVariable, ids: Any) -> np.ndarray:
    """Check that ids are a list of rows of a variable."""
    what = f"ids of {variable.name!r}"
    ids = check_array(caller, what, ids)
    if ids.dtype.kind not in "iu" or ids.ndim != 1:
        raise ArgumentTypeError(
            f"{caller} was given {what} of {ids.dtype}{list(ids.shape)}.\n\n"
            "ids are a list of integers: an array with one dim.\n\n"
            "Pass np.ravel(ids).astype(np.int64)."
        )
    if not variable.shape:
        raise ShapeError(
            f"{caller} was given {what}, which is {variable.describe()}.\n\n"
            "Rows are along the first dim, and this variable has no dims.\n\n"
            "Read or change it as a whole."
        )
    wrong = ids[(ids < 0) | (ids >= variable.shape[0])]
    if wrong.size:
        raise ArgumentError(
            f"{caller} was given {wrong.size} {what} out of range, the first is {wrong[0]}.\n\n"
            f"{variable.name!r} has {variable.shape[0]} rows: ids are from 0 to "
            f"{variable.shape[0] - 1}.\n\n"
            "Clip the ids, or create the variable with more rows."
        )
    return ids


def check_change(
    caller: str, variable: StoredVariable, change: Change, programs: Collection[str]
) -> None:
    """Check the operation, the number of operands, shapes, dtypes and ids of a change.

    Operands of an update program are checked by the program itself.
    """
    operands: Sequence[Any] = change.operands
    if change.op in DENSE:
        _check_count(caller, change, 1)
        value = check_array(caller, f"the operand of {change.op}", operands[0])
        _check_like(caller, variable, change, value, variable.shape)
        if change.op != "assign" and variable.dtype == np.bool_:
            raise _make_bool_error(caller, variable, change)
    elif change.op in ROWS:
        _check_count(caller, change, 2)
        ids = check_ids(caller, variable, operands[0])
        rows = check_array(caller, f"the rows of {change.op}", operands[1])
        _check_like(caller, variable, change, rows, (len(ids), *variable.shape[1:]))
        if change.op != "scatter_update" and variable.dtype == np.bool_:
            raise _make_bool_error(caller, variable, change)
        if change.op == "scatter_div" and not jax.dtypes.issubdtype(variable.dtype, np.inexact):
            raise ArgumentError(
                f"{caller} was given op='scatter_div' for {variable.name!r}, which is "
                f"{variable.describe()}.\n\n"
                "A division gives fractions, which integers cannot hold.\n\n"
                "Create the variable with a float dtype."
            )
    elif not change.op.startswith(PROGRAM) or change.op.removeprefix(PROGRAM) not in programs:
        known = ", ".join([*DENSE, *ROWS, *(PROGRAM + key for key in programs)])
        raise ArgumentError(
            f"{caller} was given op={show(change.op)} for {change.name!r}.\n\n"
            f"The operations of this server are {known}.\n\n"
            "Register an update program first: register_update(key, ...)."
        )


def _check_count(caller: str, change: Change, wanted: int) -> None:
    if len(change.operands) != wanted:
        raise ArgumentError(
            f"{caller} was given {len(change.operands)} operands of {change.op} for "
            f"{change.name!r}.\n\n"
            f"{change.op} has {wanted}: {'the value' if wanted == 1 else 'the ids and the rows'}."
            f"\n\nPass {wanted}."
        )


def _check_like(
    caller: str, variable: StoredVariable, change: Change, array: np.ndarray, shape: Sequence[int]
) -> None:
    if array.shape != tuple(shape) or array.dtype != variable.dtype:
        raise ShapeError(
            f"{caller} was given {change.op} of {variable.name!r} with "
            f"{array.dtype}{list(array.shape)}.\n\n"
            f"The variable is {variable.describe()}, so {change.op} takes "
            f"{variable.dtype}{list(shape)}.\n\n"
            f"Convert the operand: np.asarray(value, {str(variable.dtype)!r})."
        )


def _make_bool_error(caller: str, variable: StoredVariable, change: Change) -> ArgumentError:
    return ArgumentError(
        f"{caller} was given op={change.op!r} for {variable.name!r}, which is "
        f"{variable.describe()}.\n\n"
        "There is no arithmetic with bools.\n\n"
        "Assign the new value, or create the variable with an integer dtype."
    )
