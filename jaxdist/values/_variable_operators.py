"""Arithmetic on a variable is arithmetic on its value."""

import operator
from typing import Any

import jax
import numpy as np

from jaxdist.values._arithmetic import Arithmetic, on_operand

# Methods and properties of an array that an object has as well, of its value.
OF_ARRAYS = frozenset(
    """
    T all any argmax argmin argpartition argsort astype at block_until_ready choose clip compress
    conj conjugate copy cumprod cumsum devices diagonal dot flatten imag item itemsize mT max mean
    min nbytes nonzero prod ptp ravel real repeat reshape round searchsorted sharding sort squeeze
    std sum swapaxes take tobytes tolist trace transpose var view
    """.split()
)


class ValueOperators(Arithmetic):
    """The operators and methods of an array, on the value that the caller would read."""

    __slots__ = ()

    def __getattr__(self, name: str) -> Any:
        if name in OF_ARRAYS:
            return getattr(self.value(), name)
        return getattr(super(), "__getattr__", self._has_no)(name)

    def _has_no(self, name: str) -> Any:
        kind = type(self).__name__
        raise AttributeError(f"{kind!r} object has no attribute {name!r}", name=name, obj=self)

    def value(self) -> Any:
        """The value that operators work on."""
        raise NotImplementedError

    def _operand(self) -> Any:
        return self.value()

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        held = np.asarray(self.value(), dtype=dtype)
        return held.copy() if copy else held

    def __jax_array__(self) -> jax.Array:
        array: jax.Array = self.value()
        return array

    __float__ = on_operand(float)
    __int__ = on_operand(int)
    __complex__ = on_operand(complex)
    __index__ = on_operand(operator.index)
    __eq__ = on_operand(operator.eq)
    __ne__ = on_operand(operator.ne)
    # Equality is elementwise, as for arrays, so a variable is no key: use `ref()`.
    __hash__ = None  # type: ignore[assignment]
