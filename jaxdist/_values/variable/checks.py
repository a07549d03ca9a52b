"""Checks of the arguments that create a variable, and of the values assigned to it."""

from contextvars import ContextVar
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxdist import _compat, _integers
from jaxdist._called import call_as, called, name_call, refuse, refuse_type
from jaxdist._validate import as_array, is_array, show, spell_dtype
from jaxdist._values.access import VariableAggregation, VariableSynchronization
from jaxdist._values.arrays import copy_if_writable, make_deleted_error, refuse_ref
from jaxdist._values.replicas.per_replica import PerReplica
from jaxdist._values.variable.arguments import name_method, refuse_in_method
from jaxdist.errors import ArgumentError, ArgumentTypeError, InputContextError, ShapeError

# From narrow to wide: a value may be cast to a later kind, not to an earlier one.
_KINDS = (np.bool_, np.integer, np.floating, np.complexfloating)


@called(lambda name: f"Variable {name!r}")
def check_modes(name: str, synchronization: Any, aggregation: Any, *, in_scope: bool) -> None:
    """Raise if synchronization or aggregation is invalid, or not allowed in this context."""
    for given, kind, what in (
        (synchronization, VariableSynchronization, "synchronization"),
        (aggregation, VariableAggregation, "aggregation"),
    ):
        if not isinstance(given, kind):
            raise refuse(
                f"{what}={given!r}, of type {type(given).__name__}.",
                f"{what} is one of {', '.join(f'{kind.__name__}.{m.name}' for m in kind)}.",
                f"Pass for instance {what}=jaxdist.{kind.__name__}.{next(iter(kind)).name}.",
            )
    if in_scope and synchronization is VariableSynchronization.NONE:
        raise refuse(
            "VariableSynchronization.NONE in the scope of a strategy.",
            "A strategy keeps the copies of its variables together, so there synchronization is "
            "AUTO, ON_WRITE or ON_READ.",
            "Leave synchronization out, or make the variable outside the scope.",
        )


@called(lambda name, dtype: f"Variable {name!r} of dtype {dtype}")
def check_aggregation(name: str, aggregation: VariableAggregation, dtype: Any) -> None:
    """Raise if values of this dtype have no sum or mean of the same dtype."""
    if aggregation is VariableAggregation.NONE:
        return
    # The copies of a variable keep its dtype, so a mean of integers would have to be rounded.
    needed = np.inexact if aggregation is VariableAggregation.MEAN else np.number
    first_of_booleans = aggregation is VariableAggregation.ONLY_FIRST_REPLICA and dtype == np.bool_
    if jnp.issubdtype(dtype, needed) or first_of_booleans:
        return
    what = "floats" if needed is np.inexact else "numbers"
    raise refuse(
        f"VariableAggregation.{aggregation.name}.",
        f"{aggregation.name} is for {what}: the result has the dtype of the variable.",
        "Give it a dtype that fits (dtype='float32'), or another aggregation.",
    )


# Whether this code is part of a function that makes the dataset of a worker.
IN_DATASET_FUNCTION: ContextVar[bool] = ContextVar("jaxdist_in_dataset_function", default=False)


@called(lambda name: f"Variable {name!r} was made in a function that")
def check_may_make(name: str) -> None:
    """Raise if a variable is made in a function that makes the dataset of a worker.

    Raises:
        InputContextError: The variable is made in such a function.
    """
    if IN_DATASET_FUNCTION.get():
        raise refuse(
            "to create_per_worker_dataset.",
            "Each worker calls it, and again after it was lost, so it would make many variables.",
            "Make the variable before, in strategy.scope().",
            kind=InputContextError,
        )


