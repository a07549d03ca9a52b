"""The operands of JAX's loops and solvers, split by their roles."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from jaxdist import _compat
from jaxdist._program.jaxprs.subprograms import get_input_variables

V = TypeVar("V")
Values = Sequence[V]


@dataclasses.dataclass(frozen=True)
class Scan:
    """A `scan`: constants, a carry, and arrays that each iteration reads one row of."""

    program: Any
    length: int
    num_consts: int
    num_carry: int

    @classmethod
    def of(cls, params: Mapping[str, Any]) -> "Scan":
        """Return the parts of a `scan` with these parameters."""
        return cls(params["jaxpr"], params["length"], *_compat.get_scan_counts(params))

    @property
    def row_avals(self) -> list[Any]:
        """The shapes and dtypes of one row of each array that the loop iterates over."""
        return [v.aval for v in get_input_variables(self.program)][
            self.num_consts + self.num_carry :
        ]

    def split(self, operands: Values[V]) -> tuple[list[V], list[V], list[V]]:
        """Return the constants, the initial carry, and the arrays that the loop iterates over."""
        return _split(operands, self.num_consts, self.num_carry)


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

    @property
    def is_batched(self) -> bool:
        """Whether the condition has one value for each row, as under `jax.vmap`."""
        return bool(self.condition.out_avals[0].shape)

    def split(self, operands: Values[V]) -> tuple[list[V], list[V], list[V]]:
        """Return the constants of the condition, those of the body, and the initial state."""
        return _split(operands, self.num_condition_consts, self.num_body_consts)


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
