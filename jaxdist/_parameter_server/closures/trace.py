"""The trace of a closure.

Note [Changes of a closure]
A variable that a function changes by `assign_add` is sent as what is added, so that the changes of
several workers all count; see Note [Ports]. The variables of an NNX object have no such methods: a
new value that is computed from the old one is sent as the difference, and one that is not is
assigned. What `nnx.Optimizer.update` changes is sent as gradients, and the servers run the
transformation (`optimizer`). A parameter has no value in the closure after that.
"""

import dataclasses
import hashlib
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import export
from jax.extend.core import jaxpr_as_fun
from jax.sharding import NamedSharding

from jaxdist import _compat
from jaxdist._mesh import ReplicaMesh
from jaxdist._parameter_server.closures.dependence import find_origins
from jaxdist._parameter_server.closures.marks import UPDATED
from jaxdist._parameter_server.closures.recorder import Recorders
from jaxdist._parameter_server.closures.trace_errors import (
    make_foreign_error,
    make_key_error,
    make_lookup_error,
    make_lost_update_error,
    make_state_error,
    make_used_after_error,
)
from jaxdist._parameter_server.closures.traced import (
    Input,
    Lookup,
    Source,
    Structure,
    TracedClosure,
    Update,
)
from jaxdist._parameter_server.variables.ports import (
    Addition,
    Port,
    ProgramChange,
    RowChange,
    RowRead,
    WorkerIndex,
)
from jaxdist._parameter_server.variables.server_variable import ServerVariable
from jaxdist._program import (
    BatchLeaf,
    FunctionTrace,
    WholeCall,
    contains,
    iterate_equations,
)
from jaxdist.errors import UnsupportedError

_CALLBACKS = frozenset(
    {"callback", "debug_callback", "debug_print", "io_callback", "pure_callback"}
)
# Stands for the key of an update program until the optimizer is on the servers.
OPTIMIZER = "optimizer:"


@dataclasses.dataclass(frozen=True)
class StateLeaf:
    """A variable of an NNX object that is an argument.

    Args:
        variable: Its variable on the servers; None for the state of an optimizer, which the
            servers hold beside the parameters, and for random keys.
        key: The random key, for an `nnx.RngKey`.
        name: Its name in messages.
    """

    variable: ServerVariable | None
    name: str
    template: Any
    key: Any = None


def trace_closure(
    call: WholeCall,
    state: Sequence[StateLeaf],
    layout: ReplicaMesh,
    move_captured: Callable[[Any], bool] = lambda _: False,
) -> tuple[TracedClosure, Recorders]:
    """Trace a call of a function that a coordinator schedules.

    Args:
        call: The call.
        state: The variables of its NNX objects.
        layout: The replicas of one worker.
        move_captured: Moves variables that the trace took for constants to the servers, and returns
            whether there were any. See Note [Captured objects].

    Returns:
        The closure, and the optimizers that it uses: `Update.op` is `optimizer:<number>` for
        them, and `Update.name` is the variable whose gradient it is.
    """
    templates = [leaf.template for leaf in state]
    while True:
        recorders = Recorders(layout)
        found = call.trace(templates, recorders.replace_in)
        if not move_captured(found.closed):
            break
        call.draws.put_back()
    return _Builder(call, state, layout, found, recorders).build(), recorders


