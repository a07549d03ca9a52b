"""Whether a step only adds to a variable, read from its trace."""

import enum
from collections.abc import Sequence
from typing import Any

from jax.extend.core import Literal

from jaxdist import _compat
from jaxdist._program.jaxprs import primitives as known


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
    return _results(jaxpr, given)[result]


def _results(jaxpr: Any, given: Sequence[Dependence]) -> list[Dependence]:
    jaxpr = getattr(jaxpr, "jaxpr", jaxpr)
    env: dict[Any, Dependence] = dict.fromkeys(jaxpr.constvars, Dependence.FREE)
    env.update(zip(jaxpr.invars, given, strict=True))

    def read(atom: Any) -> Dependence:
        return Dependence.FREE if isinstance(atom, Literal) else env[atom]

    for eqn in jaxpr.eqns:
        env.update(zip(eqn.outvars, _equation(eqn, [read(v) for v in eqn.invars]), strict=True))
    return [read(v) for v in jaxpr.outvars]


def _equation(eqn: Any, given: list[Dependence]) -> list[Dependence]:
    name = eqn.primitive.name
    if all(g is Dependence.FREE for g in given):
        return [Dependence.FREE] * len(eqn.outvars)
    if name in known.CALLS and known.CALLS[name] in eqn.params:
        return _results(eqn.params[known.CALLS[name]], given)
    if name == "scan":
        return _scan(eqn, given)
    if name == "cond" and given[0] is Dependence.FREE:
        branches = [_results(b, given[1:]) for b in eqn.params["branches"]]
        return [_joined(ways) for ways in zip(*branches, strict=True)]
    return [_of_one(eqn, name, given)] * len(eqn.outvars)


def _of_one(eqn: Any, name: str, given: list[Dependence]) -> Dependence:
    first, *others = given
    if Dependence.OTHER in given:
        return Dependence.OTHER
    if name in ("add", "add_any") and given.count(Dependence.FREE) == 1:
        return Dependence.SUM
    if name == "sub" and others == [Dependence.FREE]:
        return Dependence.SUM
    if name == "select_n" and first is Dependence.FREE:
        return _joined(others)
    same_size = eqn.outvars[0].aval.size == eqn.invars[0].aval.size
    if name in _PASSED_ON and len(given) == 1 and same_size:
        return first
    if name == "convert_element_type":
        before, after = eqn.invars[0].aval.dtype, eqn.outvars[0].aval.dtype
        return first if before.kind == after.kind else Dependence.OTHER
    return Dependence.OTHER


def _joined(ways: Sequence[Dependence]) -> Dependence:
    found = set(ways)
    if len(found) == 1:
        return ways[0]
    return Dependence.SUM if found == {Dependence.SAME, Dependence.SUM} else Dependence.OTHER


def _scan(eqn: Any, given: list[Dependence]) -> list[Dependence]:
    consts, carry = _compat.scan_counts(eqn.params)
    held, state, rows = given[:consts], given[consts : consts + carry], given[consts + carry :]
    while True:
        out = _results(eqn.params["jaxpr"], held + state + rows)
        grown = [_joined(pair) for pair in zip(state, out[:carry], strict=True)]
        if grown == state:
            return state + out[carry:]
        state = grown
