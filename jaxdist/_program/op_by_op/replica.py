"""One replica of a step op by op: its arguments, its operations, and its results."""

import contextlib
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax

from jaxdist import _compat
from jaxdist._collectives import fresh_trace_key, record_gathers
from jaxdist._mesh import ReplicaMesh
from jaxdist._program.nnx.graph_rules import is_metric
from jaxdist._program.op_by_op.merge_once import MergeAnswer, make_merge_call, trace_merge
from jaxdist._program.op_by_op.replica_ops import ReplicaOps
from jaxdist._program.proof.pieces import ShardFact, ShardingProof
from jaxdist._program.proof.reduced_gradients import check_reduced_gradients
from jaxdist._program.proof.replication import NONE, Differs, analyse
from jaxdist._program.proof.same_work import find_same_work
from jaxdist._program.trace.axis_errors import needs_explicit_axes, out_sharding_error
from jaxdist._program.trace.layouts import LayoutsOfReplica
from jaxdist._program.trace.trace import Argument, LocalStep, Signature, TracedStep
from jaxdist._program.variables.access import StepAccess, check_same_strategy
from jaxdist._replica import HasLayout
from jaxdist._values import OPEN, PIECE, Variable, get_arrays
from jaxdist.errors import ContextError


@dataclasses.dataclass
class _Cell:
    variable: Variable
    value: Any
    is_written: bool = False


class VariablesNow(StepAccess):
    """One replica's values of variables: read at the first use, and kept until the step ends."""

    def __init__(self, layout: ReplicaMesh, number: int, ops: ReplicaOps) -> None:
        super().__init__(layout)
        self._number = number
        self._ops = ops
        self._cells: dict[int, _Cell] = {}
        self._tracing = contextlib.ExitStack()

    def body(self) -> contextlib.AbstractContextManager[object]:
        """Return the context in which the body of one replica runs."""
        return self._tracing

    def merge(self, merged: Callable[[Any, Any], Any], fn: Any, given: Any) -> Any:
        """Call a merge function: once for all replicas if their Python inputs are equal."""
        if self._layout.num_replicas == 1 or _compat.is_staged_in(self._ops.trace):
            return merged(given, self)
        call, arrays, reached = make_merge_call(fn, given)
        if not self._ops.meet(call):
            return merged(given, self)
        # Only replica 0 traces the function, so its Python side effects happen once.
        leads = self._number == 0
        own = trace_merge(merged, given, reached, self._layout) if leads else None
        done = self._ops.meet(MergeAnswer(own, call.source))
        if done is None:
            return merged(given, self)
        values = [self._own(v) for v in done.touched]
        new, result = done.replay(reached, arrays, values)
        for variable, value in zip(done.written, new, strict=True):
            self._set(variable, "merge_call", value)
        return result

    def results(self) -> list[Any]:
        """Return nothing: here `value_of` gives the new values of variables."""
        return []

    @property
    def used(self) -> list[Variable]:
        """The variables that this replica has used, in the order of their first use."""
        return [c.variable for c in self._cells.values()]

    @property
    def changed(self) -> list[Variable]:
        """The variables that this replica has assigned."""
        return [c.variable for c in self._cells.values() if c.is_written]

    def value_of(self, variable: Variable) -> Any:
        """Return the value of a variable on this replica after the step."""
        return self._cell(variable).value

    def _cell(self, variable: Variable) -> _Cell:
        cell = self._cells.get(id(variable))
        if cell is None:
            check_same_strategy(variable, self._layout)
            copies = _compat.call_outside_traces(variable.home.copies, get_arrays([variable])[0])
            own = copies[self._number] if len(copies) > 1 else copies[0]
            cell = self._cells[id(variable)] = _Cell(variable, self._ops.add_input(own))
        return cell

    def _own(self, variable: Variable) -> Any:
        return self._cell(variable).value

    def _write(self, variable: Variable, what: str, own: Any) -> None:
        cell = self._cell(variable)
        if isinstance(own, jax.core.Tracer) and not isinstance(own, _compat.HeldTracer):
            raise _explain_still_traced(variable, what)
        cell.value, cell.is_written = own, True
        # JAX caches the trace of a rematerialised function, with the value that the variable had
        # then. Another key for the cache makes it trace again.
        self._tracing.enter_context(fresh_trace_key())


def _explain_still_traced(variable: Variable, what: str) -> ContextError:
    return ContextError(
        f"Variable {variable.label!r}.{what} was called at {_compat.find_callers_line()}, inside a "
        "function that JAX traces even where steps run op by op: jax.checkpoint, or cond and "
        f"while under jax.vmap. Variables: [{variable.label!r}].\n\n"
        "The value that is assigned there is not computed yet.\n\n"
        "Return it from the function, and assign it outside; or run this step compiled "
        "(jaxdist.config.run_eagerly(False))."
    )


