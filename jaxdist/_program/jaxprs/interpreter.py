"""The one way in which jaxdist goes through a program of JAX, one operation after the other."""

import abc
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Generic, TypeVar

from jax.extend.core import Literal

from jaxdist._program.jaxprs import primitives as known
from jaxdist._program.jaxprs.subprograms import consts_of, open_jaxpr

V = TypeVar("V")

# Note [Programs inside operations]
#
# Some primitives of JAX hold programs: loops, branches, and functions that are called. This table
# is the only place that knows them by name. It says which method of `Interpreter` has the rule.
# `ForwardAnalysis` has the rules of all analyses, and an `Interpreter` that computes has its own.
# A primitive that is not here is given to `operation`, like one without programs: each analysis
# answers with the least that it can say, so a new primitive of JAX costs precision, never truth.
HIGHER_ORDER = {
    **dict.fromkeys(known.CALLS, "call"),
    "scan": "scan",
    "while": "while_loop",
    "cond": "cond",
    "custom_linear_solve": "linear_solve",
}


class Environment(Generic[V]):
    """The values of the variables of one program.

    Args:
        literal: Gives the value of a literal.
        values: Of the first variables.
        alias: Variables that stand for others, or for literals.
    """

    def __init__(
        self,
        literal: Callable[[Any], V],
        values: Mapping[Any, V],
        alias: Mapping[Any, Any] | None = None,
    ) -> None:
        self._literal = literal
        self._values = dict(values)
        self._alias = alias or {}

    def read(self, atom: Any) -> V:
        """The value of a variable or literal."""
        # A literal cannot be hashed.
        found = atom if isinstance(atom, Literal) else self._alias.get(atom, atom)
        if isinstance(found, Literal):
            return self._literal(found)
        return self._values[found]

    def read_all(self, atoms: Iterable[Any]) -> list[V]:
        """The values of several."""
        return [self.read(atom) for atom in atoms]

    def write(self, variables: Sequence[Any], values: Sequence[V]) -> None:
        """Keep the results of an operation."""
        self._values.update(zip(variables, values, strict=True))


def value_of_literal(literal: Any) -> Any:
    """The number or array that a literal is."""
    return literal.val


class Interpreter(abc.ABC, Generic[V]):
    """Goes through a program with a value of `V` for each variable.

    A subclass says what literals, constants and operations give. Where an operation holds programs
    and the subclass has no rule for it, it is an operation like the others; functions that are only
    called are gone into. See Note [Programs inside operations].
    """

    @abc.abstractmethod
    def literal(self, literal: Any) -> V:
        """The value of a literal."""

    @abc.abstractmethod
    def constant(self, variable: Any, value: Any) -> V:
        """The value of a constant of a program; `value` is None in an open one."""

    @abc.abstractmethod
    def operation(self, eqn: Any, inputs: list[V]) -> list[V]:
        """The results of one operation that no rule takes apart."""

    def run(self, program: Any, inputs: Sequence[V], consts: Sequence[Any] = ()) -> list[V]:
        """The results of an open or closed program.

        Args:
            program: The program.
            inputs: One for each input.
            consts: Of an open program, where they are known.
        """
        jaxpr = open_jaxpr(program)
        env = self.environment(program, inputs, consts)
        self.evaluate(jaxpr.eqns, env)
        return env.read_all(jaxpr.outvars)

    def environment(
        self, program: Any, inputs: Sequence[V], consts: Sequence[Any] = ()
    ) -> Environment[V]:
        """The values that a program starts with."""
        jaxpr = open_jaxpr(program)
        held = consts or consts_of(program) or [None] * len(jaxpr.constvars)
        values = {v: self.constant(v, c) for v, c in zip(jaxpr.constvars, held, strict=True)}
        values.update(zip(jaxpr.invars, inputs, strict=True))
        return Environment(self.literal, values)

    def evaluate(self, eqns: Iterable[Any], env: Environment[V]) -> None:
        """Go through operations, and keep what they give."""
        for eqn in eqns:
            env.write(eqn.outvars, self.equation(eqn, env.read_all(eqn.invars)))

    def equation(self, eqn: Any, inputs: list[V]) -> list[V]:
        """The results of one operation."""
        rule = rule_for(eqn)
        if rule is None:
            return self.operation(eqn, inputs)
        found: list[V] = getattr(self, rule)(eqn, inputs)
        return found

    def call(self, eqn: Any, inputs: list[V]) -> list[V]:
        """The results of a function that is called."""
        return self.run(called(eqn), inputs)

    def scan(self, eqn: Any, inputs: list[V]) -> list[V]:
        """The results of a `scan`."""
        return self.operation(eqn, inputs)

    def while_loop(self, eqn: Any, inputs: list[V]) -> list[V]:
        """The results of a `while`."""
        return self.operation(eqn, inputs)

    def cond(self, eqn: Any, inputs: list[V]) -> list[V]:
        """The results of a `cond`, of which the first operand chooses the branch."""
        return self.operation(eqn, inputs)

    def linear_solve(self, eqn: Any, inputs: list[V]) -> list[V]:
        """The results of a `custom_linear_solve`."""
        return self.operation(eqn, inputs)


def rule_for(eqn: Any) -> str | None:
    """The name of the rule for an operation that holds programs, else None."""
    name = eqn.primitive.name
    rule = HIGHER_ORDER.get(name)
    # A primitive of another library may have the name of a call, and no program.
    if rule == "call" and known.CALLS[name] not in eqn.params:
        return None
    return rule


def called(eqn: Any) -> Any:
    """The program of a function that an operation calls."""
    return eqn.params[known.CALLS[eqn.primitive.name]]
