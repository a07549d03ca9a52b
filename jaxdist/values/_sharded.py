"""One array of which each replica holds a piece."""

import math
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec
from jax.tree_util import GetAttrKey, register_pytree_with_keys

from jaxdist.errors import ArgumentError, ReplicaValueError
from jaxdist.mesh import ReplicaMesh


class Cut(NamedTuple):
    """Along which dim an array is cut, and how long that dim is without padding."""

    dim: int
    size: int

    def rows(self, num_replicas: int) -> int:
        """Length of one piece: the last pieces are padded to it."""
        return math.ceil(self.size / num_replicas)

    def padding(self, num_replicas: int) -> int:
        """How much longer the cut dim is with padding."""
        return self.rows(num_replicas) * num_replicas - self.size

    def local_shape(self, shape: tuple[int, ...], num_replicas: int) -> tuple[int, ...]:
        """The shape of one piece, from any shape that is right in the other dims."""
        return (*shape[: self.dim], self.rows(num_replicas), *shape[self.dim + 1 :])

    def spec(self, layout: ReplicaMesh) -> PartitionSpec:
        """The layout over the replica axes."""
        return PartitionSpec(*[None] * self.dim, layout.replica_spec[0])


class Sharded:
    """One array of which each replica holds a piece, cut along one dim and padded.

    A registered pytree node with one leaf. Optimizer state of `sharded_update` is held so. It
    goes into `Strategy.run` and comes out with the same layout; inside a step `array` is the
    piece of the replica. `Strategy.reduce`, `Strategy.gather`, checkpoints and, outside of steps,
    `np.asarray` take it for the one array that it stands for.

    Shapes:
        A logical `[..., size, ...]` on `R` replicas is held as `[..., R*p, ...]` with
        `p = ceil(size / R)`, laid out over the replica axes on `dim`. What stands behind `size`
        is padding, and means nothing.

    Cost:
        None: the array is held as it is.

    Args:
        array: The padded array over all replicas, or the piece of one inside a step.
        dim: The dim that is cut, counted from the front.
        size: Its length without padding.

    Raises:
        ArgumentError: `dim` is not one of the array's, or `size` is less than 1.

    Example:
        >>> strategy = MirroredStrategy(["cpu:0", "cpu:1"])
        >>> rows = np.arange(4.0, dtype="float32")
        >>> held = Sharded(rows, dim=0, size=3)
        >>> strategy.run(lambda x: Sharded(x.array * 2, 0, 3), (held,)).whole().tolist()
        [0.0, 2.0, 4.0]

    Source:
        `DESIGN.md` §2.3; ZeRO, arXiv:1910.02054.
    """

    __slots__ = ("array", "dim", "size")

    array: Any
    dim: int
    size: int

    def __init__(self, array: Any, dim: int, size: int) -> None:
        rank = getattr(array, "ndim", None)
        if rank is not None and not 0 <= dim < rank:
            raise ArgumentError(
                f"Sharded(array, dim={dim}): the array is {array.dtype}{list(array.shape)}, of "
                f"rank {rank}.\n\ndim must lie in {list(range(rank))}."
            )
        if size < 1:
            raise ArgumentError(
                f"Sharded(array, size={size}): the cut dim has at least one element.\n\n"
                "Leave an array without elements as it is."
            )
        self.array, self.dim, self.size = array, dim, size

    @property
    def cut(self) -> Cut:
        """Dim and size."""
        return Cut(self.dim, self.size)

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the one array, without padding.

        Example:
            >>> Sharded(np.zeros((2, 4)), dim=1, size=3).shape
            (2, 3)
        """
        shape: tuple[int, ...] = tuple(self.array.shape)
        return (*shape[: self.dim], self.size, *shape[self.dim + 1 :])

    @property
    def dtype(self) -> Any:
        """The dtype of the array."""
        return self.array.dtype

    @property
    def ndim(self) -> int:
        """The rank of the array."""
        rank: int = self.array.ndim
        return rank

    def whole(self) -> Any:
        """The one array, without padding.

        Shapes:
            `[..., size, ...]`, laid out as it is held where there is no padding.

        Cost:
            None without padding; else a slice, which may move rows between devices.

        Raises:
            ReplicaValueError: Inside a step, where there is only a piece.

        Example:
            >>> Sharded(np.arange(4), dim=0, size=3).whole().tolist()
            [0, 1, 2]
        """
        array, rows = self.array, self.array.shape[self.dim]
        if rows < self.size:
            raise ReplicaValueError(
                f"Sharded.whole(): inside a step there is a piece of {rows} of the {self.size} "
                f"elements of dim {self.dim}.\n\n"
                "Bring the pieces together: get_replica_context().all_gather(value.array, "
                f"axis={self.dim}), which has the padding at its end."
            )
        if rows == self.size:
            return array
        if isinstance(array, jax.ShapeDtypeStruct):
            return jax.ShapeDtypeStruct(self.shape, array.dtype)
        index = (*[slice(None)] * self.dim, slice(self.size))
        return array[index]

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        host = np.asarray(self.whole(), dtype=dtype)
        return host.copy() if copy else host

    def __repr__(self) -> str:
        array = self.array
        if not hasattr(array, "shape"):
            return f"Sharded({array!r}, dim={self.dim}, size={self.size})"
        return (
            f"Sharded({array.dtype}{list(self.shape)} cut along dim {self.dim}, held as "
            f"{list(array.shape)})"
        )


def is_sharded(x: Any) -> bool:
    """For `is_leaf`: whether `x` is one array in pieces."""
    return isinstance(x, Sharded)


def pad_dim(array: Any, dim: int, more: int) -> Any:
    """`array` with zeros behind the end of one dim."""
    if not more:
        return array
    widths = [(0, more if d == dim else 0, 0) for d in range(array.ndim)]
    return jax.lax.pad(array, jnp.zeros((), array.dtype), widths)


# [Note: the declaration in the key]
# `nnx.Optimizer.update` writes a node of a pytree that it does not know into a variable as an
# `nnx.State` of the node's children by key, and drops the rest. So the key says what the node is.
_KEY = "array_cut_along_{}_of_{}"


def _key(value: Sharded) -> str:
    return _KEY.format(value.dim, value.size)


def from_state(value: Any) -> Any:
    """A `Sharded` that NNX turned into a mapping, as one again; see the note above."""
    if not isinstance(value, Mapping) or len(value) != 1:
        return value
    [(key, array)] = value.items()
    parts = str(key).split("_")
    if len(parts) != 6 or _KEY.format(parts[3], parts[5]) != key:
        return value
    return Sharded(array, int(parts[3]), int(parts[5]))


def _flatten_with_keys(value: Sharded) -> tuple[list[tuple[Any, Any]], Cut]:
    return [(GetAttrKey(_key(value)), value.array)], value.cut


def _flatten(value: Sharded) -> tuple[tuple[Any, ...], Cut]:
    return (value.array,), value.cut


def _rebuild(cut: Cut, children: Iterable[Any]) -> Sharded:
    value = object.__new__(Sharded)
    [value.array] = children
    value.dim, value.size = cut
    return value


register_pytree_with_keys(Sharded, _flatten_with_keys, _rebuild, _flatten)
