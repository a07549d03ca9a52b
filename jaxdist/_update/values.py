"""What a value of `tx.update` is while the update runs in pieces."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxdist._collectives import opaque, require_replicated
from jaxdist._mesh import ReplicaMesh
from jaxdist._values import Cut, pad_dim, piece_of


class Replicas:
    """The replicas among which arrays are cut, as seen from one of them."""

    def __init__(self, layout: ReplicaMesh) -> None:
        self.layout = layout
        self.axes = layout.replica_axes
        self.count = layout.num_replicas

    def pieces(self, cut: Cut) -> int:
        """How many pieces there are of an array that is cut so."""
        return cut.pieces(self.layout)

    def start_of(self, cut: Cut) -> Any:
        """Where the piece of this replica starts."""
        return jax.lax.axis_index(cut.over(self.layout)) * cut.rows(self.pieces(cut))

    def take_piece(self, array: Any, cut: Cut) -> Any:
        """The piece of this replica, of an array that all have whole."""
        return piece_of(array, cut, self.layout)

    def gather(self, piece: Any, cut: Cut) -> Any:
        """The whole array, from the pieces of all."""
        whole = jax.lax.all_gather(piece, cut.over(self.layout), axis=cut.dim, tiled=True)
        return jax.lax.slice_in_dim(whole, 0, cut.size, axis=cut.dim)

    def scatter_sum(self, array: Any, cut: Cut) -> Any:
        """The piece of this replica, of the sum over all."""
        axes = cut.over(self.layout)
        array = pad_dim(array, cut.dim, cut.padding(self.pieces(cut)))
        piece = jax.lax.psum_scatter(opaque(array), axes, scatter_dimension=cut.dim, tiled=True)
        others = tuple(a for a in self.axes if a not in axes)
        return jax.lax.psum(piece, others) if others else piece

    def mask_padding(self, piece: Any, cut: Cut, neutral: Any) -> Any:
        """A piece with its padding replaced."""
        if not cut.padding(self.pieces(cut)):
            return piece
        places = jax.lax.broadcasted_iota(jnp.int32, piece.shape, cut.dim) + self.start_of(cut)
        return jnp.where(places < cut.size, piece, jnp.asarray(neutral, piece.dtype))


class Value:
    """A value; what it is as an array depends on who asks.

    What is made once is kept in plain fields: `functools.cached_property` locks the class while
    it computes (Python 3.11), and replicas that run op by op wait for one another in there.
    """

    def whole(self) -> Any:
        """All of it, the same on every replica."""
        raise NotImplementedError

    def piece(self, cut: Cut) -> Any:
        """The piece of this replica; a scalar has no pieces, and is given as it is."""
        raise NotImplementedError


@dataclasses.dataclass(eq=False)
class Whole(Value):
    """Every replica has all of it."""

    array: Any
    replicas: Replicas
    name: str = "a value that the update of the optimizer state uses"
    _checked: Any = None

    def whole(self) -> Any:
        return self.array

    def piece(self, cut: Cut) -> Any:
        array = self.check_replicated()
        return array if not np.ndim(array) else self.replicas.take_piece(array, cut)

    def check_replicated(self) -> Any:
        """The array; pieces of values that differ would not be pieces of one array."""
        if self._checked is None:
            if isinstance(self.array, jax.core.Tracer):
                self._checked = require_replicated(self.array, self.name)
            else:
                self._checked = jnp.asarray(self.array) if np.ndim(self.array) else self.array
        return self._checked


@dataclasses.dataclass(eq=False)
class Piece(Value):
    """Every replica has a piece of it; what the padding holds means nothing."""

    array: Any
    cut: Cut
    replicas: Replicas
    _whole: Any = None

    def whole(self) -> Any:
        if self._whole is None:
            self._whole = self.replicas.gather(self.array, self.cut)
        return self._whole

    def piece(self, cut: Cut) -> Any:
        # Where the pieces are split over logical devices is XLA's business.
        if cut[:3] == self.cut[:3]:
            return self.array
        return self.replicas.take_piece(self.whole(), cut)

    def mask_padding(self, neutral: Any) -> Any:
        """The piece, with padding that does not change a reduction."""
        return self.replicas.mask_padding(self.array, self.cut, neutral)


@dataclasses.dataclass(eq=False)
class Broadcast(Value):
    """A smaller value along the dims of a larger one; made only as large as it is needed."""

    source: Whole
    shape: tuple[int, ...]
    dims: tuple[int, ...]  # of the result, for each dim of `of`
    _whole: Any = None

    def whole(self) -> Any:
        if self._whole is None:
            self._whole = jax.lax.broadcast_in_dim(self.source.array, self.shape, self.dims)
        return self._whole

    def piece(self, cut: Cut) -> Any:
        replicas = self.source.replicas
        shape = cut.local_shape(self.shape, replicas.pieces(cut))
        array = self.source.check_replicated()
        if cut.dim in self.dims:
            dim = self.dims.index(cut.dim)
            if array.shape[dim] == cut.size and cut.size > 1:
                array = replicas.take_piece(array, cut._replace(dim=dim))
        return jax.lax.broadcast_in_dim(array, shape, self.dims)


@dataclasses.dataclass(eq=False)
class Partial(Value):
    """A sum over the replicas that has not been taken yet, and what is added to it.

    Sums of many leaves are added up first: a norm over the whole tree is one all-reduce.
    """

    array: Any
    plus: Any  # None, or the same on all replicas
    replicas: Replicas
    axes: tuple[str, ...]  # over which the pieces lie that it is the sum of
    _whole: Any = None

    def whole(self) -> Any:
        if self._whole is None:
            total = jax.lax.psum(self.array, self.axes)
            self._whole = total if self.plus is None else total + self.plus
        return self._whole

    def piece(self, cut: Cut) -> Any:
        return Whole(self.whole(), self.replicas).piece(cut)

    def add(self, other: Value) -> "Partial":
        """The sum with another value of this shape."""
        if isinstance(other, Partial) and other.axes == self.axes:
            both = [x for x in (self.plus, other.plus) if x is not None]
            plus = both[0] + both[1] if len(both) == 2 else both[0] if both else None
            return Partial(self.array + other.array, plus, self.replicas, self.axes)
        more = other.piece(Cut(0, 1)) if not _rank(other) else other.whole()
        plus = more if self.plus is None else self.plus + more
        return Partial(self.array, plus, self.replicas, self.axes)


def _rank(value: Value) -> int:
    return np.ndim(value.whole())
