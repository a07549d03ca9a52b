"""The operators of a variable: arithmetic on a variable is arithmetic on its value."""

import operator
from typing import Any

import jax
import numpy as np

from jaxdist._values.arithmetic import Arithmetic, make_operator, make_reflected_operator
from jaxdist.errors import ContextError

# Methods and properties of an array that a variable has too; they work on its value.
ARRAY_NAMES = frozenset(
    """
    T all any argmax argmin argpartition argsort astype at block_until_ready choose clip compress
    conj conjugate copy cumprod cumsum devices diagonal dot flatten imag item itemsize mT max mean
    min nbytes nonzero prod ptp ravel real repeat reshape round searchsorted sharding sort squeeze
    std sum swapaxes take tobytes tolist trace transpose var view
    """.split()
)


def _make_in_place_error(sign: str, instead: str) -> Any:
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


class ValueOperators(Arithmetic):
    """A base class with the operators and methods of an array, on the result of `value()`."""

    __slots__ = ()

    def __getattr__(self, name: str) -> Any:
        if name in ARRAY_NAMES:
            return getattr(self.value(), name)
        # The next base class may have a `__getattr__` of its own (`DocumentedNames`).
        return getattr(super(), "__getattr__", super().__getattribute__)(name)

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
        return self.value()

    def __dlpack__(self, **kwargs: Any) -> Any:
        # A copy: another library may write to the memory that it gets.
        return jax.numpy.array(_take_one_copy(self.value()), copy=True).__dlpack__(**kwargs)

    def __dlpack_device__(self) -> Any:
        return _take_one_copy(self.value()).__dlpack_device__()

    __lshift__ = make_operator(operator.lshift)
    __rlshift__ = make_reflected_operator(operator.lshift)
    __rshift__ = make_operator(operator.rshift)
    __rrshift__ = make_reflected_operator(operator.rshift)
    __divmod__ = make_operator(divmod)
    __rdivmod__ = make_reflected_operator(divmod)
    __round__ = make_operator(round)
    __iadd__ = _make_in_place_error("+=", "assign_add(value)")
    __isub__ = _make_in_place_error("-=", "assign_sub(value)")
    __imul__ = _make_in_place_error("*=", "assign(variable * value)")
    __itruediv__ = _make_in_place_error("/=", "assign(variable / value)")
    __ifloordiv__ = _make_in_place_error("//=", "assign(variable // value)")
    __imod__ = _make_in_place_error("%=", "assign(variable % value)")
    __ipow__ = _make_in_place_error("**=", "assign(variable ** value)")
    __imatmul__ = _make_in_place_error("@=", "assign(variable @ value)")
    __iand__ = _make_in_place_error("&=", "assign(variable & value)")
    __ior__ = _make_in_place_error("|=", "assign(variable | value)")
    __ixor__ = _make_in_place_error("^=", "assign(variable ^ value)")
    __ilshift__ = _make_in_place_error("<<=", "assign(variable << value)")
    __irshift__ = _make_in_place_error(">>=", "assign(variable >> value)")
    __float__ = make_operator(float)
    __int__ = make_operator(int)
    __complex__ = make_operator(complex)
    __index__ = make_operator(operator.index)
    __eq__ = make_operator(operator.eq)
    __ne__ = make_operator(operator.ne)
    # Equality is elementwise, as for arrays, so a variable cannot be a key of a dict; `ref()` can.
    __hash__ = None  # type: ignore[assignment]


def _take_one_copy(array: Any) -> Any:
    """Return one copy of a mirrored array: other libraries accept arrays of one device only."""
    is_mirrored = isinstance(array, jax.Array) and len(array.devices()) > 1
    return array.addressable_data(0) if is_mirrored and array.is_fully_replicated else array
