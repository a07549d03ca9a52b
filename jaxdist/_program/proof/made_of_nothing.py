"""Analysis of the values that a replica without rows computes.

A sum over no rows is zero and a mean over no rows is nan, whatever the parameters are. So their
values are known while tracing: they are computed from arrays without elements and from literals
alone. `NothingAnalysis` evaluates them. A nan among them marks all values that are computed from
it, until a `select_n` with a known predicate drops it. If a mark reaches a collective or state,
jaxdist raises, with the line that made the nan.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from jaxdist import _compat
from jaxdist._program.jaxprs import primitives as known
from jaxdist._program.jaxprs.control_flow import Scan
from jaxdist._program.jaxprs.interpreter import ForwardAnalysis, evaluate_known
from jaxdist._program.jaxprs.subprograms import open_jaxpr, subprograms
from jaxdist._program.proof.replication import get_named_axes

# The cost is bounded: larger values are evaluated only if all their elements are equal.
_MOST_ELEMENTS = 4096
_ELEMENTWISE = frozenset(
    """
    abs add add_any and ceil clamp convert_element_type copy cos div eq erf exp exp2 expm1 floor ge
    gt integer_pow is_finite le log log1p logistic lt max min mul ne neg nextafter not or pow
    reduce_precision rem round rsqrt select_n sign sin sqrt square stop_gradient sub tan tanh
    """.split()
)
# Each element of the result is an element of an operand.
_SAME_ELEMENTS = frozenset(
    "broadcast_in_dim concatenate expand_dims reshape rev slice squeeze transpose".split()
)
_SUMS = frozenset({"reduce_sum", "dot_general", "conv_general_dilated", "cumsum"})


@dataclasses.dataclass(frozen=True)
class Origin:
    """The operation that made a nan from an array without elements."""

    name: str
    line: str


@dataclasses.dataclass(frozen=True, eq=False)
class Found:
    """The facts about one value."""

    value: Any = None  # the array, if it is known
    of_nothing: bool = False  # whether it was computed from an array without elements
    nan: Origin | None = None  # the operation whose nan it may contain


UNKNOWN = Found()
# Called with the equation of the collective, the line that called it, and the origin of the nan.
OnCollective: TypeAlias = Callable[[Any, str, Origin], None]


def find_line(eqn: Any) -> str:
    """Return the user's line of an operation; operations of a tape have it as `line`."""
    noted: str = getattr(eqn, "line", "")
    return noted or _compat.find_source(eqn)


def constant(value: Any) -> Found:
    """Return the fact of a literal or constant of a program."""
    if isinstance(value, jax.core.Tracer) or not _has_numbers(value):
        return UNKNOWN
    if getattr(value, "size", 1) > _MOST_ELEMENTS:
        return UNKNOWN
    return Found(np.asarray(value))


def nothing(shape: Sequence[int], dtype: Any) -> Found:
    """Return the fact of an array without elements."""
    # NumPy has no arrays of random keys.
    if jax.dtypes.issubdtype(dtype, jax.dtypes.extended):
        return UNKNOWN
    return Found(np.zeros(shape, dtype), of_nothing=True)


