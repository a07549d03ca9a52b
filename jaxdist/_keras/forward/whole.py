"""Evaluates the program of all rows on replicas that each have some of the rows.

Each value is evaluated in one of the ways of `row_rules.Kind`. An operation without a rule gets
whole values: the replicas gather the rows, add up the parts, and compute what the program of all
rows computes. Values that differ between replicas by design, such as random numbers and the
statistics of `BatchNormalization`, must stay with the rows; a whole value cannot depend on them.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Literal

from jaxdist import _compat
from jaxdist._keras.forward import marks
from jaxdist._keras.forward.aligned import NotAlignedError, find_differences
from jaxdist._keras.forward.nested import find_nested
from jaxdist._keras.forward.row_rules import OWN, PART, WHOLE, Fact, Kind, Sizes, find_fact
from jaxdist._keras.rows import Rows, with_gradient
from jaxdist._program import get_consts, iterate_with_inner, open_jaxpr
from jaxdist._program import primitives as known


@dataclasses.dataclass(frozen=True)
class Conversions:
    """Conversions between values of one replica and values of all rows inside a step.

    The replicas compute shares of one loss, whose sum is differentiated. So the gradients of a
    whole value are shares that add up. The gradient of rows is the part for these rows. The
    gradient of a partial sum is the same on all replicas.

    Args:
        rows: The rows of the replica; `own` of them are real.
        sizes: The numbers of rows in the programs of one replica, which may be more, and of all.
    """

    rows: Rows
    sizes: Sizes

    def add_up(self, part: Any) -> Any:
        """Return the sum over the replicas of a partial sum."""
        return with_gradient(self.rows.add_up, self.rows.add_up, part)

    def gather(self, array: Any, dim: int) -> Any:
        """Return the rows of all replicas.

        Shapes:
            In: `sizes.own` blocks of rows along `dim`. Out: `sizes.total` blocks.
        """
        rows, length = self.rows, array.shape[dim]
        block = length // self.sizes.own

        def forward(value: Any) -> Any:
            real = jax.lax.slice_in_dim(value, 0, rows.own * block, axis=dim)
            return rows.gather(real, dim, block)

        def backward(cotangent: Any) -> Any:
            own = rows.take_own(rows.add_up(cotangent), dim, block)
            pads = [(0, 0)] * own.ndim
            pads[dim] = (0, length - own.shape[dim])
            return jnp.pad(own, pads)

        return with_gradient(forward, backward, array)

    def take_rows(self, whole: Any, dim: int) -> Any:
        """Return the rows of this replica, padded with copies of the last; zeros without rows."""
        own, length = self.rows.own, self.sizes.own
        block = whole.shape[dim] // self.sizes.total
        if not own:
            shape = list(whole.shape)
            shape[dim] = block * length
            return jnp.zeros(shape, whole.dtype)
        taken = self.rows.take_own(whole, dim, block)
        if own == length:
            return taken
        last = jax.lax.slice_in_dim(taken, (own - 1) * block, own * block, axis=dim)
        return jnp.concatenate([taken] + [last] * (length - own), dim)

    def keep_real(self, array: Any, dim: int) -> Any:
        """Return the rows, with zeros instead of padding."""
        if self.rows.own == self.sizes.own:
            return array
        block = array.shape[dim] // self.sizes.own
        numbers = jax.lax.broadcasted_iota(jnp.int32, array.shape, dim)
        return jnp.where(numbers < self.rows.own * block, array, jnp.zeros_like(array))


_INLINED = frozenset({"jit", "pjit", "closed_call", "core_call", "remat", "remat2", "checkpoint"})
_NESTED = frozenset({"scan", "while", "cond", "custom_jvp_call", "custom_linear_solve"})
_DETERMINISTIC = known.FIRST_ORDER | known.PAIRWISE | frozenset(known.CALLS) | _NESTED
_LINEAR_IN_FIRST = frozenset({"reshape", "squeeze", "transpose", "reduce_sum", "broadcast_in_dim"})
_SMALL = 1024


class NotProvedError(Exception):
    """A value of all rows cannot be computed. The message has the operation and the reason."""


@dataclasses.dataclass(frozen=True, eq=False)
class Value:
    """A value, and how it relates to that in the program of all rows."""

    fact: Fact
    array: Any


class WholeProgram:
    """Evaluates a program of all rows.

    Args:
        conversions: The conversions of this replica.
    """

    def __init__(self, conversions: Conversions) -> None:
        self._to = conversions
        # Each value is converted once: the key is the identity of the value.
        self._whole: dict[int, tuple[Value, Value]] = {}

    def run(self, own: Any, whole: Any, inputs: Sequence[Value]) -> list[Value]:
        """Return the results of a program.

        Args:
            own: The program for the rows of one replica.
            whole: The program of all rows.
            inputs: The values of the inputs.

        Raises:
            NotProvedError: A result depends on a value that differs between replicas, or the
                programs are not the same.
        """
        try:
            find_differences(own, whole)
        except NotAlignedError:
            raise NotProvedError(
                "the layers compute something else for another number of rows"
            ) from None
        return self._run(own, whole, inputs)

    def _run(self, own: Any, whole: Any, inputs: Sequence[Value]) -> list[Value]:
        one, all_rows = open_jaxpr(own), open_jaxpr(whole)
        env: dict[Any, Value] = dict(zip(one.invars, inputs, strict=True))
        consts = zip(one.constvars, get_consts(own), get_consts(whole), strict=True)
        env.update((v, _make_constant(a, b)) for v, a, b in consts)

        def read(atom: Any, same: Any) -> Value:
            return Value(WHOLE, same.val) if isinstance(atom, Literal) else env[atom]

        for eqn, other in zip(one.eqns, all_rows.eqns, strict=True):
            given = [read(a, b) for a, b in zip(eqn.invars, other.invars, strict=True)]
            env.update(zip(eqn.outvars, self._evaluate(eqn, other, given), strict=True))
        return [read(a, b) for a, b in zip(one.outvars, all_rows.outvars, strict=True)]

    def _evaluate(self, eqn: Any, other: Any, given: list[Value]) -> list[Value]:
        name = eqn.primitive.name
        mark = marks.name_of_mark(eqn)
        if mark == marks.ADD_UP:
            return [self._add_up(eqn, given[0])]
        if mark == marks.OWN_STATISTICS:
            return self._bind(eqn, other, given, [OWN] * len(eqn.outvars))
        if name in _INLINED:
            parameter = known.CALLS[name]
            return self._run(eqn.params[parameter], other.params[parameter], given)
        if name == "select_n" and (chosen := _choose(given)) is not None:
            return [chosen]
        linear = _find_linear(eqn, other, name, given)
        if linear:
            return self._bind(eqn, other, given, [PART])
        given = [self.to_whole(v, eqn) if v.fact is PART else v for v in given]
        if name == "axis_index":
            return self._bind(eqn, other, given, [OWN])
        if all(v.fact is WHOLE for v in given) and not _is_spread(eqn, other):
            return self._compute_whole(eqn, other, given)
        facts = self._find_facts(eqn, other, given)
        if facts is not None:
            return self._bind(eqn, other, given, facts)
        return self._compute_whole(eqn, other, [self.to_whole(v, eqn) for v in given])

    def _find_facts(self, eqn: Any, other: Any, given: list[Value]) -> list[Fact] | None:
        """Return the facts of the results of the own operation on own operands; None if unknown."""
        facts: list[Fact] = []
        sizes = self._to.sizes
        for value, a, b in zip(given, eqn.invars, other.invars, strict=True):
            dim = sizes.find_dim(a.aval.shape, b.aval.shape)
            if value.fact is not WHOLE or dim == -1:
                facts.append(value.fact)
            elif dim is None:
                return None
            else:
                facts.append(Fact(Kind.ROWS, dim))
        if eqn.primitive.name in _NESTED:
            return find_nested(eqn, other, facts, sizes)
        fact = find_fact(eqn, other, facts, sizes)
        return None if fact is None else [fact] * len(eqn.outvars)

    def _bind(self, eqn: Any, other: Any, given: list[Value], facts: list[Fact]) -> list[Value]:
        """Run the own operation on own operands, and return its results."""
        operands = []
        for value, a, b in zip(given, eqn.invars, other.invars, strict=True):
            operands.append(self._to_own(value, a, b))
        if facts == [PART] and any(v.fact.kind is Kind.ROWS for v in given):
            # Padding does not count in a sum over the rows.
            operands[0] = self._to.keep_real(operands[0], self._dim_of(given[0], eqn, other, 0))
        results = _compat.bind_like(eqn, operands, eqn.params)
        return [Value(f, r) for f, r in zip(facts, results, strict=True)]

    def _dim_of(self, value: Value, eqn: Any, other: Any, place: int) -> int:
        if value.fact.kind is Kind.ROWS:
            return value.fact.dim
        shapes = eqn.invars[place].aval.shape, other.invars[place].aval.shape
        return self._to.sizes.find_dim(*shapes) or 0

    def _to_own(self, value: Value, own: Any, whole: Any) -> Any:
        if value.fact is not WHOLE or own.aval.shape == whole.aval.shape:
            return value.array
        dim = self._to.sizes.find_dim(own.aval.shape, whole.aval.shape)
        return self._to.take_rows(value.array, 0 if dim is None else dim)

    def _compute_whole(self, eqn: Any, other: Any, given: list[Value]) -> list[Value]:
        """Run the operation of all rows, and return its results."""
        for inner in iterate_with_inner(other):
            is_mark = marks.name_of_mark(inner) in (marks.ADD_UP, marks.OWN_STATISTICS)
            if is_mark or inner.effects or inner.primitive.name not in _DETERMINISTIC:
                raise NotProvedError(
                    "it is not known whether all replicas compute the same result for the "
                    f"operation {inner.primitive.name!r}, at {_compat.find_source(eqn)}"
                )
        operands = [v.array for v in given]
        results = _fold(other, operands)
        if results is None:
            results = _compat.bind_like(other, operands, other.params)
        return [Value(WHOLE, r) for r in results]

    def to_whole(self, value: Value, eqn: Any) -> Value:
        """Return a value of all rows.

        Raises:
            NotProvedError: Each replica has its own value.
        """
        if value.fact is WHOLE:
            return value
        if value.fact is OWN:
            where = "" if eqn is None else f", at {_compat.find_source(eqn)}"
            raise NotProvedError(
                "it depends on values that differ between replicas (random numbers, or statistics "
                f"of BatchNormalization), and not row by row{where}"
            )
        known_value = self._whole.get(id(value))
        if known_value is None:
            if value.fact is PART:
                array = self._to.add_up(value.array)
            else:
                array = self._to.gather(value.array, value.fact.dim)
            known_value = self._whole[id(value)] = (value, Value(WHOLE, array))
        return known_value[1]

    def _add_up(self, eqn: Any, value: Value) -> Value:
        if value.fact is not PART:
            raise NotProvedError(
                f"it adds up over the replicas a value that is not a sum over rows, at "
                f"{_compat.find_source(eqn)}"
            )
        return self.to_whole(value, eqn)


def _make_constant(own: Any, whole: Any) -> Value:
    if isinstance(own, jax.core.Tracer):
        # A value of the outer step: it may be the number of the replica.
        return Value(OWN, own)
    return Value(WHOLE, whole)


def _choose(given: list[Value]) -> Value | None:
    """Return the value that a known condition selects; None if it is unknown."""
    which = given[0].array
    if given[0].fact is not WHOLE or isinstance(which, jax.core.Tracer) or np.ndim(which):
        return None
    return given[1 + int(which)]


def _find_linear(eqn: Any, other: Any, name: str, given: list[Value]) -> bool:
    """Whether the operation on parts gives a part."""
    kinds = [v.fact for v in given]
    if PART not in kinds:
        return False
    pairs = zip((*eqn.invars, *eqn.outvars), (*other.invars, *other.outvars), strict=True)
    if any(a.aval.shape != b.aval.shape for a, b in pairs):
        return False
    if name == "mul":
        return sorted(f.kind.value for f in kinds) == ["part", "whole"]
    if name == "div":
        return kinds == [PART, WHOLE]
    if name in ("neg", "copy", *_LINEAR_IN_FIRST):
        return True
    if name in ("add", "add_any", "sub"):
        return all(v.fact is PART or _is_zero(v) for v in given)
    if name == "select_n":
        return kinds[0] is WHOLE and all(v.fact is PART or _is_zero(v) for v in given[1:])
    return False


def _is_zero(value: Value) -> bool:
    array = value.array
    if value.fact is not WHOLE or isinstance(array, jax.core.Tracer) or np.size(array) > _SMALL:
        return False
    return not np.any(np.asarray(array))


def _is_spread(eqn: Any, other: Any) -> bool:
    """Whether a value is repeated for each row: the replica repeats it for its own rows."""
    if eqn.primitive.name != "broadcast_in_dim":
        return False
    return bool(eqn.outvars[0].aval.shape != other.outvars[0].aval.shape)


def _fold(eqn: Any, operands: list[Any]) -> list[Any] | None:
    """Compute an operation on known numbers while tracing; None if that is not possible."""
    if eqn.primitive.name not in known.FIRST_ORDER:
        return None
    sizes = [v.aval.size for v in (*eqn.invars, *eqn.outvars)]
    if any(isinstance(x, jax.core.Tracer) for x in operands) or max(sizes) > _SMALL:
        return None
    with jax.ensure_compile_time_eval():
        return list(_compat.bind_like(eqn, operands, eqn.params))
