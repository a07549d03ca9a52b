"""Arithmetic for objects that represent an array."""

import operator
from collections.abc import Callable
from typing import Any

from jaxdist import _compat
from jaxdist._integers import has_unfit
from jaxdist._values.items import NoItemAssignment


def make_operator(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a method that calls `function` on the array that its object represents."""

    @_compat.outside_of_meshes
    def method(self: Any, *others: Any) -> Any:
        operands = (self._operand(), *map(_to_operand, others))
        if not has_unfit(operands):
            return function(*operands)
        with _compat.check_constants():
            return function(*operands)

    return method


def make_reflected_operator(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the method of an object that is the right operand."""
    return make_operator(lambda own, other: function(other, own))


def _to_operand(other: Any) -> Any:
    return other._operand() if isinstance(other, Arithmetic) else other


class Arithmetic(NoItemAssignment):
    """A base class with the operators of an array; they work on the array of `_operand`."""

    __slots__ = ()

    # Written out instead of made in a loop, so that type checkers see the operators.

    def _operand(self) -> Any:
        """Return the array that operators work on."""
        raise NotImplementedError

    __add__ = make_operator(operator.add)
    __radd__ = make_reflected_operator(operator.add)
    __sub__ = make_operator(operator.sub)
    __rsub__ = make_reflected_operator(operator.sub)
    __mul__ = make_operator(operator.mul)
    __rmul__ = make_reflected_operator(operator.mul)
    __truediv__ = make_operator(operator.truediv)
    __rtruediv__ = make_reflected_operator(operator.truediv)
    __floordiv__ = make_operator(operator.floordiv)
    __rfloordiv__ = make_reflected_operator(operator.floordiv)
    __mod__ = make_operator(operator.mod)
    __rmod__ = make_reflected_operator(operator.mod)
    __pow__ = make_operator(operator.pow)
    __rpow__ = make_reflected_operator(operator.pow)
    __matmul__ = make_operator(operator.matmul)
    __rmatmul__ = make_reflected_operator(operator.matmul)
    __and__ = make_operator(operator.and_)
    __rand__ = make_reflected_operator(operator.and_)
    __or__ = make_operator(operator.or_)
    __ror__ = make_reflected_operator(operator.or_)
    __xor__ = make_operator(operator.xor)
    __rxor__ = make_reflected_operator(operator.xor)
    __lt__ = make_operator(operator.lt)
    __le__ = make_operator(operator.le)
    __gt__ = make_operator(operator.gt)
    __ge__ = make_operator(operator.ge)
    __neg__ = make_operator(operator.neg)
    __pos__ = make_operator(operator.pos)
    __abs__ = make_operator(operator.abs)
    __invert__ = make_operator(operator.invert)
    __getitem__ = make_operator(operator.getitem)
    __len__ = make_operator(len)
    # Without `__iter__` Python would read elements until an IndexError. JAX never raises one: it
    # clamps indices beyond the end, so the loop would not end.
    __iter__ = make_operator(iter)
    __bool__ = make_operator(bool)
