"""First values of new variables: cut into shards, or computed by the server."""

import dataclasses
import inspect
import math
import operator
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import export

from jaxdist._called import called, refuse
from jaxdist._validate import as_array, is_array, show
from jaxdist._values import check_is_real
from jaxdist.errors import ArgumentError, ArgumentTypeError, ShapeError


class ShardInfo(NamedTuple):
    """The argument `shard_info` of an initialiser: the shape and the place of a shard."""

    shape: tuple[int, ...]
    offset: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Shard:
    """One shard of a new variable: some of its rows.

    Args:
        shape: The shape of the shard.
        offset: The place of its first element in the whole variable.
        make_value: Returns the first value of the shard. Called late, so that not all shards of a
            large table need memory at the same time.
    """

    shape: tuple[int, ...]
    offset: tuple[int, ...]
    make_value: Callable[[], Any]


def split_rows(rows: int, count: int) -> list[int]:
    """Return the sizes of `count` shards: equal, or with one row more in the first ones.

    Example:
        >>> from jaxdist._parameter_server.variables.make_shards import split_rows
        >>> split_rows(10, 4)
        [3, 3, 2, 2]
    """
    each, more = divmod(rows, count)
    return [each + (number < more) for number in range(count)]


@called(lambda name: f"Variable {name!r}")
def make_shards(
    shape: Sequence[int] | None,
    dtype: Any,
    partitioner: Callable[..., Any] | None,
    initial_value: Any,
    name: str = "Variable",
) -> list[Shard]:
    """Cut a new variable along dim 0, as its partitioner says.

    Args:
        shape: The shape of the variable; None means that of `initial_value`.
        dtype: Its dtype; None likewise.
        partitioner: Called as `partitioner(shape=..., dtype=...)`; returns `[n, 1, 1, ...]`. None
            means one shard.
        initial_value: An array, or a function that returns one. If the function has the parameters
            `partition_shape` and `partition_offset` (or `shard_info`), it is called for each shard.
            Otherwise it is called once, and what it returns is cut.
        name: The name of the variable, for errors.

    Returns:
        The shards, in the order of their rows. One shard is the whole variable.

    Raises:
        ArgumentError: There is no initial value, or the partitioner cuts another dim than the first
            one.
        ArgumentTypeError: The partitioner does not return a list of integers.
        ShapeError: The initial value does not have the shape of the variable or of the shard.
    """
    if initial_value is None:
        raise refuse(
            "no initial_value.",
            "A variable has a value from the start, even if a variable_partitioner cuts it.",
            "Pass an array, a number, or a function that makes one.",
        )
    # A function cannot tell its shape and dtype before it was called.
    if not callable(initial_value) or shape is None or dtype is None:
        whole = _as_whole(name, initial_value() if callable(initial_value) else initial_value)
        if shape is not None and tuple(shape) != tuple(whole.shape):
            raise _make_shape_error(name, tuple(shape), tuple(whole.shape))
        shape, dtype = tuple(whole.shape), whole.dtype if dtype is None else dtype
        initial_value = whole
    dims = tuple(shape)
    sizes = split_rows(dims[0], _count_shards(name, dims, dtype, partitioner)) if dims else []
    if len(sizes) <= 1:
        return [Shard(dims, (0,) * len(dims), _find_maker(name, initial_value, dims, dims, 0))]
    starts = np.cumsum([0, *sizes[:-1]]).tolist()
    # One maker of the whole for all shards, so that a function is called once.
    shared = initial_value
    if callable(initial_value) and not _find_arguments(initial_value, dims, dims):
        shared = _call_once(initial_value)
    return [
        Shard(
            (size, *dims[1:]),
            (start,) + (0,) * (len(dims) - 1),
            _find_maker(name, shared, dims, (size, *dims[1:]), start),
        )
        for size, start in zip(sizes, starts, strict=True)
    ]


def _call_once(initialize: Callable[[], Any]) -> Callable[[], Any]:
    """Return a function that returns the same value each time, but for traced values."""
    found: list[Any] = []

    def call() -> Any:
        if found:
            return found[0]
        value = initialize()
        # A traced value belongs to the program of one shard.
        if not isinstance(value, jax.core.Tracer):
            found.append(value)
        return value

    return call


def _count_shards(
    name: str, dims: tuple[int, ...], dtype: Any, partitioner: Callable[..., Any] | None
) -> int:
    if partitioner is None:
        return 1
    found = partitioner(shape=dims, dtype=dtype)
    what = (
        f"Variable {name!r} of shape {list(dims)}: its variable_partitioner returned {show(found)}."
    )
    rule = (
        f"A variable_partitioner returns a list of {len(dims)} integer(s), one for each dim: the "
        "number of shards of dim 0, from 1 up, and 1 for the other dims."
    )
    remedy = f"Return for instance {[2, *[1] * (len(dims) - 1)]}."
    if not isinstance(found, (list, tuple)):
        raise ArgumentTypeError(f"{what}\n\n{rule}\n\n{remedy}")
    try:
        parts = [operator.index(part) for part in found]
    except TypeError:
        raise ArgumentTypeError(f"{what}\n\n{rule}\n\n{remedy}") from None
    if len(parts) != len(dims) or parts[0] < 1 or any(part != 1 for part in parts[1:]):
        raise ArgumentError(f"{what}\n\n{rule}\n\n{remedy}")
    return max(1, min(parts[0], dims[0]))


