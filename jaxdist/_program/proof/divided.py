"""Analysis of values that were divided by the rows of all replicas.

Such a value is this replica's share of a mean: the mean is the sum of the shares. A loss of
`nn.compute_average_loss` is one. Used as a mean of its own, it is too small by the number of
replicas.
"""

import dataclasses
import math
import operator
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from jaxdist import _compat
from jaxdist._collectives import ASSUME_REPLICATED
from jaxdist._program.jaxprs import primitives as known
from jaxdist._program.jaxprs.interpreter import ForwardAnalysis, read_number
from jaxdist._program.proof.made_of_nothing import find_line
from jaxdist._program.proof.replication import get_named_axes

# They keep a scale: a sum, a maximum or a selection of shares is a share.
_KEEPS_SCALE = frozenset(
    """
    add add_any broadcast_in_dim concatenate convert_element_type copy dynamic_slice gather max min
    neg pad pcast pvary reduce_max reduce_min reduce_precision reduce_sum reshape rev select_n
    sharding_constraint slice sort squeeze stop_gradient sub transpose
    """.split()
)
# Sums of numbers that count rows, or weigh them, are such numbers.
_COUNTS = _KEEPS_SCALE - {"neg", "sub", "pad", "sort"} | {"mul", "clamp"}
_FOLDED: dict[str, Callable[..., Any]] = {
    "add": operator.add,
    "div": operator.truediv,
    "eq": operator.eq,
    "max": max,
    "min": min,
    "mul": operator.mul,
}
_SAME_NUMBER = frozenset({"broadcast_in_dim", "copy", "reshape", "squeeze", "stop_gradient"})


@dataclasses.dataclass(frozen=True)
class Scale:
    """The facts about one value."""

    number: float | None = None  # its number, if the trace shows it
    is_count: bool = False  # made only of integers, booleans and inputs, as the rows of a mask
    is_total: bool = False  # such a count, summed over all replicas
    is_sum: bool = False  # made only of sums over all replicas
    # For a sum: the number of its terms, and the size of its first dim.
    terms: frozenset[int] = frozenset()
    line: str = ""  # where it was divided by the rows of all replicas; empty if it was not


_PLAIN = Scale()


class DividedValues(ForwardAnalysis[Scale]):
    """The analysis of which values were divided by the rows of all replicas.

    Args:
        axes: The replica axes.
        num_replicas: The number of replicas.
    """

    of_constants = _PLAIN

    def __init__(self, axes: frozenset[str], num_replicas: int) -> None:
        self._axes = axes
        self._num_replicas = num_replicas

    def constant(self, variable: Any, value: Any) -> Scale:
        return _describe_constant(value)

    def join(self, eqn: Any, aval: Any, first: Scale, second: Scale) -> Scale:
        if first == second:
            return first
        # A replica without rows has 0 instead of its share, so one of two is enough.
        return Scale(
            is_count=first.is_count and second.is_count,
            is_total=first.is_total and second.is_total,
            is_sum=first.is_sum and second.is_sum,
            line=first.line or second.line,
        )

    def call(self, eqn: Any, inputs: list[Scale]) -> list[Scale]:
        # An all-reduce of jaxdist may consist of permutes.
        if "plan" in eqn.params:
            return [self._sum_over_replicas(s) for s in inputs]
        return super().call(eqn, inputs)

    def operation(self, eqn: Any, inputs: list[Scale]) -> list[Scale]:
        name = eqn.primitive.name
        over = self._axes & {*get_named_axes(eqn.params)}
        if name in known.SUMS and over:
            return [self._sum_over_replicas(s) for s in inputs]
        if name in known.COLLECTIVES and over:
            # Gathered counts may be summed.
            return [Scale(is_count=s.is_count, is_total=s.is_count, is_sum=True) for s in inputs]
        if (
            name in known.PAIRWISE
            or name in known.LAYOUT_ONLY
            or eqn.primitive is ASSUME_REPLICATED
        ):
            return inputs
        if name not in known.FIRST_ORDER or len(eqn.outvars) != 1 or not inputs:
            return [_PLAIN] * len(eqn.outvars)
        return [self._find_scale(eqn, name, inputs)]

    def _sum_over_replicas(self, value: Scale) -> Scale:
        number = None if value.number is None else value.number * self._num_replicas
        return Scale(number, is_count=value.is_count, is_total=value.is_count, is_sum=True)

    def _find_scale(self, eqn: Any, name: str, inputs: list[Scale]) -> Scale:
        number = _fold(eqn, name, inputs)
        if number is not None:
            # `all_reduce("mean", rows)` multiplies the rows by a fraction first.
            is_whole = all(s.is_count for s in inputs) and number.is_integer()
            return Scale(
                number,
                is_count=is_whole,
                is_total=_is_total(name, inputs),
                is_sum=_is_made_of(operator.attrgetter("is_sum"), inputs),
            )
        if name == "select_n" and inputs[0].number is not None:
            return inputs[1 + int(inputs[0].number)]
        dtype = eqn.outvars[0].aval.dtype
        is_discrete = not jnp.issubdtype(dtype, np.inexact)
        is_count = is_discrete or (name in _COUNTS and all(s.is_count for s in inputs))
        if name == "mul" and not is_discrete and any(s.number is not None for s in inputs):
            is_count = False
        return Scale(
            is_count=is_count,
            is_total=_is_total(name, inputs),
            is_sum=_is_made_of(operator.attrgetter("is_sum"), inputs),
            terms=_count_terms(eqn, name, inputs),
            line=self._find_line(eqn, name, inputs),
        )

    def _find_line(self, eqn: Any, name: str, inputs: list[Scale]) -> str:
        """Return the line that divided the result by the rows of all replicas, or ''."""
        lines = [s.line for s in inputs if s.line]
        if name == "div":
            over, under = inputs
            is_local = any(_is_close(under.number, n) for n in over.terms)
            is_by_all = under.is_total and not is_local
            is_by_all = is_by_all or self._is_size_of_all(over, under.number)
            # A mean divides by the elements of its own array. If a dim is as long as the number of
            # replicas, they may be as many as the rows of all replicas.
            if is_by_all and not _compat.is_from_mean(eqn):
                return "" if over.is_sum else over.line or find_line(eqn)
            is_undone = bool(under.line) or _is_close(under.number, 1 / self._num_replicas)
            return "" if is_undone else over.line
        if name == "mul":
            numbers = [s.number for s in inputs if s.number]
            if any(self._is_size_of_all(s, 1 / n) for s in inputs for n in numbers):
                return find_line(eqn)
            is_undone = any(s.is_total for s in inputs) or any(
                _is_close(n, self._num_replicas) for n in numbers
            )
            return "" if is_undone or not lines else lines[0]
        if name == "dot_general" or name in _KEEPS_SCALE:
            return lines[0] if lines else ""
        return ""

    def _is_size_of_all(self, value: Scale, divisor: float | None) -> bool:
        """Whether a divisor is the number of terms of a sum, times the number of replicas."""
        # A single term is not a sum over rows: `x / 2` is not a mean of two replicas.
        return divisor is not None and any(
            n > 1 and _is_close(divisor, n * self._num_replicas) for n in value.terms
        )


