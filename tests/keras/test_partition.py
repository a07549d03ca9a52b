"""Models whose variables partition rules split over the logical devices of each replica."""

import dataclasses
import logging
import pathlib
import types
from collections.abc import Callable
from typing import Any

import jax
import keras
import numpy as np
import pytest
from keras import layers

import jaxdist
from jaxdist import partition
from jaxdist._processes import Process
from jaxdist.errors import (
    ArgumentError,
    ContextError,
    JaxdistError,
    MixedStrategyError,
    ShapeError,
    UnsupportedError,
)
from tests.keras.models import FEATURES, Data, check_equal, make_data, train
from tests.tables import refused

Make = Callable[[], Any]
HIDDEN, CLASSES = 8, 3


def make_strategy(data: int = 4, model: int = 2) -> jaxdist.MirroredStrategy:
    mesh = jax.make_mesh(
        (data, model),
        ("data", "model"),
        axis_types=(jax.sharding.AxisType.Auto,) * 2,
        devices=jax.devices()[: data * model],
    )
    return jaxdist.MirroredStrategy(mesh=mesh, replica_axes=("data",))


def make_model() -> Any:
    return keras.Sequential(
        [
            keras.Input((FEATURES,)),
            layers.Dense(HIDDEN, activation="relu", name="up"),
            layers.Dense(CLASSES, activation="softmax", name="down"),
        ]
    )


def compile_model() -> dict[str, Any]:
    return {
        "optimizer": keras.optimizers.Adam(0.01),
        "loss": "sparse_categorical_crossentropy",
        "metrics": ["accuracy"],
    }


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
        ((2, 2), 13, {"run_eagerly": True}),
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
    assert layer.kernel.value.addressable_shards[0].data.shape == (FEATURES, 4)
    assert {len(v.value.sharding.device_set) for v in (*metric.variables, seeds.state)} == {2}


def _rules_of(**placements: Any) -> partition.Rules:
    pairs = [(name.replace("_", "/"), placement) for name, placement in placements.items()]
    return partition.Rules(pairs, otherwise=partition.Replicate())


@pytest.mark.parametrize(
    ("rules", "kind", "said"),
    [
        (_rules_of(upp_kernel=partition.Split(1)), ArgumentError, ("match no", "up/kernel")),
        (_rules_of(down_kernel=partition.Split(1)), ShapeError, ("down/kernel", "Split dim 0")),
        (_rules_of(up_kernel=partition.Split(2)), ShapeError, ("up/kernel", "names dim 2")),
        (partition.fsdp(min_bytes=0), UnsupportedError, ("Shard(", "whole on each replica")),
        (_rules_of(up_kernel=partition.Shard(1)), UnsupportedError, ("up/kernel", "Split(dim)")),
        (
            partition.ByNames({"embed": "model"}),
            UnsupportedError,
            ("ByNames", "no names of dims", "tensor_parallel()"),
        ),
    ],
)
def test_rules_that_do_not_fit_are_refused_and_leave_the_model_as_it_was(
    rules: Any, kind: type[JaxdistError], said: tuple[str, ...]
) -> None:
    strategy, model = make_strategy(), make_model()
    with refused(kind, *said):
        partition.place(strategy, model, rules)
    assert {len(v.value.sharding.device_set) for v in model.variables} == {1}
    with make_strategy(2, 2).scope():
        model.compile(**compile_model())


def test_a_model_that_is_not_built_is_refused_with_the_way_to_build_it() -> None:
    strategy = make_strategy()
    with strategy.scope():
        model = keras.Sequential([layers.Dense(HIDDEN)])
    with refused(ArgumentError, "is not built", "model.build((None, num_features))"):
        partition.place(strategy, model, partition.tensor_parallel())
    model.build((None, FEATURES))
    partition.place(strategy, model, {"kernel": partition.Split(1), "bias": partition.Split(0)})
    assert model.variables[0].value.addressable_shards[0].data.shape == (FEATURES, 4)


def test_a_filter_of_flax_is_refused_for_a_keras_model() -> None:
    with refused(ArgumentError, "wrt='kernel'", "Leave wrt out"):
        partition.place(make_strategy(), make_model(), partition.replicated(), wrt="kernel")


def test_a_model_of_another_strategy_is_refused() -> None:
    strategy, other = make_strategy(), make_strategy(2, 4)
    with other.scope():
        model = make_model()
    with refused(MixedStrategyError, "partition.place was given", "made in the scope of"):
        partition.place(strategy, model, partition.replicated())
    layer = layers.Dense(HIDDEN, name="up")
    layer.build((None, FEATURES))
    partition.place(strategy, layer, {"kernel": partition.Split(1), "bias": partition.Split(0)})
    with other.scope():
        model = keras.Sequential([keras.Input((FEATURES,)), layer])
        model.compile("sgd", "mse")
    with refused(MixedStrategyError, "up/kernel", "placed it for a strategy with other devices"):
        model.predict(make_data(4).x, verbose=0)


def test_strategies_with_parameter_servers_are_refused() -> None:
    cluster = jaxdist.cluster_resolver.ClusterSpec({"worker": ["w:1"], "ps": ["p:1"]})
    resolver = jaxdist.cluster_resolver.SimpleClusterResolver(cluster, rpc_layer="local")
    strategy = jaxdist.ParameterServerStrategy(resolver)
    with refused(UnsupportedError, "partition.place", "on its parameter servers"):
        partition.place(strategy, make_model(), partition.tensor_parallel())


def test_replicas_with_devices_of_several_processes_are_refused() -> None:
    layout = make_strategy().layout
    shared = dataclasses.replace(layout, owners=(0, 1) * 4, process=Process(0, 2))
    strategy: Any = types.SimpleNamespace(layout=shared)
    with refused(UnsupportedError, "replicas span processes", "[0, 1]", "of one process"):
        partition.place(strategy, make_model(), partition.tensor_parallel())


def test_a_callback_cannot_place_a_model_whose_values_fit_has() -> None:
    strategy, data = make_strategy(), make_data(8)
    with strategy.scope():
        model = make_model()
        model.compile(**compile_model())

    class Place(keras.callbacks.Callback):
        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            partition.place(strategy, model, partition.tensor_parallel())

    with refused(ContextError, "while it trains", "before or after fit"):
        model.fit(data.x, data.y, batch_size=4, callbacks=[Place()], verbose=0)


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

    expected = train(None, lambda: make(False), compile_model, data, 7)
    check_equal(train(strategy, make_split, compile_model, data, 7), expected)
