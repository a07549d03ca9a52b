"""Analyses of how a step changes a value: whether it adds to a variable, or updates parameters."""

import enum
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.extend.core import Literal

from jaxdist._program.jaxprs.interpreter import Environment, ForwardAnalysis
from jaxdist._program.jaxprs.primitives import SUMS
from jaxdist._program.jaxprs.subprograms import open_jaxpr


class Dependence(enum.Enum):
    """How a value depends on one variable."""

    FREE = "free"  # does not depend on it
    SAME = "same"  # equals it
    SUM = "sum"  # equals it plus something that does not depend on it
    OTHER = "other"  # depends on it in another way


# Operations with one operand that keep its values, and change at most shape, dtype or layout.
_VALUE_PRESERVING = frozenset(
    {"broadcast_in_dim", "copy", "mesh_cast", "pcast", "pvary", "reshape", "reshard"}
    | {"sharding_constraint", "squeeze", "stop_gradient"}
)


def growth(jaxpr: Any, variable: Any, result: int) -> Dependence:
    """Return how result number `result` of an open jaxpr depends on its input `variable`."""
    return growths(jaxpr, variable)[result]


def growths(jaxpr: Any, variable: Any) -> list[Dependence]:
    """Return how each result of an open jaxpr depends on its input `variable`."""
    given = [Dependence.SAME if v is variable else Dependence.FREE for v in jaxpr.invars]
    return DependenceAnalysis().run(jaxpr, given)


class _Dependences(Environment[Dependence]):
    """The variables of a program that depend on the one variable; all others are free of it."""

    def read(self, atom: Any) -> Dependence:
        known = not isinstance(atom, Literal) and self.holds(atom)
        return super().read(atom) if known else Dependence.FREE

    def write(self, variables: Sequence[Any], values: Sequence[Dependence]) -> None:
        pairs = zip(variables, values, strict=True)
        kept = [(v, given) for v, given in pairs if given is not Dependence.FREE]
        super().write([v for v, _ in kept], [given for _, given in kept])


class DependenceAnalysis(ForwardAnalysis[Dependence]):
    """The analysis of how values depend on one variable."""

    of_constants = Dependence.FREE

    def join(self, eqn: Any, aval: Any, first: Dependence, second: Dependence) -> Dependence:
        return _join([first, second])

    def environment(
        self, program: Any, inputs: Sequence[Dependence], consts: Sequence[Any] = ()
    ) -> Environment[Dependence]:
        found = _Dependences(self.literal, {})
        found.write(open_jaxpr(program).invars, inputs)
        return found

    def evaluate(self, eqns: Iterable[Any], env: Environment[Dependence]) -> None:
        # The analysis runs once for each variable of a model, and few operations use one.
        for eqn in eqns:
            if any(not isinstance(atom, Literal) and env.holds(atom) for atom in eqn.invars):
                env.write(eqn.outvars, self.equation(eqn, env.read_all(eqn.invars)))

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
        is_like = before.kind == after.kind or _are_floats(before, after)
        return first if is_like else Dependence.OTHER
    return Dependence.OTHER


def _are_floats(*dtypes: Any) -> bool:
    # The kind of bfloat16 and its like is "V".
    return all(jax.dtypes.issubdtype(dtype, np.floating) for dtype in dtypes)


class WeightedSums(DependenceAnalysis):
    """Dependence analysis in which a sum may scale the variable, as an average does."""

    def operation(self, eqn: Any, inputs: list[Dependence]) -> list[Dependence]:
        name, free = eqn.primitive.name, inputs.count(Dependence.FREE)
        if name in SUMS:
            # The mean over the replicas, which may have several operands.
            return [Dependence.SUM if given is Dependence.SAME else given for given in inputs]
        is_known = Dependence.OTHER not in inputs
        is_sum = name in ("add", "add_any", "sub", "neg")
        is_scaled = name == "mul" and free == 1
        is_divided = name == "div" and inputs[1] is Dependence.FREE
        # `v.at[ids].add(rows)`, where neither the ids nor the rows depend on the variable.
        is_scattered = (
            name in ("scatter-add", "scatter-sub") and inputs[1:] == [Dependence.FREE] * 2
        )
        if is_known and (is_sum or is_scaled or is_divided or is_scattered):
            return [Dependence.SUM]
        return super().operation(eqn, inputs)


