"""Models whose variables partition rules split over the logical devices of each replica."""

import dataclasses
import logging
import pathlib
from collections.abc import Callable
from typing import Any

import jax
import keras
import numpy as np
import pytest
from keras import layers

import jaxdist
from jaxdist import partition
from jaxdist.errors import (
    ArgumentError,
    ShapeError,
)
from tests.keras.models import CLASSES, FEATURES, Data, check_equal, make_data, train
from tests.keras.split import HIDDEN, compile_model, make_model, make_strategy
from tests.strategies.oracle import refused

Make = Callable[[], Any]


def make_placed(strategy: Any, rules: Any, make: Make = make_model) -> Any:
    """Return a compiled model whose variables are placed."""
    with strategy.scope():
        model = make()
        model.compile(**compile_model())
    partition.place(strategy, model, rules)
    return model


def held_by(device: jax.Device, variables: Any) -> int:
    """Return the bytes of the variables on one device."""
    shards = [s for v in variables for s in v.value.addressable_shards if s.device == device]
    return sum(s.data.nbytes for s in shards)


def parts(variables: Any) -> dict[str, tuple[int, ...]]:
    return {v.path.split("/", 1)[1]: v.value.addressable_shards[0].data.shape for v in variables}


def train_placed(strategy: Any, data: Data, batch_size: int, **more: Any) -> dict[str, Any]:
    def make() -> Any:
        model = make_model()
        partition.place(strategy, model, partition.tensor_parallel())
        return model

    return train(strategy, make, lambda: compile_model() | more, data, batch_size)


@pytest.mark.parametrize(
    ("mesh", "rows", "more"),
    [
        ((4, 2), 40, {}),
        ((4, 2), 37, {}),
        ((1, 2), 19, {}),
        ((2, 4), 19, {"steps_per_execution": 2}),
        ((2, 2), 5, {"run_eagerly": True}),
    ],
)
def test_a_split_model_has_the_numbers_of_keras_alone(
    mesh: tuple[int, int], rows: int, more: dict[str, Any]
) -> None:
    data = make_data(rows, weighted=True)
    expected = train(None, make_model, compile_model, data, 8)
    check_equal(train_placed(make_strategy(*mesh), data, 8, **more), expected)


def test_variables_and_slots_are_split_before_in_and_after_fit() -> None:
    strategy, seen = make_strategy(), []
    model = make_placed(strategy, partition.tensor_parallel())
    wanted = {"up/kernel": (FEATURES, 4), "up/bias": (4,), "down/kernel": (4, 3), "down/bias": (3,)}
    assert parts(model.variables) == wanted
    run = type(strategy).run

    def run_and_look(self: Any, fn: Any, *args: Any, **kwargs: Any) -> Any:
        result = run(self, fn, *args, **kwargs)
        seen.append([x.addressable_shards[0].data.shape for g in result[1] for x in g])
        return result

    data = make_data(16)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(strategy), "run", run_and_look)
        model.fit(data.x, data.y, batch_size=8, verbose=0)
    assert [s[:4] for s in seen] == [[*wanted.values()]] * 2
    assert parts(model.variables) == wanted
    slots = parts(model.optimizer.variables)
    for path, shape in wanted.items():
        flat = f"{model.name}_{path.replace('/', '_')}"
        assert slots[f"{flat}_momentum"] == slots[f"{flat}_velocity"] == shape
    kernels = [v for v in (*model.variables, *model.optimizer.variables) if "kernel" in v.path]
    assert held_by(jax.devices()[0], kernels) * 2 == 3 * 4 * (FEATURES * HIDDEN + HIDDEN * 3)
    assert {len(v.value.sharding.device_set) for v in model.optimizer.variables} == {2}


def test_an_optimizer_that_exists_is_placed_with_its_model_and_by_other_rules_again() -> None:
    data, strategy = make_data(16), make_strategy()
    with strategy.scope():
        model = make_model()
        model.compile(**compile_model())
    model.fit(data.x, data.y, batch_size=8, verbose=0)
    before = [np.asarray(v.value) for v in model.optimizer.variables]
    rules = partition.Rules([("up/kernel", partition.Split(-1))], otherwise=partition.Replicate())
    partition.place(strategy, (model, model.optimizer), rules)
    moved = [v for v in model.optimizer.variables if "up_kernel" in v.path]
    assert {v.value.addressable_shards[0].data.shape for v in moved} == {(FEATURES, 4)}
    for variable, value in zip(model.optimizer.variables, before, strict=True):
        np.testing.assert_array_equal(variable.value, value)
    model.fit(data.x, data.y, batch_size=8, verbose=0)
    partition.place(strategy, model, partition.replicated())
    assert {v.value.addressable_shards[0].data.shape for v in moved} == {(FEATURES, HIDDEN)}
    alone = partition.Rules([("up/kernel", partition.Split(1))], otherwise=partition.Replicate())
    partition.place(strategy, [model.optimizer], alone)
    assert {v.value.addressable_shards[0].data.shape for v in moved} == {(FEATURES, 4)}


