"""What `fit`, `evaluate` and `predict` take as data."""

import re
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np
import optax
import pytest
from flax import nnx
from flax.training.dynamic_scale import DynamicScale

import jaxdist
from jaxdist.errors import ArgumentError, ArgumentTypeError, ContextError, ShapeError
from tests.fit.models import LOSS, Net, make_data, make_model, mirrored


def _losses(model: Any, *args: Any, **kwargs: Any) -> list[float]:
    return model.fit(*args, shuffle=False, verbose=0, **kwargs).history["loss"]


class _Two(nnx.Module):
    """A module of two arguments."""

    def __init__(self) -> None:
        self.net = Net()

    def __call__(self, first: jax.Array, second: jax.Array) -> jax.Array:
        return self.net(first + second)


class _OfDict(nnx.Module):
    """A module of a dict, which returns a dict."""

    def __init__(self) -> None:
        self.net = Net()

    def __call__(self, batch: dict[str, jax.Array]) -> dict[str, jax.Array]:
        return {"logits": self.net(batch["a"] + batch["b"]), "sum": batch["a"].sum(axis=1)}


def test_datasets_train_as_the_arrays_that_they_read() -> None:
    data = make_data(30)
    wanted = _losses(make_model(mirrored(3)), data.x, data.y, 8, epochs=2)
    pieces = [(data.x[i : i + 8], data.y[i : i + 8]) for i in range(0, 30, 8)]
    strategy = mirrored(3)

    class Loader:
        def __iter__(self) -> Iterator[Any]:
            return iter(pieces)

    for source in (
        pieces,
        Loader(),
        jaxdist.data.batches((data.x, data.y), 8),
        strategy.experimental_distribute_dataset(pieces),
    ):
        found = _losses(make_model(strategy), source, epochs=2)
        np.testing.assert_allclose(found, wanted, rtol=1e-5)


def test_a_dataset_of_weights_counts_them() -> None:
    data = make_data(20)
    wanted = _losses(make_model(mirrored(3)), data.x, data.y, 8, sample_weight=data.weight)
    pieces = jaxdist.data.batches((data.x, data.y, data.weight), 8)
    np.testing.assert_allclose(_losses(make_model(mirrored(3)), pieces), wanted, rtol=1e-5)


def test_endless_data_is_read_on_from_epoch_to_epoch() -> None:
    data = make_data(32)
    read: list[int] = []

    def endless() -> Iterator[Any]:
        for index in range(10**6):
            read.append(index)
            at = index * 8 % 32
            yield data.x[at : at + 8], data.y[at : at + 8]

    model = make_model(mirrored(2))
    history = model.fit(endless(), epochs=2, steps_per_epoch=3, verbose=0)
    assert history.params["steps"] == 3
    assert 6 <= len(read) <= 6 + 4
    assert len(history.history["loss"]) == 2


def test_arrays_with_steps_per_epoch_begin_again_at_their_end() -> None:
    data = make_data(20)
    model = make_model(mirrored(2))
    history = model.fit(data.x, data.y, 8, epochs=2, steps_per_epoch=5, verbose=0, shuffle=False)
    other = make_model(mirrored(2))
    passes = _losses(other, data.x, data.y, 8, epochs=4)
    assert len(passes) == 4
    assert np.isfinite(history.history["loss"]).all()


def test_a_generator_that_is_read_once_is_an_error_in_the_second_epoch() -> None:
    data = make_data(8)
    model = make_model(mirrored(2))
    source = ((data.x, data.y) for _ in range(1))
    with pytest.raises(ContextError, match=r"this dataset was iterated over already"):
        model.fit(source, epochs=2, verbose=0)
    source = iter([(data.x, data.y)])
    with pytest.raises(ContextError, match=r"this dataset was iterated over already"):
        model.fit(source, steps_per_epoch=5, verbose=0)
    with pytest.raises(ArgumentError, match=r"read 0 batch\(es\) in epoch 1"):
        model.fit(iter([]), verbose=0)
    with pytest.raises(ShapeError, match=r"evaluate was given x, a dataset without batches"):
        model.evaluate(iter([]), verbose=0)
    with pytest.raises(ShapeError, match=r"predict was given x, a dataset without batches"):
        model.predict(iter([]))


