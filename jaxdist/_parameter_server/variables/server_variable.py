"""`ServerVariable`: a variable whose value is on a parameter server."""

import contextlib
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxdist._called import called
from jaxdist._mesh import ReplicaMesh
from jaxdist._parameter_server.protocol import Change as ServerChange
from jaxdist._parameter_server.server import check_arithmetic
from jaxdist._parameter_server.variables.lent import Lent
from jaxdist._parameter_server.variables.make_shards import (
    ExportedInitial,
    export_initial,
    is_known_form,
)
from jaxdist._parameter_server.variables.ports import (
    Addition,
    Distant,
    Port,
    RowRead,
    ServerUpdate,
    make_zero,
)
from jaxdist._parameter_server.variables.servers import Servers
from jaxdist._parameter_server.worker_protocol import Part
from jaxdist._program import collect_rows
from jaxdist._values import (
    Change,
    IndexedSlices,
    Scatter,
    VariableAggregation,
    VariablePlacement,
    VariableSynchronization,
    cast_to_variable,
    check_slices,
    copy_if_writable,
    current_binding,
    get_call_context,
    show_value_to_jax,
)
from jaxdist.errors import ContextError, UnsupportedError

_OPS = {Change.ASSIGN: "assign", Change.ADD: "add", Change.SUBTRACT: "sub"}


