"""The record of a step op by op, in the form of a program that the analyses can read."""

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any

import jax
import numpy as np

from jaxdist import _compat
from jaxdist._program.arguments.exact import is_key

# Constants of at most this many elements keep their values. Analyses need small ones, such as a
# divisor or a predicate; large ones would keep memory alive.
_SMALL = 16


@dataclasses.dataclass(eq=False, slots=True)
class TapedValue:
    """One value, with the attributes of a variable of a jaxpr.

    `value` is the value of a small constant. `from_zero` is the value as it would be if the metrics
    were zero before the step; None if it does not depend on metrics. `is_read` is whether Python
    has read it, which may have decided what the replica does.
    """

    aval: Any
    value: Any = None
    from_zero: Any = None
    is_read: bool = False


@dataclasses.dataclass(slots=True)
class TapedOp:
    """One operation, with the attributes of an equation of a jaxpr."""

    primitive: Any
    params: dict[str, Any]
    invars: list[TapedValue]
    outvars: list[TapedValue]
    effects: frozenset[Any] = frozenset()
    source_info: Any = _compat.NO_SOURCE
    line: str = ""  # the user's line, if it is not the line of `source_info`


class Tape:
    """A record of all operations of one replica, with shapes and without data.

    It has the attributes of an open jaxpr. It has no loops or branches, since Python has already
    decided them.
    """

    def __init__(self) -> None:
        self.constvars: list[TapedValue] = []
        self.invars: list[TapedValue] = []
        self.eqns: list[TapedOp] = []
        self.outvars: list[TapedValue] = []

    def add_input(self, aval: Any) -> TapedValue:
        """Add the next input of the step."""
        value = TapedValue(aval)
        self.invars.append(value)
        return value

    def record(
        self,
        primitive: Any,
        params: dict[str, Any],
        args: Sequence[Any],
        avals: Sequence[Any],
        line: str = "",
    ) -> list[TapedValue]:
        """Record an operation, and return its results."""
        made = [TapedValue(a) for a in avals]
        given = [self._value(a) for a in args]
        op = TapedOp(
            primitive, params, given, made, source_info=_compat.get_current_source(), line=line
        )
        self.eqns.append(op)
        return made

    def add_results(self, values: Iterable[Any]) -> None:
        """Record the results of the step."""
        self.outvars += [self._value(v) for v in values]

    def _value(self, x: Any) -> TapedValue:
        if isinstance(x, _compat.HeldTracer):
            return x.mark
        return self.add_constant(x)

    def add_constant(self, x: Any) -> TapedValue:
        """Record a value that is not the result of an operation."""
        aval = jax.typeof(x)
        is_small = getattr(aval, "size", _SMALL + 1) <= _SMALL and not is_key(aval)
        constant = TapedValue(aval, np.asarray(x) if is_small else None)
        self.constvars.append(constant)
        return constant
