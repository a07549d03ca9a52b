"""The trace of a closure.

Note [Changes of a closure]
A variable that a function changes by `assign_add` is sent as what is added, so that the changes of
several workers all count; see Note [Ports]. The variables of an NNX object have no such methods: a
new value that is the old one plus something, or a moving average, is sent as the difference, and
another one is assigned. Differences of other values would not add up: those of two maxima, from the
same old value, give a value that nobody has computed, and the difference to an infinite or much
larger old value cannot be represented. What `nnx.Optimizer.update` changes is sent as gradients,
and the servers run the transformation (`optimizer`). A parameter has no value in the closure after
that.

Note [Small new values]
The weights of a sum may be computed: `v * (1 - done) + done * 0.5` resets v where done is 1. The
difference from an old value of 1e8 is rounded to -1e8, and 0.5 would be lost. What the rounding of
a difference has lost is a second addition, which is sent only if it matters for the new value; that
of an average with a weight of the old value near 1 never does. It is not an assignment: with done =
0 that would undo what another worker has added.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from jaxdist import _compat
from jaxdist._called import called
from jaxdist._parameter_server.closures.adopted import adopt_captured
from jaxdist._parameter_server.closures.exporter import (
    ClosureExporter,
    Output,
    find_rest,
    has_rest,
    subtract,
)
from jaxdist._parameter_server.closures.inputs import (
    StateLeaf,
    TraceInputs,
    is_key,
    make_changed_too_error,
    make_other_strategy_error,
    make_state_error,
    make_used_after_error,
)
from jaxdist._parameter_server.closures.recorder import UPDATED, Recorders
from jaxdist._parameter_server.closures.traced import Traced
from jaxdist._parameter_server.protocol import as_array
from jaxdist._parameter_server.variables.ports import (
    Addition,
    Port,
    RowRead,
    ServerUpdate,
)
from jaxdist._parameter_server.variables.server_variable import ServerVariable
from jaxdist._parameter_server.worker_protocol import Part, TracedClosure, Update
from jaxdist._program import (
    ON_SERVERS,
    Dependence,
    ForwardAnalysis,
    FunctionTrace,
    WholeCall,
    growth,
    is_weighted_sum,
    log_options_without_effect,
)
from jaxdist.errors import ContextError, UnsupportedError

# An input of the closure by its number, or an update: (optimizer, leaf).
Source = int | tuple[int, int]
Sources = frozenset[Source]

# Operations with one operand that keep its values, and change at most shape or layout. The results
# of `strategy.run` pass through some of them.
_PRESERVING = frozenset(
    {"broadcast_in_dim", "copy", "pcast", "pvary", "reshape", "sharding_constraint", "squeeze"}
    | {"jaxdist_assume_replicated"}
)
# Stands for the key of an update program until the optimizer is on the servers.
OPTIMIZER = "optimizer:"


@dataclasses.dataclass(frozen=True)
class Origin:
    """Where a value comes from.

    Args:
        sources: What it depends on.
        same_as: The input that it equals; None if it is computed.
        update_of: The input whose update by an optimizer it is.
        next_of: The input whose value after the update it is, or perhaps the input itself.
    """

    sources: Sources = frozenset()
    same_as: int | None = None
    update_of: int | None = None
    next_of: int | None = None


_CONSTANT = Origin()


class SourceAnalysis(ForwardAnalysis[Origin]):
    """The origin of each value."""

    of_constants = _CONSTANT

    def operation(self, eqn: Any, inputs: list[Origin]) -> list[Origin]:
        if eqn.primitive.name in _PRESERVING and len(inputs) == 1:
            if eqn.outvars[0].aval.size == eqn.invars[0].aval.size:
                return inputs
        found: Sources = frozenset().union(*(origin.sources for origin in inputs))
        if eqn.primitive is UPDATED:
            found = found | {(eqn.params["optimizer"], eqn.params["leaf"])}
            return [Origin(found, update_of=inputs[0].same_as)]
        following = _find_updated(inputs) if eqn.primitive.name == "add" else None
        return [Origin(found, next_of=following)] * len(eqn.outvars)

    def join(self, eqn: Any, aval: Any, first: Origin, second: Origin) -> Origin:
        same = first.same_as if first.same_as == second.same_as else None
        update = first.update_of if first.update_of == second.update_of else None
        # The branch without the update returns the input itself.
        ways = {o.same_as if o.next_of is None else o.next_of for o in (first, second)}
        following = None if same is not None or len(ways) > 1 else ways.pop()
        return Origin(first.sources | second.sources, same, update, following)

    # The number of iterations, and the choice of a branch, decide on the results too.
    def decide(self, eqn: Any, values: list[Origin], decided_by: Origin) -> list[Origin]:
        return [
            value
            if value.same_as is not None
            else dataclasses.replace(value, sources=value.sources | decided_by.sources)
            for value in values
        ]

    def linear_solve(self, eqn: Any, inputs: list[Origin]) -> list[Origin]:
        return self.operation(eqn, inputs)


def _find_updated(inputs: Sequence[Origin]) -> int | None:
    """Return the input that a sum updates: it adds the input and its update."""
    for old, update in (inputs, inputs[::-1]):
        if old.same_as is not None and old.same_as == update.update_of:
            return old.same_as
    return None


@called("strategy.run")
def trace_closure(
    call: WholeCall,
    state: Sequence[StateLeaf],
    strategy: Any,
    platforms: Sequence[str],
    read: Callable[[Any], Any],
) -> tuple[Traced, Recorders]:
    """Trace a call of a function that a coordinator schedules.

    Args:
        call: The call.
        state: The variables of its NNX objects.
        strategy: The strategy of the servers.
        platforms: The platforms of the workers, as `jax.export` names them.
        read: Returns what is returned for each leaf of the function's result.

    Returns:
        The closure, and the optimizers that it uses: `Update.op` is `optimizer:<number>` for
        them, and `Update.name` is the variable whose gradient it is.
    """
    templates = [leaf.template for leaf in state]
    while True:
        recorders = Recorders(strategy.layout)
        found = call.trace(templates, recorders.replace_in, read)
        # See Note [Captured objects].
        if not adopt_captured(call.fn, found.closed, strategy):
            break
        call.draws.put_back()
    asked = tuple((found.options or {}).items())
    log_options_without_effect(asked, None, ON_SERVERS)
    inputs = TraceInputs(call, state, strategy.layout, found)
    builder = _Builder(state, strategy, found, inputs, recorders)
    return builder.build(platforms), recorders


def _make_whole(table: ServerVariable) -> Part:
    rows = int(table.shape[0])
    return Part(table.label, 0, rows, rows)


class _Builder:
    """Builds the closure of one trace."""

    def __init__(
        self,
        state: Sequence[StateLeaf],
        strategy: Any,
        found: FunctionTrace,
        inputs: TraceInputs,
        recorders: Recorders,
    ) -> None:
        self._state, self._strategy = state, strategy
        self._found, self._inputs, self._recorders = found, inputs, recorders
        self._name = inputs.name
        given = [Origin(frozenset({n}), n) for n in range(len(found.closed.jaxpr.invars))]
        self._origins = SourceAnalysis().run(found.closed, given)
        # The results of the trace: written variables, then state, then what the function returns.
        first, total = len(found.written), len(found.closed.jaxpr.outvars)
        self._after: list[int] = found.treedef.unflatten(range(first, total))[0]
        self._returned = range(first + len(self._after), total)
        self._outputs: list[Output] = []

    def build(self, platforms: Sequence[str]) -> Traced:
        """Return the closure."""
        self._check_strategy()
        updates = [*self._find_written(), *self._find_changed_state()]
        for result in self._returned:
            aval = self._found.closed.out_avals[result]
            if is_key(aval) and not _compat.are_row_numbers(aval):
                raise UnsupportedError(
                    f"{self._name} returns a random key.\n\n"
                    "Results are arrays of NumPy, which has no random keys.\n\n"
                    "Return jax.random.key_data(key), and use jax.random.wrap_key_data on the "
                    "coordinator."
                )
            self._output(result)
        exporter = ClosureExporter(self._found, self._inputs, platforms)
        inputs, exported = exporter.export_outputs(self._outputs)
        lookup, parts = exporter.export_lookup(self._origins), self._find_parts()
        closure = TracedClosure(
            name=self._name,
            exported=as_array(exported),
            inputs=inputs,
            updates=tuple(updates),
            num_results=len(self._returned),
            batches=self._found.counts,
            num_replicas=self._strategy.layout.num_replicas,
            lookup=lookup,
            parts=parts,
        )
        return Traced(closure.with_digest(), self._found.treedef, len(self._after))

    def _find_parts(self) -> dict[str, Part]:
        """Return the rows of tables, or of shards, whose rows the function reads or changes."""
        roles = [
            found.role
            for found in (*self._found.inputs, *self._found.variables)
            if isinstance(found, Port)
        ]
        tables = [
            role.variable
            for role in roles
            if isinstance(role, RowRead)
            or (isinstance(role, ServerUpdate) and role.op.startswith("scatter_"))
        ]
        return {v.remote_name: v.part or _make_whole(v) for v in tables}

    def _check_strategy(self) -> None:
        """Raise if a variable is on the servers of another strategy, which know it by its name."""
        for found in (*self._found.inputs, *self._found.variables):
            # Rows of a variable are read and changed by ports alone.
            role = found.role if isinstance(found, Port) else None
            variable = getattr(role, "variable", found)
            if not isinstance(variable, ServerVariable):
                continue
            if variable.distribute_strategy is not self._strategy:
                raise make_other_strategy_error(self._name, f"Variable {variable.label!r}")

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
                raise ContextError(
                    f"{self._name} uses Variable {variable.label!r}, which was made outside of the "
                    "scope of the ParameterServerStrategy.\n\n"
                    "Workers read and change variables of the parameter servers; a variable of "
                    "this process is on no server.\n\n"
                    "Make it inside `with strategy.scope():`, or pass its value as an argument."
                )
            elif id(variable) in number:
                added += self._find_change_by(variable, number)
        return [*assigned, *added, *self._find_gradients(number)]

    def _find_change_by(self, port: Port, number: dict[int, int]) -> list[Update]:
        """Return the change that a written port sends, by its role."""
        role, own = port.role, number[id(port)]
        if isinstance(role, Addition):
            target = role.variable
            return [Update("add", target.remote_name, (self._output(own),), what=target.label)]
        if not isinstance(role, ServerUpdate):
            return []
        name = role.variable.remote_name
        operands = tuple(self._output(number[id(port)]) for port in role.operands)
        return [Update(role.op, name, operands, self._output(own), is_once=True, what=role.what)]

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
                    raise ContextError(
                        f"{self._name} calls optimizer.update with a gradient of parameter "
                        f"{recorder.names[leaf]}, and no model among its arguments gets the new "
                        "value.\n\nThe servers update variables; the model has to be an argument, "
                        "whose variables they hold.\n\nPass the model and the optimizer: "
                        "coordinator.schedule(fn, args=(model, optimizer))."
                    )
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
        found: dict[tuple[int, int], ServerVariable] = {}
        others: list[tuple[StateLeaf, list[tuple[int, int]]]] = []
        for place, (leaf, result) in enumerate(zip(self._state, self._after, strict=True)):
            origin = self._origins[result]
            marks = [s for s in origin.sources if isinstance(s, tuple)]
            if not marks:
                continue
            if leaf.variable is not None and marks[1:] == [] and origin.next_of == place:
                found[marks[0]] = leaf.variable
            else:
                others.append((leaf, marks))
        for leaf, marks in others:
            # Another variable with the mark was computed from the parameter after its update, such
            # as an average of parameters.
            is_other = leaf.variable is None or len(marks) > 1 or marks[0] in found
            make_error = make_used_after_error if is_other else make_changed_too_error
            raise make_error(self._name, leaf.name)
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
            is_sum = self._adds_up(leaf, place, result)
            operand = self._output(result, place if is_sum else None)
            op = "add" if is_sum else "assign"
            updates.append(Update(op, name, (operand,), what=leaf.name))
            if is_sum and self._scales(leaf, place, result):
                rest = self._output(result, place, find_rest)
                count = self._output(result, place, has_rest)
                updates.append(Update("add", name, (rest,), count, what=leaf.name))
        return updates

    def _scales(self, leaf: StateLeaf, place: int, result: int) -> bool:
        """Whether a new value may be much smaller than the old one; see Note [Small new values]."""
        if leaf.is_moment or leaf.template.dtype not in (np.float32, np.float64):
            return False
        jaxpr = self._found.closed.jaxpr
        return growth(jaxpr, jaxpr.invars[place], result) is Dependence.OTHER

    def _adds_up(self, leaf: StateLeaf, place: int, result: int) -> bool:
        """Whether the changes of a variable by several functions are added to it."""
        if place not in self._origins[result].sources or leaf.template.dtype == np.bool_:
            return False
        return leaf.is_moment or is_weighted_sum(self._found.closed.jaxpr, place, result)

    # The program

    def _output(
        self, result: int, minus: int | None = None, take: Callable[..., Any] = subtract
    ) -> int:
        """Let the program return a result of the trace; return its number."""
        self._outputs.append(Output(result, minus, take))
        return len(self._outputs) - 1
