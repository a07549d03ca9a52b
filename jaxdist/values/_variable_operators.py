"""Arithmetic on a variable is arithmetic on its value."""

import operator
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np


def _on_value(function: Callable[..., Any]) -> Callable[..., Any]:
    def method(self: Any, *others: Any) -> Any:
        return function(self.value(), *(_plain(o) for o in others))

    return method


def _reflected(function: Callable[..., Any]) -> Callable[..., Any]:
    def method(self: Any, other: Any) -> Any:
        return function(_plain(other), self.value())

    return method


def _plain(other: Any) -> Any:
    return other.value() if isinstance(other, ValueOperators) else other


class ValueOperators:
    """The operators of an array, on the value that the caller would read."""

    __slots__ = ()

    def value(self) -> Any:
        """The value that operators work on."""
        raise NotImplementedError

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        held = np.asarray(self.value(), dtype=dtype)
        return held.copy() if copy else held

    def __jax_array__(self) -> jax.Array:
        array: jax.Array = self.value()
        return array

    def __iter__(self) -> Iterator[Any]:
        return iter(self.value())

    __add__ = _on_value(operator.add)
    __radd__ = _reflected(operator.add)
    __sub__ = _on_value(operator.sub)
    __rsub__ = _reflected(operator.sub)
    __mul__ = _on_value(operator.mul)
    __rmul__ = _reflected(operator.mul)
    __truediv__ = _on_value(operator.truediv)
    __rtruediv__ = _reflected(operator.truediv)
    __floordiv__ = _on_value(operator.floordiv)
    __rfloordiv__ = _reflected(operator.floordiv)
    __mod__ = _on_value(operator.mod)
    __rmod__ = _reflected(operator.mod)
    __pow__ = _on_value(operator.pow)
    __rpow__ = _reflected(operator.pow)
    __matmul__ = _on_value(operator.matmul)
    __rmatmul__ = _reflected(operator.matmul)
    __and__ = _on_value(operator.and_)
    __rand__ = _reflected(operator.and_)
    __or__ = _on_value(operator.or_)
    __ror__ = _reflected(operator.or_)
    __xor__ = _on_value(operator.xor)
    __rxor__ = _reflected(operator.xor)
    __lt__ = _on_value(operator.lt)
    __le__ = _on_value(operator.le)
    __gt__ = _on_value(operator.gt)
    __ge__ = _on_value(operator.ge)
    __neg__ = _on_value(operator.neg)
    __pos__ = _on_value(operator.pos)
    __abs__ = _on_value(operator.abs)
    __invert__ = _on_value(operator.invert)
    __getitem__ = _on_value(operator.getitem)
    __float__ = _on_value(float)
    __int__ = _on_value(int)
    __complex__ = _on_value(complex)
    __bool__ = _on_value(bool)
    __index__ = _on_value(operator.index)
    __len__ = _on_value(len)
    __eq__ = _on_value(operator.eq)
    __ne__ = _on_value(operator.ne)
    # Equality is elementwise, as for arrays, so a variable is no key: use `ref()`.
    __hash__ = None  # type: ignore[assignment]
