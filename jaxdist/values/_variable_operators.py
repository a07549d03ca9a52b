"""Arithmetic on a variable is arithmetic on its value."""

import operator
from typing import Any

import jax
import numpy as np

from jaxdist.values._arithmetic import Arithmetic, on_operand


class ValueOperators(Arithmetic):
    """The operators of an array, on the value that the caller would read."""

    __slots__ = ()

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
