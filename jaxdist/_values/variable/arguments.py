"""Checks of arguments that methods of variables share: `name`, `use_locking` and an index."""

import contextlib
import operator
from typing import Any

import jax
import numpy as np

from jaxdist._called import call_as, name_call, refuse, refuse_type
from jaxdist._integers import check_not_masked
from jaxdist._validate import (
    as_array,
    check_instance,
    log_without_effect,
    show,
)
from jaxdist._values.replicas.per_replica import PerReplica
from jaxdist.errors import ArgumentTypeError, JaxdistError

_INDICES = (
    "An index is one that an array of JAX accepts: integers, slices, None, ..., arrays of integers "
    "or of bool, or a tuple of these."
)


def name_method(label: str) -> str:
    """Return the name of the method of a variable that is being called, for errors."""
    return f"Variable {label!r}.{name_call()}"


def refuse_in_method(
    label: str, found: str, rule: str, remedy: str, kind: type[JaxdistError] = ArgumentTypeError
) -> JaxdistError:
    """Return the error of a method of a variable that got a wrong argument; see `refuse`."""
    return call_as(name_method(label), refuse, found, rule, remedy, kind=kind)


def check_name(label: str, name: Any, use_locking: Any = False) -> None:
    """Check `name` (a string) and `use_locking` (a bool); log once that they have no effect."""
    if name is None and use_locking is False:
        return
    caller = name_call()
    method = f"Variable {label!r}.{caller}"
    text, flag = "a text or None; it has no effect", "either True or False; it has no effect"
    kinds, way = (str, type(None)), "Leave use_locking out."
    call_as(method, check_instance, "name", name, kinds, text, "Leave name out.")
    call_as(method, check_instance, "use_locking", use_locking, bool, flag, way)
    if name is not None:
        call_as(f"Variable.{caller}", log_without_effect, "name", "there are no operations to name")
    if use_locking:
        why = "a variable changes as a whole or not at all"
        call_as(f"Variable.{caller}", log_without_effect, "use_locking", why)


def check_ids(name: str, ids: Any, table: Any) -> Any:
    """Return row numbers as an array of NumPy, or as a traced one.

    Raises:
        ArgumentTypeError: `ids` are not integers.
        ArgumentError: One of them is not a row of `table`. Traced ones are not checked.
    """
    check_not_masked(name, ids)
    rule = "They are numbers of rows: integers from 0."
    if isinstance(ids, PerReplica):
        raise refuse_type(
            f"{name}={show(ids)}.",
            "Outside of strategy.run rows are read for all replicas at once.",
            f"Call it in the function that strategy.run runs, with {name} as an argument.",
        )
    is_traced = any(isinstance(x, jax.core.Tracer) for x in jax.tree.leaves(ids))
    # Without this, the array of a list is a tracer in a traced function.
    with contextlib.nullcontext() if is_traced else jax.ensure_compile_time_eval():
        found: Any = ids if hasattr(ids, "dtype") else as_array(name, ids)
    if not is_traced:
        # An empty list has no integers that would determine its dtype.
        is_empty = isinstance(ids, (list, tuple)) and not found.size
        found = np.asarray(found, np.int32 if is_empty else None)
    if getattr(found.dtype, "kind", "") not in "iu":
        raise refuse_type(f"{name} of dtype {found.dtype}.", rule, f"Pass {name}.astype('int32').")
    if is_traced:
        return found
    count = int(table.shape[0])
    wrong = found[(found < 0) | (found >= count)]
    if wrong.size:
        raise refuse(
            f"{name} with the row {int(wrong[0])}, and its table has {count} rows: {table.dtype}"
            f"{list(table.shape)}.",
            rule,
            f"Pass {name} from 0 to {count - 1}." if count else "Pass a table that has rows.",
        )
    return found


def get_elements(array: jax.Array, index: Any) -> jax.Array:
    """Return `array[index]`, or raise an error that names the index."""
    parts = index if isinstance(index, tuple) else (index,)
    for part in parts:
        if isinstance(part, PerReplica) or not _is_index(part):
            raise refuse_type(
                f"index={show(part)}.",
                _INDICES,
                f"Pass for instance variable[0]{', or jnp.array(index)' * isinstance(part, list)}.",
            )
    # JAX would clamp an index that is too large to the last element.
    _check_bounds(array, parts)
    try:
        return array[index]
    # These errors are about tracers, not about the index, and are subclasses of the next ones.
    except (jax.errors.JAXTypeError, jax.errors.JAXIndexError):
        raise
    except (IndexError, TypeError, ValueError, OverflowError) as error:
        raise refuse(
            f"index={show(index)}, and the variable is {array.dtype}{list(array.shape)}: {error}",
            _INDICES,
            f"Pass an index for {array.ndim} dim(s).",
        ) from error


def _is_index(part: Any) -> bool:
    if part is None or part is Ellipsis:
        return True
    if isinstance(part, slice):
        return all(b is None or _is_integer(b) for b in (part.start, part.stop, part.step))
    kind = getattr(getattr(part, "dtype", None), "kind", None)
    return kind in ("i", "u", "b") if kind is not None else _is_integer(part)


def _is_integer(value: Any) -> bool:
    try:
        operator.index(value)
    except jax.errors.JAXTypeError:
        return True  # a traced integer
    except TypeError:
        return False
    return True


def _check_bounds(array: jax.Array, parts: tuple[Any, ...]) -> None:
    """Raise if an integer index is out of bounds; traced indices cannot be checked."""
    dim = 0
    for place, part in enumerate(parts):
        # The ellipsis takes all dims that the parts after it leave over.
        if part is Ellipsis:
            taken = sum(_count_dims(later) for later in parts[place + 1 :])
            dim = max(dim, array.ndim - taken)
            continue
        if dim < array.ndim and not _is_mask(part) and not isinstance(part, (slice, type(None))):
            _check_places(array, dim, part)
        dim += _count_dims(part)


def _check_places(array: jax.Array, dim: int, part: Any) -> None:
    if isinstance(part, jax.core.Tracer):
        return
    size = array.shape[dim]
    found = np.asarray(part if hasattr(part, "dtype") else operator.index(part))
    wrong = found[(found < -size) | (found >= size)]
    if wrong.size:
        raise refuse(
            f"index={int(wrong[0])} for dim {dim}, and the variable is {array.dtype}"
            f"{list(array.shape)}.",
            f"Its dim {dim} has {size} element(s).",
            (
                f"Pass an index from 0 to {size - 1}, or from {-size} to -1."
                if size
                else "Pass a slice, which may be empty."
            ),
        )


def _is_mask(part: Any) -> bool:
    return isinstance(part, bool) or getattr(getattr(part, "dtype", None), "kind", "") == "b"


def _count_dims(part: Any) -> int:
    """Return the number of dims that one part of an index consumes."""
    if part is None or part is Ellipsis:
        return 0
    if _is_mask(part):
        return int(getattr(part, "ndim", 0))  # True and False add a dim, and consume none
    return 1
