"""`Signature`: the structure, dtypes and shapes of the arguments of a registered function."""

from collections.abc import Sequence
from typing import Any

import jax
import msgspec
import numpy as np

from jaxdist._called import called, refuse, refuse_type
from jaxdist._parameter_server.rpc.values import (
    ARRAY,
    Shown,
    as_jax,
    fits,
    flatten,
    format_tree,
    unflatten,
)
from jaxdist._parameter_server.transport.message import get_dtypes, get_names
from jaxdist._validate import show
from jaxdist.errors import InvalidArgumentError, ShapeError


def _suggest(name: str) -> str:
    return (
        f"Pass for instance {name.partition('[')[0]}=[jax.ShapeDtypeStruct((), jnp.int32)]; a "
        "dimension of any size is one of jax.export.symbolic_shape('n, 3')."
    )


class LeafSpec(msgspec.Struct, frozen=True, array_like=True):
    """One array: the name of its dtype, and its dimensions. A string is a dimension of any size."""

    dtype: str
    dims: tuple[int | str, ...]

    def __str__(self) -> str:
        return f"{self.dtype}[{', '.join(map(str, self.dims))}]"


class Signature(msgspec.Struct, frozen=True, array_like=True):
    """The arguments of a function; their structure is that of the tuple of all arguments."""

    structure: Any
    leaves: tuple[LeafSpec, ...]

    def __str__(self) -> str:
        return format_tree(self.structure, list(map(str, self.leaves)))

    def read_arguments(
        self, method: str, structure: Any, leaves: Sequence[tuple[str, np.ndarray]]
    ) -> tuple[Any, ...]:
        """Return the arguments of a call, or raise an error that says what does not fit.

        Args:
            method: The name of the method.
            structure: The structure of the arguments.
            leaves: How each of their leaves was given, and the leaf.

        Raises:
            InvalidArgumentError: The structure, a dtype or a shape is another one.
        """
        shown = [x if kind == ARRAY else Shown(kind) for kind, x in leaves]
        self.check_structure(method, structure, shown)
        sizes: dict[str, int] = {}
        read = [self._read(method, number, *leaf, sizes) for number, leaf in enumerate(leaves)]
        return tuple(unflatten(self.structure, read))

    @called(lambda method: f"A call of {method!r}")
    def check_structure(self, method: str, structure: Any, leaves: Sequence[Any]) -> None:
        """Raise `ArgumentError` if arguments have another structure."""
        if structure == self.structure and len(leaves) == len(self.leaves):
            return
        given = format_tree(structure, [_describe(leaf) for leaf in leaves])
        raise refuse(
            f"args={given}, and the method takes {self}.",
            "Arguments have the number and the structure that the server registered: the same "
            "dicts, lists, tuples and None.",
            "Pass these arguments, or register the function with another input_signature.",
        )

    @called(lambda method: f"A call of {method!r}")
    def _read(
        self, method: str, number: int, kind: str, array: np.ndarray, sizes: dict[str, int]
    ) -> jax.Array:
        spec = self.leaves[number]
        dtype = get_dtypes()[spec.dtype]
        if kind != ARRAY and not array.shape and fits(kind, array, dtype):
            array, kind = array.astype(dtype), ARRAY
        if kind != ARRAY or array.dtype != dtype:
            found = f"the {kind} {array}" if kind != ARRAY else _describe(array)
            raise refuse(
                f"{found} as array {number + 1} of args={self}.",
                f"An array has the dtype that the server registered, {spec.dtype}. A number of "
                "Python becomes that dtype where it keeps its value.",
                f"Pass jnp.asarray(value, {spec.dtype!r}).",
                kind=InvalidArgumentError,
            )
        pairs = zip(spec.dims, array.shape, strict=False)
        wanted = [sizes.setdefault(d, n) if isinstance(d, str) else d for d, n in pairs]
        if len(spec.dims) != array.ndim or wanted != [*array.shape]:
            known = "".join(f", with {name}={size} here" for name, size in sizes.items())
            raise refuse(
                f"{_describe(array)} as array {number + 1} of args={self}.",
                f"An array has the shape that the server registered, {spec}{known}.",
                "Pass an array of that shape, or register the function with another "
                "input_signature.",
                kind=ShapeError,
            )
        return as_jax(array)


def _describe(leaf: Any) -> str:
    if hasattr(leaf, "dtype") and hasattr(leaf, "shape"):
        return str(LeafSpec(str(leaf.dtype), tuple(leaf.shape)))
    return repr(leaf) if isinstance(leaf, Shown) else type(leaf).__name__


def make_signature(given: Any) -> Signature:
    """Return the signature that a user declares: a list with a pytree for each argument.

    Raises:
        ArgumentTypeError: It is not a list, or a leaf has no shape or dtype.
        ArgumentError: A call cannot have such a dtype or dimension.
    """
    if not isinstance(given, (list, tuple)):
        raise refuse_type(
            f"input_signature={show(given)}.",
            "input_signature is a list with one entry for each argument of func.",
            _suggest("input_signature"),
        )
    structure, leaves = flatten("input_signature", tuple(given))
    return Signature(structure, tuple(read_spec(*leaf, is_for_jax=True) for leaf in leaves))


def read_spec(name: str, leaf: Any, *, is_for_jax: bool = False) -> LeafSpec:
    """Return the dtype and the shape of a leaf that describes an array."""
    try:
        dtype, shape = np.dtype(leaf.dtype), tuple(leaf.shape)
    except (AttributeError, TypeError):
        raise refuse_type(
            f"{name}={show(leaf)}.",
            "Each array is described by something with a shape and a dtype.",
            _suggest(name),
        ) from None
    if dtype not in get_names():
        raise refuse(
            f"{name} of dtype {dtype}.",
            "Arrays of a call are of numbers or bools.",
            _suggest(name),
        )
    if is_for_jax and jax.dtypes.canonicalize_dtype(dtype) != dtype:
        raise refuse(
            f"{name} of dtype {dtype}.",
            "JAX has 64 bits only where they are turned on, before arrays are made.",
            "Call jax.config.update('jax_enable_x64', True), or declare "
            f"{jax.dtypes.canonicalize_dtype(dtype)}.",
        )
    return LeafSpec(get_names()[dtype], tuple(_read_dim(name, dim) for dim in shape))


def _read_dim(name: str, dim: Any) -> int | str:
    if isinstance(dim, (int, np.integer)) and dim >= 0:
        return int(dim)
    if jax.export.is_symbolic_dim(dim) and str(dim).isidentifier():
        return str(dim)
    raise refuse(
        f"{name} with the dimension {show(dim)}.",
        "A dimension is an integer from 0 up, or a name of jax.export.symbolic_shape: equal names "
        "are equal sizes in one call.",
        _suggest(name),
    )
