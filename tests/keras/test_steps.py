"""Keras models and variables in steps that `strategy.run` runs."""

import collections
import re
from typing import Any

import jax
import keras
import numpy as np
import pytest
from keras import layers

import jaxdist
from jaxdist.errors import MixedStrategyError, StateDivergenceError
from tests.keras.models import FEATURES, make_data, make_strategy
from tests.strategies.oracle import refused


def test_a_variable_in_a_closure_has_its_value_of_each_call() -> None:
    strategy = make_strategy(2)
    variable = keras.Variable(1.0)

    def step() -> Any:
        variable.assign_add(1.0)
        return variable.value

    assert float(strategy.run(step)) == 2
    assert float(strategy.run(step)) == 3
    variable.assign(10.0)
    assert float(strategy.run(step)) == 11
    assert float(variable.value) == 11
    assert isinstance(variable.value, jax.Array)
    assert not isinstance(variable.value, jax.core.Tracer)


def test_a_model_is_an_argument_and_has_new_weights_in_the_next_call() -> None:
    strategy = make_strategy(2)
    model = keras.Sequential([keras.Input((2,)), layers.Dense(1, kernel_initializer="ones")])
    x = jax.device_put(np.ones((2, 2), "float32"), strategy.per_replica_sharding)

    def step(model: Any, x: Any) -> Any:
        return jaxdist.get_replica_context().all_reduce("sum", model(x))

    assert strategy.run(step, (model, x)).tolist() == [[4.0]]
    model.layers[0].set_weights([np.zeros((2, 1)), np.ones(1)])
    assert strategy.run(step, (model, x)).tolist() == [[2.0]]


def test_an_optimizer_makes_its_variables_in_the_first_step() -> None:
    strategy = make_strategy(2)
    x = np.random.default_rng(0).normal(size=(4, 3)).astype("float32")
    weights = []
    for replicated in (False, True):
        keras.utils.set_random_seed(0)
        model = keras.Sequential([keras.Input((3,)), layers.Dense(1)])
        optimizer = keras.optimizers.Adam(0.1)

        def step(
            x: Any, model: Any = model, optimizer: Any = optimizer, use_replicas: bool = replicated
        ) -> None:
            def compute_loss(values: Any) -> Any:
                y, _ = model.stateless_call(values, [], x)
                return (y**2).mean()

            gradients = jax.grad(compute_loss)([v.value for v in model.trainable_variables])
            if use_replicas:
                gradients = jaxdist.get_replica_context().all_reduce("mean", gradients)
            optimizer.apply(gradients, model.trainable_variables)

        for _ in range(3):
            if replicated:
                strategy.run(step, (jax.device_put(x, strategy.per_replica_sharding),))
            else:
                step(x)
        assert int(optimizer.iterations.value) == 3
        weights.append([np.asarray(v.value) for v in model.variables])
    for a, b in zip(*weights, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5)


def test_a_value_that_differs_between_replicas_is_refused_and_changes_nothing() -> None:
    strategy = make_strategy(2)
    variable = keras.Variable(1.0)
    x = jax.device_put(np.arange(2.0, dtype="float32"), strategy.per_replica_sharding)
    with refused(StateDivergenceError, "would leave 1 variable(s)"):
        strategy.run(lambda x: variable.assign(x.sum()), (x,))
    assert float(variable.value) == 1


def test_two_strategies_do_not_share_a_variable() -> None:
    variable = keras.Variable(1.0)
    make_strategy(2).run(lambda: variable.value)
    with refused(MixedStrategyError, "Keras variable", "another model"):
        make_strategy(3).run(lambda: variable.value)