def of_input() -> Scale:
    """Return the facts of an input: it may be a mask, whose sum counts rows."""
    return Scale(is_count=True)


def _describe_constant(value: Any) -> Scale:
    number = read_number(value)
    return _PLAIN if number is None else Scale(number, is_count=number.is_integer())


def _is_total(name: str, inputs: Sequence[Scale]) -> bool:
    given = inputs[1:] if name == "select_n" else inputs
    if name == "div":
        return given[0].is_total and not given[1].is_total
    return name in _COUNTS and _is_made_of(operator.attrgetter("is_total"), given)


def _is_made_of(has: Callable[[Scale], bool], values: Sequence[Scale]) -> bool:
    """Whether values have a property, except for known numbers."""
    is_whole = all(has(s) or s.number is not None for s in values)
    return is_whole and any(map(has, values))


def _count_terms(eqn: Any, name: str, inputs: Sequence[Scale]) -> frozenset[int]:
    if name == "reduce_sum":
        shape = eqn.invars[0].aval.shape
        sizes = [shape[a] for a in eqn.params["axes"]]
        if not sizes:
            return inputs[0].terms
        before = inputs[0].terms or {1}
        return frozenset({sizes[0], math.prod(sizes), *(n * math.prod(sizes) for n in before)})
    if name in _SAME_NUMBER or name == "convert_element_type":
        return inputs[0].terms
    return frozenset()


def _fold(eqn: Any, name: str, inputs: Sequence[Scale]) -> float | None:
    """Return the result of an operation on known numbers, or None."""
    numbers = [s.number for s in inputs]
    if any(n is None for n in numbers):
        return None
    if name in _SAME_NUMBER:
        return numbers[0]
    if name == "convert_element_type":
        # A conversion to an integer truncates.
        is_float = jnp.issubdtype(eqn.outvars[0].aval.dtype, np.inexact)
        return numbers[0] if is_float else float(int(numbers[0] or 0))
    fold = _FOLDED.get(name)
    if fold is None or (name == "div" and not numbers[1]):
        return None
    return float(fold(*numbers))


def _is_close(number: float | None, wanted: float) -> bool:
    return number is not None and math.isclose(number, wanted, rel_tol=1e-6)
