"""Analysis of whether a step only adds to a variable."""

import enum
from collections.abc import Sequence
from typing import Any

from jaxdist._program.jaxprs.forward_analysis import ForwardAnalysis


class Dependence(enum.Enum):
    """How a value depends on one variable."""

    FREE = "free"  # does not depend on it
    SAME = "same"  # equals it
    SUM = "sum"  # equals it plus something that does not depend on it
    OTHER = "other"  # depends on it in another way


# Operations with one operand that keep its values, and change at most shape, dtype or layout.
_VALUE_PRESERVING = frozenset(
    {"broadcast_in_dim", "copy", "mesh_cast", "pcast", "pvary", "reshape", "reshard"}
    | {"sharding_constraint", "squeeze"}
)


def growth(jaxpr: Any, variable: Any, result: int) -> Dependence:
    """Return how result number `result` of an open jaxpr depends on its input `variable`."""
    return growths(jaxpr, variable)[result]


def growths(jaxpr: Any, variable: Any) -> list[Dependence]:
    """Return how each result of an open jaxpr depends on its input `variable`."""
    given = [Dependence.SAME if v is variable else Dependence.FREE for v in jaxpr.invars]
    return DependenceAnalysis().run(jaxpr, given)


class DependenceAnalysis(ForwardAnalysis[Dependence]):
    """The analysis of how values depend on one variable."""

    of_constants = Dependence.FREE

    def join(self, eqn: Any, aval: Any, first: Dependence, second: Dependence) -> Dependence:
        return _join([first, second])

    def equation(self, eqn: Any, inputs: list[Dependence]) -> list[Dependence]:
        # Without this shortcut, loops and unknown primitives that do not use the variable would
        # give OTHER.
        if all(g is Dependence.FREE for g in inputs):
            return [Dependence.FREE] * len(eqn.outvars)
        return super().equation(eqn, inputs)

    def operation(self, eqn: Any, inputs: list[Dependence]) -> list[Dependence]:
        return [_classify(eqn, eqn.primitive.name, inputs)] * len(eqn.outvars)

    def cond(self, eqn: Any, inputs: list[Dependence]) -> list[Dependence]:
        free = inputs[0] is Dependence.FREE
        return super().cond(eqn, inputs) if free else self.operation(eqn, inputs)

    # The number of iterations may depend on the variable, which the rules of `ForwardAnalysis`
    # ignore.
    while_loop = operation
    linear_solve = operation


def _classify(eqn: Any, name: str, given: list[Dependence]) -> Dependence:
    first, *others = given
    if Dependence.OTHER in given:
        return Dependence.OTHER
    # `v + v` is not a SUM: the term that is added must not depend on the variable.
    if name in ("add", "add_any") and given.count(Dependence.FREE) == 1:
        return Dependence.SUM
    if name == "sub" and others == [Dependence.FREE]:
        return Dependence.SUM
    if name == "select_n" and first is Dependence.FREE:
        return _join(others)
    # A broadcast to more elements is refused: the increment of the result is another array.
    same_size = eqn.outvars[0].aval.size == eqn.invars[0].aval.size
    if name in _VALUE_PRESERVING and len(given) == 1 and same_size:
        return first
    if name == "convert_element_type":
        # A conversion from float to int rounds, and rounding does not commute with sums.
        before, after = eqn.invars[0].aval.dtype, eqn.outvars[0].aval.dtype
        return first if before.kind == after.kind else Dependence.OTHER
    return Dependence.OTHER


def _join(ways: Sequence[Dependence]) -> Dependence:
    found = set(ways)
    if len(found) == 1:
        return ways[0]
    return Dependence.SUM if found == {Dependence.SAME, Dependence.SUM} else Dependence.OTHER