# JAX's own message mentions `disable_jit`, which a user of `run_eagerly` did not call.
_NO_TURNS = (
    "Op by op, JAX cannot run a scan (or lax.map) without iterations. Run this step compiled: "
    "jaxdist.config.run_eagerly(False)."
)


class Replica:
    """One replica: its arguments, its operations, and its values of variables."""

    def __init__(
        self,
        number: int,
        fn: Callable[..., Any],
        signature: Signature,
        strategy: HasLayout,
        device: jax.Device,
        arguments: Sequence[Any],
    ) -> None:
        self._layout: ReplicaMesh = strategy.layout
        self._device = device
        self.ops = ReplicaOps(number, self._layout, device)
        self.variables = VariablesNow(self._layout, number, self.ops)
        self._local = LocalStep(fn, signature, strategy, self.variables)
        self._arguments = list(arguments)
        self._inputs = signature.inputs
        kinds = signature.graph.types if signature.graph else ()
        count = len(self._arguments) - len(kinds)
        self._is_metric = [*map(is_metric, kinds), *[False] * count]
        self.finals: list[Any] = []
        self._results: list[Any] = []

    def run(self, settings: _compat.ThreadSettings, dims: _compat.InferredDims) -> list[Any]:
        """Run the step in the thread of this replica.

        Args:
            settings: JAX's settings of the calling thread.
            dims: What -1 stands for in the reshapes of the step.
        """
        sizes = [(a, self._layout.mesh.shape[a]) for a in self._layout.replica_axes]
        axes = frozenset({*self._layout.replica_axes, *self._layout.mesh.explicit_axes})
        with (
            settings.use(),
            jax.default_device(self._device),
            _compat.op_by_op(self.ops, self.ops.stage, sizes, self._layout.auto_mesh) as trace,
            record_gathers(self.ops.log),
            _compat.infer_dims(dims),
            # Each replica has whole arrays on one device.
            _compat.rewrite_shardings(LayoutsOfReplica(self._layout, self._inputs, axes)),
        ):
            self.ops.trace = trace
            try:
                given = zip(self._arguments, self._is_metric, strict=True)
                return self._local(*(self.ops.add_input(x, is_metric=m) for x, m in given))
            except ValueError as error:
                if "zero-length scan" in str(error):
                    error.add_note(_NO_TURNS)
                if not needs_explicit_axes(error):
                    raise
                raise out_sharding_error(error, self._local.fn, self._layout) from error

    @property
    def old_metrics(self) -> set[int]:
        """The numbers of the inputs that are old values of metrics of Keras."""
        used = enumerate(self.variables.used, len(self._arguments))
        return {number for number, variable in used if variable._is_of_metric}

    def get_trace(self) -> TracedStep:
        """Return the operations of the replica in the form of a trace."""
        tape = self.ops.tape
        others = len(tape.invars) - len(self._arguments)
        operands = (*map(Argument, range(len(self._arguments))), *[None] * others)
        return self._local.describe(None, operands, tape=tape)

    def finish(self, results: Sequence[Any], changed: Sequence[Variable]) -> None:
        """Record the results, and the values of all variables that any replica has changed."""
        finals = [*results, *(self.variables.value_of(v) for v in changed)]
        self.ops.tape.add_results(finals)
        self.finals = [getattr(x, "held", x) for x in finals]
        self._results = list(results)

    def from_zero(self, number: int) -> Any:
        """Return a result as it would be if the metrics were zero before the step."""
        result = self._results[number]
        other = getattr(getattr(result, "mark", None), "from_zero", None)
        return self.finals[number] if other is None else other

    def differs(self, axes: Differs) -> Sequence[Differs]:
        """Return for each result and changed variable the axes over which it may differ."""
        return analyse(self.ops.tape, self._list_input_facts(axes), axes).outputs

    def find_same_work(self, axes: Differs) -> frozenset[int]:
        """Return the inputs that reach the results, if this replica has no work of its own."""
        is_cut = [i.cut is not None for i in self._inputs] + [False] * len(self.variables.used)
        differs = [bool(d) for d in self._list_input_facts(axes)]
        return find_same_work(self.ops.tape, differs, is_cut, self._local.cuts, axes)

    def _list_input_facts(self, axes: Differs) -> list[Differs]:
        """Return for each input and variable the axes over which it may differ."""
        of_variables = (axes if v.home.per_replica else NONE for v in self.variables.used)
        return [*(i.differs(axes) for i in self._inputs), *of_variables]

    def find_wrong_pieces(self, axes: Differs) -> list[str]:
        """Return the names of results that are declared as pieces without a proof.

        Raises:
            ShardedArrayError: An operation saw a piece instead of the whole array.
        """
        tape = self.ops.tape
        if not any(op.primitive is PIECE or op.primitive is OPEN for op in tape.eqns):
            return []
        check_reduced_gradients(tape)
        proof = ShardingProof(self._layout, axes)
        proof.run(tape, [ShardFact(d) for d in self._list_input_facts(axes)])
        return [*proof.wrong]
