"""Partitioners: into how many shards a variable is cut."""

import math
from collections.abc import Sequence
from typing import Any, final

import jax
import jax.numpy as jnp

from jaxdist._called import called, name_call
from jaxdist._validate import as_integer, as_list, show, spell_dtype
from jaxdist.errors import ArgumentError, ArgumentTypeError, UnsupportedError

_SHAPE = "the whole shape of the variable, a list or tuple of integers"
# NumPy's kinds of strings; TensorFlow has one dtype for them, string.
_KINDS_OF_STRINGS = "SUT"


class Partitioner:
    """A rule for the number of shards of a variable; subclasses define `__call__`.

    Example:
        >>> from jaxdist.experimental import partitioners
        >>> class Halves(partitioners.Partitioner):
        ...     def __call__(self, shape, dtype, axis=0):
        ...         return [2 if dim == axis else 1 for dim in range(len(shape))]
        >>> Halves()((10, 3), "float32")
        [2, 1]

    Source:
        `tf.distribute.experimental.partitioners.Partitioner`.
    """

    def __call__(self, shape: Sequence[int], dtype: Any, axis: int = 0) -> list[int]:
        """Return the number of shards along each dim.

        Args:
            shape: The shape of the variable.
            dtype: Its dtype.
            axis: The dim that is cut.

        Raises:
            UnsupportedError: The class does not define the rule.
        """
        raise UnsupportedError(
            f"{type(self).__name__} was called with shape={show(shape)}, and it has no rule.\n\n"
            "Partitioner is a base class; a subclass defines __call__(shape, dtype, axis=0), which "
            "returns the number of shards along each dim.\n\n"
            "Use FixedShardsPartitioner(num_shards=2), MinSizePartitioner or MaxSizePartitioner, "
            "or define the method."
        )


@final
class FixedShardsPartitioner(Partitioner):
    """A fixed number of shards, but no more than there are rows.

    Args:
        num_shards: The number of shards.

    Raises:
        ArgumentError: `num_shards` is below 1.
        ArgumentTypeError: `num_shards` is not an integer.

    Example:
        >>> from jaxdist.experimental import partitioners
        >>> partitioners.FixedShardsPartitioner(num_shards=2)((10, 3), "float32")
        [2, 1]

    Source:
        `tf.distribute.experimental.partitioners.FixedShardsPartitioner`.
    """

    @called("FixedShardsPartitioner")
    def __init__(self, num_shards: int) -> None:
        self._num_shards = as_integer("num_shards", num_shards, least=1, example=2)

    @called("FixedShardsPartitioner")
    def __call__(self, shape: Sequence[int], dtype: Any, axis: int = 0) -> list[int]:
        """Return `num_shards` for `axis`, or its size where that is smaller, and 1 elsewhere.

        Raises:
            ArgumentError: `axis` is not a dim of `shape`, or `shape` has a negative size.
            ArgumentTypeError: `shape` is not known, or `dtype` is not a dtype.
        """
        dims, dim = _read_shape(shape, axis)
        _count_bytes(dtype, 1)
        return _cut_one(dims, dim, self._num_shards)