def test_a_tuple_is_the_arguments_of_the_module_and_a_dict_is_one() -> None:
    data = make_data(20)
    halves = (data.x / 2, data.x / 2)
    wanted = _losses(make_model(mirrored(3)), data.x, data.y, 8)
    two = make_model(mirrored(3), _Two())
    np.testing.assert_allclose(_losses(two, halves, data.y, 8), wanted, rtol=1e-5)
    loss = lambda y_true, y_pred: LOSS(y_pred["logits"], y_true)  # noqa: E731
    of_dict = make_model(mirrored(3), _OfDict(), loss=loss)
    given = dict(zip("ab", halves, strict=True))
    np.testing.assert_allclose(_losses(of_dict, given, data.y, 8), wanted, rtol=1e-5)
    outputs = of_dict.predict(given, 8)
    assert {name: v.shape for name, v in outputs.items()} == {"logits": (20, 3), "sum": (20,)}
    np.testing.assert_allclose(outputs["sum"], halves[0].sum(axis=1), rtol=1e-5)


@pytest.mark.parametrize("count", [1, 2, 7, 9])
def test_predictions_have_the_order_of_the_examples(count: int) -> None:
    x = np.arange(count * 4, dtype=np.float32).reshape(count, 4)
    model = make_model(mirrored(4))
    np.testing.assert_allclose(
        model.predict(x, 3, verbose=0), np.asarray(model.module(x)), rtol=1e-5
    )
    pieces = [(x[i : i + 3], np.zeros(3)) for i in range(0, count, 3)]
    np.testing.assert_allclose(
        model.predict([(p[0],) for p in pieces]), np.asarray(model.module(x)), rtol=1e-5
    )


def test_the_last_examples_are_held_out_as_in_keras() -> None:
    data = make_data(20)
    model = make_model(mirrored(2))
    history = model.fit(data.x, data.y, 8, validation_split=0.3, verbose=0).history
    np.testing.assert_allclose(
        history["val_loss"], [model.evaluate(data.x[14:], data.y[14:], verbose=0)], rtol=1e-6
    )
    given: dict[str, Any] = {
        "validation_data": (data.x, data.y),
        "validation_freq": 2,
        "validation_steps": 1,
    }
    history = model.fit(data.x, data.y, 8, epochs=5, verbose=0, **given).history
    assert (len(history["loss"]), len(history["val_loss"])) == (5, 2)


def test_one_batch_trains_evaluates_and_predicts() -> None:
    data = make_data(10)
    model, other = make_model(mirrored(3), metrics=["accuracy"]), make_model(mirrored(3))
    loss, accuracy = model.train_on_batch(data.x, data.y, data.weight)
    given: dict[str, Any] = {"sample_weight": data.weight, "verbose": 0}
    np.testing.assert_allclose(loss, other.fit(data.x, data.y, 10, **given).history["loss"][0])
    assert 0 <= accuracy <= 1
    again = model.test_on_batch(data.x, data.y, data.weight, return_dict=True)
    np.testing.assert_allclose(again["loss"], other.evaluate(data.x, data.y, 10, **given))
    np.testing.assert_allclose(model.predict_on_batch(data.x), model.predict(data.x))


def test_examples_that_do_not_belong_together_are_all_listed() -> None:
    data = make_data(10)
    model = make_model(mirrored(2))
    with pytest.raises(ShapeError) as error:
        model.fit({"a": data.x, "b": data.x[:4]}, data.y[:9], sample_weight=data.weight)
    for line in ("x['a']: [10, 4]", "x['b']: [4, 4]", "y: [9]", "sample_weight: [10]"):
        assert line in str(error.value)


