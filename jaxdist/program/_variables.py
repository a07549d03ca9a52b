"""Variables that a step has from a closure, while the step is traced.

A variable that is changed only at the top of the step is a plain value there. One that is changed
inside a transformation (`jax.grad`, `scan`, `cond`) is a `jax.Ref` made at the start of the body,
which is all that JAX lets pass through them; the refs are turned into values before the trace is
analysed.
"""

import contextlib
import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jaxdist import _compat
from jaxdist.collectives import traced_anew
from jaxdist.mesh import ReplicaMesh
from jaxdist.program._variables_access import StepAccess, check_home, one_for_each_example
from jaxdist.program._variables_refs import without_refs
from jaxdist.values import Variable, any_variable


@dataclasses.dataclass(frozen=True)
class Use:
    """How a step uses one variable."""

    variable: Variable = dataclasses.field(compare=False)  # equality of variables is elementwise
    written: bool = False
    in_transformation: bool = False  # changed there

    def joined(self, *, written: bool, in_transformation: bool) -> "Use":
        """This use and another one."""
        return dataclasses.replace(
            self,
            written=self.written or written,
            in_transformation=self.in_transformation or in_transformation,
        )


class _Cell:
    """What one replica has of one variable while its step is traced."""

    def __init__(self, value: Any, *, is_ref: bool) -> None:
        self.is_ref = is_ref
        self._held = jax.new_ref(value) if is_ref else value

    def read(self) -> Any:
        return self._held[...] if self.is_ref else self._held

    def write(self, value: Any) -> None:
        if self.is_ref:
            self._held[...] = jax.lax.stop_gradient(value)
        else:
            self._held = value


class Lifting(StepAccess):
    """One trace of a step: `uses` are the variables that are known to be touched.

    Others that it meets read as zeros and keep nothing; the step is traced again with them.
    """

    def __init__(self, layout: ReplicaMesh, uses: dict[int, Use]) -> None:
        super().__init__(layout)
        self._uses = uses
        self.seen: dict[int, Use] = {}
        self._cells: dict[int, _Cell] = {}
        self._body: Any = None
        self._read_inside: set[int] = set()
        self._number = contextlib.ExitStack()

    @property
    def written(self) -> tuple[Variable, ...]:
        """Variables that are results of the program as well."""
        return tuple(u.variable for u in self._uses.values() if u.written)

    @property
    def read_only(self) -> tuple[Variable, ...]:
        """Variables that are inputs alone."""
        return tuple(u.variable for u in self._uses.values() if not u.written)

    @property
    def holds_refs(self) -> bool:
        """Whether some variable is changed inside a transformation."""
        return any(u.in_transformation for u in self._uses.values())

    @property
    def is_settled(self) -> bool:
        """Whether the step used what was known, in the way that was known."""
        return self.seen == self._uses

    @contextlib.contextmanager
    def body(self, written: Sequence[Any], read_only: Sequence[Any]) -> Iterator[None]:
        """The body of one replica, with these values of the variables."""
        self._body = _compat.current_trace()
        self._read_inside.clear()
        named = zip((*self.written, *self.read_only), (*written, *read_only), strict=True)
        self._cells = {
            id(v): _Cell(value, is_ref=self._uses[id(v)].in_transformation) for v, value in named
        }
        with self._number:
            if any_variable():
                self._trace_anew()
            yield

    def results(self) -> list[Any]:
        """The new values of the variables that are written."""
        return [self._cells[id(v)].read() for v in self.written]

    def finished(self, traced: Any) -> Any:
        """The trace without the refs of its variables."""
        names = [v.label for v in self.written]
        return without_refs(traced, names) if self.holds_refs else traced

    def _own(self, variable: Variable) -> Any:
        inside = self._note(variable, written=False)
        cell = self._cells.get(id(variable))
        if cell is None:
            return _nothing_like(variable)
        if inside and not cell.is_ref:
            self._read_inside.add(id(variable))
        return cell.read()

    def _set(self, variable: Variable, what: str, value: Any) -> None:
        inside = self._note(variable, written=True)
        cell = self._cells.get(id(variable))
        if cell is None or (inside and not cell.is_ref):
            return
        try:
            cell.write(value)
        except Exception as error:
            if "unbatched array reference" not in str(error):
                raise
            raise one_for_each_example(variable, what) from error
        if id(variable) in self._read_inside:
            self._trace_anew()

    def _note(self, variable: Variable, *, written: bool) -> bool:
        """Remember a use; whether it is inside a transformation."""
        check_home(variable, self._layout)
        inside = _compat.current_trace() is not self._body
        use = self.seen.get(id(variable), Use(variable))
        self.seen[id(variable)] = use.joined(written=written, in_transformation=written and inside)
        return inside

    def _trace_anew(self) -> None:
        self._number.enter_context(traced_anew())


def _nothing_like(variable: Variable) -> Any:
    """A traced value of the shape and dtype of one copy."""
    if not jax.dtypes.issubdtype(variable.dtype, jax.dtypes.extended):
        return jnp.zeros(variable.shape, variable.dtype)
    like: Any = variable.home.copies(variable.held)[0]
    raw = jax.random.key_data(like)
    return jax.random.wrap_key_data(jnp.zeros(raw.shape, raw.dtype), impl=jax.random.key_impl(like))
