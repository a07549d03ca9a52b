"""Converts between values of a replica and values of all rows inside a step.

The replicas compute shares of one loss, whose sum is differentiated. So the gradients of a whole
value are shares that add up. The gradient of rows is the part for these rows. The gradient of a
partial sum is the same on all replicas.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jaxdist._keras.forward.row_rules import Sizes
from jaxdist._keras.rows import Rows


@dataclasses.dataclass(frozen=True)
class Conversions:
    """The conversions of one replica.

    Args:
        rows: The rows of the replica; `own` of them are real.
        sizes: The numbers of rows in the programs of one replica, which may be more, and of all.
    """

    rows: Rows
    sizes: Sizes

    def add_up(self, part: Any) -> Any:
        """Return the sum over the replicas of a partial sum."""
        return _with_gradient(self.rows.add_up, self.rows.add_up, part)

    def gather(self, array: Any, dim: int) -> Any:
        """Return the rows of all replicas.

        Shapes:
            In: `sizes.own` blocks of rows along `dim`. Out: `sizes.total` blocks.
        """
        block = array.shape[dim] // self.sizes.own
        length = array.shape[dim]

        def backward(cotangent: Any) -> Any:
            own = self._take(self.rows.add_up(cotangent), dim, block)
            pads = [(0, 0)] * own.ndim
            pads[dim] = (0, length - own.shape[dim])
            return jnp.pad(own, pads)

        return _with_gradient(lambda a: self._gather(a, dim, block), backward, array)

    def take_rows(self, whole: Any, dim: int) -> Any:
        """Return the rows of this replica, padded with copies of the last; zeros without rows."""
        own, length = self.rows.own, self.sizes.own
        block = whole.shape[dim] // self.sizes.total
        if not own:
            shape = list(whole.shape)
            shape[dim] = block * length
            return jnp.zeros(shape, whole.dtype)
        taken = self._take(whole, dim, block)
        if own == length:
            return taken
        last = jax.lax.slice_in_dim(taken, (own - 1) * block, own * block, axis=dim)
        return jnp.concatenate([taken] + [last] * (length - own), dim)

    def keep_real(self, array: Any, dim: int) -> Any:
        """Return the rows, with zeros instead of padding."""
        if self.rows.own == self.sizes.own:
            return array
        block = array.shape[dim] // self.sizes.own
        numbers = jax.lax.broadcasted_iota(jnp.int32, array.shape, dim)
        return jnp.where(numbers < self.rows.own * block, array, jnp.zeros_like(array))

    def _gather(self, array: Any, dim: int, block: int) -> Any:
        first = jnp.moveaxis(array, dim, 0)[: self.rows.own * block]
        pads = [(0, (self.rows.most - self.rows.own) * block)] + [(0, 0)] * (array.ndim - 1)
        joined = self.rows.replica.all_gather(jnp.pad(first, pads), axis=0)
        return jnp.moveaxis(joined[: self.rows.total * block], 0, dim)

    def _take(self, whole: Any, dim: int, block: int) -> Any:
        rows = self.rows
        pads = [(0, 0)] * whole.ndim
        pads[dim] = (0, (rows.most * rows.count - rows.total) * block)
        start = rows.replica.replica_id_in_sync_group * rows.most * block
        return jax.lax.dynamic_slice_in_dim(jnp.pad(whole, pads), start, rows.own * block, dim)


def _with_gradient(
    forward: Callable[[Any], Any], backward: Callable[[Any], Any], array: Any
) -> Any:
    if not jnp.issubdtype(array.dtype, jnp.inexact):
        return forward(array)

    @jax.custom_vjp
    def convert(value: Any) -> Any:
        return forward(value)

    convert.defvjp(lambda value: (forward(value), None), lambda _, ct: (backward(ct),))
    return convert(array)
