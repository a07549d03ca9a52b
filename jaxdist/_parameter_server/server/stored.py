"""`StoredVariable`: one variable on a server, how it is changed, and checks of requests."""

import collections
import dataclasses
from collections.abc import Callable, Collection, Sequence
from typing import Any

import jax
import numpy as np

from jaxdist._called import refuse, refuse_type
from jaxdist._parameter_server.protocol import Change
from jaxdist._parameter_server.transport.layout import make_empty
from jaxdist._validate import show
from jaxdist.errors import NotFoundError, ShapeError

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
_STEPS: dict[str, Step | None] = {**DENSE, **ROWS}


@dataclasses.dataclass
class StoredVariable:
    """One variable of a server. The lock of the server protects it.

    # Note [Values of a server]
    A value is an array of NumPy, or the `jax.Array` that an update program returned. Most values
    are replaced as a whole and never written into, so a read returns the array itself, without a
    copy. A variable with changes of single rows is a table: its array belongs to the server alone
    and is written into, so a read of all of it is a copy.

    Args:
        name: The name.
        value: The value.
        version: How many requests have changed it.
        creator: The client that created it.
    """

    name: str
    value: Any
    version: int = 0
    creator: str = ""
    is_table: bool = False
    applied: int = 0  # by this incarnation
    staleness: collections.Counter[int] = dataclasses.field(default_factory=collections.Counter)
    start_version: int = 0  # that of the snapshot from which this incarnation began
    snapshot: str | None = None  # the folder of that snapshot

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape."""
        return tuple(self.value.shape)

    @property
    def dtype(self) -> np.dtype[Any]:
        """The dtype."""
        return self.value.dtype

    @property
    def nbytes(self) -> int:
        """The bytes of the value."""
        return int(self.value.nbytes)

    def describe(self) -> str:
        """Return dtype and shape for error messages."""
        return f"{self.dtype}{list(self.shape)}"

    def describe_origin(self) -> str:
        """Return who created the variable, and from which snapshot it comes."""
        who = f"created by client {self.creator!r}" if self.creator else "created without a client"
        return who if self.snapshot is None else f"{who} and restored from {self.snapshot}"

    def read(self) -> np.ndarray:
        """Return the value, which no later change writes into.

        Cost:
            No copy; of a table a copy.
        """
        return self.value.copy() if self.is_table else self.peek()

    def peek(self) -> np.ndarray:
        """Return the value for use under the lock; later changes of a table write into it."""
        # While this view lives, XLA does not write into the memory of an array that is donated.
        return np.asarray(self.value)

    def make_table(self) -> np.ndarray:
        """Return an array that belongs to the server alone, so that rows are written into it."""
        if not self.is_table:
            self.value = np.array(self.value)
            self.is_table = True
        return self.value


class StagedVariable:
    """The next value of a variable in a request that is not applied yet.

    All changes of a request are computed first, and then committed by assignments, which cannot
    fail. So a request is applied as a whole or not at all.
    """

    def __init__(self, stored: StoredVariable) -> None:
        self.stored = stored
        self._value: Any = None  # None means: that of `stored`, with the rows below
        self._rows: list[tuple[np.ndarray, np.ndarray]] = []  # sorted ids, and their new rows

    def get_dense(self) -> Any:
        """Return the whole value, as an array of NumPy or JAX, to compute the next one from it."""
        if self._value is None and not self._rows:
            return self.stored.value
        if self._value is None:
            # A change of rows and then one of the whole variable, in one request.
            value = self.stored.peek().copy()
            for ids, rows in self._rows:
                value[ids] = rows
            self.set_dense(value)
        return self._value

    def set_dense(self, value: Any) -> None:
        """Set the whole value."""
        self._value = value
        self._rows.clear()

    def get_rows(self, ids: np.ndarray) -> np.ndarray:
        """Return a copy of rows; `ids` are unique and in ascending order."""
        base = self.stored.peek() if self._value is None else np.asarray(self._value)
        found = base[ids]
        for staged_ids, rows in self._rows:
            at = np.searchsorted(staged_ids, ids)
            at[at == len(staged_ids)] = 0
            same = staged_ids[at] == ids
            found[same] = rows[at[same]]
        return found

    def set_rows(self, ids: np.ndarray, rows: np.ndarray) -> None:
        """Set rows; `ids` are unique and in ascending order."""
        if self._value is not None:
            value = np.array(self._value)
            value[ids] = rows
            self._value = value
        elif len(ids):
            # Here, since a copy may fail for lack of memory, and the commit must not.
            self.stored.make_table()
            self._rows.append((ids, rows))

    def commit(self) -> None:
        """Make the staged value the value of the variable."""
        if self._value is not None:
            self.stored.value, self.stored.is_table = self._value, False
        for ids, rows in self._rows:
            self.stored.value[ids] = rows


def put_on_cpu(value: Any) -> jax.Array:
    """Return the value as an array of JAX on the CPU, which update programs may donate."""
    if isinstance(value, jax.Array):
        return value
    # A copy: the memory of an array of NumPy may be that of a reader.
    with jax.enable_x64(True):
        return jax.device_put(value, jax.devices("cpu")[0], may_alias=False)


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
    """Compute the next values of rows. Rows with the same id are combined as in TensorFlow."""
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
        # The sum of rows with one id is one operand; it adds them in the order of the request.
        order = np.argsort(place, kind="stable")
        starts = np.searchsorted(place[order], np.arange(len(unique)))
        summed = np.add.reduceat(rows[order], starts, axis=0, dtype=rows.dtype)
        found = np.asarray(step(found, summed), dtype=found.dtype)
    else:
        step.at(found, place, rows)
    staged.set_rows(unique, found)


PROGRAM = "program:"
_LONGEST_NAME = 512


def check_name(what: str, name: Any) -> str:
    """Check that a name is a string of printable characters."""
    if not isinstance(name, str) or not 0 < len(name) <= _LONGEST_NAME or not name.isprintable():
        raise refuse(
            f"{what}={show(name)}.",
            f"{what} is a string of 1 to {_LONGEST_NAME} printable characters.",
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
            "Create it first, or ask the server that has it.",
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
    elif change.op in ROWS:
        _check_count(change, 2)
        ids = check_ids(variable, operands[0])
        rows = check_array(f"the rows of {change.op}", operands[1])
        _check_like(variable, change, rows, (len(ids), *variable.shape[1:]))
    elif not change.op.startswith(PROGRAM) or change.op.removeprefix(PROGRAM) not in programs:
        known = ", ".join([*DENSE, *ROWS, *(PROGRAM + key for key in programs)])
        raise refuse(
            f"op={show(change.op)} for {change.name!r}.",
            f"The operations of this server are {known}.",
            "Register an update program first: register_update(key, ...).",
        )
    check_arithmetic(change.op, variable.name, variable.dtype, variable.shape)


def check_arithmetic(op: str, name: str, dtype: np.dtype[Any], shape: Sequence[int]) -> None:
    """Check that the numbers of a variable can be changed by an operation.

    Args:
        op: The operation.
        name: The variable.
        dtype: Its dtype.
        shape: Its shape.
    """
    if dtype == np.bool_ and _STEPS.get(op) is not None:
        rule = "Bools have no arithmetic."
        remedy = "Assign the new value, or create the variable with an integer dtype."
    elif op == "scatter_div" and not jax.dtypes.issubdtype(dtype, np.inexact):
        rule = "A division gives fractions, which integers cannot hold."
        remedy = "Create the variable with a float dtype."
    else:
        return
    # Only now: this runs for each change, and the text of a dtype takes longer than the checks.
    raise refuse(f"op={op!r} for {name!r}, which is {dtype}{list(shape)}.", rule, remedy)


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