@pytest.mark.parametrize(
    ("kwargs", "kind", "words"),
    [
        ({"batch_size": 0}, ArgumentError, "batch_size=0"),
        ({"batch_size": 2.5}, ArgumentTypeError, "batch_size=2.5"),
        ({"epochs": 0}, ArgumentError, "epochs=0"),
        ({"verbose": 3}, ArgumentError, "verbose=3"),
        ({"validation_split": 1.0}, ArgumentError, "validation_split=1.0"),
        ({"validation_split": 0.99}, ArgumentError, "leave 0 to train on"),
        ({"callbacks": [print]}, ArgumentTypeError, "callbacks"),
        ({"class_weight": {"cat": 1.0}}, ArgumentTypeError, "class_weight"),
        ({"class_weight": {0: -1.0}}, ArgumentError, "class_weight"),
        ({"class_weight": [1.0]}, ArgumentTypeError, "class_weight"),
        ({"steps_per_epoch": 0}, ArgumentError, "steps_per_epoch=0"),
        ({"validation_data": (1, 2, 3, 4)}, ArgumentError, "4 entries"),
        ({"sample_weight": np.ones((10, 2))}, ShapeError, "sample_weight"),
        ({"x": np.array(["a"] * 10)}, ArgumentTypeError, "x="),
        ({"x": None}, ArgumentTypeError, "x=None"),
        ({"x": [(1, 2)]}, ArgumentError, "Leave out y"),
    ],
)
def test_wrong_arguments_are_named(kwargs: Any, kind: type[Exception], words: str) -> None:
    data = make_data(10)
    model = make_model(mirrored(2))
    before = model.get_weights()
    given: dict[str, Any] = {"x": data.x, "y": data.y, "verbose": 0, **kwargs}
    with pytest.raises(kind) as error:
        model.fit(**given)
    assert words in str(error.value)
    for one, other in zip(before, model.get_weights(), strict=True):
        np.testing.assert_array_equal(one, other)


_CALLS: dict[str, tuple[Callable[[Any, Any, Any, Any], Any], str]] = {
    "x": (lambda m, bad, x, y: m.fit(bad, y), "fit.Model.fit was given x,"),
    "a leaf of x": (lambda m, bad, x, y: m.fit({"a": bad}, y), "fit.Model.fit was given x['a'],"),
    "y": (lambda m, bad, x, y: m.fit(x, bad), "fit.Model.fit was given y,"),
    "weight": (
        lambda m, bad, x, y: m.fit(x, y, sample_weight=bad[:, 0]),
        "fit.Model.fit was given sample_weight,",
    ),
    "x of validation": (
        lambda m, bad, x, y: m.fit(x, y, validation_data=(bad, y)),
        "fit.Model.fit was given validation_data[0],",
    ),
    "y of validation": (
        lambda m, bad, x, y: m.fit(x, y, validation_data=(x, bad)),
        "fit.Model.fit was given validation_data[1],",
    ),
    "weight of validation": (
        lambda m, bad, x, y: m.fit(x, y, validation_data=(x, y, bad[:, 0])),
        "fit.Model.fit was given validation_data[2],",
    ),
    "evaluate": (lambda m, bad, x, y: m.evaluate(bad, y), "fit.Model.evaluate was given x,"),
    "y of evaluate": (lambda m, bad, x, y: m.evaluate(x, bad), "fit.Model.evaluate was given y,"),
    "predict": (lambda m, bad, x, y: m.predict(bad), "fit.Model.predict was given x,"),
    "one batch": (
        lambda m, bad, x, y: m.train_on_batch(x, bad),
        "fit.Model.train_on_batch was given y,",
    ),
}


@pytest.mark.parametrize("call", _CALLS)
@pytest.mark.parametrize(
    ("dtype", "words"),
    [
        (">f4", "dtype >f4.*byte order.*value.astype\\('float32'\\)"),
        pytest.param(
            np.longdouble,
            "dtype float128.*up to 64 bits.*value.astype\\('float64'\\)",
            marks=pytest.mark.skipif(
                np.dtype("g").itemsize == 8, reason="no long double on this machine"
            ),
        ),
        ([("a", "f4")], r"with the fields \['a'\].*a dict of arrays"),
    ],
)
def test_an_array_that_jax_does_not_have_is_named_by_its_argument(
    call: str, dtype: Any, words: str
) -> None:
    data = make_data(10)
    run, start = _CALLS[call]
    with pytest.raises(ArgumentTypeError, match=f"(?s)^{re.escape(start)}.*{words}"):
        run(make_model(mirrored(2)), data.x.astype(dtype), data.x, data.y)


def test_a_dataset_takes_no_batch_size_and_cannot_be_split() -> None:
    data = make_data(10)
    model, pieces = make_model(mirrored(2)), [(data.x, data.y)]
    with pytest.raises(ArgumentError, match=r"batch_size=4 and a dataset"):
        model.fit(pieces, batch_size=4)
    with pytest.raises(ArgumentError, match=r"Only examples in memory can be split"):
        model.fit(pieces, validation_split=0.5)
    with pytest.raises(ArgumentError, match=r"It takes one batch"):
        model.train_on_batch(pieces)
    with pytest.raises(ArgumentError, match=r"tuples of 4 entries"):
        model.fit([(data.x, data.y, data.weight, data.y)], verbose=0)
    with pytest.raises(ArgumentTypeError, match=r"fit.Model.fit was given no y"):
        model.fit(data.x, verbose=0)


