"""Finds loops, branches and custom-derivative functions that run on the rows of a replica."""

from collections.abc import Sequence
from typing import Any

from jax.extend.core import Literal

from jaxdist._keras.forward import marks
from jaxdist._keras.forward.aligned import find_differences
from jaxdist._keras.forward.row_rules import PART, WHOLE, Fact, Kind, Sizes, find_fact
from jaxdist._program import Scan, While, get_consts, open_jaxpr
from jaxdist._program import primitives as known

_INLINED = frozenset({"jit", "pjit", "closed_call", "core_call", "custom_jvp_call"})


def find_nested(eqn: Any, other: Any, facts: Sequence[Fact], sizes: Sizes) -> list[Fact] | None:
    """Return the facts of the results if the operation runs on the own rows; None if it cannot.

    Args:
        eqn: A loop, a branch, or a call of a function with its own derivatives.
        other: The same operation in the program of all rows.
        facts: The facts of its operands, as for `find_fact`.
        sizes: The rows of the two programs.
    """
    name = eqn.primitive.name
    if name == "scan":
        found = _scan(eqn, other, list(facts), sizes)
    elif name == "cond":
        found = _cond(eqn, other, list(facts), sizes)
    elif name == "while":
        found = _while(eqn, other, list(facts), sizes)
    elif name in _INLINED:
        parameter = known.CALLS[name]
        found = _run(eqn.params[parameter], other.params[parameter], facts, sizes)
    else:
        return None
    return found if found is not None and _fit(eqn, other, found, sizes) else None


def _fit(eqn: Any, other: Any, facts: Sequence[Fact], sizes: Sizes) -> bool:
    """Whether the facts of the results agree with their shapes."""
    for fact, a, b in zip(facts, eqn.outvars, other.outvars, strict=True):
        dim = sizes.find_dim(a.aval.shape, b.aval.shape)
        if dim != (fact.dim if fact.kind is Kind.ROWS else -1):
            return False
    return True


def _run(own: Any, whole: Any, facts: Sequence[Fact], sizes: Sizes) -> list[Fact] | None:
    """Return the facts of the results of an inner program, which has no collectives."""
    one, all_rows = open_jaxpr(own), open_jaxpr(whole)
    differ = find_differences(own, whole)
    env: dict[Any, Fact] = dict(zip(one.invars, facts, strict=True))
    consts = zip(one.constvars, get_consts(own), strict=False)
    if any(id(v) in differ for v, _ in consts):
        return None
    env.update((v, WHOLE) for v in one.constvars)

    def read(atom: Any) -> Fact | None:
        if isinstance(atom, Literal):
            return None if id(atom) in differ else WHOLE
        return env[atom]

    for eqn, other in zip(one.eqns, all_rows.eqns, strict=True):
        given = [f for f in map(read, eqn.invars) if f is not None]
        if len(given) < len(eqn.invars):
            return None
        found = _find(eqn, other, given, sizes, id(eqn) in differ)
        if found is None:
            return None
        env.update(zip(eqn.outvars, found, strict=True))
    results = [f for f in map(read, one.outvars) if f is not None]
    return results if len(results) == len(one.outvars) else None


def _find(
    eqn: Any, other: Any, given: list[Fact], sizes: Sizes, differs: bool
) -> list[Fact] | None:
    name = eqn.primitive.name
    if marks.name_of_mark(eqn) is not None:
        return None
    if name in known.FIRST_ORDER and not differs and all(f is WHOLE for f in given):
        return [WHOLE] * len(eqn.outvars)
    if name in _INLINED or name in ("scan", "cond", "while"):
        return find_nested(eqn, other, given, sizes)
    fact = find_fact(eqn, other, given, sizes)
    return None if fact is None or fact is PART else [fact] * len(eqn.outvars)


def _scan(eqn: Any, other: Any, facts: list[Fact], sizes: Sizes) -> list[Fact] | None:
    loop, wide = Scan.of(eqn.params), Scan.of(other.params)
    consts, carry, over = loop.split(facts)
    if loop.length != wide.length or any(f.kind is Kind.ROWS and f.dim == 0 for f in over):
        return None
    rows = [Fact(f.kind, f.dim - 1) if f.kind is Kind.ROWS else f for f in over]
    out = _run(loop.program, wide.program, [*consts, *carry, *rows], sizes)
    # A fact must be the same before and after an iteration to hold for every iteration.
    if out is None or out[: loop.num_carry] != carry:
        return None
    stacked = [Fact(f.kind, f.dim + 1) if f.kind is Kind.ROWS else f for f in out[loop.num_carry :]]
    return [*carry, *stacked]


def _cond(eqn: Any, other: Any, facts: list[Fact], sizes: Sizes) -> list[Fact] | None:
    if facts[0] is not WHOLE:
        return None
    pairs = zip(eqn.params["branches"], other.params["branches"], strict=True)
    ways = [_run(a, b, facts[1:], sizes) for a, b in pairs]
    return ways[0] if all(w == ways[0] for w in ways) else None


def _while(eqn: Any, other: Any, facts: list[Fact], sizes: Sizes) -> list[Fact] | None:
    loop, wide = While.of(eqn.params), While.of(other.params)
    of_condition, of_body, state = loop.split(facts)
    goes_on = _run(loop.condition, wide.condition, [*of_condition, *state], sizes)
    after = _run(loop.body, wide.body, [*of_body, *state], sizes)
    return state if goes_on == [WHOLE] and after == state else None