def test_a_split_model_is_saved_loaded_assigned_and_called_as_always(
    tmp_path: pathlib.Path,
) -> None:
    data = make_data(16)
    model = make_placed(make_strategy(), partition.tensor_parallel())
    saved = tmp_path / "best.keras"
    checkpoint = keras.callbacks.ModelCheckpoint(saved, save_best_only=True, monitor="loss")
    stop = keras.callbacks.EarlyStopping(monitor="loss", patience=1, restore_best_weights=True)
    model.fit(data.x, data.y, batch_size=8, epochs=2, verbose=0, callbacks=[checkpoint, stop])
    predicted = model.predict(data.x, verbose=0)
    np.testing.assert_allclose(model(data.x), predicted, rtol=1e-5)
    restored = keras.saving.load_model(saved)
    assert {len(v.value.sharding.device_set) for v in restored.variables} == {1}
    np.testing.assert_allclose(restored.predict(data.x, verbose=0), predicted, rtol=1e-5)
    model.save_weights(tmp_path / "own.weights.h5")
    kept = model.get_weights()
    model.set_weights([np.zeros_like(w) for w in kept])
    assert not np.asarray(model.variables[0]).any()
    model.load_weights(tmp_path / "own.weights.h5")
    assert parts(model.variables)["up/kernel"] == (FEATURES, 4)
    np.testing.assert_allclose(model.predict(data.x, verbose=0), predicted, rtol=1e-5)
    # An update outside of steps: all variables of the model are on the same devices.
    model.optimizer.apply([np.ones_like(w) for w in kept], model.trainable_variables)
    assert parts(model.variables)["up/kernel"] == (FEATURES, 4)


def test_a_step_of_strategy_run_trains_a_split_model() -> None:
    data, strategy = make_data(16), make_strategy()
    target = np.eye(CLASSES, dtype="float32")[data.y]

    def run(strategy: Any, rules: Any) -> tuple[list[np.ndarray], Any]:
        keras.utils.set_random_seed(0)
        with strategy.scope():
            model, optimizer = make_model(), keras.optimizers.Adam(0.1)
        partition.place(strategy, model, rules)

        def step(x: Any, y: Any) -> Any:
            def compute_loss(weights: Any) -> Any:
                return ((model.stateless_call(weights, [], x)[0] - y) ** 2).mean()

            values = [v.value for v in model.trainable_variables]
            gradients = jax.grad(compute_loss)(values)
            gradients = jaxdist.get_replica_context().all_reduce("mean", gradients)
            optimizer.apply(gradients, model.trainable_variables)

        batch = jax.device_put((data.x, target), strategy.per_replica_sharding)
        for _ in range(3):
            strategy.run(step, batch)
        return [np.asarray(v) for v in model.trainable_variables], model

    found, model = run(strategy, partition.tensor_parallel())
    expected, _ = run(jaxdist.MirroredStrategy(["cpu:0", "cpu:1"]), partition.replicated())
    for one, two in zip(found, expected, strict=True):
        np.testing.assert_allclose(one, two, rtol=1e-4, atol=1e-6)
    assert parts(model.variables)["up/kernel"] == (FEATURES, 4)
    with refused(ArgumentError, "partition.place", "a step of strategy.run has used"):
        partition.place(strategy, model, partition.replicated())


def test_statistics_and_seeds_are_replicated_and_frozen_layers_are_split() -> None:
    strategy, data = make_strategy(), make_data(16)

    def make() -> Any:
        model = keras.Sequential(
            [
                keras.Input((FEATURES,)),
                layers.Dense(HIDDEN, name="up"),
                layers.BatchNormalization(name="norm"),
                layers.Dropout(0.5, seed=1),
                layers.Dense(CLASSES, name="down", activation="softmax"),
            ]
        )
        model.layers[0].trainable = False
        return model

    rules = partition.Rules(
        [("up/kernel", partition.Split(1)), ("norm/*", partition.Split(0))],
        otherwise=partition.Replicate(),
    )
    model = make_placed(strategy, rules, make)
    model.fit(data.x, data.y, batch_size=8, verbose=0)
    found = parts(model.variables)
    assert found["up/kernel"] == (FEATURES, 4)
    assert found["norm/gamma"] == found["norm/beta"] == (4,)
    assert found["norm/moving_mean"] == found["norm/moving_variance"] == (HIDDEN,)


def test_with_one_logical_device_split_is_replicate_as_for_other_models() -> None:
    strategy, data = jaxdist.MirroredStrategy(["cpu:0", "cpu:1"]), make_data(16)
    model = make_placed(strategy, partition.tensor_parallel())
    model.fit(data.x, data.y, batch_size=8, verbose=0)
    assert {len(v.value.sharding.device_set) for v in model.variables} == {1}


