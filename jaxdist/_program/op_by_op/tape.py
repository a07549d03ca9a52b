"""What a step that ran op by op has done, in the form of a program that can be analysed."""

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any

import jax
import numpy as np

from jaxdist import _compat

# Constants of up to so many elements are remembered with their values.
_SMALL = 16


@dataclasses.dataclass(eq=False, slots=True)
class TapedValue:
    """One value; plays a variable of a jaxpr.

    `value` is that of a small constant. `from_zero` is what it would be if the metrics that the
    step was given were zero, where it hangs on them.
    """

    aval: Any
    value: Any = None
    from_zero: Any = None


@dataclasses.dataclass(slots=True)
class TapedOp:
    """One operation; plays an equation of a jaxpr."""

    primitive: Any
    params: dict[str, Any]
    invars: list[TapedValue]
    outvars: list[TapedValue]
    effects: frozenset[Any] = frozenset()
    source_info: Any = _compat.NO_SOURCE
    line: str = ""  # where it is another one than that of `source_info`


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
        self,
        primitive: Any,
        params: dict[str, Any],
        args: Sequence[Any],
        avals: Sequence[Any],
        line: str = "",
    ) -> list[TapedValue]:
        """Remember an operation; its results."""
        made = [TapedValue(a) for a in avals]
        given = [self._value(a) for a in args]
        op = TapedOp(
            primitive, params, given, made, source_info=_compat.get_current_source(), line=line
        )
        self.eqns.append(op)
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
        aval = jax.typeof(x)
        is_small = getattr(aval, "size", _SMALL + 1) <= _SMALL and not _is_key(aval)
        constant = TapedValue(aval, np.asarray(x) if is_small else None)
        self.constvars.append(constant)
        return constant


def _is_key(x: Any) -> bool:
    return bool(jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key))


def same_bits(values: Sequence[Any]) -> bool:
    """Whether arrays hold the same bits in the same shape and dtype."""
    raw = [_bits(v) for v in values]
    return all(r == raw[0] for r in raw)


def _bits(value: Any) -> tuple[Any, ...]:
    if _is_key(value):
        value = jax.random.key_data(value)
    host = np.asarray(value)
    return host.shape, host.dtype, host.tobytes()
