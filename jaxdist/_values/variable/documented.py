"""The other documented names of `tf.Variable`: aliases, and errors that say what replaces them."""

import operator
from typing import Any

import jax
import numpy as np

from jaxdist._called import called, refuse
from jaxdist._devices import device_name
from jaxdist._validate import check_instance, log_without_effect
from jaxdist._values.arithmetic import Arithmetic, make_operator, make_reflected_operator
from jaxdist._values.variable.arguments import check_name
from jaxdist.errors import ContextError, JaxdistError, MissingNameError, ShapeError

_GRAPHS = "JAX has no graphs and sessions: a variable has its value at once, read_value()."
_SAVED = "A checkpoint saves the value: jaxdist.training.Checkpoints, or read_value()."

# Documented names that `Variable` does not have, and what replaces them.
REPLACED = {
    "SaveSliceInfo": _SAVED,
    "constraint": "Apply it to the value: v.assign(project(v.value())).",
    "count_up_to": "Use range(limit), or v.assign_add(1).",
    "eval": _GRAPHS,
    "from_proto": _SAVED,
    "graph": _GRAPHS,
    "handle": "The array is read_value().",
    "initial_value": "Keep the value that the variable is made of, where it is needed again.",
    "initialized_value": _GRAPHS,
    "initializer": _GRAPHS,
    "op": _GRAPHS,
    "to_proto": _SAVED,
}


class DocumentedNames:
    """A base class with the names of `tf.Variable` that neither read nor assign."""

    __slots__ = ()

    # `self` is a `Variable`, which this module cannot import.

    def __getattr__(self, name: str) -> Any:
        if name in REPLACED:
            raise MissingNameError(
                f"Variable.{name} is not there.\n\ntf.Variable has it.\n\n{REPLACED[name]}"
            )
        return super().__getattribute__(name)

    @property
    def device(self: Any) -> str:
        """The full name of the device that holds the first copy.

        Example:
            >>> Variable(1.0).device
            '/job:localhost/replica:0/task:0/device:CPU:0'

        Source:
            `tf.Variable.device`.
        """
        layout = self.home.layout
        first: Any = None if layout is None else layout.first_device
        if layout is not None and layout.variables_on is not None:
            (first,) = layout.variables_on.device_set
        return device_name(next(iter(self.read_value().devices())) if first is None else first)

    def get_shape(self: Any) -> tuple[int, ...]:
        """Return the shape, the same as `shape`.

        Example:
            >>> Variable([1.0, 2.0]).get_shape()
            (2,)

        Source:
            `tf.Variable.get_shape`.
        """
        return tuple(self.shape)

    @called(lambda self: f"Variable {self.label!r}.set_shape")
    def set_shape(self: Any, shape: Any) -> None:
        """Check the shape; None means a dim of any size.

        Raises:
            ShapeError: The variable has another shape, which cannot change.

        Example:
            >>> Variable([1.0, 2.0]).set_shape([None])

        Source:
            `tf.Variable.set_shape`.
        """
        kinds, what = (tuple, list), "a tuple or list of integers and None"
        remedy = f"Pass shape={tuple(self.shape)}."
        check_instance("shape", shape, kinds, what, remedy)
        wanted = tuple(shape)
        fits = len(wanted) == len(self.shape) and all(
            w in (None, n) for w, n in zip(wanted, self.shape, strict=True)
        )
        if not fits:
            raise refuse(
                f"shape={list(wanted)}, and the variable has the shape {list(self.shape)}.",
                "A variable keeps its shape.",
                "Make another variable for another shape.",
                kind=ShapeError,
            )

    @called("is_initialized")
    def is_initialized(self: Any, name: str | None = None) -> bool:
        """Return True: a variable always has a value.

        Example:
            >>> Variable(1.0).is_initialized()
            True
        """
        check_name(self.label, name)
        return True

    @called("Variable.load")
    def load(self: Any, value: Any, session: Any = None) -> None:
        """Assign `value` without a result, as `assign(value, read_value=False)` does.

        Args:
            value: The new value.
            session: None; JAX has no sessions.

        Example:
            >>> Variable(1.0).load(2.0)

        Source:
            `tf.Variable.load`.
        """
        if session is not None:
            log_without_effect("session", "there are no sessions")
        # Errors of `assign` must name `load`, which is what the user called.
        name = f"Variable {self.label!r}"
        try:
            self.assign(value, read_value=False)
        except JaxdistError as error:
            text = str(error).replace(f"{name}.assign ", f"{name}.load ", 1)
            error.args = (text, *error.args[1:])
            raise

    def experimental_ref(self: Any) -> Any:
        """Return `ref()`; this is its older name.

        Example:
            >>> v = Variable(1.0)
            >>> v.experimental_ref() == v.ref()
            True

        Source:
            `tf.Variable.experimental_ref`.
        """
        return self.ref()


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
