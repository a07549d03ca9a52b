"""The operators of a variable: arithmetic on a variable is arithmetic on its value."""

import operator
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from jaxdist._values.arithmetic import Arithmetic, on_operand
from jaxdist.errors import ContextError

# Methods and properties of an array that a variable has too; they work on its value.
OF_ARRAYS = frozenset(
    """
    T all any argmax argmin argpartition argsort astype at block_until_ready choose clip compress
    conj conjugate copy cumprod cumsum devices diagonal dot flatten imag item itemsize mT max mean
    min nbytes nonzero prod ptp ravel real repeat reshape round searchsorted sharding sort squeeze
    std sum swapaxes take tobytes tolist trace transpose var view
    """.split()
)


def _in_place(sign: str, instead: str) -> Any:
    """Return an in-place operator that raises: Python would rebind the name to an array."""

    def method(self: Any, other: Any) -> Any:
        label = self.label
        raise ContextError(
            f"Variable {label!r} was used in: variable {sign} value.\n\n"
            "Python would give the name to a new array, and the variable would keep its value.\n\n"
            f"Use variable.{instead} to change the variable, or variable {sign[:-1]} value for a "
            "new array."
        )

    return method


def _of_value(function: Callable[..., Any], *, swapped: bool = False) -> Any:
    """Return a method for an operator that `Arithmetic` does not have."""

    def method(self: Any, *others: Any) -> Any:
        operands = (
            self.value(),
            *(o.value() if isinstance(o, ValueOperators) else o for o in others),
        )
        return function(*(reversed(operands) if swapped else operands))

    return method


class ValueOperators(Arithmetic):
    """A base class with the operators and methods of an array, on the result of `value()`."""

    __slots__ = ()

    def __getattr__(self, name: str) -> Any:
        if name in OF_ARRAYS:
            return getattr(self.value(), name)
        # The next base class may have a `__getattr__` of its own (`DocumentedNames`).
        return getattr(super(), "__getattr__", self._has_no)(name)

    def _has_no(self, name: str) -> Any:
        kind = type(self).__name__
        raise AttributeError(f"{kind!r} object has no attribute {name!r}", name=name, obj=self)

    def value(self) -> Any:
        """Return the value that operators work on."""
        raise NotImplementedError

    def _operand(self) -> Any:
        return self.value()

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        held = np.asarray(self.value(), dtype=dtype)
        return held.copy() if copy else held

    def __format__(self, spec: str) -> str:
        return format(self.value(), spec) if spec else str(self)

    def __jax_array__(self) -> jax.Array:
        array: jax.Array = self.value()
        return array

    def __dlpack__(self, **kwargs: Any) -> Any:
        # A copy: another library may write to the memory that it gets.
        return jax.numpy.array(_one_copy(self.value()), copy=True).__dlpack__(**kwargs)

    def __dlpack_device__(self) -> Any:
        return _one_copy(self.value()).__dlpack_device__()

    __lshift__ = _of_value(operator.lshift)
    __rlshift__ = _of_value(operator.lshift, swapped=True)
    __rshift__ = _of_value(operator.rshift)
    __rrshift__ = _of_value(operator.rshift, swapped=True)
    __divmod__ = _of_value(divmod)
    __rdivmod__ = _of_value(divmod, swapped=True)
    __round__ = _of_value(round)
    __iadd__ = _in_place("+=", "assign_add(value)")
    __isub__ = _in_place("-=", "assign_sub(value)")
    __imul__ = _in_place("*=", "assign(variable * value)")
    __itruediv__ = _in_place("/=", "assign(variable / value)")
    __ifloordiv__ = _in_place("//=", "assign(variable // value)")
    __imod__ = _in_place("%=", "assign(variable % value)")
    __ipow__ = _in_place("**=", "assign(variable ** value)")
    __imatmul__ = _in_place("@=", "assign(variable @ value)")
    __iand__ = _in_place("&=", "assign(variable & value)")
    __ior__ = _in_place("|=", "assign(variable | value)")
    __ixor__ = _in_place("^=", "assign(variable ^ value)")
    __ilshift__ = _in_place("<<=", "assign(variable << value)")
    __irshift__ = _in_place(">>=", "assign(variable >> value)")
    __float__ = on_operand(float)
    __int__ = on_operand(int)
    __complex__ = on_operand(complex)
    __index__ = on_operand(operator.index)
    __eq__ = on_operand(operator.eq)
    __ne__ = on_operand(operator.ne)
    # Equality is elementwise, as for arrays, so a variable cannot be a key of a dict; `ref()` can.
    __hash__ = None  # type: ignore[assignment]


def _one_copy(array: Any) -> Any:
    """Return one copy of a mirrored array: other libraries accept arrays of one device only."""
    is_mirrored = isinstance(array, jax.Array) and len(array.devices()) > 1
    return array.addressable_data(0) if is_mirrored and array.is_fully_replicated else array