@final
class MinSizePartitioner(Partitioner):
    """As many shards as fit, while each of them has about `min_shard_bytes` or more.

    The number of shards is rounded up, as in TensorFlow: the bytes of a shard may be fewer by less
    than what one shard more has saved (28 bytes and a minimum of 8 give 4 shards).

    Args:
        min_shard_bytes: The least number of bytes of a shard.
        max_shards: The greatest number of shards.
        bytes_per_string: The bytes that count for one element of a dtype of strings.

    Raises:
        ArgumentError: A number is below 1.
        ArgumentTypeError: A number is not an integer.

    Example:
        >>> from jaxdist.experimental import partitioners
        >>> partitioners.MinSizePartitioner(min_shard_bytes=4, max_shards=2)((6, 1), "float32")
        [2, 1]

    Source:
        `tf.distribute.experimental.partitioners.MinSizePartitioner`.
    """

    @called("MinSizePartitioner")
    def __init__(
        self, min_shard_bytes: int = 256 << 10, max_shards: int = 1, bytes_per_string: int = 16
    ) -> None:
        self._least = as_integer("min_shard_bytes", min_shard_bytes, least=1, example=4096)
        self._max_shards = as_integer("max_shards", max_shards, least=1, example=2)
        self._of_text = as_integer("bytes_per_string", bytes_per_string, least=1)

    @called("MinSizePartitioner")
    def __call__(self, shape: Sequence[int], dtype: Any, axis: int = 0) -> list[int]:
        """Return the number of shards for `axis`, and 1 elsewhere.

        Raises:
            ArgumentError: `axis` is not a dim of `shape`, or `shape` has a negative size.
            ArgumentTypeError: `shape` is not known, or `dtype` is not a dtype.
        """
        dims, dim = _read_shape(shape, axis)
        total = math.prod(dims) * _count_bytes(dtype, self._of_text)
        return _cut_one(dims, dim, min(self._max_shards, -(-total // self._least)))


@final
class MaxSizePartitioner(Partitioner):
    """As few shards as possible, while each of them has `max_shard_bytes` or fewer.

    A shard has at least one row, and where `max_shards` is reached, shards are larger.

    Args:
        max_shard_bytes: The greatest number of bytes of a shard.
        max_shards: The greatest number of shards; None and 0 mean no limit.
        bytes_per_string: The bytes that count for one element of a dtype of strings.

    Raises:
        ArgumentError: `max_shard_bytes` or `bytes_per_string` is below 1, or `max_shards` below 0.
        ArgumentTypeError: A number is not an integer.

    Example:
        >>> from jaxdist.experimental import partitioners
        >>> partitioners.MaxSizePartitioner(max_shard_bytes=8)((6, 1), "float32")
        [3, 1]

    Source:
        `tf.distribute.experimental.partitioners.MaxSizePartitioner`.
    """

    @called("MaxSizePartitioner")
    def __init__(
        self, max_shard_bytes: int, max_shards: int | None = None, bytes_per_string: int = 16
    ) -> None:
        self._most = as_integer("max_shard_bytes", max_shard_bytes, least=1, example=4096)
        given = 0 if max_shards is None else max_shards
        self._max_shards = as_integer("max_shards", given, least=0, example=2)
        self._of_text = as_integer("bytes_per_string", bytes_per_string, least=1)

    @called("MaxSizePartitioner")
    def __call__(self, shape: Sequence[int], dtype: Any, axis: int = 0) -> list[int]:
        """Return the number of shards for `axis`, and 1 elsewhere.

        Raises:
            ArgumentError: `axis` is not a dim of `shape`, or `shape` has a negative size.
            ArgumentTypeError: `shape` is not known, or `dtype` is not a dtype.
        """
        dims, dim = _read_shape(shape, axis)
        rows = math.prod(dims[:dim] + dims[dim + 1 :])
        row_bytes = rows * _count_bytes(dtype, self._of_text)
        if not row_bytes:
            # TensorFlow divides by zero here; an array without elements has nothing to cut.
            return [1] * len(dims)
        shards = -(-dims[dim] // max(1, self._most // row_bytes))
        return _cut_one(dims, dim, min(shards, self._max_shards or shards))


def _cut_one(dims: Sequence[int], dim: int, shards: int) -> list[int]:
    """Return `shards` for one dim, but no more than its size, and 1 for the others."""
    parts = [1] * len(dims)
    # A dim of size 0 is one shard: a variable has at least one.
    parts[dim] = max(1, min(shards, dims[dim]))
    return parts


def _read_shape(shape: Any, axis: Any) -> tuple[list[int], int]:
    """Return the sizes, and the number of the dim to cut, counted from 0."""
    remedy = "Pass for instance shape=variable.shape."
    if shape is None or isinstance(shape, dict):
        raise ArgumentTypeError(
            f"{name_call()} was called with shape={show(shape)}.\n\nshape is {_SHAPE}.\n\n{remedy}"
        )
    listed = as_list("shape", shape, _SHAPE, remedy)
    dims = [
        as_integer(f"shape[{i}]", size, least=0, remedy=remedy) for i, size in enumerate(listed)
    ]
    if not dims:
        raise ArgumentError(
            f"{name_call()} was called with shape=(), the shape of a scalar.\n\n"
            "A partitioner cuts one dim, and a scalar has none.\n\n"
            "Leave scalars as they are; a strategy does not ask its partitioner about them."
        )
    rank = len(dims)
    remedy = f"Pass axis=0, the first of {rank} dim(s)."
    number = as_integer("axis", axis, least=-rank, most=rank - 1, remedy=remedy)
    return dims, number % rank


def _count_bytes(dtype: Any, of_text: int) -> int:
    """Return the bytes of one element."""
    if isinstance(dtype, str) and dtype == "string":
        return of_text
    try:
        # NumPy reads None as float64, and takes the dtype of an array.
        if dtype is None or isinstance(dtype, (jax.Array, list, dict)):
            raise TypeError
        found = jnp.dtype(spell_dtype(dtype))
        # "V" without fields is the kind of bfloat16 and other dtypes of JAX.
        if found.kind not in f"biufcV{_KINDS_OF_STRINGS}" or found.names is not None:
            raise TypeError
    except TypeError:
        raise ArgumentTypeError(
            f"{name_call()} was called with dtype={show(dtype)}.\n\n"
            "dtype is the dtype of the variable's elements.\n\nPass for instance dtype='float32'."
        ) from None
    return of_text if found.kind in _KINDS_OF_STRINGS else found.itemsize
