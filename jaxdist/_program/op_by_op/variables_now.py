"""One replica's values of the variables that a step op by op uses."""

import contextlib
import dataclasses
from collections.abc import Callable
from typing import Any

import jax

from jaxdist import _compat
from jaxdist._collectives import fresh_trace_key
from jaxdist._mesh import ReplicaMesh
from jaxdist._program.op_by_op.merge_once import MergeAnswer, make_merge_call, trace_merge
from jaxdist._program.op_by_op.replica_ops import ReplicaOps
from jaxdist._program.variables.access import StepAccess, check_same_strategy
from jaxdist._values import Variable, get_arrays
from jaxdist.errors import ContextError


@dataclasses.dataclass
class _Cell:
    variable: Variable
    value: Any
    is_written: bool = False


class VariablesNow(StepAccess):
    """One replica's values of variables: read at the first use, and kept until the step ends."""

    def __init__(
        self,
        layout: ReplicaMesh,
        number: int,
        bring: Callable[[Variable, Any], Any],
        ops: ReplicaOps,
    ) -> None:
        super().__init__(layout)
        self._number = number
        self._ops = ops
        self._bring = bring
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
            cell = self._cells[id(variable)] = _Cell(variable, self._bring(variable, own))
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
        "What is assigned there has no value yet.\n\n"
        "Return it from the function, and assign it outside; or run this step compiled "
        "(jaxdist.config.run_eagerly(False))."
    )