def _find_maker(
    name: str, initial_value: Any, dims: tuple[int, ...], own: tuple[int, ...], start: int
) -> Callable[[], Any]:
    """Return a function that makes the value of the shard with the shape `own`."""
    offset = (start,) + (0,) * (len(dims) - 1)

    def make() -> Any:
        if not callable(initial_value):
            return initial_value[start : start + own[0]] if dims else initial_value
        value = _as_whole(name, initial_value(**_find_arguments(initial_value, own, offset)))
        found = tuple(value.shape)
        if found == own:
            return value
        if found != dims:
            raise _make_shape_error(name, own, found)
        return value[start : start + own[0]]

    return make


def _find_arguments(
    initialize: Callable[..., Any], own: tuple[int, ...], offset: tuple[int, ...]
) -> dict[str, Any]:
    """Return the arguments for one shard, if the function takes them."""
    try:
        parameters = inspect.signature(initialize).parameters.values()
    except (TypeError, ValueError):  # some functions of C have no signature
        return {}
    names = {p.name for p in parameters}
    if "shard_info" in names:
        return {"shard_info": ShardInfo(own, offset)}
    takes_any = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters)
    if takes_any or {"partition_shape", "partition_offset"} <= names:
        return {"partition_shape": own, "partition_offset": offset}
    return {}


def keep_array(parameter: str, value: Any) -> Any:
    """Return an array as it is, also a traced one; and other values as an array."""
    has_dtype = hasattr(value, "dtype") and is_array(value)
    return value if has_dtype else as_array(parameter, value)


@called(lambda name: f"Variable {name!r}")
def _as_whole(name: str, value: Any) -> Any:
    return keep_array("initial_value", value)


@called(lambda name: f"Variable {name!r}")
def _make_shape_error(name: str, wanted: tuple[int, ...], found: tuple[int, ...]) -> ShapeError:
    return refuse(
        f"an initial_value of shape {list(found)} for a variable or shard of shape {list(wanted)}.",
        "The initial value has the shape of the variable; a function with partition_shape or "
        "shard_info may return the rows of one shard.",
        f"Return an array of shape {list(wanted)}.",
        kind=ShapeError,
    )


# Smaller values are sent: compiling a program takes longer.
_LARGE = 2**24
# A program with larger constants is no smaller than the value that it makes.
_MOST_CONSTANTS = 2**20


@dataclasses.dataclass(frozen=True)
class ExportedInitial:
    """A program that makes the first value of a variable.

    Args:
        shape: The shape of the value.
        dtype: Its dtype.
        content: The bytes of the exported function.
    """

    shape: tuple[int, ...]
    dtype: Any
    content: bytes


def is_known_form(shape: Any, dtype: Any) -> bool:
    """Return whether both are given, and valid; the checks of variables name what is not."""
    try:
        jnp.dtype(dtype)
        return dtype is not None and all(n >= 0 for n in shape)
    except (TypeError, ValueError):
        return False


@called(lambda name: f"Variable {name!r}")
def export_initial(
    name: str, make: Callable[[], Any], shape: Sequence[int], dtype: Any
) -> ExportedInitial | Any:
    """Return a program for the server, or the value where a program is not possible.

    A function that computes with JAX is traced and exported. The value of any other function, such
    as one of NumPy, is made here.

    Args:
        name: The name of the variable.
        make: The function; it is called once, or traced once and then called.
        shape: The shape of the variable.
        dtype: Its dtype.

    Raises:
        ShapeError: The function makes another shape.
    """
    wanted = jax.dtypes.canonicalize_dtype(dtype)
    if math.prod(shape) * wanted.itemsize < _LARGE:
        return make()
    plain: list[Any] = []

    def compute() -> Any:
        value = make()
        if not isinstance(value, jax.core.Tracer):
            # Tracing it would make it a constant of the program.
            plain.append(value)
            return jnp.zeros(())
        check_is_real(name, value.dtype, wanted)
        return value.astype(wanted)

    try:
        traced = jax.jit(compute).trace()
    except jax.errors.JAXTypeError:
        # The function needs values while it runs: `float(x)`, `np.asarray(x)`, `if x:`.
        return make()
    if plain:
        return plain[0]
    closed = traced.jaxpr
    found = tuple(closed.out_avals[0].shape)
    if found != tuple(shape):
        raise refuse(
            f"an initial_value that makes the shape {list(found)}, and shape={list(shape)}.",
            "The function makes the value of the whole variable.",
            f"Let it return an array of shape {list(shape)}.",
            kind=ShapeError,
        )
    constants = sum(int(np.size(x)) * x.dtype.itemsize for x in closed.consts)
    if constants > _MOST_CONSTANTS or closed.effects:
        return make()
    program = export.export(jax.jit(compute), platforms=["cpu"])()
    return ExportedInitial(found, wanted, bytes(program.serialize()))
