"""JAX's loops and solvers: their operands by roles, and the same loops with other bodies."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp

from jaxdist import _compat
from jaxdist._program.jaxprs.subprograms import open_jaxpr

V = TypeVar("V")
Values = Sequence[V]


@dataclasses.dataclass(frozen=True)
class Scan:
    """A `scan`: constants, a carry, and arrays that each iteration reads one row of."""

    program: Any
    length: int
    is_reverse: bool
    unroll: Any
    num_consts: int
    num_carry: int

    @classmethod
    def of(cls, params: Mapping[str, Any]) -> "Scan":
        """Return the parts of a `scan` with these parameters."""
        p = params
        counts = _compat.get_scan_counts(p)
        return cls(p["jaxpr"], p["length"], p["reverse"], p["unroll"], *counts)

    @property
    def row_avals(self) -> list[Any]:
        """The shapes and dtypes of one row of each array that the loop iterates over."""
        return [v.aval for v in open_jaxpr(self.program).invars][self.num_consts + self.num_carry :]

    def split(self, operands: Values[V]) -> tuple[list[V], list[V], list[V]]:
        """Return the constants, the initial carry, and the arrays that the loop iterates over."""
        return _split(operands, self.num_consts, self.num_carry)

    def run(
        self,
        body: Callable[[list[Any]], list[Any]],
        start: list[Any],
        over: list[Any],
        *,
        unroll: Any = 1,
    ) -> list[Any]:
        """Return the results of the loop with another body.

        Args:
            body: Returns the next carry and the rows to stack, for a carry and rows.
            start: The first carry.
            over: The arrays that the loop iterates over.
            unroll: As for `jax.lax.scan`.
        """

        def run_body(carry: list[Any], rows: list[Any]) -> tuple[list[Any], list[Any]]:
            results = body([*carry, *rows])
            return results[: self.num_carry], results[self.num_carry :]

        carry, stacked = jax.lax.scan(
            run_body, start, over, length=self.length, reverse=self.is_reverse, unroll=unroll
        )
        return [*carry, *stacked]


@dataclasses.dataclass(frozen=True)
class While:
    """A `while`: constants of the condition, constants of the body, and the state."""

    condition: Any
    body: Any
    num_condition_consts: int
    num_body_consts: int

    @classmethod
    def of(cls, params: Mapping[str, Any]) -> "While":
        """Return the parts of a `while` with these parameters."""
        p = params
        return cls(p["cond_jaxpr"], p["body_jaxpr"], p["cond_nconsts"], p["body_nconsts"])

    def split(self, operands: Values[V]) -> tuple[list[V], list[V], list[V]]:
        """Return the constants of the condition, those of the body, and the initial state."""
        return _split(operands, self.num_condition_consts, self.num_body_consts)

    def run(
        self,
        condition: Callable[[list[Any]], Any],
        body: Callable[[list[Any]], list[Any]],
        start: list[Any],
        axes: Sequence[int] | None = None,
    ) -> list[Any]:
        """Return the last state of the loop with another condition and another body.

        Under `jax.vmap` the condition has one value for each row, but `jax.lax.while_loop` accepts
        a scalar only. Then one loop runs for all rows, which finish independently of each other.

        Args:
            condition: Returns for a state whether a row continues, `[rows...]`; or a scalar.
            body: Returns the next state of all rows.
            start: The first state.
            axes: As for `keep_finished_rows`.
        """
        is_batched = bool(self.condition.out_avals[0].shape)

        def run_body(state: list[Any]) -> list[Any]:
            after = body(state)
            return keep_finished_rows(condition(state), after, state, axes) if is_batched else after

        def has_active_row(state: list[Any]) -> Any:
            return jnp.any(condition(state)) if is_batched else condition(state)

        return jax.lax.while_loop(has_active_row, run_body, start)


def keep_finished_rows(
    condition: Any, after: Sequence[Any], before: Sequence[Any], axes: Sequence[int] | None = None
) -> list[Any]:
    """Return the next state, in which rows that have finished keep their values.

    Args:
        condition: The condition of all rows, `[rows...]`; or a scalar.
        after: The results of the body, `[rows..., ...]`.
        before: The state before the body.
        axes: For each value, the number of dims before those of the rows; 0 by default.
    """
    if not jnp.ndim(condition):
        return list(after)

    def select(new: Any, old: Any, front: int) -> Any:
        behind = jnp.ndim(new) - jnp.ndim(condition) - front
        shape = (1,) * front + jnp.shape(condition) + (1,) * behind
        return jnp.where(condition.reshape(shape), new, old)

    fronts = [0] * len(after) if axes is None else axes
    return [select(n, o, f) for n, o, f in zip(after, before, fronts, strict=True)]


def _split(operands: Values[V], first: int, second: int) -> tuple[list[V], list[V], list[V]]:
    whole = list(operands)
    return whole[:first], whole[first : first + second], whole[first + second :]


def get_solve(eqn: Any, operands: Values[V]) -> tuple[Any, list[V]]:
    """Return the program that a `custom_linear_solve` runs, and its operands.

    The equation holds four programs; only derivatives use the other three.
    """
    lengths = eqn.params["const_lengths"]
    start = lengths.matvec + lengths.vecmat
    whole = list(operands)
    given = whole[start : start + lengths.solve] + whole[sum(lengths) :]
    return eqn.params["jaxprs"].solve, given
