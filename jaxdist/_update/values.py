"""The values of `tx.update` while it runs on pieces. See Note [Update on pieces].

# Note [Padding of pieces]
If the number of replicas does not divide a dim, the last pieces have padding. Elementwise
operations compute on it too, so it may hold any value, including nan (0 / 0). That does no harm,
since `gather` cuts it off. Only a reduction over the dim must first replace it by a neutral value.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxdist._collectives import hide_complex_constant, require_replicated
from jaxdist._mesh import ReplicaMesh
from jaxdist._values import Cut, cut_piece, mask_padding, pad_dim


def scatter_sum(array: Any, cut: Cut, layout: ReplicaMesh) -> Any:
    """Return this replica's piece of the sum over all replicas."""
    axes = cut.over(layout)
    array = pad_dim(array, cut.dim, cut.padding(cut.pieces(layout)))
    # Scatter over the axes of the cut, then all-reduce the piece over the other replica axes. This
    # order sends fewer bytes over the other axes, which may be slow links. XLA aborts the process
    # when it sums complex constants, so they are hidden from it.
    piece = jax.lax.psum_scatter(
        hide_complex_constant(array), axes, scatter_dimension=cut.dim, tiled=True
    )
    others = tuple(a for a in layout.replica_axes if a not in axes)
    return jax.lax.psum(piece, others) if others else piece


class Value:
    """A value that operations take as a whole array or as a piece."""

    # Subclasses cache results in plain fields. In Python 3.11 `functools.cached_property` holds a
    # lock of the class while it computes. Replicas that run op by op are threads that wait for
    # one another inside a collective, so they would deadlock.

    def whole(self) -> Any:
        """Return the whole array, which is equal on every replica."""
        raise NotImplementedError

    def piece(self, cut: Cut) -> Any:
        """Return this replica's piece; a scalar is returned unchanged."""
        raise NotImplementedError


@dataclasses.dataclass(eq=False)
class Whole(Value):
    """A value of which every replica has the whole array."""

    array: Any
    layout: ReplicaMesh
    name: str = "a value that the update of the optimizer state uses"
    _checked: Any = None

    def whole(self) -> Any:
        return self.array

    def piece(self, cut: Cut) -> Any:
        array = self.check_replicated()
        return array if not np.ndim(array) else cut_piece(array, cut, self.layout)

    def check_replicated(self) -> Any:
        """Return the array, with a mark that `run` proves to be equal on all replicas."""
        # Pieces of values that differ between replicas would be pieces of different arrays.
        if self._checked is None:
            if isinstance(self.array, jax.core.Tracer):
                self._checked = require_replicated(self.array, self.name)
            else:
                self._checked = jnp.asarray(self.array) if np.ndim(self.array) else self.array
        return self._checked


@dataclasses.dataclass(eq=False)
class Piece(Value):
    """A value of which every replica has a piece. See Note [Padding of pieces]."""

    array: Any
    cut: Cut
    layout: ReplicaMesh
    _whole: Any = None

    def whole(self) -> Any:
        if self._whole is None:
            axes, dim = self.cut.over(self.layout), self.cut.dim
            padded = jax.lax.all_gather(self.array, axes, axis=dim, tiled=True)
            self._whole = jax.lax.slice_in_dim(padded, 0, self.cut.size, axis=dim)
        return self._whole

    def piece(self, cut: Cut) -> Any:
        # `cut.split` is not compared, since XLA handles the layout over logical devices.
        if cut[:3] == self.cut[:3]:
            return self.array
        return cut_piece(self.whole(), cut, self.layout)

    def mask_padding(self, neutral: Any) -> Any:
        """Return the piece with `neutral` as padding. See Note [Padding of pieces]."""
        return mask_padding(self.array, self.cut, self.layout, neutral)


@dataclasses.dataclass(eq=False)
class Broadcast(Value):
    """A broadcast that is not computed yet, since an operation may need only a piece of it."""

    source: Whole
    shape: tuple[int, ...]
    dims: tuple[int, ...]  # dims of the result, for each dim of `source`
    _whole: Any = None

    def whole(self) -> Any:
        if self._whole is None:
            self._whole = jax.lax.broadcast_in_dim(self.source.array, self.shape, self.dims)
        return self._whole

    def piece(self, cut: Cut) -> Any:
        layout = self.source.layout
        shape = cut.local_shape(self.shape, cut.pieces(layout))
        array = self.source.check_replicated()
        # If the cut dim is a new dim, or a dim of size 1, every piece is the same broadcast.
        if cut.dim in self.dims:
            dim = self.dims.index(cut.dim)
            if array.shape[dim] == cut.size and cut.size > 1:
                array = cut_piece(array, cut._replace(dim=dim), layout)
        return jax.lax.broadcast_in_dim(array, shape, self.dims)


@dataclasses.dataclass(eq=False)
class Partial(Value):
    """A sum that is not all-reduced yet, and a value to add to it.

    Sums of many leaves are added before the all-reduce, so a norm over the whole tree costs one.
    """

    array: Any
    plus: Any  # None, or a value that is equal on all replicas
    layout: ReplicaMesh
    axes: tuple[str, ...]  # axes over which the summed pieces are sharded
    _whole: Any = None

    def whole(self) -> Any:
        if self._whole is None:
            total = jax.lax.psum(self.array, self.axes)
            self._whole = total if self.plus is None else total + self.plus
        return self._whole

    def piece(self, cut: Cut) -> Any:
        return Whole(self.whole(), self.layout).piece(cut)

    def add(self, other: Value) -> "Partial":
        """Return the sum with another value of the same shape."""
        if isinstance(other, Partial) and other.axes == self.axes:
            both = [x for x in (self.plus, other.plus) if x is not None]
            plus = both[0] + both[1] if len(both) == 2 else both[0] if both else None
            return Partial(self.array + other.array, plus, self.layout, self.axes)
        # `plus` is added once, after the all-reduce, so it must not be part of the local sums.
        # `piece` of a scalar marks it as equal on all replicas.
        more = other.whole()
        more = more if np.ndim(more) else other.piece(Cut(0, 1))
        plus = more if self.plus is None else self.plus + more
        return Partial(self.array, plus, self.layout, self.axes)
