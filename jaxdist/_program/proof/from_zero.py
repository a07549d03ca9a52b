"""Evaluation of one program on two values of some inputs: the real values, and zeros.

A step adds some increment to a metric. The increment equals the metric after the step, if the
metric was zero before the step. The difference after - before cannot replace it: in float32 it
loses increments to totals above 2**24, and it is nan for infinite totals. Only the operations
between these inputs and the wanted results run twice; the rest of the program runs once.
"""

from collections.abc import Sequence
from typing import Any, TypeAlias

import jax
from jax.extend.core import Literal

from jaxdist import _compat
from jaxdist._program.jaxprs import primitives as known
from jaxdist._program.jaxprs.control_flow import Scan
from jaxdist._program.jaxprs.interpreter import ForwardAnalysis, Interpreter
from jaxdist._program.jaxprs.subprograms import open_jaxpr

# Calls that may be inlined. The others have derivatives of their own, which inlining would lose.
_INLINED = frozenset({"jit", "pjit", "closed_call", "core_call"}) & frozenset(known.CALLS)


# The value of the real run, and the value of the other run; None where both are the same.
Pair: TypeAlias = tuple[Any, Any]
# The results of the real run, and those of the other run.
Results: TypeAlias = tuple[list[Any], list[Any]]


def run_twice(
    program: Any, arguments: Sequence[Any], others: Sequence[Any], wanted: Sequence[bool]
) -> Results:
    """Evaluate an open or closed program on two sets of inputs.

    Args:
        program: The program of one replica.
        arguments: The real inputs.
        others: The inputs of the other run; None where the input is the real one.
        wanted: For each result, whether the caller wants its value in the other run.

    Returns:
        The results of the real run, and the wanted results of the other run; None where a result
        is the same in both runs.
    """
    runs = TwoRuns(_find_needed(open_jaxpr(program), wanted))
    pairs = runs.run(program, list(zip(arguments, others, strict=True)))
    return [real for real, _ in pairs], [
        other if w else None for (_, other), w in zip(pairs, wanted, strict=True)
    ]


class TwoRuns(Interpreter[Pair]):
    """An interpreter that computes each value in both runs, once where both values are the same.

    Args:
        needed: The variables of the program that the wanted results depend on.
    """

    def __init__(self, needed: set[Any]) -> None:
        self._needed = needed

    def constant(self, variable: Any, value: Any) -> Pair:
        return value, None

    def equation(self, eqn: Any, inputs: list[Pair]) -> list[Pair]:
        asked = [v in self._needed for v in eqn.outvars]
        operands, others = [real for real, _ in inputs], [other for _, other in inputs]
        if not any(asked) or all(x is None for x in others):
            results = _compat.bind_like(eqn, operands, eqn.params)
            found: list[Any] = [None] * len(eqn.outvars)
        else:
            results, found = _evaluate_both(eqn, operands, others, asked)
        return list(zip(results, found, strict=True))

    operation = equation


def _find_needed(jaxpr: Any, wanted: Sequence[bool]) -> set[Any]:
    """Return the variables that the wanted results depend on."""
    found = {
        v for v, w in zip(jaxpr.outvars, wanted, strict=True) if w and not isinstance(v, Literal)
    }
    for eqn in reversed(jaxpr.eqns):
        if any(v in found for v in eqn.outvars):
            found.update(v for v in eqn.invars if not isinstance(v, Literal))
    return found


def _evaluate_both(eqn: Any, operands: list[Any], others: list[Any], asked: list[bool]) -> Results:
    name = eqn.primitive.name
    if name in _INLINED:
        return run_twice(eqn.params[known.CALLS[name]], operands, others, asked)
    if name == "scan":
        return _scan(eqn, operands, others)
    # If the index itself differs, the two runs may take different branches: bind both.
    if name == "cond" and others[0] is None:
        return _cond(eqn, operands, others, asked)
    second = [a if b is None else b for a, b in zip(operands, others, strict=True)]
    results = _compat.bind_like(eqn, operands, eqn.params)
    return results, _compat.bind_like(eqn, second, eqn.params)


def _scan(eqn: Any, operands: list[Any], others: list[Any]) -> Results:
    params, loop = eqn.params, Scan.of(eqn.params)
    program, carry = loop.program, loop.num_carry
    # The scan below carries a second copy only of those parts of the carry that can differ.
    asked = MarkedInputs().scan(eqn, [x is not None for x in others])
    held, start, rows = loop.split(operands)
    other_held, given, other_rows = loop.split(others)
    second = _select(start, given, asked[:carry])

    def body(state: Any, values: Any) -> Any:
        own, copies = state
        row, other_row = values
        of_carry = _spread(copies, asked[:carry])
        results, found = run_twice(
            program, [*held, *own, *row], [*other_held, *of_carry, *other_row], asked
        )
        made = _select(results, found, asked)
        count = len(copies)
        return (results[:carry], made[:count]), (results[carry:], made[count:])

    (state, copies), (stacked, other_stacked) = jax.lax.scan(
        body,
        (start, second),
        (rows, other_rows),
        length=params["length"],
        reverse=params["reverse"],
        unroll=params["unroll"],
    )
    return [*state, *stacked], _spread([*copies, *other_stacked], asked)


def _select(real: Sequence[Any], other: Sequence[Any], asked: Sequence[bool]) -> list[Any]:
    """Return the requested values of the other run; the real value where both are the same."""
    rows = zip(real, other, asked, strict=True)
    return [r if o is None else o for r, o, a in rows if a]


def _spread(values: Sequence[Any], asked: Sequence[bool]) -> list[Any]:
    """Return the values at the requested positions, and None at the others."""
    left = iter(values)
    return [next(left) if a else None for a in asked]


class MarkedInputs(ForwardAnalysis[bool]):
    """The analysis of which values depend on the marked inputs."""

    of_constants = False
    # The rules look into exactly the programs that `_evaluate_both` evaluates twice. If they found
    # fewer dependent values, the two runs would have different pytrees.
    not_entered = frozenset(known.CALLS) - _INLINED

    def join(self, eqn: Any, aval: Any, first: bool, second: bool) -> bool:
        return first or second

    def operation(self, eqn: Any, inputs: list[bool]) -> list[bool]:
        return [any(inputs)] * len(eqn.outvars)

    def cond(self, eqn: Any, inputs: list[bool]) -> list[bool]:
        return self.operation(eqn, inputs) if inputs[0] else super().cond(eqn, inputs)

    while_loop = operation
    linear_solve = operation


def _cond(eqn: Any, operands: list[Any], others: list[Any], asked: list[bool]) -> Results:
    index, *values = operands
    branches = eqn.params["branches"]
    given = [x is not None for x in others[1:]]
    ways = [MarkedInputs().run(b, given) for b in branches]
    # All branches must return the same pytree: a second value of each result that differs in any
    # of them.
    either = [a and any(w) for a, w in zip(asked, zip(*ways, strict=True), strict=True)]

    def make_branch(branch: Any) -> Any:
        def run(held: Any) -> Any:
            own, second = held
            results, found = run_twice(branch, own, second, either)
            return results, _select(results, found, either)

        return run

    results, made = jax.lax.switch(index, [make_branch(b) for b in branches], (values, others[1:]))
    return list(results), _spread(made, either)
