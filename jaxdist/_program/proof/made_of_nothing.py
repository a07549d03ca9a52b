"""What a replica without rows computes: values that are made of nothing.

A sum over no rows is zero, and a mean over none is nan, whatever the parameters are. A forward walk
over the replica's trace finds such values, since they are known: they are computed of arrays
without elements, and of literals. A nan among them marks what is computed with it, up to a known
choice that drops it. A mark that reaches a collective or state is an error, with the line that
made the nan.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Literal

from jaxdist import _compat
from jaxdist._collectives import UNEVEN_ALL_GATHER
from jaxdist._program.jaxprs import primitives as known
from jaxdist._program.jaxprs.subprograms import inner_inputs, subprograms
from jaxdist._program.proof.replication import named_axes

# Values of more elements are evaluated only where all elements are one.
_MOST_ELEMENTS = 4096
_ELEMENTWISE = frozenset(
    """
    abs add add_any and ceil clamp convert_element_type copy cos div eq erf exp exp2 expm1 floor ge
    gt integer_pow is_finite le log log1p logistic lt max min mul ne neg nextafter not or pow
    reduce_precision rem round rsqrt select_n sign sin sqrt square stop_gradient sub tan tanh
    """.split()
)
# A result has the elements of its operand, in another order or more than once.
_SAME_ELEMENTS = frozenset(
    "broadcast_in_dim concatenate expand_dims reshape rev slice squeeze transpose".split()
)
_SUMS = frozenset({"reduce_sum", "dot_general", "conv_general_dilated", "cumsum"})


@dataclasses.dataclass(frozen=True)
class Origin:
    """The operation that made a nan of nothing."""

    name: str
    line: str


@dataclasses.dataclass(frozen=True, eq=False)
class Found:
    """What is known of one value."""

    value: Any = None  # an array, where it is known
    of_nothing: bool = False  # it was computed of an array without elements
    nan: Origin | None = None  # it may hold a nan that was made of nothing


UNKNOWN = Found()
# Called with the collective's equation, the line that asked for it, and the nan that reaches it.
OnCollective: TypeAlias = Callable[[Any, str, Origin], None]


def line_of(eqn: Any) -> str:
    """The line that asked for an operation; that of a tape notes it itself."""
    noted: str = getattr(eqn, "line", "")
    return noted or _compat.source_of(eqn)


def constant(value: Any) -> Found:
    """A value that is part of the program."""
    if isinstance(value, jax.core.Tracer) or not _has_numbers(value):
        return UNKNOWN
    if getattr(value, "size", 1) > _MOST_ELEMENTS:
        return UNKNOWN
    return Found(np.asarray(value))


def nothing(shape: Sequence[int], dtype: Any) -> Found:
    """An array without elements; random keys are none that NumPy has."""
    if jax.dtypes.issubdtype(dtype, jax.dtypes.extended):
        return UNKNOWN
    return Found(np.zeros(shape, dtype), of_nothing=True)


def walk(
    jaxpr: Any, given: Sequence[Found], axes: frozenset[str], on_collective: OnCollective
) -> list[Found]:
    """What is known of the results of an open or closed program of one replica.

    Args:
        jaxpr: The program, or the tape of one.
        given: What is known of its inputs.
        axes: The replica axes.
        on_collective: Called for each collective that a nan reaches.
    """
    return _Walk(axes, on_collective).program(jaxpr, list(given))


class _Walk:
    def __init__(self, axes: frozenset[str], on_collective: OnCollective) -> None:
        self._axes = axes
        self._on_collective = on_collective
        # The line of the all-reduce that is being walked, and that of any call.
        self._line = ""
        self._call_line = ""

    def _origin(self, eqn: Any) -> Origin:
        """Where a nan is made; functions of JAX that are jitted have no line of their own."""
        line = getattr(eqn, "line", "") or _compat.caller_of_library(eqn) or self._call_line
        return Origin(eqn.primitive.name, line)

    def program(self, program: Any, given: list[Found]) -> list[Found]:
        jaxpr = getattr(program, "jaxpr", program)
        consts = getattr(program, "consts", None)
        env: dict[Any, Found] = {}
        for i, v in enumerate(jaxpr.constvars):
            # A tape holds the small ones beside its variables.
            value = consts[i] if consts else getattr(v, "value", None)
            env[v] = UNKNOWN if value is None else constant(value)
        env.update(zip(jaxpr.invars, given, strict=True))

        def read(atom: Any) -> Found:
            return constant(atom.val) if isinstance(atom, Literal) else env[atom]

        for eqn in jaxpr.eqns:
            results = self._equation(eqn, [read(v) for v in eqn.invars])
            env.update(zip(eqn.outvars, results, strict=True))
        return [read(v) for v in jaxpr.outvars]

    def _equation(self, eqn: Any, given: list[Found]) -> list[Found]:
        name, params = eqn.primitive.name, eqn.params
        meets = name in known.COLLECTIVES or eqn.primitive is UNEVEN_ALL_GATHER
        if meets and frozenset(named_axes(params)) & self._axes:
            return self._collective(eqn, given)
        if name in known.CALLS and known.CALLS[name] in params:
            around = self._line, self._call_line
            if "plan" in params:
                self._line = self._line or line_of(eqn)
            self._call_line = line_of(eqn) or self._call_line
            results = self.program(params[known.CALLS[name]], given)
            self._line, self._call_line = around
            return results
        if name == "cond":
            return self._cond(eqn, given)
        if name == "scan":
            return self._scan(eqn, given)
        if name == "while":
            return self._while(eqn, given)
        if name == "select_n" and given[0].value is not None and given[0].value.size:
            return [self._chosen(eqn, given)]
        results = self._evaluated(eqn, name, given)
        if results is not None:
            return results
        for inner in subprograms(eqn):
            self.program(inner, [UNKNOWN] * len(inner_inputs(inner)))
        return self._marked(eqn, name, given)

    def _collective(self, eqn: Any, given: list[Found]) -> list[Found]:
        marks = [g.nan for g in given if g.nan is not None]
        if marks:
            self._on_collective(eqn, self._line or line_of(eqn), marks[0])
        return [_of_shape(v.aval) for v in eqn.outvars]

    # Known values

    def _evaluated(self, eqn: Any, name: str, given: list[Found]) -> list[Found] | None:
        avals = [v.aval for v in eqn.outvars]
        if all(_is_empty(a) for a in avals):
            return [_of_shape(a) for a in avals]
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
        if is_one and name in _SAME_ELEMENTS and _all_same(values):
            made = [np.broadcast_to(_point(values[0]), avals[0].shape)]
        elif is_one and name in _ELEMENTWISE and len(avals) == 1:
            points = [_point(v) for v in values]
            made = [np.broadcast_to(x, avals[0].shape) for x in _bind(eqn, points)]
        elif max(sizes) <= _MOST_ELEMENTS:
            made = _bind(eqn, values)
        else:
            return None
        if not made:
            return None
        came_in = next((g.nan for g in given if g.nan is not None), None)
        had = any(_has_nan(v) for v in values)
        is_new = of_nothing and not had
        origin = self._origin(eqn) if is_new else came_in
        return [Found(x, of_nothing, origin if _has_nan(x) else None) for x in made]

    def _chosen(self, eqn: Any, given: list[Found]) -> Found:
        """A choice that is known takes only what it chooses."""
        which, *cases = given
        numbers = sorted({int(i) for i in np.unique(np.asarray(which.value))})
        taken = [cases[i] for i in numbers]
        if len(taken) == 1:
            # `jnp.var` of nothing is a nan that stands in the program.
            is_nan = taken[0].value is not None and _has_nan(taken[0].value)
            if is_nan and taken[0].nan is None and any(c.of_nothing for c in cases):
                return dataclasses.replace(taken[0], of_nothing=True, nan=self._origin(eqn))
            return taken[0]
        made = self._evaluated(eqn, "select_n", given)
        return made[0] if made is not None else _joined(taken, eqn.outvars[0].aval)

    def _marked(self, eqn: Any, name: str, given: list[Found]) -> list[Found]:
        """What is not known holds a nan where an operand may; numbers that have none do not."""
        mark = next((g.nan for g in given if g.nan is not None), None)
        if mark is None and name == "div" and _is_zero(given[1]):
            mark = self._origin(eqn)
        return [Found(nan=mark) if _is_inexact(v.aval) else UNKNOWN for v in eqn.outvars]

    # Control flow

    def _cond(self, eqn: Any, given: list[Found]) -> list[Found]:
        index, *operands = given
        branches = eqn.params["branches"]
        if index.value is not None:
            chosen = min(max(int(index.value), 0), len(branches) - 1)
            return self.program(branches[chosen], operands)
        ways = [self.program(b, operands) for b in branches]
        return [
            _joined(list(way), v.aval)
            for way, v in zip(zip(*ways, strict=True), eqn.outvars, strict=True)
        ]

    def _scan(self, eqn: Any, given: list[Found]) -> list[Found]:
        consts, carry = _compat.scan_counts(eqn.params)
        held, state, rows = given[:consts], given[consts : consts + carry], given[consts + carry :]
        avals = [v.aval for v in eqn.outvars]
        if not eqn.params["length"]:
            return [*state, *(_of_shape(a) for a in avals[carry:])]
        program = eqn.params["jaxpr"]
        inner = [v.aval for v in inner_inputs(program)][consts + carry :]
        each = [_row_of(r, a) for r, a in zip(rows, inner, strict=True)]
        stacked = avals[carry:]
        while True:
            out = self.program(program, [*held, *state, *each])
            pairs = zip(state, out[:carry], avals, strict=False)
            grown = [_joined([a, b], aval) for a, b, aval in pairs]
            if all(map(_is_same, grown, state)):
                ends = [Found(nan=o.nan) for o in out[carry:]]
                made = [
                    e if not _is_empty(a) else _of_shape(a)
                    for e, a in zip(ends, stacked, strict=True)
                ]
                return [*grown, *made]
            state = grown

    def _while(self, eqn: Any, given: list[Found]) -> list[Found]:
        p = eqn.params
        split = p["cond_nconsts"], p["cond_nconsts"] + p["body_nconsts"]
        of_cond, of_body, state = given[: split[0]], given[split[0] : split[1]], given[split[1] :]
        while True:
            self.program(p["cond_jaxpr"], [*of_cond, *state])
            out = self.program(p["body_jaxpr"], [*of_body, *state])
            triples = zip(state, out, eqn.outvars, strict=True)
            grown = [_joined([a, b], v.aval) for a, b, v in triples]
            if all(map(_is_same, grown, state)):
                return grown
            state = grown


def _bind(eqn: Any, values: Sequence[Any]) -> list[Any]:
    """The results on these values; none where the operation cannot be done by itself."""
    typed = [np.asarray(x, v.aval.dtype) for x, v in zip(values, eqn.invars, strict=True)]
    try:
        with jax.ensure_compile_time_eval(), jax.debug_nans(False), jax.debug_infs(False):
            params = eqn.primitive.get_bind_params(eqn.params)
            made = eqn.primitive.bind(*map(jnp.asarray, typed), **params)
            results = list(made) if eqn.primitive.multiple_results else [made]
            return [np.asarray(x) for x in results]
    except Exception:
        # A mesh or a layout that is not here; it is unknown then, which marks nothing by itself.
        return []


def _joined(ways: list[Found], aval: Any) -> Found:
    if _is_empty(aval):
        return _of_shape(aval)
    first = ways[0]
    mark = next((w.nan for w in ways if w.nan is not None), None)
    if all(w.value is not None and _same_bits(w.value, first.value) for w in ways):
        return Found(first.value, any(w.of_nothing for w in ways), mark)
    return Found(nan=mark)


def _same_bits(a: Any, b: Any) -> bool:
    if b is None or a.shape != b.shape:
        return False
    if _is_uniform(a) and _is_uniform(b):
        a, b = _point(a), _point(b)
    return bool(a.dtype == b.dtype and np.asarray(a).tobytes() == np.asarray(b).tobytes())


def _is_same(a: Found, b: Found) -> bool:
    known_alike = (a.value is None) == (b.value is None)
    return known_alike and (a.nan is None) == (b.nan is None)


def _row_of(rows: Found, aval: Any) -> Found:
    """One row of what a scan goes over."""
    if _is_empty(aval):
        return _of_shape(aval)
    if rows.value is not None and _is_uniform(rows.value):
        return Found(np.broadcast_to(_point(rows.value), aval.shape), rows.of_nothing, rows.nan)
    return Found(nan=rows.nan)


def _of_shape(aval: Any) -> Found:
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


def _is_inexact(aval: Any) -> bool:
    return _has_numbers(aval) and bool(jnp.issubdtype(aval.dtype, jnp.inexact))


def _is_uniform(value: Any) -> bool:
    """Whether all elements are one in memory (`np.broadcast_to`)."""
    dims = zip(value.strides, value.shape, strict=True)
    return bool(value.size) and not any(step for step, size in dims if size > 1)


def _point(value: Any) -> Any:
    """An element of an array that has some."""
    return np.asarray(value[(0,) * value.ndim])


def _all_same(values: Sequence[Any]) -> bool:
    return len({(v.dtype, _point(v).tobytes()) for v in values}) == 1


def _has_nan(value: Any) -> bool:
    if not jnp.issubdtype(value.dtype, jnp.inexact):
        return False
    return bool(np.isnan(_point(value) if _is_uniform(value) else value).any())


def _is_zero(found: Found) -> bool:
    value = found.value
    return (
        value is not None
        and bool(value.size)
        and not np.any(_point(value) if _is_uniform(value) else value)
    )
