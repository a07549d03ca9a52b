"""Variables from a step's closure, while the step is traced.

# Note [Lifted variables]
Which variables a step uses is known only after it was traced. So the first use of a variable adds
a placeholder to the trace. `lift` turns the placeholders into inputs of the program afterwards, and
one trace is enough.

A variable that is changed at the top of the step, or under `jax.grad` or `jax.vmap`, is a plain
value there. A variable that is changed in a subprogram (`scan`, `while_loop`, `cond`, `jit`,
`checkpoint`) is a `jax.Ref`, because JAX lets no other change leave a subprogram. `remove_refs`
turns the refs into values before the trace is analysed.

The ref must exist before such a subprogram reads the variable. If the subprogram reads it first
and changes it later, the value that it read is a constant of a loop that JAX traces only once.
Then the step must be traced again, with a ref from the start (`need_refs`).
"""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Literal

from jaxdist import _compat
from jaxdist._collectives import fresh_trace_key
from jaxdist._mesh import ReplicaMesh
from jaxdist._program.jaxprs.control_flow import While
from jaxdist._program.jaxprs.primitives import placeholder
from jaxdist._program.jaxprs.subprograms import iterate_equations, open_jaxpr
from jaxdist._program.variables.access import StepAccess, check_same_strategy
from jaxdist._values import Variable, has_any_variable
from jaxdist.errors import ContextError


@dataclasses.dataclass(frozen=True, eq=False)
class Lifting:
    """How the traces of one step treat variables.

    `order` contains the variables that are inputs in any case, the written ones first. `refs`
    contains those that are refs from the start, by `id`.
    """

    layout: ReplicaMesh
    order: tuple[Variable, ...] = ()
    written: frozenset[int] = frozenset()
    refs: frozenset[int] = frozenset()

    def begin(self) -> "TraceVariables":
        """Return the variables of one more trace."""
        return TraceVariables(self)


class _Cell:
    """The current value of one variable on one replica, while its step is traced."""

    def __init__(self, variable: Variable, value: Any) -> None:
        self.variable = variable
        self.is_written = False
        self._held = value
        self._ref: Any = None

    @property
    def is_ref(self) -> bool:
        return self._ref is not None

    def make_ref(self, body: Any) -> None:
        self._ref = _compat.call_in_trace(body, jax.new_ref, self._held)

    def read(self) -> Any:
        return self._held if self._ref is None else self._ref[...]

    def write(self, value: Any) -> None:
        self.is_written = True
        if self._ref is None:
            self._held = value
        else:
            self._ref[...] = value


