"""Variables of a step that runs op by op: one replica's values of them."""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import jax

from jaxdist import _compat
from jaxdist._collectives import fresh_trace_key
from jaxdist._mesh import ReplicaMesh
from jaxdist._program.op_by_op.merge_once import Merged, merge_call_of, trace_merge
from jaxdist._program.op_by_op.replica_ops import ReplicaOps
from jaxdist._program.variables.access import StepAccess, check_same_strategy, mapped_value_error
from jaxdist._values import Variable, get_arrays
from jaxdist.errors import ContextError


@dataclasses.dataclass
class _Cell:
    variable: Variable
    value: Any
    is_written: bool = False


class VariablesNow(StepAccess):
    """Values that are taken from the variables when first met, and kept until the step is done."""

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

    @contextlib.contextmanager
    def body(self) -> Iterator[None]:
        """The body of one replica."""
        with self._tracing:
            yield

    def merge(self, merged: Callable[[Any, Any], Any], fn: Any, given: Any) -> Any:
        """Call a merge function once, where the replicas come to it alike."""
        if self._layout.num_replicas == 1 or _compat.is_staged_in(self._ops.trace):
            return merged(given, self)
        call, arrays, reached = merge_call_of(fn, given)
        if not self._ops.meet(call):
            return merged(given, self)
        leads = self._number == 0
        own = trace_merge(merged, given, reached, self._layout) if leads else None
        done = self._ops.meet(Merged(own, call.source))
        if done is None:
            return merged(given, self)
        values = [self._own(v) for v in done.touched]
        new, result = done.replay(reached, arrays, values)
        for variable, value in zip(done.written, new, strict=True):
            self._set(variable, "merge_call", value)
        return result

    def results(self) -> list[Any]:
        """Results of a program that are variables; here they are asked for by `value_of`."""
        return []

    @property
    def changed(self) -> list[Variable]:
        """The variables that this replica has assigned."""
        return [c.variable for c in self._cells.values() if c.is_written]

    def value_of(self, variable: Variable) -> Any:
        """The value that this replica leaves."""
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

    def _set(self, variable: Variable, what: str, value: Any) -> None:
        cell = self._cell(variable)
        own = jax.lax.stop_gradient(value)
        if _compat.is_mapped(own):
            raise mapped_value_error(variable, what)
        if isinstance(own, jax.core.Tracer) and not isinstance(own, _compat.HeldTracer):
            raise _still_traced(variable, what)
        cell.value, cell.is_written = own, True
        # A rematerialised function keeps the value that it was traced with.
        self._tracing.enter_context(fresh_trace_key())


def _still_traced(variable: Variable, what: str) -> ContextError:
    return ContextError(
        f"Variable {variable.label!r}.{what} was called at {_compat.find_callers_line()}, inside a "
        "function that JAX traces even where steps run op by op: jax.checkpoint, or cond and "
        f"while under jax.vmap. Variables: [{variable.label!r}].\n\n"
        "What is assigned there has no value yet.\n\n"
        "Return it from the function, and assign it outside; or run this step compiled "
        "(jaxdist.config.run_eagerly(False))."
    )