def test_a_model_that_is_not_compiled_predicts_and_does_not_train() -> None:
    data = make_data(5)
    model = jaxdist.fit.Model(Net())
    assert model.predict(data.x).shape == (5, 3)
    for method in ("fit", "evaluate", "train_on_batch"):
        with pytest.raises(ContextError, match=rf"{method} was called before compile"):
            getattr(model, method)(data.x, data.y)
    with pytest.raises(ContextError, match=r"optimizer was called before compile"):
        _ = model.optimizer


@pytest.mark.parametrize(
    ("kwargs", "kind", "words"),
    [
        ({"loss": "sparse_categorical_crossentropy"}, ArgumentError, "optax.softmax_cross"),
        ({"loss": "mist"}, ArgumentError, "mse, mae"),
        ({"loss": None}, ArgumentTypeError, "loss"),
        ({"optimizer": "adem"}, ArgumentError, "sgd, adam"),
        ({"optimizer": 0.1}, ArgumentTypeError, "transformation of optax"),
        ({"metrics": "accuracy"}, ArgumentTypeError, "metrics"),
        ({"metrics": ["acuracy"]}, ArgumentError, "metrics[0]='acuracy'"),
        ({"metrics": [3]}, ArgumentTypeError, "metrics[0]"),
        ({"metrics": ["mae", "mae"]}, ArgumentError, "Give another name to mae"),
        ({"steps_per_execution": 0}, ArgumentError, "steps_per_execution=0"),
        ({"mixed_precision": "int8"}, ArgumentError, "'bfloat16', 'float16' or None"),
        ({"loss_scale": DynamicScale()}, ArgumentError, "without mixed_precision='float16'"),
        ({"loss_scale": 1, "mixed_precision": "float16"}, ArgumentTypeError, "loss_scale=1"),
        ({"gradient_accumulation_steps": 1}, ArgumentError, "gradient_accumulation_steps=1"),
        ({"find_nonfinite": True, "steps_per_execution": 2}, ArgumentError, "one dispatch"),
    ],
)
def test_wrong_arguments_of_compile_are_named(
    kwargs: Any, kind: type[Exception], words: str
) -> None:
    with pytest.raises(kind) as error:
        make_model(mirrored(2), **kwargs)
    assert words in str(error.value)


@pytest.mark.parametrize(
    ("loss", "words"),
    [
        (lambda y, p: LOSS(p, y).mean(), "it returned a scalar"),
        (lambda y, p: LOSS(p, y)[:-1], "it returned an array of shape"),
        (lambda y, p: 1.0, "it returned 1.0"),
    ],
)
def test_a_loss_without_a_value_for_each_example_is_explained(loss: Any, words: str) -> None:
    data = make_data(8)
    with pytest.raises((ShapeError, ArgumentTypeError)) as error:
        make_model(mirrored(2), loss=loss).fit(data.x, data.y, verbose=0)
    assert words in str(error.value)


def test_losses_take_their_arguments_in_the_order_of_their_names() -> None:
    x = np.array([[2.0], [3.0]], np.float32)
    y = np.array([[5.0], [9.0]], np.float32)
    for loss in (
        lambda y_true, y_pred: (y_pred - 2 * y_true)[:, 0],
        lambda predictions, targets: (predictions - 2 * targets)[:, 0],
        lambda a, b: (b - 2 * a)[:, 0],
    ):
        model = make_model(mirrored(2), nnx.Linear(1, 1, rngs=nnx.Rngs(0)), loss=loss)
        model.set_weights([np.zeros(1), np.ones((1, 1))])
        assert model.evaluate(x, y, verbose=0) == pytest.approx((2 - 10 + 3 - 18) / 2)


def test_optimizers_by_name_learn() -> None:
    data = make_data(40)
    for name in ("sgd", "adam", "adamw", "rmsprop", "adagrad"):
        losses = _losses(make_model(mirrored(1), optimizer=name), data.x, data.y, epochs=3)
        assert losses[-1] < losses[0], name
    transform = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(1e-2))
    assert len(_losses(make_model(mirrored(1), optimizer=transform), data.x, data.y)) == 1
