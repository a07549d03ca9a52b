"""What a step that ran op by op has done, in the form of a program that can be analysed."""

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any

import jax
import numpy as np

from jaxdist import _compat


@dataclasses.dataclass(eq=False, slots=True)
class TapedValue:
    """One value; plays a variable of a jaxpr."""

    aval: Any


@dataclasses.dataclass(slots=True)
class TapedOp:
    """One operation; plays an equation of a jaxpr."""

    primitive: Any
    params: dict[str, Any]
    invars: list[TapedValue]
    outvars: list[TapedValue]
    effects: frozenset[Any] = frozenset()
    source_info: Any = _compat.NO_SOURCE


class Tape:
    """Remembers every operation of one replica, with shapes and without data.

    It has the attributes of an open jaxpr. Control flow has been decided already, so it is a
    straight line.
    """

    def __init__(self) -> None:
        self.constvars: list[TapedValue] = []
        self.invars: list[TapedValue] = []
        self.eqns: list[TapedOp] = []
        self.outvars: list[TapedValue] = []

    def input(self, aval: Any) -> TapedValue:
        """The next input of the step."""
        value = TapedValue(aval)
        self.invars.append(value)
        return value

    def did(
        self, primitive: Any, params: dict[str, Any], args: Sequence[Any], avals: Sequence[Any]
    ) -> list[TapedValue]:
        """Remember an operation; its results."""
        made = [TapedValue(a) for a in avals]
        self.eqns.append(TapedOp(primitive, params, [self._value(a) for a in args], made))
        return made

    def results(self, values: Iterable[Any]) -> None:
        """The results of the step."""
        self.outvars += [self._value(v) for v in values]

    def _value(self, x: Any) -> TapedValue:
        if isinstance(x, _compat.HeldTracer):
            mark: TapedValue = x.mark
            return mark
        return self.constant(x)

    def constant(self, x: Any) -> TapedValue:
        """A value that is no result of an operation."""
        constant = TapedValue(jax.typeof(x))
        self.constvars.append(constant)
        return constant


def same_bits(values: Sequence[Any]) -> bool:
    """Whether arrays hold the same bits in the same shape and dtype."""
    raw = [_bits(v) for v in values]
    return all(r == raw[0] for r in raw)


def _bits(value: Any) -> tuple[Any, ...]:
    if jax.dtypes.issubdtype(value.dtype, jax.dtypes.prng_key):
        value = jax.random.key_data(value)
    host = np.asarray(value)
    return host.shape, host.dtype, host.tobytes()
