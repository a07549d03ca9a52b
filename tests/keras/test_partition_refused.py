"""What `partition.place` refuses for models of Keras."""

import dataclasses
import types
from typing import Any

import keras
import pytest
from keras import layers

import jaxdist
from jaxdist import partition
from jaxdist.errors import (
    ArgumentError,
    ContextError,
    JaxdistError,
    MixedStrategyError,
    ShapeError,
    UnsupportedError,
)
from tests.keras.models import FEATURES, make_data
from tests.keras.split import HIDDEN, compile_model, make_model, make_strategy
from tests.strategies.oracle import refused


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
    process = dataclasses.replace(layout.process, count=2)
    shared = dataclasses.replace(layout, owners=(0, 1) * 4, process=process)
    strategy: Any = types.SimpleNamespace(_has_servers=False, layout=shared)
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
