"""Two traces of one function for two numbers of rows, compared operation by operation."""

from typing import Any

import jax
import numpy as np
from jax.extend.core import Literal

from jaxdist._program import get_consts, iterate_programs, open_jaxpr

# Parameters with functions that compute derivatives, which each trace makes anew. The values of
# the operation do not depend on them.
_OF_DERIVATIVES = frozenset(
    {"jvp_jaxpr_fun", "jvp", "fwd_jaxpr_thunk", "fwd", "bwd", "out_trees", "call_jaxpr_debug_info"}
)


class NotAlignedError(Exception):
    """The two traces have other operations: the function decides by the number of rows."""


def find_differences(one: Any, other: Any, *, shapes: bool = True) -> frozenset[int]:
    """Return the parts of a program that are not those of another one.

    Args:
        one: An open or closed program.
        other: The program of the same function for another number of rows.
        shapes: Whether an operation differs whose results have other shapes, and whose parameters
            are the same ones.

    Returns:
        The `id` of each literal, variable of a constant, and operation of `one`, also inside of
        other operations, that differs.

    Raises:
        NotAlignedError: The operations are not the same ones.
    """
    found: set[int] = set()
    _compare(one, other, found, shapes)
    return frozenset(found)


def _compare(one: Any, other: Any, found: set[int], shapes: bool) -> None:
    first, second = open_jaxpr(one), open_jaxpr(other)
    if first is second and one is other:
        return
    same: dict[Any, Any] = {}
    if len(first.eqns) != len(second.eqns) or len(first.constvars) != len(second.constvars):
        raise NotAlignedError
    _pair(first.invars, second.invars, same)
    _pair(first.constvars, second.constvars, same)
    consts = zip(first.constvars, get_consts(one), get_consts(other), strict=False)
    found.update(id(v) for v, a, b in consts if not is_same_constant(a, b))
    for a, b in zip(first.eqns, second.eqns, strict=True):
        if a.primitive.name != b.primitive.name:
            raise NotAlignedError
        _check_atoms(a.invars, b.invars, same, found)
        _pair(a.outvars, b.outvars, same)
        if _differ(a, b, found, shapes):
            found.add(id(a))
    _check_atoms(first.outvars, second.outvars, same, found)


def _pair(ones: Any, others: Any, same: dict[Any, Any]) -> None:
    if len(ones) != len(others):
        raise NotAlignedError
    same.update(zip(ones, others, strict=True))


def _check_atoms(ones: Any, others: Any, same: dict[Any, Any], found: set[int]) -> None:
    if len(ones) != len(others):
        raise NotAlignedError
    for a, b in zip(ones, others, strict=True):
        if isinstance(a, Literal) != isinstance(b, Literal):
            raise NotAlignedError
        if not isinstance(a, Literal):
            if same.get(a) is not b:
                raise NotAlignedError
        elif not is_same_constant(a.val, b.val):
            found.add(id(a))


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


def _differ(a: Any, b: Any, found: set[int], shapes: bool) -> bool:
    """Whether the results or parameters of two operations differ; compares their programs too."""
    is_equal = _compare_inner(a, b, found, shapes)
    pairs = zip(a.outvars, b.outvars, strict=True)
    return not is_equal or (shapes and any(v.aval.shape != w.aval.shape for v, w in pairs))


def _compare_inner(a: Any, b: Any, found: set[int], shapes: bool) -> bool:
    """Compare the parameters of two operations; return whether all but programs are equal."""
    if a.params.keys() != b.params.keys():
        raise NotAlignedError
    is_equal = True
    for key, value in a.params.items():
        other = b.params[key]
        inner, others = list(iterate_programs(value)), list(iterate_programs(other))
        if len(inner) != len(others):
            raise NotAlignedError
        for one, two in zip(inner, others, strict=True):
            _compare(one, two, found, shapes)
        if not inner and key not in _OF_DERIVATIVES:
            is_equal = is_equal and is_same_parameter(value, other)
    return is_equal


def is_same_parameter(value: Any, other: Any) -> bool:
    """Whether two parameters of an operation are equal; False where that cannot be told."""
    if value is other:
        return True
    programs, others = list(iterate_programs(value)), list(iterate_programs(other))
    try:
        if programs and len(programs) == len(others):
            return not any(map(find_differences, programs, others))
        return bool(value == other)
    except (NotAlignedError, TypeError, ValueError):
        return False
