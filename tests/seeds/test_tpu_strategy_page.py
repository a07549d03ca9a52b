"""The page of `tf.distribute.TPUStrategy`: its example with Keras, and `fit` as it names it.

Changes: `jaxdist` for `tf.distribute`, `keras` for `tf.keras`, a `keras.Input` for `input_shape`,
and `jax.grad` with `all_reduce` for the tape.
"""

from typing import Any

import jax
import keras
import numpy as np

import jaxdist


def _make_strategy() -> jaxdist.Strategy:
    resolver = jaxdist.cluster_resolver.TPUClusterResolver(tpu="virtual:v5e:2x4")
    jaxdist.tpu.experimental.initialize_tpu_system(resolver)
    return jaxdist.TPUStrategy(resolver)


def test_the_custom_training_loop_of_the_page_trains() -> None:
    strategy = _make_strategy()
    with strategy.scope():
        model = keras.Sequential([keras.Input((5,)), keras.layers.Dense(2)])
        optimizer = keras.optimizers.SGD(learning_rate=0.1)

    def dataset_fn(ctx: Any) -> Any:
        x = np.random.default_rng(0).random((2, 5)).astype(np.float32)
        y = np.random.default_rng(0).integers(2, size=(2, 1))
        while True:
            yield x[:1], y[:1]
            yield x[1:], y[1:]

    dist_dataset = strategy.distribute_datasets_from_function(dataset_fn)
    iterator = iter(dist_dataset)

    def train_step(iterator: Any) -> None:
        def step_fn(inputs: Any) -> None:
            features, labels = inputs

            def compute_loss(trainable: Any) -> Any:
                logits, _ = model.stateless_call(trainable, [], features, training=True)
                losses = keras.losses.sparse_categorical_crossentropy(
                    labels, logits, from_logits=True
                )
                return losses.sum()

            grads = jax.grad(compute_loss)([v.value for v in model.trainable_variables])
            grads = jaxdist.get_replica_context().all_reduce("sum", grads)
            optimizer.apply_gradients(zip(grads, model.trainable_variables, strict=True))

        strategy.run(step_fn, args=(next(iterator),))

    before = [np.asarray(v.value) for v in model.trainable_variables]
    train_step(iterator)
    train_step(iterator)
    assert int(optimizer.iterations.value) == 2
    assert not np.array_equal(before[0], model.trainable_variables[0].value)


def test_compile_and_fit_train_on_the_strategy() -> None:
    strategy = _make_strategy()
    with strategy.scope():
        model = keras.Sequential([keras.Input((5,)), keras.layers.Dense(2)])
        model.compile(optimizer="sgd", loss="mse", metrics=["mae"])
    x, y = np.ones((20, 5), "float32"), np.zeros((20, 2), "float32")
    history = model.fit(x, y, batch_size=8, epochs=3, verbose=0)
    assert history.history["loss"][2] < history.history["loss"][0]