def is_weighted_sum(jaxpr: Any, number: int, result: int) -> bool:
    """Whether a result of an open jaxpr is a weighted sum of one input and of what is free of it.

    Changes of a weighted sum add up: those that two workers compute from the same old value may
    both be added to it.

    Args:
        jaxpr: The program.
        number: The number of the input.
        result: The number of the result.
    """
    given = [Dependence.SAME if n == number else Dependence.FREE for n in range(len(jaxpr.invars))]
    return WeightedSums().run(jaxpr, given)[result] is not Dependence.OTHER


def _join(ways: Sequence[Dependence]) -> Dependence:
    found = set(ways)
    if len(found) == 1:
        return ways[0]
    return Dependence.SUM if found == {Dependence.SAME, Dependence.SUM} else Dependence.OTHER


class Part(enum.IntEnum):
    """How a value depends on one argument; `join` takes the larger of two."""

    CONSTANT = 0  # equal on all replicas, and independent of the argument
    DATA = 1  # may differ between replicas, and independent of the argument
    ITSELF = 2  # the argument, scaled by constants
    MOVED = 3  # the scaled argument, plus a term of the replica's data
    UPDATED = 4  # the scaled argument, plus a term that depends on the argument
    COMPUTED = 5  # depends on the argument in another way


# Operations with one operand that keep its values up to sign, shape, dtype and layout.
_LINEAR_OPERATIONS = frozenset(
    {"broadcast_in_dim", "convert_element_type", "copy", "neg", "pcast", "pvary", "reshape"}
    | {"mesh_cast", "reshard", "sharding_constraint", "squeeze", "stop_gradient"}
)
_INDEPENDENT = frozenset({Part.CONSTANT, Part.DATA})
_LINEAR = frozenset({Part.ITSELF, Part.MOVED, Part.UPDATED})


def part_of_result(jaxpr: Any, variable: Any, own: Mapping[Any, bool], result: int) -> Part:
    """Return how result number `result` of an open jaxpr depends on its input `variable`.

    Args:
        jaxpr: The program of one replica.
        variable: One of its inputs.
        own: For inputs, whether each replica has its own value.
        result: The number of the result.
    """
    given = [
        Part.ITSELF if v is variable else Part.DATA if own.get(v, False) else Part.CONSTANT
        for v in jaxpr.invars
    ]
    return UpdateAnalysis().run(jaxpr, given)[result]


class UpdateAnalysis(ForwardAnalysis[Part]):
    """The analysis of how values depend on one argument."""

    of_constants = Part.CONSTANT

    def join(self, eqn: Any, aval: Any, first: Part, second: Part) -> Part:
        return max(first, second)

    def operation(self, eqn: Any, inputs: list[Part]) -> list[Part]:
        return [_classify_update(eqn.primitive.name, inputs)] * len(eqn.outvars)

    # Optimizers have no such operations, so no precise rule is needed.
    while_loop = operation
    linear_solve = operation


def _classify_update(name: str, given: list[Part]) -> Part:
    found = set(given)
    # `axis_index` has no operands, and still differs between replicas.
    if found <= _INDEPENDENT:
        return Part.DATA if Part.DATA in found or name == "axis_index" else Part.CONSTANT
    linear = [g for g in given if g in _LINEAR]
    others = [g for g in given if g not in _LINEAR]
    if name in _LINEAR_OPERATIONS:
        return given[0]
    if name in ("add", "add_any", "sub") and linear:
        return max(linear + [_classify_sum(g) for g in others])
    if name == "mul" and len(linear) == 1 and others == [Part.CONSTANT]:
        return linear[0]
    if name == "div" and given[1] is Part.CONSTANT:
        return given[0]
    if name == "select_n" and given[0] in _INDEPENDENT and linear:
        return max(given[1:]) if Part.COMPUTED not in given else Part.COMPUTED
    return Part.COMPUTED


def _classify_sum(part: Part) -> Part:
    """Return the kind of a sum of a linear value and a value of this kind."""
    steps = {Part.CONSTANT: Part.ITSELF, Part.DATA: Part.MOVED}
    return steps.get(part, Part.UPDATED)