def test_layers_variables_optimizers_and_metrics_of_keras_are_placed_alone() -> None:
    strategy = make_strategy()
    layer, metric = layers.Dense(HIDDEN), keras.metrics.MeanSquaredError()
    layer.build((None, FEATURES))
    variable = keras.Variable(np.ones((4, 4), "float32"), name="alone")
    seeds = keras.random.SeedGenerator(1)
    rules = {"kernel": partition.Split(1), "{bias,alone}": partition.Split(0)}
    tree = {"layer": layer, "v": variable, "metric": metric, "seeds": seeds}
    assert partition.place(strategy, tree, rules)["layer"] is layer
    assert variable.value.addressable_shards[0].data.shape == (2, 4)
    assert layer.variables[0].value.addressable_shards[0].data.shape == (FEATURES, 4)
    assert {len(v.value.sharding.device_set) for v in (*metric.variables, seeds.state)} == {2}


def test_a_batch_that_the_replicas_do_not_divide_is_told(caplog: pytest.LogCaptureFixture) -> None:
    data = make_data(10)
    model = make_placed(make_strategy(), partition.tensor_parallel())
    with caplog.at_level(logging.WARNING, "jaxdist"):
        model.fit(data.x, data.y, batch_size=8, verbose=0)
        assert not caplog.records, "only the last batch is another one"
        model = make_placed(make_strategy(), partition.tensor_parallel())
        model.fit(data.x, data.y, batch_size=5, verbose=0)
    (record,) = caplog.records
    assert "5 rows, which 4 replicas" in record.getMessage()
    assert "batch_size of 4 or 8" in record.getMessage()


def test_a_step_of_the_user_needs_equal_rows_where_replicas_have_several_devices() -> None:
    class Own(keras.Model):
        def test_step(self, state: Any, data: Any) -> Any:
            error = ((self.stateless_call(state[0], state[1], data[0])[0] - 1) ** 2).mean()
            return {"own": jaxdist.get_replica_context().all_reduce("mean", error)}, state

    given = keras.Input((FEATURES,))
    data, strategy = make_data(8), make_strategy()
    with strategy.scope():
        model = Own(given, layers.Dense(HIDDEN, name="up")(given))
        model.compile("sgd", "mse")
    partition.place(strategy, model, partition.tensor_parallel())
    own = model.evaluate(data.x, data.y, verbose=0, return_dict=True)["own"]
    expected = ((np.asarray(model(data.x)) - 1) ** 2).mean()
    np.testing.assert_allclose(own, expected, rtol=1e-5)
    with refused(ShapeError, "test_step", "a batch of 7 row(s) on 4 replicas", "4 or 8 rows"):
        model.evaluate(data.x[:7], data.y[:7], verbose=0)


@pytest.mark.parametrize("synchronized", [False, True])
def test_batch_statistics_of_a_whole_batch_are_those_of_keras_alone(synchronized: bool) -> None:
    data, strategy = make_data(7), make_strategy()

    def make(synchronized: bool) -> Any:
        return keras.Sequential(
            [
                keras.Input((FEATURES,)),
                layers.Dense(HIDDEN, name="up"),
                layers.BatchNormalization(synchronized=synchronized),
                layers.Dense(CLASSES, activation="softmax", name="down"),
            ]
        )

    def make_split() -> Any:
        model = make(synchronized)
        partition.place(strategy, model, partition.tensor_parallel())
        return model

    # The true gradient of a bias before the layer is zero, and Adam would enlarge its rounding.
    def compile_it() -> dict[str, Any]:
        return {"loss": "sparse_categorical_crossentropy"}

    expected = train(None, lambda: make(False), compile_it, data, 7)
    check_equal(train(strategy, make_split, compile_it, data, 7), expected)


def _train_in_a_job() -> dict[str, Any]:
    import os

    os.environ["KERAS_BACKEND"] = "jax"
    import keras

    import jaxdist

    # As a `TPUStrategy` on several hosts: replicas of two devices in each process.
    strategy = jaxdist.MultiWorkerMirroredStrategy()
    mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    strategy._set_up(dataclasses.replace(strategy.layout, mesh=mesh, replica_axes=("data",)))

    def make() -> Any:
        # Other weights in each process, as without a seed.
        keras.utils.set_random_seed(1 if jax.process_index() == 0 else 77)
        model = make_model()
        partition.place(strategy, model, partition.tensor_parallel())
        assert {len(v.value.sharding.device_set) for v in model.variables} == {2}
        assert all(v.value.is_fully_addressable for v in model.variables)
        return model

    return train(strategy, make, compile_model, make_data(19), 8)


@pytest.mark.slow
def test_two_processes_train_a_split_model_with_the_numbers_of_keras_alone() -> None:
    from jaxdist.testing import launch

    expected = train(None, make_model, compile_model, make_data(19), 8)
    for found in launch(_train_in_a_job, 2, devices_per_process=4, timeout_seconds=300):
        check_equal(found, expected)