class NothingAnalysis(ForwardAnalysis[Found]):
    """The analysis of the values of a replica without rows.

    Args:
        axes: The replica axes.
        on_collective: Called for each collective that a nan reaches.
    """

    def __init__(self, axes: frozenset[str], on_collective: OnCollective) -> None:
        self._axes = axes
        self._on_collective = on_collective
        # The line of the current all-reduce, and the line of the current call.
        self._all_reduce_line = ""
        self._call_line = ""

    def _find_origin(self, eqn: Any) -> Origin:
        """Return the operation and the user's line that made a nan."""
        # Operations inside jitted functions of JAX have no line of the user.
        line = getattr(eqn, "line", "") or _compat.find_caller_of_library(eqn) or self._call_line
        return Origin(eqn.primitive.name, line)

    def constant(self, variable: Any, value: Any) -> Found:
        return UNKNOWN if value is None else constant(value)

    def join(self, eqn: Any, aval: Any, first: Found, second: Found) -> Found:
        return _join_facts([first, second], aval)

    def is_same(self, first: Found, second: Found) -> bool:
        known_alike = (first.value is None) == (second.value is None)
        return known_alike and (first.nan is None) == (second.nan is None)

    def operation(self, eqn: Any, inputs: list[Found]) -> list[Found]:
        name = eqn.primitive.name
        if name in known.COLLECTIVES and frozenset(get_named_axes(eqn.params)) & self._axes:
            return self._collective(eqn, inputs)
        which = inputs[0].value if inputs else None
        # Before `_evaluate`: the case that is not taken may be unknown, or a nan that is dropped.
        if name == "select_n" and which is not None and which.size:
            return [self._select(eqn, inputs)]
        results = self._evaluate(eqn, name, inputs)
        if results is not None:
            return results
        # The programs of an unknown primitive may make a nan that reaches a collective inside.
        for inner in subprograms(eqn):
            self.run(inner, [UNKNOWN] * len(open_jaxpr(inner).invars))
        return self._mark_unknown(eqn, name, inputs)

    def call(self, eqn: Any, inputs: list[Found]) -> list[Found]:
        around = self._all_reduce_line, self._call_line
        if "plan" in eqn.params:
            self._all_reduce_line = self._all_reduce_line or find_line(eqn)
        self._call_line = find_line(eqn) or self._call_line
        results = super().call(eqn, inputs)
        self._all_reduce_line, self._call_line = around
        return results

    def _collective(self, eqn: Any, given: list[Found]) -> list[Found]:
        marks = [g.nan for g in given if g.nan is not None]
        if marks:
            self._on_collective(eqn, self._all_reduce_line or find_line(eqn), marks[0])
        return [_get_fact_of_aval(v.aval) for v in eqn.outvars]

    # Known values

    def _evaluate(self, eqn: Any, name: str, given: list[Found]) -> list[Found] | None:
        avals = [v.aval for v in eqn.outvars]
        if all(_is_empty(a) for a in avals):
            return [_get_fact_of_aval(a) for a in avals]
        # The mean divides by a number of rows that is a literal 0 here.
        by_zero = name == "div" and _is_zero(given[1])
        of_nothing = by_zero or any(g.of_nothing for g in given)
        if name in _SUMS and any(_is_empty(v.aval) for v in eqn.invars) and len(avals) == 1:
            zero = np.zeros((), avals[0].dtype)
            return [Found(np.broadcast_to(zero, avals[0].shape), of_nothing=True)]
        if any(g.value is None for g in given) or not given or eqn.effects:
            return None
        if name not in known.FIRST_ORDER or not all(map(_has_numbers, avals)):
            return None
        values = [g.value for g in given]
        sizes = [math.prod(v.shape) for v in values] + [math.prod(a.shape) for a in avals]
        is_one = all(map(_is_uniform, values))
        # Evaluate uniform arrays on one element, so that large ones cost nothing.
        if is_one and name in _SAME_ELEMENTS and _all_same(values):
            made = [np.broadcast_to(_get_first_element(values[0]), avals[0].shape)]
        elif is_one and name in _ELEMENTWISE and len(avals) == 1:
            points = [_get_first_element(v) for v in values]
            found = evaluate_known(eqn, points) or []
            made = [np.broadcast_to(x, avals[0].shape) for x in found]
        elif max(sizes) <= _MOST_ELEMENTS:
            made = evaluate_known(eqn, values) or []
        else:
            return None
        if not made:
            return None
        came_in = next((g.nan for g in given if g.nan is not None), None)
        had = any(_has_nan(v) for v in values)
        # A nan that came in with the operands keeps its own origin.
        is_new = of_nothing and not had
        origin = self._find_origin(eqn) if is_new else came_in
        return [Found(x, of_nothing, origin if _has_nan(x) else None) for x in made]

    def _select(self, eqn: Any, given: list[Found]) -> Found:
        """Return the facts of a `select_n` with a known predicate: those of the chosen cases."""
        which, *cases = given
        numbers = sorted({int(i) for i in np.unique(np.asarray(which.value))})
        taken = [cases[i] for i in numbers]
        if len(taken) == 1:
            # `jnp.var` of no elements selects a literal nan of the program.
            is_nan = taken[0].value is not None and _has_nan(taken[0].value)
            if is_nan and taken[0].nan is None and any(c.of_nothing for c in cases):
                return dataclasses.replace(taken[0], of_nothing=True, nan=self._find_origin(eqn))
            return taken[0]
        made = self._evaluate(eqn, "select_n", given)
        return made[0] if made is not None else _join_facts(taken, eqn.outvars[0].aval)

    def _mark_unknown(self, eqn: Any, name: str, given: list[Found]) -> list[Found]:
        """Return facts of unknown results, marked if an operand may contain a nan."""
        mark = next((g.nan for g in given if g.nan is not None), None)
        if mark is None and name == "div" and _is_zero(given[1]):
            mark = self._find_origin(eqn)
        # Integers and booleans have no nan.
        return [
            Found(nan=mark) if _has_numbers(a) and jnp.issubdtype(a.dtype, jnp.inexact) else UNKNOWN
            for a in (v.aval for v in eqn.outvars)
        ]

    # Control flow

    def cond(self, eqn: Any, inputs: list[Found]) -> list[Found]:
        index, *operands = inputs
        if index.value is None:
            return super().cond(eqn, inputs)
        branches = eqn.params["branches"]
        chosen = min(max(int(index.value), 0), len(branches) - 1)
        return self.run(branches[chosen], operands)

    def scan(self, eqn: Any, inputs: list[Found]) -> list[Found]:
        loop = Scan.of(eqn.params)
        # A scan over no rows does not run its body: the carry stays known.
        if loop.length:
            return super().scan(eqn, inputs)
        _, state, _ = loop.split(inputs)
        return [*state, *(_get_fact_of_aval(v.aval) for v in eqn.outvars[loop.num_carry :])]

    def rows(self, eqn: Any, given: list[Found], avals: Sequence[Any]) -> list[Found]:
        return [_get_row_fact(g, a) for g, a in zip(given, avals, strict=True)]

    def stack(self, eqn: Any, rows: list[Found], avals: Sequence[Any]) -> list[Found]:
        pairs = zip(rows, avals, strict=True)
        return [_get_fact_of_aval(a) if _is_empty(a) else Found(nan=r.nan) for r, a in pairs]

    # The program may have an iterative solver, whose number of iterations depends on values.
    linear_solve = operation