class _Builder:
    """Builds the closure of one trace."""

    def __init__(
        self,
        call: WholeCall,
        state: Sequence[StateLeaf],
        layout: ReplicaMesh,
        found: FunctionTrace,
        recorders: Recorders,
    ) -> None:
        self._call, self._state, self._layout = call, state, layout
        self._found, self._recorders = found, recorders
        self._name = getattr(call.fn, "__name__", "function")
        self._origins = find_origins(found.closed)
        # The results of the trace: written variables, then state, then what the function returns.
        first, total = len(found.written), len(found.closed.jaxpr.outvars)
        self._after: list[int] = found.treedef.unflatten(range(first, total))[0]
        self._returned = range(first + len(self._after), total)
        self._slot_of = self._slots()
        ports = [x for x in found.inputs if isinstance(x, Port)]
        self._reads = [x for x in ports if isinstance(x.role, RowRead)]
        # What the program returns, as pairs: a result, and the input to subtract from it.
        self._outputs: list[tuple[int, int | None]] = []

    def build(self) -> TracedClosure:
        """Return the closure."""
        updates = [*self._find_written(), *self._find_changed_state()]
        for result in self._returned:
            if is_key(self._found.closed.out_avals[result]):
                raise make_key_error(self._name)
            self._output(result)
        inputs, exported = self._export()
        lookup = self._export_lookup()
        text = repr((inputs, updates, self._layout.num_replicas, lookup)).encode()
        return TracedClosure(
            self._name,
            exported,
            hashlib.blake2b(exported + text, digest_size=16).hexdigest(),
            tuple(inputs),
            tuple(updates),
            len(self._returned),
            Structure(self._found.treedef, len(self._after)),
            self._found.counts,
            self._layout.num_replicas,
            lookup,
        )

    # Changes

    def _find_written(self) -> list[Update]:
        """Return the changes that left the trace through variables: assignments come first."""
        number = {i: n for n, i in enumerate(self._found.written)}
        assigned: list[Update] = []
        added: list[Update] = []
        for variable in self._found.variables:
            if isinstance(variable, ServerVariable):
                if id(variable) in number:
                    operand = self._output(number[id(variable)])
                    count = self._output(number[id(variable.assigned)])
                    name, label = variable.remote_name, variable.label
                    assigned.append(Update("assign", name, (operand,), count, what=label))
            elif not isinstance(variable, Port):
                raise make_foreign_error(self._name, variable)
            elif id(variable) in number:
                added += self._find_change_by(variable, number)
        return [*assigned, *added, *self._find_gradients(number)]

    def _find_change_by(self, port: Port, number: dict[int, int]) -> list[Update]:
        """Return the change that a written port sends, by its role."""
        role, own = port.role, number[id(port)]
        if isinstance(role, Addition):
            target = role.variable
            return [Update("add", target.remote_name, (self._output(own),), what=target.label)]
        if isinstance(role, ProgramChange):
            name, operand = role.variable.remote_name, self._output(number[id(role.operand)])
            count = self._output(own)
            return [Update(role.op, name, (operand,), count, is_once=True, what=role.what)]
        if not isinstance(role, RowChange):
            return []
        operands = [self._output(number[id(p)]) for p in (role.ids, role.rows)]
        name, what = role.variable.remote_name, role.op
        return [Update(what, name, tuple(operands), self._output(own), is_once=True, what=what)]

    def _find_gradients(self, number: dict[int, int]) -> list[Update]:
        """Return the gradients that optimizers on the servers take."""
        targets = self._find_targets()
        updates = []
        for index, recorder in enumerate(self._recorders.all):
            if not recorder.is_used:
                continue
            count = self._output(number[id(recorder.count)])
            for leaf, port in enumerate(recorder.gradients):
                target = targets.get((index, leaf))
                if target is None:
                    raise make_lost_update_error(self._name, recorder.names[leaf])
                updates.append(
                    Update(
                        f"{OPTIMIZER}{index}:{leaf}",
                        target.remote_name,
                        (self._output(number[id(port)]),),
                        count,
                        is_once=True,
                        what="optimizer.update",
                    )
                )
        return updates

    def _find_targets(self) -> dict[tuple[int, int], ServerVariable]:
        """Return the variable that each gradient of each optimizer is for."""
        found = {}
        for leaf, result in zip(self._state, self._after, strict=True):
            marks = [s for s in self._origins[result].sources if isinstance(s, tuple)]
            if not marks:
                continue
            # A second variable with the mark was computed from the parameter after its update,
            # such as an average of parameters.
            if len(marks) > 1 or leaf.variable is None or marks[0] in found:
                raise make_used_after_error(self._name, leaf.name)
            found[marks[0]] = leaf.variable
        return found

    def _find_changed_state(self) -> list[Update]:
        """Return the changes of variables of NNX objects that no optimizer updates."""
        updates = []
        for place, (leaf, result) in enumerate(zip(self._state, self._after, strict=True)):
            origin = self._origins[result]
            sources = origin.sources
            if origin.same_as == place or any(isinstance(s, tuple) for s in sources):
                continue
            if leaf.variable is None:
                if leaf.key is not None:
                    # The next closure gets another key by its number.
                    continue
                raise make_state_error(self._name, leaf.name)
            name = leaf.variable.remote_name
            is_sum = place in sources and leaf.variable.dtype != np.bool_
            operand = self._output(result, minus=place if is_sum else None)
            op = "add" if is_sum else "assign"
            updates.append(Update(op, name, (operand,), what=leaf.name))
        return updates

    # The program

    def _output(self, result: int, minus: int | None = None) -> int:
        """Let the program return a result of the trace; return its number."""
        self._outputs.append((result, minus))
        return len(self._outputs) - 1

    def _export(self) -> tuple[list[Input], bytes]:
        """Return the inputs of the program, and the program."""
        return self._export_outputs(self._outputs)

    def _export_lookup(self) -> Lookup | None:
        """Return the program that computes which rows the closure reads."""
        if not self._reads:
            return None
        number = {i: n for n, i in enumerate(self._found.written)}
        outputs: list[tuple[int, int | None]] = []
        for port in self._reads:
            result = number[id(port.role.ids)]
            slots = [self._slot_of[s] for s in self._origins[result].sources if isinstance(s, int)]
            wrong = next((x for x in slots if _is_of_variable(x)), None)
            if wrong is not None:
                raise make_lookup_error(self._name, port.label, wrong)
            outputs.append((result, None))
        inputs, exported = self._export_outputs(outputs)
        return Lookup(exported, tuple(inputs))

    def _export_outputs(
        self, outputs: Sequence[tuple[int, int | None]]
    ) -> tuple[list[Input], bytes]:
        closed, slots = self._found.closed, self._slot_of
        needed = sorted({result for result, _ in outputs})
        small, used = _compat.drop_unused(closed, needed)
        if contains(small, UPDATED.name):
            raise make_used_after_error(self._name, "a parameter")
        given = set(used) | {minus for _, minus in outputs if minus is not None}
        zeros = {n: slots[n] for n in given if isinstance(slots[n], Port) and _is_zero(slots[n])}
        folded = {n for n in given if isinstance(slots[n], StateLeaf)}
        found = {n: self._find_key(slots[n]) for n in given}
        impls = {n: jax.random.key_impl(k) for n, k in found.items() if k is not None}
        _check_no_callback(self._name, small)
        plain = [n for n in sorted(given) if n not in zeros]
        place = {result: n for n, result in enumerate(needed)}
        body = jaxpr_as_fun(small)

        def program(number: Any, *values: Any) -> list[Any]:
            known = dict(zip(plain, values, strict=True))
            for n, impl in impls.items():
                known[n] = jax.random.wrap_key_data(known[n], impl=impl)
            for n in folded & impls.keys():
                known[n] = jax.random.fold_in(known[n], number)
            for n, port in zeros.items():
                known[n] = jnp.zeros(port.home.global_shape, port.dtype)
            results = body(*(known[n] for n in used))
            return [
                results[place[r]] if minus is None else results[place[r]] - known[minus]
                for r, minus in outputs
            ]

        inputs = [Input(Source.NUMBER)]
        avals = [self._shape((), np.uint32)]
        for n in plain:
            one, aval = self._describe(n, slots[n])
            inputs.append(one)
            avals.append(aval)
        program.__name__ = self._name
        exported = export.export(jax.jit(program))(*avals)
        return inputs, bytes(exported.serialize())

    def _slots(self) -> list[Any]:
        """Return what each input of the trace is."""
        state = [leaf if leaf.variable is None else leaf.variable for leaf in self._state]
        leaves = jax.tree.leaves(self._call.arguments)
        arguments = [Input(Source.ARGUMENT, index=(n,)) for n in range(len(leaves))]
        others = [
            Input(Source.BATCH, index=(x.source, x.batch, x.leaf))
            if isinstance(x, BatchLeaf)
            else x
            for x in self._found.inputs
        ]
        return [*state, *arguments, *others]

    def _describe(self, number: int, slot: Any) -> tuple[Input, jax.ShapeDtypeStruct]:
        """Return one input of the program, with its shape."""
        aval = self._found.closed.in_avals[number]
        if isinstance(slot, ServerVariable):
            return Input(Source.VARIABLE, slot.remote_name), self._shape(aval.shape, aval.dtype)
        if isinstance(slot, Port) and isinstance(slot.role, WorkerIndex):
            # The last argument; the worker finds it by itself.
            index = len(jax.tree.leaves(self._call.arguments)) + self._count_keys()
            return Input(Source.ARGUMENT, index=(index,)), self._shape(aval.shape, aval.dtype)
        if isinstance(slot, Port):
            index = next(n for n, port in enumerate(self._reads) if port is slot)
            shape = self._shape(aval.shape, aval.dtype, slot.home.sharding)
            return Input(Source.ROWS, slot.role.variable.remote_name, (index,)), shape
        if isinstance(slot, Input):
            sharding = None
            if slot.source is Source.ARGUMENT:
                given = jax.tree.leaves(self._call.arguments)[slot.index[0]]
                if is_key(given):
                    data = jax.random.key_data(given)
                    return slot, self._shape(data.shape, data.dtype)
                sharding = getattr(given, "sharding", None)
            elif slot.source is Source.BATCH:
                source, batch, leaf = slot.index
                given = BatchLeaf(source, batch, leaf).of(self._call.draws.batches)
                sharding = getattr(given, "sharding", None)
            return slot, self._shape(aval.shape, aval.dtype, sharding)
        if not isinstance(slot, StateLeaf) or slot.key is None:
            raise make_state_error(self._name, getattr(slot, "name", "an input"))
        data = jax.random.key_data(slot.key)
        keys = [n for n, leaf in enumerate(self._state) if leaf.key is not None]
        index = len(jax.tree.leaves(self._call.arguments)) + keys.index(number)
        return Input(Source.ARGUMENT, index=(index,)), self._shape(data.shape, data.dtype)

    def _find_key(self, slot: Any) -> Any:
        """Return the random key that an input has at the trace, as an array; None for others."""
        if isinstance(slot, StateLeaf):
            return slot.key
        if isinstance(slot, Input) and slot.source is Source.ARGUMENT:
            given = jax.tree.leaves(self._call.arguments)[slot.index[0]]
            return given if is_key(given) else None
        return None

    def _count_keys(self) -> int:
        """Return how many random keys come after the arguments."""
        return sum(leaf.key is not None for leaf in self._state)

    def _shape(
        self, shape: tuple[int, ...], dtype: Any, sharding: Any = None
    ) -> jax.ShapeDtypeStruct:
        if self._layout.num_replicas == 1:
            return jax.ShapeDtypeStruct(shape, dtype)
        # An array of one device is whole on every replica.
        if not isinstance(sharding, NamedSharding):
            sharding = self._layout.replicated
        return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)


def is_key(value: Any) -> bool:
    """Whether an array, or the shape of one, has random keys as elements."""
    dtype = getattr(value, "dtype", None)
    return dtype is not None and bool(jax.dtypes.issubdtype(dtype, jax.dtypes.prng_key))


def _check_no_callback(function: str, program: Any) -> None:
    for eqn in iterate_equations(program):
        if eqn.primitive.name in _CALLBACKS:
            raise UnsupportedError(
                f"{function} calls Python while it runs, in {_compat.find_source(eqn)}: "
                f"{eqn.primitive.name}.\n\n"
                "A worker has the compiled program of a function, and none of its Python code.\n\n"
                "Return the value and look at coordinator.fetch(result); or leave out "
                "jax.debug.print, jax.debug.callback, jax.pure_callback and io_callback."
            )


def _is_zero(port: Any) -> bool:
    """Whether a port has no value at the start: all but rows, and the index of the worker."""
    return isinstance(port, Port) and not isinstance(port.role, RowRead | WorkerIndex)


def _is_of_variable(slot: Any) -> bool:
    """Whether an input is a variable of the servers, or rows of one."""
    return isinstance(slot, ServerVariable) or (
        isinstance(slot, Port) and isinstance(slot.role, RowRead)
    )