@called(lambda name: f"Variable {name!r}")
def make_initial_array(name: str, initial_value: Any, dtype: Any, shape: Any) -> Any:
    """Return the first value of a variable, in its dtype and not weakly typed."""
    if initial_value is None:
        raise refuse(
            "no initial_value.",
            "A variable has a value from the start.",
            "Pass an array, a number, or a function without arguments that makes one.",
        )
    value = initial_value() if callable(initial_value) else initial_value
    if isinstance(value, PerReplica):
        raise refuse_type(
            f"a PerReplica as initial_value: {value!r}.",
            "All copies of a variable start from one value.",
            "Pass that value; give each replica its own later: variable.assign(per_replica), with "
            "synchronization=VariableSynchronization.ON_READ.",
        )
    if isinstance(value, jax.core.Tracer):
        raise refuse_type(
            f"a traced initial_value: {value!r}.",
            "A variable outlives the trace that the value belongs to.",
            "Make the variable before strategy.run or jax.jit, and use it in there.",
        )
    if is_array(value) and _compat.has_deleted((value,)):
        raise make_deleted_error(f"Variable {name!r} was given initial_value", value)
    array: Any = as_array("initial_value", copy_if_writable(value) if is_array(value) else value)
    chosen = None if dtype is None else _check_dtype(dtype)
    # A weakly typed variable would take the dtype of the first value added to it. `asarray` keeps
    # the weak type; the conversion drops it.
    if chosen is not None:
        check_is_real(name, array.dtype, chosen)
    if chosen is not None or getattr(array, "weak_type", False):
        array = jnp.asarray(array, dtype=chosen)
        array = jax.lax.convert_element_type(array, array.dtype)
    _check_declared_shape(shape, tuple(array.shape))
    return array


def _check_dtype(dtype: Any) -> Any:
    chosen: Any = None
    try:
        chosen = jnp.dtype(spell_dtype(dtype))
        # "V" without fields is the kind of bfloat16 and other dtypes of JAX.
        is_known = chosen.kind in "biufcV" and chosen.itemsize > 0 and chosen.names is None
    except (TypeError, ValueError):
        is_known = False
    if not is_known:
        raise refuse_type(
            f"dtype={show(dtype)}.",
            "dtype is a type of numbers or of bool, as arrays have it.",
            "Pass for instance dtype=jnp.float32 or dtype='int32', or leave it out.",
        )
    return chosen


def _check_declared_shape(declared: Any, found: tuple[int, ...]) -> None:
    if declared is None:
        return
    if not isinstance(declared, (tuple, list)) or not all(isinstance(d, int) for d in declared):
        raise refuse(
            f"shape={declared!r}.",
            "Shapes are fixed when a step is compiled, so a variable has one shape of integers.",
            f"Pass shape={list(found)}, or leave it out.",
        )
    if tuple(declared) != found:
        raise refuse(
            f"shape={list(declared)} and an initial_value of shape {list(found)}.",
            "The initial value has the shape of the variable.",
            f"Pass shape={list(found)}, or leave it out.",
            kind=ShapeError,
        )


def cast_to_variable(variable: Any, value: Any) -> jax.Array | np.ndarray:
    """Return `value` in the dtype of the variable, or raise an error that names both."""
    home = variable.home
    is_array = hasattr(value, "dtype") and hasattr(value, "shape")
    if is_array and _compat.is_mutable(value):
        refuse_ref(f"{name_method(variable.label)} was given {parameter_name()}", value)
    if is_array and _compat.has_deleted((value,)):
        what = f"{name_method(variable.label)} was given {parameter_name()}"
        raise make_deleted_error(what, value)
    if isinstance(value, np.ma.MaskedArray):
        call_as(name_method(variable.label), _integers.check_not_masked, parameter_name(), value)
    array = value if is_array else _as_array(variable, value)
    if array.dtype == home.dtype and array.shape == home.shape:
        return array
    check_value(variable.label, parameter_name(), array, home.shape, home.dtype)
    if jnp.issubdtype(home.dtype, np.integer):
        call_as(name_method(variable.label), _integers.check_fits, parameter_name(), array)
    return array if array.dtype == home.dtype else array.astype(home.dtype)


