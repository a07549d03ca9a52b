"""Targets, outputs and weights whose shapes do not fit: an error, or the numbers of Keras.

Users have no setting that makes rank promotion an error, so these tests turn it off.
"""

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jaxdist
from jaxdist import fit
from jaxdist.errors import ArgumentError, ArgumentTypeError, NonFiniteLossError, ShapeError
from tests.fit.models import CLASSES, LOSS, Net, make_data, make_model, mirrored

DATA = make_data(16)


@pytest.fixture(autouse=True)
def _promote_ranks() -> Iterator[None]:
    with jax.numpy_rank_promotion("allow"):
        yield


def _line() -> nnx.Module:
    return nnx.Linear(4, 1, rngs=nnx.Rngs(0))


class _Same(nnx.Module):
    """A module that returns what it gets."""

    def __call__(self, x: jax.Array) -> jax.Array:
        return x


def _square(y_true: Any, y_pred: Any) -> Any:
    return (y_true - y_pred) ** 2


def _mean_square(y_true: Any, y_pred: Any) -> Any:
    return jnp.mean(jnp.reshape((y_true - y_pred) ** 2, (y_pred.shape[0], -1)), axis=1)


@pytest.mark.parametrize("loss", ["mse", "mae", "huber", "log_cosh", _square, _mean_square])
def test_targets_n_and_outputs_n_1_are_compared_one_by_one(loss: Any) -> None:
    y = DATA.y.astype(np.float32)
    metrics = ["mae", fit.RootMeanSquaredError(), fit.BinaryAccuracy(0.0), fit.Precision(0.0)]
    model = make_model(mirrored(2), _line(), loss=loss, metrics=metrics)
    found = model.evaluate(DATA.x, y, 8, verbose=0)
    wanted = model.evaluate(DATA.x, y[:, None], 8, verbose=0)
    np.testing.assert_allclose(found, wanted, rtol=1e-6)
    error = np.asarray(model.module(DATA.x))[:, 0] - y
    np.testing.assert_allclose(found[1], np.abs(error).mean(), rtol=1e-5)


def test_a_loss_that_compares_each_example_with_all_is_refused() -> None:
    y = DATA.y.astype(np.float32)
    pairs = lambda y_true, y_pred: (y_true[:, 0] - y_pred) ** 2  # noqa: E731
    model = make_model(mirrored(2), _line(), loss=pairs)
    before = model.get_weights()
    with pytest.raises(ShapeError, match=r"compared with all others"):
        model.fit(DATA.x, y, 8, verbose=0)
    np.testing.assert_array_equal(model.get_weights()[1], before[1])
    metric = fit.Mean(pairs, "pairs")
    with pytest.raises(ShapeError, match=r"fit.Mean called its function"):
        make_model(mirrored(2), _line(), loss="mse", metrics=[metric]).evaluate(DATA.x, y, 8)


def test_a_dim_that_has_the_size_of_the_batch_by_chance_is_right() -> None:
    x = np.random.default_rng(0).normal(size=(16, 4, 4)).astype(np.float32)
    y = np.random.default_rng(1).integers(0, 3, size=(16, 4))
    model = make_model(mirrored(2), metrics=["accuracy"])
    whole = model.evaluate(x, y, 16, verbose=0)
    np.testing.assert_allclose(model.evaluate(x, y, 8, verbose=0), whole, rtol=1e-6)


def test_a_loss_for_one_number_of_examples_only_is_called_as_it_is() -> None:
    fixed = np.ones((4, 4), np.float32)
    model = make_model(mirrored(2), loss=lambda y_true, y_pred: fixed * y_pred[:, :1])
    assert np.isfinite(model.evaluate(DATA.x, DATA.y, 8, verbose=0))


def test_a_named_loss_repeats_no_target() -> None:
    with pytest.raises(ShapeError, match=r"targets y of local shape \[4, 1\]"):
        make_model(mirrored(2), loss="mse").evaluate(DATA.x, DATA.y[:, None], 8)
    with pytest.raises(ArgumentTypeError, match=r"the targets, y, are \{'a'"):
        make_model(mirrored(2), loss="mse").evaluate(DATA.x, {"a": DATA.y}, 8)


