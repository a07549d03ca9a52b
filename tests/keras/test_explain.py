"""What `explain` says of models of Keras."""

from typing import Any

import jax
import keras
import numpy as np
import pytest
from keras import layers

import jaxdist
from jaxdist import partition
from jaxdist.errors import ArgumentTypeError
from tests.keras.models import FEATURES, make_data, make_strategy


def _make_model(strategy: jaxdist.Strategy) -> keras.Model:
    with strategy.scope():
        model = keras.Sequential(
            [
                keras.Input((FEATURES,)),
                layers.Dense(8, name="up"),
                layers.BatchNormalization(name="norm"),
                layers.Dense(3, name="down", activation="softmax"),
            ]
        )
        model.compile("adam", "sparse_categorical_crossentropy")
    return model


def _explain(value: object) -> Any:
    report = jaxdist.explain(value)
    assert type(report).__name__ == "ArraysReport"
    return report


def test_the_arrays_of_a_model_have_the_paths_of_its_variables() -> None:
    model = _make_model(make_strategy(2))
    assert model.optimizer is not None
    model.optimizer.build(model.trainable_variables)
    report = _explain(model)
    every = [*model.variables, *model.optimizer.variables, *model.metrics_variables]
    assert sorted(leaf.name for leaf in report.leaves) == sorted(v.path for v in every)
    roles = {leaf.name: leaf.role for leaf in report.leaves}
    assert {roles[v.path] for v in model.trainable_variables} == {"parameters"}
    assert {roles[v.path] for v in model.non_trainable_variables} == {"other"}
    assert {roles[v.path] for v in model.optimizer.variables} == {"optimizer"}
    assert report.num_bytes == sum(np.asarray(v).nbytes for v in every)
    assert len(report.devices) == 1
    nested = _explain({"model": model, "layer": model.layers[0]})
    assert nested.leaves[0].name.startswith("['layer']/")
    assert nested.num_bytes == report.num_bytes, "the layer is a part of the model"


def test_copies_on_all_devices_and_parts_of_split_variables_are_shown() -> None:
    data = make_data(8)
    model = _make_model(make_strategy(4))
    model.fit(data.x, data.y, batch_size=8, verbose=0)
    report = _explain(model)
    assert report.devices == tuple(jax.devices()[:4])
    assert report.bytes_on(jax.devices()[3]) == report.num_bytes
    mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    strategy = jaxdist.MirroredStrategy(mesh=mesh, replica_axes=("data",))
    model = _make_model(strategy)
    partition.place(strategy, model, partition.tensor_parallel())
    for _ in range(2):
        (kernel,) = [x for x in _explain(model).leaves if x.name.endswith("up/kernel")]
        assert kernel.describe() == "dim 1 in 2 parts over model, each part on 4 devices"
        assert kernel.device_bytes * 2 == kernel.num_bytes
        model.fit(data.x, data.y, batch_size=8, verbose=0)


def test_a_model_without_variables_says_that_it_is_to_be_built() -> None:
    with pytest.raises(ArgumentTypeError, match="a built model of Keras"):
        jaxdist.explain(keras.Sequential([layers.Dense(1)]))


def test_while_a_model_trains_fit_has_the_values_and_explain_shows_the_others() -> None:
    seen: list[str] = []
    model, data = _make_model(make_strategy(2)), make_data(8)

    class Look(keras.callbacks.Callback):
        def on_train_batch_end(self, batch: int, logs: object = None) -> None:
            other = keras.Variable(np.ones(3), name="other")
            seen.extend(leaf.name for leaf in _explain([model, other]).leaves)

    model.fit(data.x, data.y, batch_size=8, callbacks=[Look()], verbose=0)
    assert seen == ["[1]/other"]