class ServerVariable(Lent, Distant):
    """A `Variable` whose value is on a parameter server.

    The scope of a `ParameterServerStrategy` makes it. Outside of a scheduled function each read is
    one exchange with the server, and each change is one that the server applies to the value that
    it has then: two workers that call `assign_add` both count. In a scheduled function reads and
    changes are inputs and results of its program. A read there returns the value that the worker
    got at the start, with the function's own changes.

    Cost:
        Outside of a scheduled function: the bytes of the variable for each read or change.

    Attributes:
        remote_name: The name of the variable on the servers.
        part: Which rows of a table it has; None if it is not a shard.
        added: What a traced closure adds to it.
        assigned: How often a traced closure assigns it.

    Source:
        `tf.distribute.ParameterServerStrategy`: variables on `/job:ps`.
    """

    __slots__ = (
        "_added_in",
        "_copies",
        "_lent",
        "_row_changes",
        "_storage",
        "added",
        "assigned",
        "part",
        "remote_name",
    )

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        # `Variable(...)` in the scope calls this a second time for a variable that its strategy
        # has made completely.
        if not hasattr(self, "remote_name"):
            super().__init__(*args, **kwargs)

    @classmethod
    def connect(
        cls, strategy: Any, names: Sequence[str], shape: tuple[int, ...], dtype: Any
    ) -> "ServerVariable":
        """Return a variable that is on the servers already.

        Args:
            strategy: The strategy of the servers.
            names: Its name there. Several names are copies: the first one is read, and all change.
            shape: Its shape.
            dtype: Its dtype.
        """
        made = object.__new__(cls)
        made._label, made._strategy, made._trainable = names[0], strategy, False
        made._aggregation = VariableAggregation.NONE
        made._synchronization = VariableSynchronization.ON_WRITE
        made._set_up(tuple(shape), np.dtype(dtype), strategy.layout)
        made.remote_name, *made._copies = names
        return made

    def _make_initial(self, initial_value: Any, dtype: Any, shape: Any) -> Any:
        if callable(initial_value) and is_known_form(shape, dtype):
            initial_value = export_initial(self._label, initial_value, shape, dtype)
        if isinstance(initial_value, ExportedInitial):
            return initial_value
        return super()._make_initial(initial_value, dtype, shape)

    def _hold_initial(self, array: Any, layout: ReplicaMesh | None) -> None:
        self._set_up(tuple(array.shape), np.dtype(array.dtype), layout)
        is_program = isinstance(array, ExportedInitial)
        value = array.content if is_program else np.asarray(array)
        self.remote_name = self._storage.create(self._label, value)
        self._copies: list[str] = []

    def _set_up(self, shape: tuple[int, ...], dtype: Any, layout: ReplicaMesh | None) -> None:
        strategy = self._strategy
        self._storage: Servers = strategy.storage
        # A server has one value, so `ON_READ` is treated as a variable that aggregates.
        sharding = None if layout is None else layout.replicated
        self._home = VariablePlacement(layout, sharding, False, shape, dtype)
        self._zero = make_zero(shape, dtype)
        ports = strategy.layout
        self.part: Part | None = None
        self.added = Port(self._label, ports, shape, dtype, self._aggregation, role=Addition(self))
        self.assigned = Port(self._label, ports, (), np.int32)
        self._added_in: Any = _nowhere
        self._lent: Callable[[], Any] = _nowhere
        # The changes of rows in the current trace: the trace, the step in it, the port.
        self._row_changes: list[tuple[Any, Any, Port]] = []

    def __deepcopy__(self, memo: dict[int, Any]) -> "ServerVariable":
        with self._strategy.scope():
            made = ServerVariable(
                np.asarray(self.value()),
                self._trainable,
                name=self._label,
                aggregation=self._aggregation,
            )
        memo[id(self)] = made
        return made

    @property
    def device(self) -> str:
        """The full name of the CPU of the server that has the value."""
        number = self._storage.find_server(self.remote_name)
        return f"/job:ps/replica:0/task:{number}/device:CPU:0"

    def place_new_here(self) -> contextlib.AbstractContextManager[None]:
        """Return a block whose variables are on the server that has this one."""
        return self._storage.place_with(self.remote_name)

    def become_part(self, part: Part) -> None:
        """Name rows as those of a table in errors."""
        self.part = part

    # Reading

    # `get_arrays` and `set_arrays` read and write this attribute outside of a trace.
    @property
    def _held(self) -> Any:
        value = self._storage.read(self.remote_name)
        return self._home.copy_to_all(value)

    @_held.setter
    def _held(self, array: Any) -> None:
        self._send("assign", _own(array))

    def value(self) -> Any:
        """Return the value that the server has; in a scheduled function, the worker's."""
        self._check_rows_are_known("read", "reads")
        held = super().value()
        binding = current_binding()
        if binding is None or self._added_in() is not binding:
            return held
        return held + self.added.value()

    def read_rows(self, ids: Any) -> Any:
        """Return rows of the value. Only these rows move.

        In a scheduled function the worker reads them before it runs the function, so the ids must
        not depend on variables.

        Args:
            ids: The numbers of the rows, `[...]`; the result is `[..., *shape[1:]]`.
        """
        if not self._is_traced():
            ids = np.asarray(ids)
            rows = self._storage.read_rows(self.remote_name, ids.ravel())
            return jnp.asarray(rows.reshape((*ids.shape, *self.shape[1:])))
        self._check_rows_are_known("read", "reads")
        flat = jnp.ravel(ids)
        layout, mine = self._strategy.layout, self._is_own_rows()
        port = Port(self._label, layout, flat.shape, flat.dtype, per_replica=mine)
        shape = (*flat.shape, *self.shape[1:])
        read = RowRead(self, port)
        rows = Port(self._label, layout, shape, self.dtype, per_replica=mine, role=read)
        port.assign(flat, read_value=False)
        return rows.value().reshape((*jnp.shape(ids), *self.shape[1:]))

    def sparse_read(self, indices: Any, name: str | None = None) -> Any:
        """Return rows, as `read_rows` does."""
        return self.read_rows(indices)

    def _is_own_rows(self) -> bool:
        """Whether each replica reads or changes rows of its own."""
        return self._strategy.layout.num_replicas > 1 and get_call_context().in_replica

    def _check_rows_are_known(self, past: str, what: str) -> None:
        binding = current_binding()
        if binding is None:
            return
        # A step may be traced several times, so what its earlier traces did does not count: a
        # change counts if the same trace made it, or a step that has returned.
        self._row_changes = [known for known in self._row_changes if known[0]() is binding]
        step = get_call_context().in_step
        if any(of() is step or binding.has_written(port) for _, of, port in self._row_changes):
            raise ContextError(
                f"Variable {self._label!r} was {past} after its rows were changed in the same "
                "scheduled function, or after an optimizer updated it.\n\n"
                "The server does this when the whole function has run.\n\n"
                f"Write a function that {what} it first."
            )

    def _is_traced(self) -> bool:
        return current_binding() is not None or get_call_context().in_step is not None

    def _get_binding(self) -> Any:
        """Return the trace whose changes are sent."""
        binding = current_binding()
        if binding is None:
            raise UnsupportedError(
                f"Variable {self._label!r} of a parameter server was changed in a step that "
                "strategy.lower or strategy.check_gradients traces, or that another strategy "
                "runs.\n\n"
                "A change is sent when a whole step of the variable's strategy has run.\n\n"
                "Call run(step) of that strategy, or lower the step without the change."
            )
        return binding

    # Changing

    def __setitem__(self, index: Any, value: Any) -> None:
        """Assign the value: NNX calls this for `module.kernel[...] = value`."""
        if self._is_traced() or index is not Ellipsis:
            what = "in a step that closes over its module" if self._is_traced() else "by index"
            raise ContextError(
                f"Variable {self._label!r} of a parameter server was changed {what}.\n\n"
                "A scheduled function changes the modules that are its arguments, and other code "
                "assigns whole values.\n\n"
                "Pass the module in args, or assign the whole value: module.kernel[...] = value. "
                "Rows of a variable: variable.scatter_update(jaxdist.IndexedSlices(rows, ids))."
            )
        self.assign(value)

    @called(lambda change: change.value)
    def _update(
        self, change: Change, value: Any, use_locking: Any, name: Any, *, read_value: bool
    ) -> Any:
        check_arithmetic(_OPS[change], self._label, self.dtype, self.shape)
        if not self._is_traced():
            given = cast_to_variable(self, value)
            self._send(_OPS[change], np.broadcast_to(_own(given), self.shape))
            return self.value() if read_value else None
        # The server applies it before changes of rows.
        self._check_rows_are_known("changed", "changes")
        binding = self._get_binding()
        if change is Change.ASSIGN:
            self.assigned.assign_add(1, read_value=False)
            if self._added_in() is binding:
                self.added.assign(self._zero, read_value=False)
            return super()._update(change, value, use_locking, name, read_value=read_value)
        self._added_in = weakref.ref(binding)
        self.added._update(change, value, use_locking, name, read_value=False)
        return self.value() if read_value else None

    def change_rows(self, kind: Scatter, slices: IndexedSlices) -> None:
        """Change rows, as the methods `scatter_*`. Only these rows move: nothing is read."""
        if self._is_traced():
            self._scatter(kind, slices, False, None)
            return
        own = check_slices(self, kind, slices)
        # JAX may use the memory of the caller's arrays.
        self._send(kind.value, np.array(own.indices), np.array(own.values))

    def _apply_blocks(self, kind: Scatter, blocks: Any) -> Any:
        if not isinstance(blocks, IndexedSlices):
            raise UnsupportedError(
                f"Elements or blocks of Variable {self._label!r} were to be changed "
                f"({kind.value}), by scatter_nd_add or the like, batch_scatter_update, or "
                "variable[index].assign.\n\n"
                "A server changes whole variables and whole rows.\n\n"
                "Use scatter_add and the like with IndexedSlices, or assign the whole variable."
            )
        # Before the function runs: it may change variables on other servers, too.
        check_arithmetic(kind.value, self._label, self.dtype, self.shape)
        if not self._is_traced():
            self._send(kind.value, np.array(blocks.indices), np.array(blocks.values))
            return self.value()
        if self._is_own_rows():
            blocks = collect_rows(self, kind, blocks, self._strategy.layout, in_merge=False)
        ids, rows = jnp.asarray(blocks.indices), jnp.asarray(blocks.values)
        self._update_later(kind.value, kind.value, ids, rows.astype(self.dtype))
        # The new rows are known to the server only.
        return None

    def apply_update(self, op: str, operand: Any, what: str) -> None:
        """Let the server apply an update program.

        Args:
            op: The operation of the server.
            operand: Its operand, of the shape and dtype of the variable.
            what: What the change is called in messages.
        """
        if self._is_traced():
            self._update_later(op, what, operand)
        else:
            self._send(op, _own(operand))

    def _update_later(self, op: str, what: str, *operands: Any) -> None:
        """Let the server change the variable when the function has run; no worker knows how."""
        layout = self._strategy.layout
        ports = tuple(Port(self._label, layout, x.shape, x.dtype) for x in operands)
        for port, operand in zip(ports, operands, strict=True):
            port.assign(operand, read_value=False)
        role = ServerUpdate(self, op, ports, what)
        count = Port(self._label, layout, (), np.int32, role=role)
        count.assign_add(1, read_value=False)
        step = get_call_context().in_step
        of_step = _nowhere if step is None else weakref.ref(step)
        self._row_changes.append((weakref.ref(self._get_binding()), of_step, count))

    def _send(self, op: str, *operands: np.ndarray) -> None:
        for name in (self.remote_name, *self._copies):
            self._storage.change(ServerChange(op, name, operands))


show_value_to_jax(ServerVariable)


def _own(array: Any) -> np.ndarray:
    """Return an array that a server of this process may keep: nobody writes into it."""
    if isinstance(array, jax.Array):
        return np.asarray(array)
    owned: np.ndarray = copy_if_writable(np.asarray(array))
    return owned


def _nowhere() -> None:
    """Stand for the reference to a trace that has ended."""