@pytest.mark.parametrize("before", [False, True])
def test_fit_and_steps_train_the_same_weights(before: bool) -> None:
    strategy = make_strategy(2)
    with strategy.scope():
        model = keras.Sequential([keras.Input((2,)), layers.Dense(1, use_bias=False)])
        model.compile("sgd", "mse")
    x, y = np.ones((4, 2), "float32"), np.zeros((4, 1), "float32")
    if before:
        model.fit(x, y, verbose=0)
    first = strategy.run(lambda: model.layers[0].kernel.value)
    model.fit(x, y, verbose=0)
    second = strategy.run(lambda: model.layers[0].kernel.value + 0)
    np.testing.assert_array_equal(second, model.get_weights()[0])
    assert not np.array_equal(first, second)


def test_random_layers_of_a_step_draw_other_numbers_on_each_replica() -> None:
    strategy, dropout = make_strategy(2), layers.Dropout(0.5)

    def step() -> Any:
        return dropout(np.ones((1, 64), "float32"), training=True)

    drawn = [strategy.run(step).values for _ in range(2)]
    masks = {np.asarray(mask).tobytes() for masks in drawn for mask in masks}
    assert len(masks) == 4


def test_synchronized_statistics_of_a_step_are_those_of_the_rows_of_all_replicas() -> None:
    strategy = make_strategy(3)
    with strategy.scope():
        norm = layers.BatchNormalization(synchronized=True)
    x = np.random.default_rng(0).normal(size=(8, 3)).astype("float32")
    batches = [x, x[:7], x[:2]]
    expected = layers.BatchNormalization()

    def step(x: Any) -> Any:
        return norm(x, training=True)

    for rows, batch in zip(batches, strategy.experimental_distribute_dataset(batches), strict=True):
        found = strategy.run(step, (batch,))
        wanted = expected(rows, training=True)
        np.testing.assert_allclose(np.concatenate(found.values), wanted, rtol=1e-5, atol=1e-6)
    for one, other in zip(norm.weights, expected.weights, strict=True):
        np.testing.assert_allclose(one.value, other.value, rtol=1e-5, atol=1e-6)


def _count_operations(pattern: str, text: str) -> "collections.Counter[Any]":
    return collections.Counter(re.findall(pattern, text))


@pytest.mark.parametrize("kind", ["train", "test"])
def test_the_program_of_one_device_is_that_of_keras(kind: str) -> None:
    def make() -> Any:
        layers = keras.layers
        net = [layers.Dense(8, "relu"), layers.BatchNormalization(), layers.Dropout(0.5)]
        model = keras.Sequential([keras.Input((FEATURES,)), *net, layers.Dense(3, "softmax")])
        model.compile("adam", "sparse_categorical_crossentropy", metrics=["accuracy"])
        return model

    alone = make()
    strategy = make_strategy(1)
    with strategy.scope():
        model = make()
    data = make_data(4)
    batch = (data.x, data.y)
    lowered: list[Any] = []
    for one in (alone, model):
        getattr(one, f"{kind}_on_batch")(*batch)
        names = ["trainable_variables", "non_trainable_variables", "metrics_variables"]
        state = [[v.value for v in getattr(one, name)] for name in names]
        if kind == "train":
            state.insert(2, [v.value for v in one.optimizer.variables])
        if one is model:
            step = getattr(one, f"{kind}_function")._make_program(4)
            lowered.append(strategy.lower(step, (tuple(state), [batch])).lowered())
        else:
            step = getattr(one, f"{kind}_step")
            lowered.append(jax.jit(step).lower(tuple(state), batch))
    wanted, found = (_count_operations(r"stablehlo\.(\w+)", x.as_text()) for x in lowered)
    assert wanted.total() > 100
    assert not wanted - found
    # A step adds the dim of the replicas to what it returns, which the compiler takes away.
    assert set(found - wanted) <= {"reshape", "broadcast_in_dim", "mesh"}
    shape_and_name = r"= (\([^)]*\)|\S+) ([\w-]+)\("
    wanted, found = (_count_operations(shape_and_name, x.compile().as_text()) for x in lowered)
    assert wanted.total() > 100
    assert found == wanted
