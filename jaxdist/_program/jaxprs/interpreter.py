"""The base classes of everything in jaxdist that evaluates or analyses programs of JAX."""

import abc
import contextlib
import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Generic, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Literal

from jaxdist._program.jaxprs import primitives as known
from jaxdist._program.jaxprs.control_flow import Scan, While, get_solve
from jaxdist._program.jaxprs.subprograms import get_consts, open_jaxpr

V = TypeVar("V")

# Note [Programs inside operations]
#
# Some primitives of JAX hold programs: loops, branches, and calls of functions. Only this table
# lists their names, each with the method of `Interpreter` that has its rule. `ForwardAnalysis`
# implements the rules for all analyses; an `Interpreter` that computes values has its own.
# `Interpreter` passes a primitive that is not in the table to `operation`, like one without
# programs. Each analysis then returns its weakest fact, so a new primitive of JAX makes an analysis
# less precise, but never wrong.
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
        literal: Returns the value of a literal.
        values: The initial values of variables.
        alias: Variables that are replaced by other variables, or by literals.
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
        """Return the value of a variable or literal."""
        # A literal cannot be hashed.
        found = atom if isinstance(atom, Literal) else self._alias.get(atom, atom)
        if isinstance(found, Literal):
            return self._literal(found)
        return self._values[found]

    def holds(self, variable: Any) -> bool:
        """Whether a variable has a value."""
        return variable in self._values

    def read_all(self, atoms: Iterable[Any]) -> list[V]:
        """Return the values of several variables or literals."""
        return [self.read(atom) for atom in atoms]

    def write(self, variables: Sequence[Any], values: Sequence[V]) -> None:
        """Store the results of an operation."""
        self._values.update(zip(variables, values, strict=True))


def read_number(value: Any) -> float | None:
    """Return the value of a constant that is one real number; None for anything else."""
    if value is None or np.size(value) != 1 or np.iscomplexobj(value):
        return None
    array = np.asarray(value)
    # NumPy does not count bfloat16 among its numbers.
    is_number = array.dtype == bool or jnp.issubdtype(array.dtype, np.number)
    return float(array.reshape(())) if is_number else None


def evaluate_known(eqn: Any, values: Sequence[Any]) -> list[Any] | None:
    """Return the results of an operation on known numbers, or None if JAX cannot evaluate it.

    It may need a mesh or a layout.
    """
    pairs = zip(values, eqn.invars, strict=True)
    typed = [np.asarray(x).astype(v.aval.dtype) for x, v in pairs]
    try:
        # Callers look for nans on purpose, so JAX must not raise for them.
        with jax.ensure_compile_time_eval(), jax.debug_nans(False), jax.debug_infs(False):
            params = eqn.primitive.get_bind_params(eqn.params)
            made = eqn.primitive.bind(*map(jnp.asarray, typed), **params)
            results = made if eqn.primitive.multiple_results else [made]
            return [np.asarray(x) for x in results]
    except Exception:
        return None


class Interpreter(abc.ABC, Generic[V]):
    """An evaluation of a program, with a value of type `V` for each variable.

    A subclass defines the values of literals, constants and operations. Calls of functions are
    evaluated by `run`. Every other operation that holds programs is passed to `operation`, unless
    the subclass overrides its rule. See Note [Programs inside operations].
    """

    # Names of calls that are passed to `operation`, too.
    not_entered: frozenset[str] = frozenset()

    def literal(self, literal: Any) -> V:
        """Return the value of a literal; that of a constant, unless a subclass says otherwise."""
        return self.constant(literal, literal.val)

    @abc.abstractmethod
    def constant(self, variable: Any, value: Any) -> V:
        """Return the value of a constant of a program.

        Args:
            variable: Its variable, or a literal.
            value: Its number or array; None if it is not known.
        """

    @abc.abstractmethod
    def operation(self, eqn: Any, inputs: list[V]) -> list[V]:
        """Return the results of one operation that has no rule of its own."""

    def run(self, program: Any, inputs: Sequence[V], consts: Sequence[Any] = ()) -> list[V]:
        """Return the results of an open or closed program.

        Args:
            program: The program.
            inputs: The value of each input.
            consts: The constants of an open program, if they are known.
        """
        jaxpr = open_jaxpr(program)
        env = self.environment(program, inputs, consts)
        self.evaluate(jaxpr.eqns, env)
        return env.read_all(jaxpr.outvars)

    def environment(
        self, program: Any, inputs: Sequence[V], consts: Sequence[Any] = ()
    ) -> Environment[V]:
        """Return the initial values of a program: constants and inputs."""
        jaxpr = open_jaxpr(program)
        # A tape stores the values of small constants in its variables.
        of_tape = (getattr(v, "value", None) for v in jaxpr.constvars)
        held = consts or get_consts(program) or of_tape
        values = {v: self.constant(v, c) for v, c in zip(jaxpr.constvars, held, strict=True)}
        values.update(zip(jaxpr.invars, inputs, strict=True))
        return Environment(self.literal, values)

    def evaluate(self, eqns: Iterable[Any], env: Environment[V]) -> None:
        """Evaluate operations in order, and store their results."""
        for eqn in eqns:
            env.write(eqn.outvars, self.equation(eqn, env.read_all(eqn.invars)))

    def equation(self, eqn: Any, inputs: list[V]) -> list[V]:
        """Return the results of one operation."""
        rule = rule_for(eqn)
        if rule is None:
            return self.operation(eqn, inputs)
        return getattr(self, rule)(eqn, inputs)

    def call(self, eqn: Any, inputs: list[V]) -> list[V]:
        """Return the results of a call of a function."""
        if eqn.primitive.name in self.not_entered:
            return self.operation(eqn, inputs)
        return self.run(get_called_program(eqn), inputs)

    def scan(self, eqn: Any, inputs: list[V]) -> list[V]:
        """Return the results of a `scan`."""
        return self.operation(eqn, inputs)

    def while_loop(self, eqn: Any, inputs: list[V]) -> list[V]:
        """Return the results of a `while`."""
        return self.operation(eqn, inputs)

    def cond(self, eqn: Any, inputs: list[V]) -> list[V]:
        """Return the results of a `cond`, whose first operand is the index of the branch."""
        return self.operation(eqn, inputs)

    def linear_solve(self, eqn: Any, inputs: list[V]) -> list[V]:
        """Return the results of a `custom_linear_solve`."""
        return self.operation(eqn, inputs)


def rule_for(eqn: Any) -> str | None:
    """Return the name of the rule for an operation that holds programs, else None."""
    name = eqn.primitive.name
    parameter = known.CALLS.get(name)
    if parameter is None:
        return HIGHER_ORDER.get(name)
    # A primitive of another library may have the name of a call, and no program.
    return "call" if parameter in eqn.params else None


def get_called_program(eqn: Any) -> Any:
    """Return the program of the function that an operation calls."""
    return eqn.params[known.CALLS[eqn.primitive.name]]


L = TypeVar("L")


class ForwardAnalysis(Interpreter[L]):
    """An `Interpreter` whose values are facts, the elements of a lattice.

    A fact must hold for every execution of a program. So the facts of two branches are joined, and
    the body of a loop is analysed until the facts of its carry do not change any more. That ends
    if `join` returns an upper bound, and the lattice has no infinite ascending chain.
    """

    # The fact of literals and constants, which are parts of the program.
    of_constants: L

    def constant(self, variable: Any, value: Any) -> L:
        """Return the fact of a literal or constant of a program."""
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
