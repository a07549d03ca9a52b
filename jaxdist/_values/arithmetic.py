"""Arithmetic for objects that represent an array."""

import operator
from collections.abc import Callable
from typing import Any


def on_operand(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a method that calls `function` on the array that its object represents."""

    def method(self: Any, *others: Any) -> Any:
        return function(self._operand(), *(_plain(o) for o in others))

    return method


def _reflected(function: Callable[..., Any]) -> Callable[..., Any]:
    def method(self: Any, other: Any) -> Any:
        return function(_plain(other), self._operand())

    return method


def _plain(other: Any) -> Any:
    return other._operand() if isinstance(other, Arithmetic) else other


class Arithmetic:
    """A base class with the operators of an array; they work on the array of `_operand`."""

    __slots__ = ()

    # Written out and not made in a loop: type checkers read only what is written.

    def _operand(self) -> Any:
        """Return the array that operators work on."""
        raise NotImplementedError

    __add__ = on_operand(operator.add)
    __radd__ = _reflected(operator.add)
    __sub__ = on_operand(operator.sub)
    __rsub__ = _reflected(operator.sub)
    __mul__ = on_operand(operator.mul)
    __rmul__ = _reflected(operator.mul)
    __truediv__ = on_operand(operator.truediv)
    __rtruediv__ = _reflected(operator.truediv)
    __floordiv__ = on_operand(operator.floordiv)
    __rfloordiv__ = _reflected(operator.floordiv)
    __mod__ = on_operand(operator.mod)
    __rmod__ = _reflected(operator.mod)
    __pow__ = on_operand(operator.pow)
    __rpow__ = _reflected(operator.pow)
    __matmul__ = on_operand(operator.matmul)
    __rmatmul__ = _reflected(operator.matmul)
    __and__ = on_operand(operator.and_)
    __rand__ = _reflected(operator.and_)
    __or__ = on_operand(operator.or_)
    __ror__ = _reflected(operator.or_)
    __xor__ = on_operand(operator.xor)
    __rxor__ = _reflected(operator.xor)
    __lt__ = on_operand(operator.lt)
    __le__ = on_operand(operator.le)
    __gt__ = on_operand(operator.gt)
    __ge__ = on_operand(operator.ge)
    __neg__ = on_operand(operator.neg)
    __pos__ = on_operand(operator.pos)
    __abs__ = on_operand(operator.abs)
    __invert__ = on_operand(operator.invert)
    __getitem__ = on_operand(operator.getitem)
    __len__ = on_operand(len)
    # Without `__iter__` Python would read elements until an IndexError. JAX never raises one: it
    # clamps indices beyond the end, so the loop would not end.
    __iter__ = on_operand(iter)
    __bool__ = on_operand(bool)
