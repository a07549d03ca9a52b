"""Whether a step only adds to a variable, read from its trace."""

import enum
from collections.abc import Sequence
from typing import Any

from jaxdist._program.jaxprs.forward_analysis import ForwardAnalysis


class Dependence(enum.Enum):
    """What a value is made of, in terms of one variable."""

    FREE = "free"  # does not depend on it
    SAME = "same"  # the variable as it is
    SUM = "sum"  # the variable and something added to it
    OTHER = "other"


# One operand, whose values they pass on.
_PASSED_ON = frozenset(
    {"broadcast_in_dim", "copy", "pcast", "pvary", "reshape", "sharding_constraint", "squeeze"}
)


def growth(jaxpr: Any, variable: Any, result: int) -> Dependence:
    """How result number `result` of an open jaxpr depends on its input `variable`."""
    given = [Dependence.SAME if v is variable else Dependence.FREE for v in jaxpr.invars]
    return DependenceAnalysis().run(jaxpr, given)[result]


class DependenceAnalysis(ForwardAnalysis[Dependence]):
    """How values depend on one variable."""

    def literal(self, literal: Any) -> Dependence:
        return Dependence.FREE

    def constant(self, variable: Any, value: Any) -> Dependence:
        return Dependence.FREE

    def join(self, eqn: Any, aval: Any, first: Dependence, second: Dependence) -> Dependence:
        return _join([first, second])

    def equation(self, eqn: Any, inputs: list[Dependence]) -> list[Dependence]:
        if all(g is Dependence.FREE for g in inputs):
            return [Dependence.FREE] * len(eqn.outvars)
        return super().equation(eqn, inputs)

    def operation(self, eqn: Any, inputs: list[Dependence]) -> list[Dependence]:
        return [_of_one(eqn, eqn.primitive.name, inputs)] * len(eqn.outvars)

    def cond(self, eqn: Any, inputs: list[Dependence]) -> list[Dependence]:
        free = inputs[0] is Dependence.FREE
        return super().cond(eqn, inputs) if free else self.operation(eqn, inputs)

    # How often the body runs may depend on the variable.
    while_loop = operation
    linear_solve = operation


def _of_one(eqn: Any, name: str, given: list[Dependence]) -> Dependence:
    first, *others = given
    if Dependence.OTHER in given:
        return Dependence.OTHER
    if name in ("add", "add_any") and given.count(Dependence.FREE) == 1:
        return Dependence.SUM
    if name == "sub" and others == [Dependence.FREE]:
        return Dependence.SUM
    if name == "select_n" and first is Dependence.FREE:
        return _join(others)
    same_size = eqn.outvars[0].aval.size == eqn.invars[0].aval.size
    if name in _PASSED_ON and len(given) == 1 and same_size:
        return first
    if name == "convert_element_type":
        before, after = eqn.invars[0].aval.dtype, eqn.outvars[0].aval.dtype
        return first if before.kind == after.kind else Dependence.OTHER
    return Dependence.OTHER


def _join(ways: Sequence[Dependence]) -> Dependence:
    found = set(ways)
    if len(found) == 1:
        return ways[0]
    return Dependence.SUM if found == {Dependence.SAME, Dependence.SUM} else Dependence.OTHER
