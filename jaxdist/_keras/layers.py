"""Layers of Keras that depend on the replica: random numbers and synchronized statistics."""

import functools
import inspect
import math
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp

from jaxdist import _replica
from jaxdist._keras.forward import marks
from jaxdist._keras.rows import Rows, current_replica, current_rows
from jaxdist._keras.source import keras_module

# An odd number, so that its multiples by different replicas are different 32-bit words.
_STRIDE = 0x9E3779B9


def draw_by_replica(draw: Callable[..., Any]) -> Callable[..., Any]:
    """Return `SeedGenerator.next` so that replicas draw different numbers.

    The state of the generator is equal on all replicas: the number of the replica changes what is
    drawn. Replica 0 draws what a model without a strategy draws.
    """

    @functools.wraps(draw)
    def draw_own(self: Any, *args: Any, **kwargs: Any) -> Any:
        seed, replica = draw(self, *args, **kwargs), current_replica()
        if replica is None or replica.num_replicas_in_sync == 1:
            return seed
        number = jnp.asarray(replica.replica_id_in_sync_group, jnp.uint32)
        mixed = seed[0] ^ (number * jnp.uint32(_STRIDE)).astype(seed.dtype)
        return seed.at[0].set(mixed)

    return draw_own


def allow_synchronized(initialize: Callable[..., Any]) -> Callable[..., Any]:
    """Return `BatchNormalization.__init__` so that it takes `synchronized=True` in a scope."""

    @functools.wraps(initialize)
    def make(self: Any, *args: Any, synchronized: bool = False, **kwargs: Any) -> None:
        in_scope = _replica.current_frame() is not None
        # Keras refuses it for every backend but TensorFlow.
        initialize(self, *args, synchronized=synchronized and not in_scope, **kwargs)
        self.synchronized = synchronized

    # Keras reads the signature to save the arguments of a layer, and does not follow wrappers.
    make.__signature__ = inspect.signature(initialize)  # type: ignore[attr-defined]
    return make


def synchronize(moments: Callable[..., Any]) -> Callable[..., Any]:
    """Return `BatchNormalization._moments` so that `synchronized=True` is over all replicas."""

    @functools.wraps(moments)
    def moments_of_all(self: Any, inputs: Any, mask: Any) -> Any:
        axes = tuple(self._reduction_axes)
        if self.synchronized and _is_symbolic():
            # Keras only looks for the shapes.
            return jnp.mean(inputs, axes), jnp.var(inputs, axes)
        rows = current_rows() or _count_in_step(inputs)
        if not self.synchronized or rows is None:
            if marks.are_marked():
                given = (inputs,) if mask is None else (inputs, mask)
                own = functools.partial(moments, self)
                return marks.mark(marks.OWN_STATISTICS, lambda x, m=None: own(x, m), *given)
            return moments(self, inputs, mask)
        return _compute_moments(inputs, mask, axes, rows)

    return moments_of_all


def _count_in_step(inputs: Any) -> Rows | None:
    """Return the rows of a step that the user runs with `strategy.run`, or None outside of it."""
    replica = current_replica()
    if replica is None:
        return None
    return Rows(inputs.shape[0], replica.all_reduce("sum", inputs.shape[0]), replica)


def _is_symbolic() -> bool:
    return bool(keras_module("backend.common.symbolic_scope").in_symbolic_scope())


def _compute_moments(inputs: Any, mask: Any, axes: tuple[int, ...], rows: Rows) -> tuple[Any, Any]:
    # A replica without rows computes on a row that does not count.
    is_real = 1 if rows.own else 0
    if mask is None:
        per_row = math.prod(inputs.shape[a] for a in axes if a != 0)
        weights = jnp.full((), is_real, inputs.dtype)
        count = jnp.asarray(rows.total * per_row, inputs.dtype)
    else:
        weights = jnp.broadcast_to(mask[..., None], inputs.shape).astype(inputs.dtype) * is_real
        count = rows.add_up(jnp.sum(weights, axes)) + keras_module("backend").epsilon()
    mean = rows.add_up(jnp.sum(inputs * weights, axes)) / count
    shape = [1 if a in axes else n for a, n in enumerate(inputs.shape)]
    squares = jnp.square(inputs - mean.reshape(shape)) * weights
    return mean, rows.add_up(jnp.sum(squares, axes)) / count
