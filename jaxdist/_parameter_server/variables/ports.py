"""Ports: variables of one traced closure that are its further inputs and results.

# Note [Ports]
A closure is traced once (`closures`). Inside `strategy.run` the trace is nested, and the only
values that leave it are results and assigned variables. So what a closure sends to the servers
leaves it through variables that exist only for the trace: the amount that is added to a variable,
a gradient, rows and their ids. A port has no value outside of a trace; the one that it has at the
start of a trace is zero.

A change may be in a branch that is not taken, or be made twice. So each port that must not be
written twice has a `count`, which the worker looks at before it sends the change.
"""

import dataclasses
from typing import Any, NoReturn

import numpy as np

from jaxdist._mesh import ReplicaMesh
from jaxdist._values import (
    Variable,
    VariableAggregation,
    VariablePlacement,
    VariableSynchronization,
    current_binding,
)
from jaxdist.errors import ContextError


class Distant(Variable):
    """A variable whose value is not in this process; in a trace it is an input of the program."""

    __slots__ = ("_zero",)

    @property
    def held(self) -> Any:
        """The value: in a trace the traced one, else `_held`."""
        binding = current_binding()
        return self._held if binding is None else binding.held(self, self._zero)

    @held.setter
    def held(self, array: Any) -> None:
        binding = current_binding()
        if binding is None:
            self._held = array
        else:
            binding.hold(self, array)


class Port(Distant):
    """A variable of a traced closure. Its first value is zero.

    Args:
        label: The name of the variable that it belongs to, for messages.
        layout: The replicas that run the closure.
        shape: Its shape.
        dtype: Its dtype.
        aggregation: How the values of the replicas become one.
        per_replica: Whether each replica has a value of its own.
        role: What the closure sends by it, or reads by it.
    """

    __slots__ = ("role",)

    def __new__(cls, *_: Any, **__: Any) -> Any:
        return object.__new__(cls)

    def __init__(
        self,
        label: str,
        layout: ReplicaMesh,
        shape: tuple[int, ...],
        dtype: Any,
        aggregation: VariableAggregation = VariableAggregation.NONE,
        *,
        per_replica: bool = False,
        role: Any = None,
    ) -> None:
        # The checks of `Variable` refuse to make one in a step, where ports are made.
        self._label, self._strategy, self._trainable = label, None, False
        self._aggregation = aggregation
        self._synchronization = VariableSynchronization.ON_WRITE
        sharding = layout.per_replica if per_replica else layout.replicated
        self._home = VariablePlacement(layout, sharding, per_replica, tuple(shape), np.dtype(dtype))
        self._zero = make_zero(self._home.global_shape, dtype)
        self.role = role

    # `get_arrays` and `set_arrays` read and write this attribute outside of a trace.
    @property
    def _held(self) -> Any:
        return self._refuse()

    @_held.setter
    def _held(self, array: Any) -> None:
        self._refuse()

    def _refuse(self) -> NoReturn:
        raise ContextError(
            f"Variable {self._label!r} of a parameter server was changed, or rows of it were read, "
            "in a jaxdist.function that no worker runs.\n\n"
            "Rows are requested before a whole scheduled function runs, and changes are sent after "
            "it.\n\n"
            "Use coordinator.schedule(fn, args) or strategy.run(fn, args). Or pass the rows: "
            "variable.sparse_read(ids)."
        )


@dataclasses.dataclass(frozen=True, eq=False)
class Addition:
    """The role of a port whose value is added to a variable."""

    variable: Any


@dataclasses.dataclass(frozen=True, eq=False)
class ServerUpdate:
    """The role of the count of a change that only the server computes: of rows, or by a program.

    Args:
        variable: The variable.
        op: The operation of the server.
        operands: The ports of its operands. Of rows they are numbers and values; the number
            `shard_rows.NO_ROW` changes nothing.
        what: What the change is called in messages.
    """

    variable: Any
    op: str
    operands: tuple[Port, ...]
    what: str


@dataclasses.dataclass(frozen=True, eq=False)
class WorkerIndex:
    """The role of the index of the worker that runs the closure."""


@dataclasses.dataclass(frozen=True, eq=False)
class RowRead:
    """The role of the rows that a closure reads, and that the worker asks for before it runs.

    Args:
        variable: The variable.
        ids: The port of the rows' numbers.
    """

    variable: Any
    ids: Port


def make_zero(shape: tuple[int, ...], dtype: Any) -> np.ndarray:
    """Return an array of zeros that takes no memory, for traces."""
    return np.broadcast_to(np.zeros((), dtype), shape)
