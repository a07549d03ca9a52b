"""Compares two traces of one function for two numbers of rows, and decides what may vary."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Literal

from jaxdist import _compat
from jaxdist._keras.forward import marks
from jaxdist._program import ReplicationAnalysis, get_consts, iterate_programs, open_jaxpr
from jaxdist._program import primitives as known

# Parameters that hold derivative functions, which each trace makes anew. They do not change the
# values of the operation.
_OF_DERIVATIVES = frozenset(
    {"jvp_jaxpr_fun", "jvp", "fwd_jaxpr_thunk", "fwd", "bwd", "out_trees", "call_jaxpr_debug_info"}
)
# The parameters of `jax.custom_jvp`: a trace shows what they compute.
_OF_JVP = frozenset({"jvp_jaxpr_fun", "jvp"})


class NotAlignedError(Exception):
    """The two traces have different operations: the function depends on the number of rows."""


def find_differences(one: Any, other: Any, *, shapes: bool = True) -> frozenset[int]:
    """Return the parts of a program that differ from another one.

    Args:
        one: An open or closed program.
        other: The program of the same function for another number of rows.
        shapes: Whether an operation also differs if only the shapes of its results differ.

    Returns:
        The `id` of each literal, constant variable and operation of `one` that differs, including
        those inside other operations.

    Raises:
        NotAlignedError: The operations are not the same.
    """
    comparison = _Comparison(shapes, _OF_DERIVATIVES)
    comparison.compare(one, other)
    return frozenset(comparison.found)


def are_same(one: Any, other: Any) -> bool:
    """Whether two programs compute the same values and gradients."""
    return _find_no_difference(_Comparison(shapes=True, ignored=_OF_JVP), one, other)


def _find_no_difference(comparison: "_Comparison", one: Any, other: Any) -> bool:
    try:
        comparison.compare(one, other)
    except NotAlignedError:
        return False
    return not comparison.found


class _Comparison:
    """The comparison of two programs: `found` has the parts of the first one that differ."""

    def __init__(self, shapes: bool, ignored: frozenset[str]) -> None:
        self._shapes, self._ignored = shapes, ignored
        self.found: set[int] = set()

    def compare(self, one: Any, other: Any) -> None:
        """Compare two programs.

        Raises:
            NotAlignedError: The operations are not the same.
        """
        first, second = open_jaxpr(one), open_jaxpr(other)
        if first is second and one is other:
            return
        same: dict[Any, Any] = {}
        if len(first.eqns) != len(second.eqns) or len(first.constvars) != len(second.constvars):
            raise NotAlignedError
        _pair(first.invars, second.invars, same)
        _pair(first.constvars, second.constvars, same)
        consts = zip(first.constvars, get_consts(one), get_consts(other), strict=False)
        self.found.update(id(v) for v, a, b in consts if not is_same_constant(a, b))
        for a, b in zip(first.eqns, second.eqns, strict=True):
            if a.primitive.name != b.primitive.name:
                raise NotAlignedError
            self._compare_atoms(a.invars, b.invars, same)
            _pair(a.outvars, b.outvars, same)
            if self._differ(a, b):
                self.found.add(id(a))
        self._compare_atoms(first.outvars, second.outvars, same)

    def _compare_atoms(self, ones: Any, others: Any, same: dict[Any, Any]) -> None:
        if len(ones) != len(others):
            raise NotAlignedError
        for a, b in zip(ones, others, strict=True):
            if isinstance(a, Literal) != isinstance(b, Literal):
                raise NotAlignedError
            if not isinstance(a, Literal):
                if same.get(a) is not b:
                    raise NotAlignedError
            elif not is_same_constant(a.val, b.val):
                self.found.add(id(a))

    def _differ(self, a: Any, b: Any) -> bool:
        """Whether the results or parameters of operations differ; compares inner programs too."""
        is_equal = self._compare_parameters(a, b)
        pairs = zip(a.outvars, b.outvars, strict=True)
        return not is_equal or (
            self._shapes and any(v.aval.shape != w.aval.shape for v, w in pairs)
        )

    def _compare_parameters(self, a: Any, b: Any) -> bool:
        """Compare the parameters of operations; return whether all except programs are equal."""
        if a.params.keys() != b.params.keys():
            raise NotAlignedError
        is_equal = True
        for key, value in a.params.items():
            other = b.params[key]
            inner, others = list(iterate_programs(value)), list(iterate_programs(other))
            if len(inner) != len(others):
                raise NotAlignedError
            for one, two in zip(inner, others, strict=True):
                self.compare(one, two)
            if not inner and key not in self._ignored:
                is_equal = is_equal and is_same_parameter(value, other)
        return is_equal and (self._ignored is _OF_DERIVATIVES or _have_same_rule(a, b))


def _have_same_rule(a: Any, b: Any) -> bool:
    """Whether two operations have the same derivative, if it is from `jax.custom_jvp`."""
    if a.primitive.name != "custom_jvp_call":
        return True
    # The rule may call the function again, but only the rule determines the gradients.
    comparison = _Comparison(shapes=True, ignored=_OF_DERIVATIVES)
    return _find_no_difference(comparison, _trace_rule(a), _trace_rule(b))


def _trace_rule(eqn: Any) -> Any:
    avals = [jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in eqn.invars]
    places = [n for n, x in enumerate(avals) if jnp.issubdtype(x.dtype, jnp.inexact)]

    def differentiate(*values: Any) -> Any:
        def call(*floats: Any) -> Any:
            given = dict(zip(places, floats, strict=True))
            operands = [given.get(n, x) for n, x in enumerate(values)]
            return _compat.bind_like(eqn, operands, eqn.params)

        floats = [values[n] for n in places]
        return jax.jvp(call, floats, floats)

    return jax.make_jaxpr(differentiate)(*avals)


def _pair(ones: Any, others: Any, same: dict[Any, Any]) -> None:
    if len(ones) != len(others):
        raise NotAlignedError
    same.update(zip(ones, others, strict=True))


def is_same_constant(one: Any, other: Any) -> bool:
    """Whether two constants of programs have the same bits."""
    if one is other:
        return not isinstance(one, jax.core.Tracer)
    if isinstance(one, jax.core.Tracer) or isinstance(other, jax.core.Tracer):
        return False
    if not _has_numbers(one) or not _has_numbers(other):
        return False
    a, b = np.asarray(one), np.asarray(other)
    return a.shape == b.shape and a.dtype == b.dtype and a.tobytes() == b.tobytes()


def _has_numbers(value: Any) -> bool:
    dtype = getattr(value, "dtype", None)
    return dtype is None or not jax.dtypes.issubdtype(dtype, jax.dtypes.extended)


def is_same_parameter(value: Any, other: Any) -> bool:
    """Whether two parameters of an operation are equal; False if this is unknown."""
    if value is other:
        return True
    programs, others = list(iterate_programs(value)), list(iterate_programs(other))
    try:
        if programs and len(programs) == len(others):
            return not any(map(find_differences, programs, others))
        return bool(value == other)
    except (NotAlignedError, TypeError, ValueError):
        return False


# Operations whose parameters may depend on the number of rows while their values do not: these
# depend on the operands only. A collective gives the rows of all replicas, and the same count.
_WITHOUT_NUMBERS = known.REPLICATING | {"reshape"}


def may_vary(
    one: tuple[Any, int], more: tuple[Any, int], own: Sequence[bool], axes: frozenset[str]
) -> bool:
    """Whether a result may depend on the rows, on their number, or on the replica.

    Args:
        one: The program of a function for some number of rows, and the number of the result.
        more: The same for another number of rows.
        own: For each input, whether it has the rows or is the number of the replica.
        axes: The replica axes.
    """
    (first, used), (second, others) = (
        _compat.drop_unused(closed, [number]) for closed, number in (one, more)
    )
    if used != others:
        return True
    try:
        differences = find_differences(first, second, shapes=False)
    except NotAlignedError:
        return True
    given = [axes if own[n] else frozenset[str]() for n in used]
    return bool(_Varies(axes, differences).run(first, given)[0])


class _Varies(ReplicationAnalysis):
    """The replication analysis, in which the number of rows differs between replicas too."""

    def __init__(self, axes: frozenset[str], differences: frozenset[int]) -> None:
        super().__init__(axes)
        self._differences = differences

    def literal(self, literal: Any) -> frozenset[str]:
        return self._of(literal)

    def constant(self, variable: Any, value: Any) -> frozenset[str]:
        return self.axes if isinstance(value, jax.core.Tracer) else self._of(variable)

    def equation(self, eqn: Any, inputs: list[frozenset[str]]) -> list[frozenset[str]]:
        results = super().equation(eqn, inputs)
        name = marks.name_of_mark(eqn)
        if name == marks.ADD_UP:
            return [frozenset[str]()] * len(results)
        if eqn.primitive.name in _WITHOUT_NUMBERS:
            return results
        own = self.axes if name == marks.OWN_STATISTICS else self._of(eqn)
        return [r | own for r in results]

    def _of(self, part: Any) -> frozenset[str]:
        return self.axes if id(part) in self._differences else frozenset()
