"""Keras models on parameter servers give the numbers of Keras alone, or those of all updates."""

from collections.abc import Callable
from typing import Any

import jax
import keras
import numpy as np
import pytest

import jaxdist
from jaxdist.coordinator import ClusterCoordinator
from jaxdist.errors import UnsupportedError
from jaxdist.experimental.partitioners import FixedShardsPartitioner
from tests.keras.models import check_equal, make_data
from tests.keras.on_servers.servers import make_model, read_state, train
from tests.parameter_server.strategy.making import make_strategy
from tests.strategies.oracle import refused

K, L = keras.optimizers, keras.layers
OPTIMIZERS: dict[str, Callable[[], Any]] = {
    "SGD": lambda: K.SGD(0.1),
    "Adam with clipnorm": lambda: K.Adam(0.01, clipnorm=0.1),
    "Adam with global_clipnorm and a scaled loss": lambda: K.Adam(
        0.01, global_clipnorm=0.1, loss_scale_factor=64.0
    ),
    "accumulation": lambda: K.Adam(0.01, gradient_accumulation_steps=3),
    "schedule": lambda: K.SGD(K.schedules.ExponentialDecay(0.1, 3, 0.5), momentum=0.9),
    "Adafactor": lambda: K.Adafactor(0.01),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_one_worker_gives_the_numbers_of_keras_alone(name: str) -> None:
    data, found = make_data(100, weighted=True), []
    for strategy in (make_strategy(workers=1), None):
        model = make_model(strategy, OPTIMIZERS[name])
        found.append({**train(model, data), "state": read_state(model)})
    check_equal(*found)


@pytest.mark.parametrize("frequency", [None, 3])
def test_averages_of_weights_are_kept_on_the_servers(frequency: int | None) -> None:
    data, found = make_data(60), []
    for strategy in (make_strategy(workers=1), None):
        average = {"use_ema": True, "ema_momentum": 0.5, "ema_overwrite_frequency": frequency}
        model = make_model(strategy, lambda given=average: K.Adam(0.01, **given))
        model.fit(data.x, data.y, batch_size=16, epochs=2, verbose=0)
        found.append(model.get_weights())
    check_equal(*found)


def _make_layers() -> list[Any]:
    return [
        L.Dense(8, kernel_regularizer="l2", kernel_constraint=keras.constraints.MaxNorm(1.0)),
        L.BatchNormalization(momentum=0.5),
        L.Dropout(0.5),
        L.Dense(8, activity_regularizer=keras.regularizers.L1(0.01)),
        L.GaussianNoise(0.1),
    ]


def test_layers_with_statistics_and_random_numbers_give_the_numbers_of_keras_alone() -> None:
    data, found = make_data(100), []
    for strategy in (make_strategy(workers=1), None):
        model = make_model(strategy, layers=_make_layers, steps_per_execution=3)
        seeds = [v for v in model.non_trainable_variables if "seed" in v.path]
        results = train(model, data)
        found.append({**results, "seeds": [np.asarray(v.value).tolist() for v in seeds]})
    check_equal(*found)


def test_variables_in_shards_give_the_numbers_of_keras_alone() -> None:
    data, found = make_data(100), []
    sharded = make_strategy(workers=1, variable_partitioner=FixedShardsPartitioner(2))
    for strategy in (sharded, None):
        model = make_model(strategy, lambda: K.Adam(0.01))
        first = train(model, data)
        # A state that is loaded goes to all shards.
        for variable in model.optimizer.variables:
            variable.assign(variable.value * 2)
        model.optimizer.learning_rate = 0.02
        found.append([first, train(model, data), read_state(model)])
    check_equal(*found)


class Largest(keras.metrics.Metric):
    """The largest output: no sum over the rows."""

    def __init__(self) -> None:
        super().__init__(name="largest")
        self.most = self.add_weight(name="most", initializer="zeros")

    # pyrefly: ignore[bad-override]
    def update_state(self, y: Any, outputs: Any, sample_weight: Any = None) -> None:
        self.most.assign(keras.ops.maximum(self.most.value, keras.ops.max(outputs)))

    def result(self) -> Any:
        return self.most.value


def _two_replicas() -> Any:
    from tests.parameter_server.strategy.making import make_resolver

    resolver = make_resolver(1, 1, num_accelerators={"CPU": 2})
    return jaxdist.ParameterServerStrategy(resolver)


def test_workers_with_two_replicas_give_the_numbers_of_keras_alone() -> None:
    # Batches of 16 rows are split evenly, and the last one of 5 is not.
    data, found = make_data(69), []

    def layers() -> list[Any]:
        return [L.Dense(8, activity_regularizer=keras.regularizers.L2(0.01)), L.ReLU()]

    for strategy in (_two_replicas(), None):
        model = make_model(strategy, layers=layers, metrics=[Largest()])
        found.append(train(model, data, batch_size=16))
    check_equal(*found)


def test_two_replicas_of_a_worker_normalize_with_the_statistics_of_their_batch() -> None:
    data, found = make_data(69), []

    def layers() -> list[Any]:
        return [L.Dense(8), L.BatchNormalization(synchronized=True)]

    for strategy in (_two_replicas(), jaxdist.OneDeviceStrategy("cpu:0")):
        found.append(train(make_model(strategy, layers=layers), data, batch_size=16))
    check_equal(*found, rtol=1e-4)


@pytest.mark.parametrize("max_staleness", [None, 0])
def test_all_updates_of_three_workers_count(max_staleness: int | None) -> None:
    data = make_data(200)
    strategy = make_strategy(workers=3, max_staleness=max_staleness)
    model = make_model(strategy)
    model.fit(data.x, data.y, batch_size=8, epochs=4, verbose=0)
    counted = ClusterCoordinator(strategy).statistics()
    assert (counted.scheduled, counted.applied, counted.lost) == (100, 100, 0)
    assert int(model.optimizer.iterations.value) == 100


def test_two_workers_reach_the_loss_of_synchronous_training() -> None:
    data, losses = make_data(240), []
    y = data.x[:, :3].argmax(axis=1)
    for strategy in (make_strategy(workers=2), None):
        model = make_model(strategy, lambda: K.SGD(0.2))
        history = model.fit(data.x, y, batch_size=16, epochs=8, verbose=0).history
        losses.append(history["loss"][-1])
    assert losses[0] < 1.3 * losses[1] < 0.3, losses


def test_losses_and_metrics_of_several_workers_are_sums_over_all_rows() -> None:
    data, found = make_data(101), []
    for strategy in (make_strategy(workers=3), None):
        # The weights stay the same, so the order of steps does not matter.
        model = make_model(strategy, lambda: K.SGD(0.0), weighted_metrics=["accuracy"])
        rows: dict[str, Any] = {"batch_size": 8, "verbose": 0}
        classes = {0: 1.0, 1: 2.0, 2: 0.5}
        history = model.fit(data.x, data.y, epochs=2, class_weight=classes, **rows).history
        scores = model.evaluate(data.x, data.y, return_dict=True, **rows)
        found.append([history, scores])
    check_equal(*found)


def test_methods_on_batch_give_the_numbers_of_keras_alone() -> None:
    data, found = make_data(30), []
    for strategy in (make_strategy(workers=2), None):
        model = make_model(strategy, lambda: K.Adam(0.01))
        results = [model.train_on_batch(data.x, data.y) for _ in range(3)]
        results.append(model.test_on_batch(data.x, data.y))
        results.append(model.predict_on_batch(data.x))
        found.append([results, model.get_weights(), read_state(model)])
    check_equal(*found)


class Watch(keras.callbacks.Callback):
    """Notes what callbacks see, and sets a learning rate."""

    def __init__(self) -> None:
        super().__init__()
        self.logs: list[Any] = []
        self.weights: list[Any] = []

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        model: Any = self.model
        model.optimizer.learning_rate = 0.1 / (1 + epoch)

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.logs.append(dict(logs or {}))
        if batch == 1:
            # Whoever looks at the model during an epoch sees the newest weights.
            model: Any = self.model
            self.weights.append(model.get_weights())


def test_callbacks_see_results_and_weights_and_set_the_learning_rate() -> None:
    data, found = make_data(64), []
    for strategy in (make_strategy(workers=1), None):
        model, watch = make_model(strategy), Watch()
        history = model.fit(data.x, data.y, 16, epochs=3, verbose=0, callbacks=[watch]).history
        assert all(set(logs) == {"accuracy", "loss"} for logs in watch.logs), watch.logs
        assert len(watch.logs) == 12
        found.append([history, watch.weights, model.get_weights()])
    check_equal(*found)


def test_weights_that_are_set_and_a_new_optimizer_go_to_the_servers() -> None:
    data, found = make_data(64), []
    for strategy in (make_strategy(workers=2), None):
        model = make_model(strategy, lambda: K.Adam(0.1))
        model.fit(data.x, data.y, batch_size=16, verbose=0)
        model.set_weights([np.full(w.shape, 0.1, w.dtype) for w in model.get_weights()])
        model.layers[0].trainable = False
        model.compile("sgd", "sparse_categorical_crossentropy", metrics=["accuracy"])
        # One step, so that the order of several does not matter.
        found.append([model.fit(data.x, data.y, 64, verbose=0).history, model.get_weights()])
    check_equal(*found)


@keras.saving.register_keras_serializable("tests")
class Notes(keras.layers.Layer):
    """Counts its calls in training, and notes the sum of its last inputs and whether it ran."""

    def build(self, shape: Any) -> None:
        def make(name: str, dtype: str) -> Any:
            return self.add_weight(
                name=name, shape=(), dtype=dtype, initializer="zeros", trainable=False
            )

        self.calls, self.last = make("calls", "int32"), make("last", "float32")
        self.has_run = make("has_run", "bool")

    def call(self, x: Any, training: bool = False) -> Any:  # pyrefly: ignore[bad-override]
        if training:
            self.calls.assign(self.calls.value + 1)
            self.last.assign(keras.ops.sum(x))
            self.has_run.assign(keras.ops.sum(x) == keras.ops.sum(x))
        return x


def test_counts_of_all_workers_add_up_and_of_notes_the_last_one_stays() -> None:
    data = make_data(64)
    model = make_model(make_strategy(workers=3), layers=lambda: [Notes()])
    model.fit(data.x, data.y, batch_size=8, epochs=2, shuffle=False, verbose=0)
    layer = model.layers[0]
    assert int(layer.calls.value) == 16
    sums = data.x.reshape(8, -1).sum(axis=1)
    assert np.isclose(sums, float(layer.last.value), atol=1e-4).any()
    assert bool(layer.has_run.value)


@keras.saving.register_keras_serializable("tests")
class State(keras.layers.Layer):
    """Keeps one number, which `change` computes from the old one and the rows."""

    def __init__(self, change: Any, aggregation: str | None) -> None:
        super().__init__()
        self._change, self._aggregation = change, aggregation

    def build(self, shape: Any) -> None:
        self.kept = self.add_weight(
            shape=(), initializer="zeros", trainable=False, aggregation=self._aggregation
        )

    def call(self, x: Any) -> Any:  # pyrefly: ignore[bad-override]
        self.kept.assign(self._change(self.kept.value, x))
        return x


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize(
    "change",
    [
        lambda old, x: keras.ops.maximum(old, keras.ops.max(x)),
        lambda old, x: old * 2 + 1,
        lambda old, x: 0.9 * old + 0.1 * keras.ops.mean(x),
    ],
    ids=["maximum", "doubled", "average"],
)
def test_state_whose_changes_do_not_add_up_is_refused_by_its_path(
    change: Any, workers: int
) -> None:
    data = make_data(16)
    model = make_model(make_strategy(workers=workers), layers=lambda: [State(change, None)])
    with refused(UnsupportedError, "state", "assign_add", "aggregation='mean'"):
        model.fit(data.x, data.y, batch_size=8, verbose=0)


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize(
    "change",
    [
        lambda old, x: keras.ops.maximum(old, keras.ops.max(x)),
        lambda old, x: 0.5 * old * old + keras.ops.mean(x),
        lambda old, x: keras.ops.sqrt(old) + keras.ops.mean(x),
        lambda old, x: keras.ops.where(old > 1e6, old, 0.5 * old + keras.ops.mean(x)),
        lambda old, x: 1.0 / (old + 1.0),
    ],
    ids=["maximum", "square", "root", "branch", "inverse"],
)
def test_state_that_is_called_a_mean_and_is_no_average_is_refused(
    change: Any, workers: int
) -> None:
    data = make_data(16)
    model = make_model(make_strategy(workers=workers), layers=lambda: [State(change, "mean")])
    with refused(UnsupportedError, "state", "assign_add", "decay * old"):
        model.fit(data.x, data.y, batch_size=8, verbose=0)


def test_averages_whose_decay_follows_the_steps_train_on_servers() -> None:
    data = make_data(32)

    def average(old: Any, x: Any) -> Any:
        decay = 0.5 / (1.0 + keras.ops.mean(x) ** 2)
        return old + (1.0 - decay) * (2.0 - old) / 2.0

    model = make_model(make_strategy(workers=2), layers=lambda: [State(average, "mean")])
    model.fit(data.x, data.y, batch_size=8, shuffle=False, verbose=0)
    assert np.isfinite(float(model.layers[0].kept.value))


@pytest.mark.parametrize("aggregation", ["sum", None])
@pytest.mark.parametrize("method", ["fit", "evaluate"])
def test_what_a_step_adds_does_not_depend_on_the_value_before(
    method: str, aggregation: str | None
) -> None:
    data = make_data(64)

    def add(old: Any, x: Any) -> Any:
        return old + keras.ops.sum(x)

    model = make_model(make_strategy(workers=2), layers=lambda: [State(add, aggregation)])
    model.fit(data.x, data.y, batch_size=8, verbose=0)
    # The difference of the value after and before would be nan.
    model.layers[0].kept.assign(np.inf)
    getattr(model, method)(data.x, data.y, batch_size=8, verbose=0)
    assert float(model.layers[0].kept.value) == np.inf


def test_sums_and_averages_of_own_layers_train_on_servers() -> None:
    data = make_data(64)

    def add(old: Any, x: Any) -> Any:
        return old + keras.ops.sum(x)

    def average(old: Any, x: Any) -> Any:
        return 0.5 * old + 0.5

    model = make_model(
        make_strategy(workers=2), layers=lambda: [State(add, "sum"), State(average, "mean")]
    )
    model.fit(data.x, data.y, batch_size=8, shuffle=False, verbose=0)
    np.testing.assert_allclose(float(model.layers[0].kept.value), data.x.sum(), rtol=1e-4)
    assert np.isfinite(float(model.layers[1].kept.value))


class OwnTest(keras.Model):
    """A model with a step of its own for evaluation."""

    def __init__(self) -> None:
        super().__init__()
        self.dense = L.Dense(3, activation="softmax")

    def call(self, x: Any) -> Any:  # pyrefly: ignore[bad-override]
        return self.dense(x)

    def test_step(self, state: Any, data: Any) -> Any:
        outputs, fixed = self.stateless_call(state[0], state[1], data[0])
        return {"sum": outputs.sum()}, (state[0], fixed, state[2])


def test_a_test_step_of_the_user_runs_with_the_weights_of_the_servers() -> None:
    data, strategy = make_data(32), make_strategy(workers=2)
    with strategy.scope():
        model = OwnTest()
        model.compile("sgd", "sparse_categorical_crossentropy", steps_per_execution=2)
    model.fit(data.x, data.y, batch_size=8, verbose=0)
    arrays = [v._value for v in model.variables]
    found = model.evaluate(data.x, data.y, batch_size=32, return_dict=True, verbose=0)
    assert np.isclose(found["sum"], 32, rtol=1e-4)
    outputs = model.predict(data.x, batch_size=8, verbose=0)
    np.testing.assert_allclose(outputs, jax.nn.softmax(data.x @ arrays[0] + arrays[1]), rtol=1e-5)
    # Others would be sent to the servers, where other workers may have changed them.
    assert all(v._value is a for v, a in zip(model.variables, arrays, strict=False))
