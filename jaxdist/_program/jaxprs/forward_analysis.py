"""The base class of analyses that compute a fact about each value of a program."""

import abc
import contextlib
import functools
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from jaxdist._program.jaxprs.control_flow import Scan, While, get_solve
from jaxdist._program.jaxprs.interpreter import Interpreter

L = TypeVar("L")


class ForwardAnalysis(Interpreter[L]):
    """An `Interpreter` whose values are facts, the elements of a lattice.

    A fact must hold for every execution of a program. So the facts of two branches are joined, and
    the body of a loop is analysed until the facts of its carry do not change any more. That ends
    if `join` returns an upper bound, and the lattice has no infinite ascending chain.
    """

    # The fact of literals and constants, which are parts of the program.
    of_constants: L

    def literal(self, literal: Any) -> L:
        """Return the fact of a literal."""
        return self.of_constants

    def constant(self, variable: Any, value: Any) -> L:
        """Return the fact of a constant of a program."""
        return self.of_constants

    @abc.abstractmethod
    def join(self, eqn: Any, aval: Any, first: L, second: L) -> L:
        """Return the fact of a value that is one of two values.

        Args:
            eqn: The loop or branch.
            aval: The shape and dtype of the value.
            first: A fact.
            second: The other fact; in a loop, that of the later iteration.
        """

    def is_same(self, first: L, second: L) -> bool:
        """Whether two facts are equal."""
        return bool(first == second)

    def inside_of(self, eqn: Any, decided_by: L) -> contextlib.AbstractContextManager[Any]:
        """Return a context for programs that run only if a value decides so.

        These are the branches of a `cond` and the body of a `while`.
        """
        return contextlib.nullcontext()

    def decide(self, eqn: Any, values: list[L], decided_by: L) -> list[L]:
        """Return the facts of values that depend on a decision.

        The decision is which branch of a `cond` ran, or how often the body of a `while` ran.
        """
        return values

    def rows(self, eqn: Any, given: list[L], avals: Sequence[Any]) -> list[L]:
        """Return the facts of one row of each array that a scan iterates over."""
        return given

    def stack(self, eqn: Any, rows: list[L], avals: Sequence[Any]) -> list[L]:
        """Return the facts of arrays that a scan stacks from its rows."""
        return rows

    def scan(self, eqn: Any, inputs: list[L]) -> list[L]:
        """Analyse the body until the facts of the carry do not change any more."""
        loop = Scan.of(eqn.params)
        consts, state, over = loop.split(inputs)
        avals = [v.aval for v in eqn.outvars]
        rows = self.rows(eqn, over, loop.row_avals)
        out: list[L] = []

        def body(carry: list[L]) -> list[L]:
            nonlocal out
            out = self.run(loop.program, [*consts, *carry, *rows])
            return out[: loop.num_carry]

        # A scan without iterations returns its initial carry, so `fixpoint` joins it, too.
        state = self.fixpoint(eqn, state, body)
        return [*state, *self.stack(eqn, out[loop.num_carry :], avals[loop.num_carry :])]

    def while_loop(self, eqn: Any, inputs: list[L]) -> list[L]:
        """Analyse condition and body until the facts of the state do not change any more."""
        loop = While.of(eqn.params)
        of_condition, of_body, state = loop.split(inputs)
        goes_on: list[L] = []

        def body(state: list[L]) -> list[L]:
            nonlocal goes_on
            goes_on = self.run(loop.condition, [*of_condition, *state])
            with self.inside_of(eqn, goes_on[0]):
                return self.run(loop.body, [*of_body, *state])

        return self.fixpoint(eqn, state, body, lambda s: self.decide(eqn, s, goes_on[0]))

    def fixpoint(
        self,
        eqn: Any,
        state: list[L],
        body: Callable[[list[L]], list[L]],
        after: Callable[[list[L]], list[L]] = lambda state: state,
    ) -> list[L]:
        """Return the facts of a carry that hold in every iteration, and before the first."""
        while True:
            grown = after(self.join_all(eqn, state, body(state)))
            if all(map(self.is_same, grown, state)):
                return grown
            state = grown

    def cond(self, eqn: Any, inputs: list[L]) -> list[L]:
        """Join the facts of all branches."""
        index, *operands = inputs
        with self.inside_of(eqn, index):
            ways = [self.run(branch, operands) for branch in eqn.params["branches"]]
        results = functools.reduce(functools.partial(self.join_all, eqn), ways)
        return self.decide(eqn, results, index)

    def linear_solve(self, eqn: Any, inputs: list[L]) -> list[L]:
        """Analyse the program that solves."""
        return self.run(*get_solve(eqn, inputs))

    def join_all(self, eqn: Any, first: Sequence[L], second: Sequence[L]) -> list[L]:
        """Join the facts of the first results of a loop or branch, pair by pair."""
        avals = [v.aval for v in eqn.outvars[: len(first)]]
        rows = zip(avals, first, second, strict=True)
        return [self.join(eqn, aval, a, b) for aval, a, b in rows]