def test_an_error_of_a_loss_says_which_shapes_it_was_given() -> None:
    with pytest.raises(ValueError, match=r"same number of dimensions") as error:
        make_model(mirrored(2)).evaluate(DATA.x, DATA.y[:, None], 8)
    (note,) = [n for n in error.value.__notes__ if "Raised by the loss" in n]
    assert "[[4, 1]]" in note
    assert "[[4, 3]]" in note


def test_weights_n_1_are_those_of_the_examples() -> None:
    model = make_model(mirrored(3), weighted_metrics=["accuracy"])
    given: dict[str, Any] = {"batch_size": 5, "verbose": 0}
    wanted = model.evaluate(DATA.x, DATA.y, sample_weight=DATA.weight, **given)
    found = model.evaluate(DATA.x, DATA.y, sample_weight=DATA.weight[:, None], **given)
    np.testing.assert_allclose(found, wanted, rtol=1e-6)


def test_weights_of_single_values_count_in_weighted_metrics() -> None:
    rng = np.random.default_rng(2)
    x = rng.normal(size=(10, 5, 4)).astype(np.float32)
    y = rng.integers(0, CLASSES, size=(10, 5)).astype(np.int32)
    weight = rng.uniform(size=(10, 5)).astype(np.float32)
    model = make_model(mirrored(3), weighted_metrics=["accuracy", fit.TopKAccuracy(2)])
    found = model.evaluate(x, y, 4, sample_weight=weight, verbose=0)
    order = np.argsort(-np.asarray(model.module(x)), axis=-1)
    is_right = [order[..., 0] == y, (order[..., :2] == y[..., None]).any(-1)]
    wanted = [np.average(right, weights=weight) for right in is_right]
    np.testing.assert_allclose(found[1:], wanted, rtol=1e-5)
    whole = fit.Mean(lambda y_true, y_pred: jnp.abs(y_pred).mean((1, 2)), "size")
    other = make_model(mirrored(3), weighted_metrics=[whole])
    size = np.abs(np.asarray(model.module(x))).mean((1, 2))
    wanted_size = np.average(size, weights=weight.mean(1))
    found = other.evaluate(x, y, 4, sample_weight=weight, verbose=0)
    np.testing.assert_allclose(found[1], wanted_size, rtol=1e-5)
    wrong = fit.Mean(lambda y_true, y_pred: jnp.abs(y_pred).mean(1), "wrong")
    with pytest.raises(ShapeError, match=r"the metric 'wrong' has values of local shape"):
        make_model(mirrored(3), weighted_metrics=[wrong]).evaluate(x, y, 4, sample_weight=weight)


def _losses(x: Any, y: Any, **given: Any) -> list[float]:
    loss = lambda y_true, y_pred: LOSS(y_pred, jnp.maximum(y_true, 0))  # noqa: E731
    given = {"batch_size": 8, "verbose": 0, "shuffle": False, **given}
    model = make_model(mirrored(3), loss=given.pop("loss", loss))
    return model.fit(x, y, **given).history["loss"]


def test_weights_of_classes_are_those_of_each_value() -> None:
    classes = {0: 3.0, 2: 0.5}
    table = np.array([3.0, 1.0, 0.5], np.float32)
    x, y = np.stack([DATA.x, DATA.x[::-1]], 1), np.stack([DATA.y, DATA.y[::-1]], 1)
    wanted = _losses(x, y, sample_weight=table[y])
    np.testing.assert_allclose(_losses(x, y, class_weight=classes), wanted, rtol=1e-5)
    found = _losses(x, y, class_weight=classes, sample_weight=DATA.weight)
    wanted = _losses(x, y, sample_weight=table[y] * DATA.weight[:, None])
    np.testing.assert_allclose(found, wanted, rtol=1e-5)
    own = np.stack([DATA.weight, 1 - DATA.weight], 1)
    found = _losses(x, y, class_weight=classes, sample_weight=own)
    np.testing.assert_allclose(found, _losses(x, y, sample_weight=table[y] * own), rtol=1e-5)
    one_hot = np.eye(CLASSES, dtype=np.float32)[DATA.y]
    found = _losses(DATA.x, one_hot, class_weight=classes, loss=optax.softmax_cross_entropy)
    wanted = _losses(DATA.x, DATA.y, sample_weight=table[DATA.y])
    np.testing.assert_allclose(found, wanted, rtol=1e-5)


