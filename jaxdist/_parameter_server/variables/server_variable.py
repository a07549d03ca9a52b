"""`ServerVariable`: a variable whose value is on a parameter server."""

import weakref
from typing import Any, Protocol

import numpy as np

from jaxdist._hooks import GET_CALL_CONTEXT
from jaxdist._mesh import ReplicaMesh
from jaxdist._parameter_server.server import Change as ServerChange
from jaxdist._parameter_server.variables.ports import Port, make_zero
from jaxdist._values import (
    Change,
    Scatter,
    Variable,
    VariablePlacement,
    cast_to_variable,
    current_binding,
)
from jaxdist.errors import UnsupportedError

_OPS = {Change.ASSIGN: "assign", Change.ADD: "add", Change.SUBTRACT: "sub"}


class Storage(Protocol):
    """The servers, as a variable uses them."""

    def create(self, label: str, value: np.ndarray) -> str:
        """Create a variable, and return its name on the servers."""
        ...

    def read(self, name: str) -> np.ndarray:
        """Return the value of a variable."""
        ...

    def read_rows(self, name: str, ids: np.ndarray) -> np.ndarray:
        """Return rows of a variable."""
        ...

    def change(self, change: ServerChange) -> None:
        """Apply one change."""
        ...


class ServerVariable(Variable):
    """A `Variable` whose value is on a parameter server.

    The scope of a `ParameterServerStrategy` makes it. Outside of a scheduled function each read is
    one exchange with the server, and each change is one that the server applies to the value that
    it has then: two workers that call `assign_add` both count. In a scheduled function reads and
    changes are inputs and results of its program. A read there returns the value that the worker
    got at the start, with the function's own changes.

    Cost:
        Outside of a scheduled function: the bytes of the variable for each read or change.

    Source:
        `tf.distribute.ParameterServerStrategy`: variables on `/job:ps`.
    """

    __slots__ = ("_added", "_added_in", "_assigned", "_remote_name", "_storage", "_zero")

    def _hold_initial(self, array: Any, layout: ReplicaMesh | None) -> None:
        strategy = self._strategy
        self._storage: Storage = strategy.storage
        shape, dtype = tuple(array.shape), np.dtype(array.dtype)
        # A server has one value, so `ON_READ` is treated as a variable that aggregates.
        sharding = None if layout is None else layout.replicated
        self._home = VariablePlacement(layout, sharding, False, shape, dtype)
        self._zero = make_zero(shape, dtype)
        ports = strategy.layout
        self._added = Port(self._label, ports, shape, dtype, self._aggregation, adds_to=self)
        self._assigned = Port(self._label, ports, (), np.int32)
        self._added_in: Any = _nowhere
        self._remote_name = self._storage.create(self._label, np.asarray(array))

    @property
    def remote_name(self) -> str:
        """The name of the variable on the servers."""
        return self._remote_name

    @property
    def added(self) -> Port:
        """What a traced closure adds to it."""
        return self._added

    @property
    def assigned(self) -> Port:
        """How often a traced closure assigns it."""
        return self._assigned

    # Reading

    @property
    def held(self) -> Any:
        """The value: in a trace the traced one, else the one that the server has."""
        binding = current_binding()
        return self._held if binding is None else binding.held(self, self._zero)

    @held.setter
    def held(self, array: Any) -> None:
        binding = current_binding()
        if binding is None:
            self._held = array
        else:
            binding.hold(self, array)

    # `get_arrays` and `set_arrays` read and write this attribute outside of a trace.
    @property
    def _held(self) -> Any:
        value = self._storage.read(self._remote_name)
        return self._home.copy_to_all(value)

    @_held.setter
    def _held(self, array: Any) -> None:
        self._send("assign", np.asarray(array))

    def value(self) -> Any:
        """Return the value that the server has; in a scheduled function, the worker's."""
        held = super().value()
        binding = current_binding()
        if binding is None or self._added_in() is not binding:
            return held
        return held + self._added.value()

    def read_rows(self, ids: Any) -> Any:
        """Return rows of the value. Only these rows move.

        Args:
            ids: The numbers of the rows, `[...]`; the result is `[..., *shape[1:]]`.
        """
        if self._is_traced():
            return super().value()[ids]
        ids = np.asarray(ids)
        rows = self._storage.read_rows(self._remote_name, ids.ravel())
        return rows.reshape((*ids.shape, *self.shape[1:]))

    def _is_traced(self) -> bool:
        return current_binding() is not None or GET_CALL_CONTEXT.call().in_step is not None

    # Changing

    def _update(
        self, change: Change, value: Any, use_locking: Any, name: Any, *, read_value: bool
    ) -> Any:
        if not self._is_traced():
            given = cast_to_variable(self, change.value, value)
            self._send(_OPS[change], np.broadcast_to(np.asarray(given), self.shape))
            return self.value() if read_value else None
        if change is Change.ASSIGN:
            self._assigned.assign_add(1, read_value=False)
            if self._added_in() is current_binding():
                self._added.assign(self._zero, read_value=False)
            return super()._update(change, value, use_locking, name, read_value=read_value)
        self._added_in = weakref.ref(current_binding())
        self._added._update(change, value, use_locking, name, read_value=False)
        return self.value() if read_value else None

    def _apply_blocks(self, kind: Scatter, blocks: Any) -> Any:
        raise UnsupportedError(f"{kind} {blocks}")

    def _send(self, op: str, *operands: np.ndarray) -> None:
        self._storage.change(ServerChange(op, self._remote_name, operands))


def _nowhere() -> None:
    """Stand for the reference to a trace that has ended."""
