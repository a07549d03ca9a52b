"""Variables that a step has from a closure, while the step is traced.

Which variables a step touches is known only when it was traced. The first use of one puts a
placeholder into the trace, which becomes an input of the program afterwards, so that one trace is
enough.

A variable that is changed at the top of the step, or under `jax.grad` or `jax.vmap`, is a plain
value there. One that is changed in a program inside (`scan`, `while_loop`, `cond`, `jit`,
`checkpoint`) is a `jax.Ref`, which is all that JAX lets pass out of them; the refs are turned into
values before the trace is analysed. The ref has to be there before such a program reads the
variable: where it is read first and changed later, what was read is a constant of a loop that JAX
traces once, and the step has to be traced again with the ref from the start.
"""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp

from jaxdist import _compat
from jaxdist._collectives import fresh_trace_key
from jaxdist._mesh import ReplicaMesh
from jaxdist._program.jaxprs.placeholder import placeholder
from jaxdist._program.variables.access import StepAccess, check_home, one_for_each_example
from jaxdist._program.variables.refs import without_refs
from jaxdist._values import Variable, any_variable


@dataclasses.dataclass(frozen=True, eq=False)
class Lifting:
    """How the traces of one step treat variables.

    `order` has those that are inputs in any case, the written ones first. Those of `refs`, by
    `id`, are refs from the start.
    """

    layout: ReplicaMesh
    order: tuple[Variable, ...] = ()
    written: frozenset[int] = frozenset()
    refs: frozenset[int] = frozenset()

    def begin(self) -> "VariablesOfTrace":
        """The variables of one more trace."""
        return VariablesOfTrace(self)


class _Cell:
    """What one replica has of one variable while its step is traced."""

    def __init__(self, variable: Variable, value: Any) -> None:
        self.variable = variable
        self.is_written = False
        self._held = value
        self._ref: Any = None

    @property
    def is_ref(self) -> bool:
        return self._ref is not None

    def make_ref(self, body: Any) -> None:
        self._ref = _compat.inside(body, jax.new_ref, self._held)

    def read(self) -> Any:
        return self._held if self._ref is None else self._ref[...]

    def write(self, value: Any) -> None:
        self.is_written = True
        if self._ref is None:
            self._held = value
        else:
            self._ref[...] = value


class VariablesOfTrace(StepAccess):
    """The variables that one trace of a step has met."""

    def __init__(self, lifting: Lifting) -> None:
        super().__init__(lifting.layout)
        self._lifting = lifting
        self._cells: dict[int, _Cell] = {}
        self._body: Any = None
        # Read in a program inside as a constant of it.
        self._read_inside: set[int] = set()
        self.need_refs: set[int] = set()
        self.merge_calls: list[str] = []  # their lines
        self._number = contextlib.ExitStack()

    @property
    def touched(self) -> tuple[Variable, ...]:
        """All that were met; a placeholder has the number of its variable here."""
        return tuple(c.variable for c in self._cells.values())

    @property
    def written(self) -> tuple[Variable, ...]:
        """Those that are results of the step as well."""
        known = self._lifting.written
        return tuple(c.variable for i, c in self._cells.items() if c.is_written or i in known)

    @contextlib.contextmanager
    def body(self) -> Iterator[None]:
        """The body of one replica."""
        self._body = _compat.current_trace()
        for variable in self._lifting.order:
            self._cell(variable)
        with self._number:
            if any_variable():
                self._trace_anew()
            yield

    @property
    def holds_refs(self) -> bool:
        """Whether some variable is changed in a program inside."""
        return any(c.is_ref for c in self._cells.values())

    def merge(self, merged: Callable[[Any, Any], Any], fn: Any, given: Any) -> Any:
        """Call a merge function; in a program inside, all replicas have to come to it."""
        if self._layout.num_replicas > 1 and _compat.is_staged_in(self._body):
            # Of no bytes: XLA leaves it out.
            jax.lax.psum(jnp.zeros((0,)), self._layout.replica_axes)
        else:
            self.merge_calls.append(_compat.callers_line())
        return merged(given, self)

    def results(self) -> list[Any]:
        """The new values of the variables that are written."""
        return [self._cells[id(v)].read() for v in self.written]

    def finished(self, traced: Any) -> Any:
        """The trace with what it touched, without the refs of its variables."""
        if self.holds_refs:
            traced = without_refs(traced, [v.label for v in self.written])
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
            check_home(variable, self._layout)
            number = len(self._cells)
            # One of its own on each replica is an element of a global [R].
            shape = variable.shape or ((1,) if variable.home.per_replica else ())
            held = placeholder(self._body, number, shape, variable.dtype)
            if shape != variable.shape:
                held = _compat.inside(self._body, held.reshape, ())
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
            if id(variable) in self._read_inside:
                self.need_refs.add(id(variable))
            cell.make_ref(self._body)
        return cell.read()

    def _set(self, variable: Variable, what: str, value: Any) -> None:
        cell = self._cell(variable)
        own = jax.lax.stop_gradient(value)
        if _compat.is_mapped(own):
            raise one_for_each_example(variable, what)
        cell.write(own)
        if id(variable) in self._read_inside:
            self._trace_anew()

    def _trace_anew(self) -> None:
        self._number.enter_context(fresh_trace_key())
