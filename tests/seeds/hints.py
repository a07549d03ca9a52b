"""The two examples of the pages on `CollectiveHints`."""

from typing import Any

import jax
import keras
import numpy as np
import pytest

import jaxdist


def train_with_hints(strategy: jaxdist.Strategy) -> list[np.ndarray]:
    """Run the example of `bytes_per_pack` in a step; return the weights.

    Changes: `jaxdist` for `tf.distribute`, gradients by `jax.grad`, and
    `experimental_aggregate_gradients` left out: this optimizer never reduces gradients.
    """
    with strategy.scope():
        model = keras.Sequential(
            [keras.Input((3,)), keras.layers.Dense(2, kernel_initializer="ones")]
        )
        optimizer = keras.optimizers.SGD(learning_rate=0.1)

    def step(x: Any) -> None:
        vars = model.trainable_variables

        def compute_loss(trainable: Any) -> Any:
            outputs, _ = model.stateless_call(trainable, [], x)
            return outputs.sum()

        grads = jax.grad(compute_loss)([v.value for v in vars])
        with pytest.warns(DeprecationWarning, match="CommunicationOptions"):
            hints = jaxdist.experimental.CollectiveHints(bytes_per_pack=50 * 1024 * 1024)
        replica = jaxdist.get_replica_context()
        assert replica is not None
        grads = replica.all_reduce("sum", grads, experimental_hints=hints)
        optimizer.apply_gradients(zip(grads, vars, strict=True))

    rows = np.arange(24, dtype=np.float32).reshape(8, 3)
    shares = np.split(rows, strategy.num_replicas_in_sync)
    strategy.run(step, args=(jaxdist.PerReplica(shares),))
    return [np.asarray(v) for v in model.trainable_variables]


def reduce_with_hints(seconds: float) -> float | str:
    """Run the example of `timeout_seconds`."""
    strategy = jaxdist.MirroredStrategy()
    v = jaxdist.PerReplica([np.float32(n) for n in range(strategy.num_replicas_in_sync)])
    with pytest.warns(DeprecationWarning, match="CommunicationOptions"):
        hints = jaxdist.experimental.CollectiveHints(timeout_seconds=seconds)
    try:
        return float(strategy.reduce("sum", v, axis=None, experimental_hints=hints))
    except jaxdist.errors.DeadlineExceededError:
        return "did something"