def parameter_name() -> str:
    """Return the name of the parameter for the value: `assign` and the other methods differ."""
    return "delta" if name_call().endswith(("_add", "_sub")) else "value"


def check_value(
    name: str,
    parameter: str,
    given: Any,
    shape: tuple[int, ...],
    dtype: Any,
    given_shape: tuple[int, ...] | None = None,
) -> None:
    """Raise if `given` has another shape, or a dtype whose values the variable cannot hold.

    `shape` is the shape of the elements to replace. `given_shape` is the shape of one value, where
    `given` has one for each replica.
    """
    found = tuple(given.shape) if given_shape is None else given_shape
    if found != shape:
        raise refuse_in_method(
            name,
            f"{parameter}={given.dtype}{list(found)}, and what it changes is {dtype}{list(shape)}.",
            "A new value has the shape of the old one; nothing is broadcast.",
            f"Pass jnp.broadcast_to({parameter}, {list(shape)}) if that is what is meant.",
            kind=ShapeError,
        )
    if given.dtype == dtype or 0 < _cast_rank(given.dtype) <= _cast_rank(dtype):
        return
    if getattr(given.dtype, "kind", "") in "OSUMm":
        raise refuse_in_method(
            name,
            f"{parameter} of dtype {given.dtype}.",
            "A variable holds arrays of numbers.",
            f"Pass an array of numbers, of dtype {dtype}.",
        )
    if jnp.issubdtype(given.dtype, np.complexfloating):
        raise call_as(name_method(name), _make_complex_error, parameter, given.dtype, dtype)
    raise refuse_in_method(
        name,
        f"{parameter} of dtype {given.dtype}, and the variable is {dtype}.",
        "Values are cast where that loses no more than precision: integers to floats, not the "
        "other way.",
        f"Cast it: {parameter}.astype({str(dtype)!r}).",
    )


@called(lambda name: f"Variable {name!r}")
def check_is_real(name: str, given: Any, dtype: Any) -> None:
    """Raise if the cast of a first value to the dtype of its variable drops imaginary parts."""
    if jnp.issubdtype(given, np.complexfloating) and not jnp.issubdtype(dtype, np.complexfloating):
        raise _make_complex_error("initial_value", given, dtype)


def _make_complex_error(parameter: str, given: Any, dtype: Any) -> ArgumentTypeError:
    return refuse_type(
        f"{parameter} of dtype {given}, and the variable is {dtype}.",
        "A cast would drop the imaginary parts.",
        "Pass the real parts (x.real) if that is what is meant, or make the variable with dtype="
        f"{str(jax.dtypes.canonicalize_dtype(given))!r}.",
    )


def _cast_rank(dtype: Any) -> int:
    """Return the position of a dtype in `_KINDS`; 0, as for bool, if it is never cast."""
    for place, kind in enumerate(_KINDS):
        if jnp.issubdtype(dtype, kind):
            return place
    return 0


def _as_array(variable: Any, value: Any) -> np.ndarray:
    array = np.asarray(value)
    if array.dtype == object or array.dtype.kind in "USO":
        raise refuse_in_method(
            variable.label,
            f"{parameter_name()}={show(value)}.",
            "A variable holds arrays of numbers.",
            "Pass an array or a number.",
        )
    # NumPy makes float64 of Python floats and int64 of integers; JAX has its own defaults.
    narrow = array.astype(jax.dtypes.canonicalize_dtype(array.dtype))
    if array.dtype.kind in "iu" and not np.array_equal(narrow, array):
        raise refuse_in_method(
            variable.label,
            f"{parameter_name()}={show(value)}.",
            f"Integers in JAX are {narrow.dtype}, and it is beyond {narrow.dtype}.",
            "Pass floats, or turn on 64 bits: jax.config.update('jax_enable_x64', True).",
            kind=ArgumentError,
        )
    return narrow