def _join_facts(ways: list[Found], aval: Any) -> Found:
    if _is_empty(aval):
        return _get_fact_of_aval(aval)
    first = ways[0]
    mark = next((w.nan for w in ways if w.nan is not None), None)
    if all(w.value is not None and _same_bits(w.value, first.value) for w in ways):
        return Found(first.value, any(w.of_nothing for w in ways), mark)
    return Found(nan=mark)


def _same_bits(a: Any, b: Any) -> bool:
    if b is None or a.shape != b.shape:
        return False
    if _is_uniform(a) and _is_uniform(b):
        a, b = _get_first_element(a), _get_first_element(b)
    return bool(a.dtype == b.dtype and np.asarray(a).tobytes() == np.asarray(b).tobytes())


def _get_row_fact(rows: Found, aval: Any) -> Found:
    """Return the fact of one row of an array that a scan iterates over."""
    if _is_empty(aval):
        return _get_fact_of_aval(aval)
    if rows.value is not None and _is_uniform(rows.value):
        return Found(
            np.broadcast_to(_get_first_element(rows.value), aval.shape), rows.of_nothing, rows.nan
        )
    return Found(nan=rows.nan)


def _get_fact_of_aval(aval: Any) -> Found:
    return nothing(aval.shape, aval.dtype) if _is_empty(aval) and _has_numbers(aval) else UNKNOWN


def _is_empty(aval: Any) -> bool:
    return 0 in getattr(aval, "shape", ())


def _has_numbers(x: Any) -> bool:
    if isinstance(x, (bool, int, float, complex)):
        return True
    dtype = getattr(x, "dtype", None)
    if dtype is None:
        return False
    return not jax.dtypes.issubdtype(dtype, jax.dtypes.extended) and hasattr(x, "shape")


def _is_uniform(value: Any) -> bool:
    """Whether all elements share one place in memory, as in a result of `np.broadcast_to`."""
    dims = zip(value.strides, value.shape, strict=True)
    return bool(value.size) and not any(step for step, size in dims if size > 1)


def _get_first_element(value: Any) -> Any:
    """Return the first element of an array that is not empty."""
    return np.asarray(value[(0,) * value.ndim])


def _all_same(values: Sequence[Any]) -> bool:
    return len({(v.dtype, _get_first_element(v).tobytes()) for v in values}) == 1


def _has_nan(value: Any) -> bool:
    if not jnp.issubdtype(value.dtype, jnp.inexact):
        return False
    return bool(np.isnan(_get_first_element(value) if _is_uniform(value) else value).any())


def _is_zero(found: Found) -> bool:
    value = found.value
    return (
        value is not None
        and bool(value.size)
        and not np.any(_get_first_element(value) if _is_uniform(value) else value)
    )