def test_a_class_without_a_weight_counts_once_also_if_it_is_negative() -> None:
    y = np.where(DATA.y == 1, -1, DATA.y)
    wanted = _losses(DATA.x, y, sample_weight=np.where(y == 0, 5.0, 1.0))
    np.testing.assert_allclose(_losses(DATA.x, y, class_weight={0: 5.0}), wanted, rtol=1e-5)
    found = _losses(DATA.x, DATA.y, class_weight={2**31 - 1: 9.0})
    np.testing.assert_allclose(found, _losses(DATA.x, DATA.y), rtol=1e-6)


def test_weights_of_classes_need_classes() -> None:
    y = np.zeros((16, 5), np.int32)
    for targets, kind, words in (
        ({"a": DATA.y}, ArgumentTypeError, "targets y that are"),
        (y, ShapeError, r"targets y of local shape \[3, 5\]"),
    ):
        with pytest.raises(kind, match=words):
            _losses(DATA.x, targets, class_weight={0: 2.0})
    with pytest.raises(ShapeError, match=r"class_weight with classes of local shape \[3, 2\]"):
        _losses(
            np.stack([DATA.x] * 2, 1),
            np.stack([DATA.y] * 2, 1),
            class_weight={0: 2.0},
            sample_weight=np.ones((16, 3)),
        )


def test_of_several_outputs_the_targets_say_the_classes() -> None:
    class Pair(nnx.Module):
        def __init__(self) -> None:
            self.net = Net()

        def __call__(self, x: jax.Array) -> Any:
            return self.net(x), x

    loss = lambda y_true, y_pred: LOSS(y_pred[0], y_true)  # noqa: E731
    given: dict[str, Any] = {"verbose": 0, "shuffle": False}
    pair = make_model(mirrored(3), Pair(), loss=loss)
    found = pair.fit(DATA.x, DATA.y, 8, class_weight={0: 5.0}, **given).history["loss"]
    wanted = _losses(DATA.x, DATA.y, sample_weight=np.where(DATA.y == 0, 5.0, 1.0))
    np.testing.assert_allclose(found, wanted, rtol=1e-5)
    outputs = pair.predict(DATA.x[:1])
    assert [part.shape for part in outputs] == [(1, 3), (1, 4)]
    with pytest.raises(ArgumentTypeError, match=r"The metric 'accuracy' was given predictions"):
        make_model(mirrored(3), Pair(), loss=loss, metrics=["accuracy"]).evaluate(DATA.x, DATA.y)


def test_integers_that_jax_would_cut_are_refused() -> None:
    model = make_model(mirrored(2), _Same(), loss="mse")
    x = np.full((4, 1), 2**40 + 1)
    with pytest.raises(ArgumentError, match=r"x, int64 with integers from 1099511627777"):
        model.predict(x)
    assert model.predict(x % 1000).tolist() == (x % 1000).tolist()


def test_a_list_of_arrays_is_neither_arguments_nor_examples() -> None:
    with pytest.raises(ArgumentTypeError, match=r"Pass tuple\(x\) for the arguments"):
        make_model(mirrored(2)).fit([DATA.x[:2], DATA.x[:2]], DATA.y[:2])


def test_a_distributed_dataset_is_evaluated_and_predicted() -> None:
    strategy = mirrored(4)
    model = make_model(strategy, metrics=["accuracy"])
    pieces = [(DATA.x[:8], DATA.y[:8]), (DATA.x[8:13], DATA.y[8:13])]
    dataset = strategy.experimental_distribute_dataset(pieces)
    wanted = model.evaluate(DATA.x[:13], DATA.y[:13], verbose=0)
    np.testing.assert_allclose(model.evaluate(dataset, verbose=0), wanted, rtol=1e-6)
    np.testing.assert_allclose(model.predict(dataset), model.predict(DATA.x[:13]), rtol=1e-6)
    history = model.fit(DATA.x, DATA.y, validation_data=dataset, verbose=0).history
    wanted = model.evaluate(DATA.x[:13], DATA.y[:13], verbose=0)
    np.testing.assert_allclose(history["val_loss"], wanted[:1], rtol=1e-6)
    assert isinstance(dataset, jaxdist.DistributedDataset)


