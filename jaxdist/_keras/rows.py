"""The rows of the replica whose step is being traced, and values of the global batch.

Each replica has its own share of the gradients of a gathered value. The gradients of the replicas
add up to the gradient of the global batch, as those of shares do.
"""

import contextlib
import dataclasses
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

import jax
import jax.numpy as jnp

from jaxdist import _compat, _replica
from jaxdist._keras.source import keras_module

# Note [Shares of a batch]
# A step of Keras computes means over the rows of the global batch. Each replica has some of them,
# so it computes its share: its sum, divided by the rows of all replicas. Shares add up to the
# value of the global batch, for any split. Losses and metrics of Keras whose rows do not depend
# on each other are computed in this way (`shares.py`), and one all-reduce adds up
# the gradients and all the shares. For other losses and metrics, the replicas gather the rows, and
# each computes the value of the global batch (`gather_rows`).


@dataclasses.dataclass(frozen=True)
class Rows:
    """How many rows of the global batch this replica has."""

    own: int
    total: int
    replica: Any  # the `ReplicaContext`
    has_shares: bool = True  # whether losses return the share of this replica

    @property
    def fraction(self) -> float:
        """The rows of this replica divided by the rows of all replicas."""
        return self.own / self.total

    @property
    def count(self) -> int:
        """The number of replicas."""
        return int(self.replica.num_replicas_in_sync)

    @property
    def most(self) -> int:
        """The largest number of rows that a replica has."""
        return -(-self.total // self.count)

    @property
    def of_all(self) -> "Rows":
        """The rows of all replicas, for a step that every replica computes like one device.

        Random numbers on each replica are those of a model without a strategy.
        """
        return Rows(self.total, self.total, OnlyReplica(self.replica.strategy), has_shares=False)

    def add_up(self, value: Any) -> Any:
        """Return the sum of a value over the replicas."""
        return self.replica.all_reduce("sum", value)

    def gather(self, array: jax.Array, dim: int = 0, block: int = 1) -> jax.Array:
        """Return the rows of all replicas, in order; each row has `block` places in `dim`.

        Shapes:
            In: `[own, ...]`. Out: `[total, ...]`.
        """
        if self.count == 1:
            return array
        # Only the last replicas have fewer rows, so padding comes after the last row.
        pads = [(0, (self.most - self.own) * block)] + [(0, 0)] * (array.ndim - 1)
        padded = jnp.pad(jnp.moveaxis(array, dim, 0), pads)
        rows: jax.Array = self.replica.all_gather(padded, axis=0)
        return jnp.moveaxis(rows[: self.total * block], 0, dim)

    def take_own(self, array: jax.Array, dim: int = 0, block: int = 1) -> jax.Array:
        """Return the rows of this replica from an array with the rows of all.

        Shapes:
            In: `[total, ...]`. Out: `[own, ...]`.
        """
        if self.count == 1:
            return array
        pads = [(0, 0)] * array.ndim
        pads[dim] = (0, (self.most * self.count - self.total) * block)
        start = self.replica.replica_id_in_sync_group * self.most * block
        return jax.lax.dynamic_slice_in_dim(jnp.pad(array, pads), start, self.own * block, dim)


# Note [Whole batches]
# The replicas of a strategy with logical devices run one program on equal shapes, and so do those
# of a worker with parameter servers. If they do not divide a batch, each replica computes all of
# its rows, as a model without a strategy would.
@dataclasses.dataclass(frozen=True)
class OnlyReplica:
    """Stands for a `ReplicaContext` in `Rows` if every replica has all rows of a step."""

    strategy: Any
    num_replicas_in_sync: int = 1
    replica_id_in_sync_group: int = 0

    def all_reduce(self, how: str, value: Any) -> Any:
        """Return the value unchanged: it is that of all rows. `how` makes no difference."""
        return value


_ROWS: ContextVar[Rows | None] = ContextVar("jaxdist_keras_rows", default=None)


def current_rows() -> Rows | None:
    """Return the rows of the step being traced; None outside a step of a strategy."""
    return _ROWS.get()


def current_replica() -> Any:
    """Return the `ReplicaContext` of the traced step, of `fit` or of the user; or None."""
    if (rows := _ROWS.get()) is not None:
        return rows.replica
    frame = _replica.innermost_explicit_frame()
    return None if frame is None else frame.replica


def use_rows(rows: Rows | None) -> contextlib.AbstractContextManager[None]:
    """Set the rows of the current replica in a block; None for a call without a strategy."""
    return _compat.set_in_block(_ROWS, rows)


def with_gradient(forward: Callable[[Any], Any], backward: Callable[[Any], Any], array: Any) -> Any:
    """Return `forward(array)`; `backward` computes the gradient from that of the result."""
    if not jnp.issubdtype(array.dtype, jnp.inexact):
        return forward(array)

    @jax.custom_vjp
    def convert(value: Any) -> Any:
        return forward(value)

    convert.defvjp(lambda value: (forward(value), None), lambda _, ct: (backward(ct),))
    return convert(array)


def gather_rows(value: Any, rows: Rows) -> Any:
    """Return the rows of all replicas; the gradient of a replica is that of its own rows.

    Shapes:
        In: a pytree of `[own, ...]`, with masks of Keras. Out: the same of `[total, ...]`.
    """
    backend = keras_module("backend")

    def gather(leaf: Any) -> Any:
        gathered = with_gradient(rows.gather, rows.take_own, leaf)
        mask = backend.get_keras_mask(leaf)
        if mask is not None:
            backend.set_keras_mask(gathered, rows.gather(mask))
        return gathered

    return jax.tree.map(gather, value)


def scale_gradient(value: Any, factor: float) -> Any:
    """Return a value that is equal on all replicas; its gradient is multiplied by `factor`."""

    def scale(cotangent: Any) -> Any:
        return cotangent * jnp.asarray(factor, cotangent.dtype)

    return jax.tree.map(lambda leaf: with_gradient(lambda x: x, scale, leaf), value)


def add_shares(share: Any, rows: Rows) -> Any:
    """Return the sum of a share over the replicas; the gradient is that of the own share."""
    return with_gradient(rows.add_up, lambda cotangent: cotangent, share)
