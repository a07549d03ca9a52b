"""Changes layers of Keras that depend on the replica: random numbers, statistics, states."""

import functools
import inspect
import math
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp

from jaxdist._keras.forward import marks
from jaxdist._keras.models import name_of
from jaxdist._keras.rows import OnlyReplica, Rows, current_replica, current_rows
from jaxdist._keras.source import keras_module
from jaxdist.errors import UnsupportedError

# An odd number, so that its multiples by different replicas are different 32-bit words.
_STRIDE = 0x9E3779B9


def draw_by_replica(draw: Callable[..., Any]) -> Callable[..., Any]:
    """Return a `SeedGenerator.next` with which replicas draw different numbers.

    The state of the generator is equal on all replicas; the number of the replica changes the
    numbers. Replica 0 draws the same as a model without a strategy.
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
    """Return a `BatchNormalization.__init__` that accepts `synchronized=True`.

    This also applies outside a scope, where saved layers are loaded. Without replicas, the
    statistics of a batch are those of all its rows.
    """

    @functools.wraps(initialize)
    def make(self: Any, *args: Any, synchronized: bool = False, **kwargs: Any) -> None:
        # Keras refuses this for every backend but TensorFlow.
        initialize(self, *args, **kwargs)
        self.synchronized = synchronized

    # Keras reads the signature to save the arguments of a layer, and does not follow wrappers.
    make.__signature__ = inspect.signature(initialize)  # type: ignore[attr-defined]
    return make


def synchronize(moments: Callable[..., Any]) -> Callable[..., Any]:
    """Return a `BatchNormalization._moments` whose `synchronized=True` spans all replicas."""

    @functools.wraps(moments)
    def moments_of_all(self: Any, inputs: Any, mask: Any) -> Any:
        axes = tuple(self._reduction_axes)
        scope = keras_module("backend.common.symbolic_scope")
        if self.synchronized and scope.in_symbolic_scope():
            # Keras only needs the shapes.
            return jnp.mean(inputs, axes), jnp.var(inputs, axes)
        if not self.synchronized:
            if marks.are_marked():
                given = (inputs,) if mask is None else (inputs, mask)
                own = functools.partial(moments, self)
                return marks.mark(marks.OWN_STATISTICS, lambda x, m=None: own(x, m), *given)
            return moments(self, inputs, mask)
        rows = current_rows() or _count_in_step(inputs)
        return _compute_moments(inputs, mask, axes, rows)

    return moments_of_all


def _count_in_step(inputs: Any) -> Rows:
    """Return the rows of a step that the user runs with `strategy.run`; all rows outside of one."""
    replica, size = current_replica(), inputs.shape[0]
    if replica is None:
        return Rows(size, size, OnlyReplica(None))
    return Rows(size, replica.all_reduce("sum", size), replica)


def _compute_moments(inputs: Any, mask: Any, axes: tuple[int, ...], rows: Rows) -> tuple[Any, Any]:
    # A replica without rows computes on a row that does not count.
    is_real = 1 if rows.own else 0
    if mask is None:
        size, per_row = inputs.shape[0], math.prod(inputs.shape[a] for a in axes if a != 0)
        # Earlier layers may have changed the number of rows of the batch.
        is_batch = size in (rows.own, max(rows.own, 1))
        total = rows.total if is_batch else rows.add_up(size * is_real)
        weights = jnp.full((), is_real, inputs.dtype)
        count = jnp.asarray(total * per_row, inputs.dtype)
    else:
        weights = jnp.broadcast_to(mask[..., None], inputs.shape).astype(inputs.dtype) * is_real
        count = rows.add_up(jnp.sum(weights, axes)) + keras_module("backend").epsilon()
    mean = rows.add_up(jnp.sum(inputs * weights, axes)) / count
    shape = [1 if a in axes else n for a, n in enumerate(inputs.shape)]
    squares = jnp.square(inputs - mean.reshape(shape)) * weights
    return mean, rows.add_up(jnp.sum(squares, axes)) / count


def check_stateful(model: Any, method: str, strategy: Any) -> None:
    """Check that no recurrent layer of a model keeps the states of rows for the next batch.

    Args:
        model: The model.
        method: The method of the model that is called.
        strategy: Its strategy.

    Raises:
        UnsupportedError: A layer does, and the strategy splits the rows.
    """
    if strategy.num_replicas_in_sync == 1 and not strategy._has_servers:
        return
    recurrent = keras_module("layers.rnn.rnn").RNN
    layers = [x for x in model._flatten_layers() if isinstance(x, recurrent) and x.stateful]
    if layers:
        called = f"{method} of the Keras model {name_of(model)!r} was called on {strategy!r}"
        names = [f"{type(layer).__name__} {layer.name!r}" for layer in layers]
        raise _make_stateful_error(f"{called}, and the model has", names)


def refuse_stateful(call: Callable[..., Any]) -> Callable[..., Any]:
    """Return an `RNN.call` that refuses `stateful=True` in a step of replicas."""

    @functools.wraps(call)
    def call_checked(self: Any, *args: Any, **kwargs: Any) -> Any:
        replica = current_replica() if self.stateful else None
        if replica is not None and replica.num_replicas_in_sync > 1:
            count, name = replica.num_replicas_in_sync, f"{type(self).__name__} {self.name!r}"
            raise _make_stateful_error(f"A step of {count} replicas calls", [name])
        return call(self, *args, **kwargs)

    return call_checked


def _make_stateful_error(what: str, layers: list[str]) -> UnsupportedError:
    return UnsupportedError(
        f"{what} {len(layers)} recurrent layer(s) with stateful=True: {layers}.\n\n"
        "Such a layer begins with the final states of the rows of the previous batch. A "
        "strategy splits the rows of each batch over its replicas, and the layer has one state "
        "for all rows.\n\n"
        "Pass the whole sequences with stateful=False. Or make the model in the scope of "
        "jaxdist.OneDeviceStrategy()."
    )