class TraceVariables(StepAccess):
    """The variables that one trace of a step uses."""

    def __init__(self, lifting: Lifting) -> None:
        super().__init__(lifting.layout)
        self._lifting = lifting
        self._cells: dict[int, _Cell] = {}
        self._body: Any = None
        # Variables that were read in a subprogram, as constants of it.
        self._read_inside: set[int] = set()
        self.need_refs: set[int] = set()
        self.merge_calls: list[str] = []  # their source lines
        self._number = contextlib.ExitStack()

    @property
    def touched(self) -> tuple[Variable, ...]:
        """The variables that the trace used, in the order of their placeholders' numbers."""
        return tuple(c.variable for c in self._cells.values())

    @property
    def written(self) -> tuple[Variable, ...]:
        """The variables that are also results of the step."""
        known = self._lifting.written
        return tuple(c.variable for i, c in self._cells.items() if c.is_written or i in known)

    @contextlib.contextmanager
    def body(self) -> Iterator[None]:
        """Enter the body of one replica."""
        self._body = _compat.get_current_trace()
        # In this order, so that the placeholders have the same numbers in each trace.
        for variable in self._lifting.order:
            self._cell(variable)
        with self._number:
            if has_any_variable():
                self._use_fresh_trace_key()
            yield

    @property
    def holds_refs(self) -> bool:
        """Whether a subprogram changes some variable."""
        return any(c.is_ref for c in self._cells.values())

    def merge(self, merged: Callable[[Any, Any], Any], fn: Any, given: Any) -> Any:
        """Call a merge function. In a subprogram, all replicas must reach the call."""
        if self._layout.num_replicas > 1 and _compat.is_staged_in(self._body):
            # The collective shows the analysis that all replicas must meet here. It has no bytes,
            # so XLA removes it.
            jax.lax.psum(jnp.zeros((0,)), self._layout.replica_axes)
        else:
            self.merge_calls.append(_compat.find_callers_line())
        return merged(given, self)

    def results(self) -> list[Any]:
        """Return the new values of the written variables."""
        return [self._cells[id(v)].read() for v in self.written]

    def finish(self, traced: Any) -> Any:
        """Return the trace with the variables that it used, and without their refs."""
        if self.holds_refs:
            traced = remove_refs(traced, [v.label for v in self.written])
        return dataclasses.replace(
            traced,
            touched=self.touched,
            written=self.written,
            need_refs=frozenset(self.need_refs),
            merge_calls=tuple(self.merge_calls),
        )

    def _cell(self, variable: Variable) -> _Cell:
        cell = self._cells.get(id(variable))
        if cell is None:
            check_same_strategy(variable, self._layout)
            number = len(self._cells)
            # A variable with a scalar copy on each replica is one element of a global [R].
            shape = variable.shape or ((1,) if variable.home.per_replica else ())
            held = placeholder(self._body, number, shape, variable.dtype)
            if shape != variable.shape:
                held = _compat.call_in_trace(self._body, held.reshape, ())
            cell = self._cells[id(variable)] = _Cell(variable, held)
            if id(variable) in self._lifting.refs:
                cell.make_ref(self._body)
        return cell

    def _own(self, variable: Variable) -> Any:
        cell = self._cell(variable)
        if not cell.is_ref and _compat.is_staged_in(self._body):
            self._read_inside.add(id(variable))
        return cell.read()

    def _own_to_change(self, variable: Variable) -> Any:
        cell = self._cell(variable)
        if not cell.is_ref and _compat.is_staged_in(self._body):
            # The subprogram may have read the variable as a constant: this trace is wrong.
            if id(variable) in self._read_inside:
                self.need_refs.add(id(variable))
            cell.make_ref(self._body)
        return cell.read()

    def _write(self, variable: Variable, what: str, own: Any) -> None:
        self._cell(variable).write(own)
        if id(variable) in self._read_inside:
            self._use_fresh_trace_key()

    def _use_fresh_trace_key(self) -> None:
        # JAX caches traces of inner functions. A cached one would contain this variable's
        # placeholder of another trace, or its old value as a constant.
        self._number.enter_context(fresh_trace_key())


def remove_refs(traced: Any, names: Sequence[str]) -> Any:
    """Return the same trace with refs replaced by values that operations take and return.

    Raises:
        ContextError: A variable would be changed twice, or an operation would read an old value.
    """
    # An operation that is recomputed for a gradient takes a ref.
    if any(
        e.params.get("differentiated") and any(map(_compat.is_ref, e.invars))
        for e in iterate_equations(traced.jaxpr)
    ):
        raise ContextError(
            f"A step assigns variables inside jax.checkpoint (remat), under jax.grad; it assigns "
            f"{list(names)[:5]}.\n\n"
            "What jax.checkpoint wraps is computed again for the gradient, so the assignment would "
            "be done twice, and the gradient would be taken at the new value.\n\n"
            "Return the new value from the wrapped function (jax.value_and_grad(..., "
            "has_aux=True)) and assign it outside."
        )
    if _has_changing_condition(traced.jaxpr):
        raise ContextError(
            "A step has a while_loop whose condition reads a variable that its body changes; it "
            f"assigns {list(names)[:5]}.\n\n"
            "JAX gives the condition a copy of the variable from before the loop, so the loop "
            "might never end.\n\n"
            "Carry the value in the state of the loop, and assign the variable after it."
        )
    return dataclasses.replace(traced, closed=_compat.discharge_refs(traced.closed))


def _has_changing_condition(jaxpr: Any) -> bool:
    """Whether a `while` reads a ref in its condition and changes it in its body."""
    for e in iterate_equations(jaxpr):
        # A `while` has two lists of constants, so one ref may be in both, as different inputs.
        if e.primitive.name == "while":
            loop = While.of(e.params)
            of_condition, of_body, _ = loop.split(e.invars)
            inner = open_jaxpr(loop.body)
            # Not strict: the inputs of the body also contain the carried values.
            for given, own in zip(of_body, inner.invars, strict=False):
                is_ref = not isinstance(given, Literal) and _compat.is_ref(given)
                if is_ref and given in of_condition and _compat.has_write_to(inner, own):
                    return True
    return False