def test_a_module_returns_an_output_for_each_example() -> None:
    class Sum(nnx.Module):
        def __call__(self, x: jax.Array) -> jax.Array:
            return x.sum(axis=0)

    with pytest.raises(ShapeError, match=r"it returned an array of shape \[4\]"):
        make_model(mirrored(2), Sum()).predict(DATA.x)
    with pytest.raises(ShapeError, match=r"fit.Model was given x=\{\}"):
        make_model(mirrored(2)).fit([({}, DATA.y)], verbose=0)


class _Noisy(nnx.Module):
    """A module with a random stream of its own, and one that counts its calls."""

    def __init__(self) -> None:
        self.net = Net()
        self.rngs = nnx.Rngs(0)
        self.calls = nnx.Variable(jnp.zeros((), jnp.int32))

    def __call__(self, x: jax.Array, training: bool) -> jax.Array:
        if training:
            self.calls[...] += 1
            x = x + 0.01 * jax.random.normal(self.rngs.noise(), x.shape)
        return self.net(x)


@pytest.mark.parametrize("steps", [1, 2])
def test_state_of_a_module_is_that_of_its_steps(steps: int) -> None:
    runs = []
    for _ in range(2):
        model = make_model(mirrored(2), _Noisy(), steps_per_execution=steps)
        runs.append(model.fit(DATA.x, DATA.y, 4, epochs=2, verbose=0).history["loss"])
        net: Any = model.module
        assert int(net.calls[...]) == 8
    assert runs[0] == runs[1]
    first = model.evaluate(DATA.x, DATA.y, verbose=0)
    assert model.evaluate(DATA.x, DATA.y, verbose=0) == first
    model.fit(DATA.x, DATA.y, 16, verbose=0)
    assert int(net.calls[...]) == 9


@pytest.mark.parametrize("label", [-1, 3, 2**31 - 1])
def test_a_label_that_is_no_class_stops_the_training(label: int) -> None:
    y = DATA.y.copy()
    y[5] = label
    model = make_model(mirrored(2))
    with pytest.raises(NonFiniteLossError, match="a label that is not a class gives nan"):
        model.fit(DATA.x, y, verbose=0)
    assert np.isnan(model.evaluate(DATA.x, y, verbose=0))


def test_a_label_that_is_no_class_does_not_count_with_the_weight_zero() -> None:
    y, weight = DATA.y.copy(), np.ones(len(DATA.y), np.float32)
    y[5], weight[5] = -1, 0
    model = make_model(mirrored(2))
    kept = np.arange(len(y)) != 5
    found = model.evaluate(DATA.x, y, sample_weight=weight, verbose=0)
    wanted = model.evaluate(DATA.x[kept], y[kept], verbose=0)
    assert found == pytest.approx(wanted * kept.sum() / len(y))


def test_batches_that_are_dicts_have_no_targets_and_the_error_says_how_to_give_them() -> None:
    batch = {"image": DATA.x[:4], "label": DATA.y[:4]}
    with pytest.raises(ArgumentTypeError, match=r"\(b\['image'\], b\['label'\]\)"):
        make_model(mirrored(2)).fit([batch, batch], verbose=0)
    with pytest.raises(ArgumentTypeError, match="its batches are dicts"):
        make_model(mirrored(2)).evaluate([batch], verbose=0)


def test_an_error_of_the_module_says_which_shape_it_was_called_with() -> None:
    with pytest.raises(TypeError) as caught:
        make_model(mirrored(2)).fit(DATA.x[:, :3], DATA.y, verbose=0)
    assert any("the module, Net, which fit.Model" in note for note in caught.value.__notes__)


def test_labels_that_are_no_integers_are_told_to_be_cast() -> None:
    with pytest.raises(TypeError) as caught:
        make_model(mirrored(2)).fit(DATA.x, DATA.y.astype(np.float32), verbose=0)
    assert any("y.astype('int32')" in note for note in caught.value.__notes__)


def test_a_model_without_a_loss_is_told_which_there_are() -> None:
    with pytest.raises(ArgumentTypeError, match="was given no loss"):
        make_model(mirrored(2), loss=None)
