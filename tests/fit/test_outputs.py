"""Models with several outputs: their losses, metrics and weights are those of Keras."""

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from jaxdist.errors import ArgumentError, ArgumentTypeError
from tests.fit.models import FEATURES, make_data, make_model, mirrored
from tests.parameter_server.strategy.making import make_strategy

WIDTHS = {"a": 2, "b": 1}


class TwoHeads(nnx.Module):
    """Two dense layers on the same input, as a dict or a list."""

    def __init__(self, is_list: bool = False) -> None:
        rngs = nnx.Rngs(0)
        self.a = nnx.Linear(FEATURES, WIDTHS["a"], rngs=rngs)
        self.b = nnx.Linear(FEATURES, WIDTHS["b"], rngs=rngs)
        self.is_list = is_list

    def __call__(self, x: jax.Array) -> Any:
        outputs = {"a": self.a(x), "b": self.b(x)}
        return list(outputs.values()) if self.is_list else outputs


def _targets(count: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(1)
    return {n: rng.normal(size=(count, w)).astype(np.float32) for n, w in WIDTHS.items()}


def _structured(values: dict[str, Any], is_list: bool) -> Any:
    return list(values.values()) if is_list else values


def _compile_args(is_list: bool) -> dict[str, Any]:
    return {
        "loss": _structured({"a": "mse", "b": "mae"}, is_list),
        "loss_weights": _structured({"a": 0.5, "b": 2.0}, is_list),
        "metrics": _structured({"a": ["mae"], "b": ["mse"]}, is_list),
        "weighted_metrics": _structured({"a": ["mse"], "b": []}, is_list),
    }


@pytest.mark.parametrize("is_weighted", [False, True], ids=["plain", "weighted"])
@pytest.mark.parametrize("is_list", [False, True], ids=["dict", "list"])
def test_losses_and_metrics_by_output_are_those_of_keras(
    keras: Any, is_list: bool, is_weighted: bool
) -> None:
    data = make_data(50)
    targets = _targets(50)
    y = tuple(targets.values()) if is_list else targets
    weight = data.weight if is_weighted else None
    given: dict[str, Any] = {"batch_size": 16, "verbose": 0, "sample_weight": weight}

    net, entry = TwoHeads(), keras.Input((FEATURES,))
    heads = {n: keras.layers.Dense(w, name=n)(entry) for n, w in WIDTHS.items()}
    by_keras = keras.Model(entry, _structured(heads, is_list))
    parts: Any = [v for head in (net.a, net.b) for v in (head.kernel, head.bias)]
    by_keras.set_weights([np.asarray(part[...]) for part in parts])
    by_keras.compile(keras.optimizers.SGD(0.1), **_compile_args(is_list))
    wanted = by_keras.fit(data.x, y, epochs=2, shuffle=False, **given).history
    wanted_result = by_keras.evaluate(data.x, y, return_dict=True, **given)

    for replicas in (1, 3):
        model = make_model(mirrored(replicas), TwoHeads(is_list), **_compile_args(is_list))
        got = model.fit(data.x, y, epochs=2, shuffle=False, **given).history
        result = model.evaluate(data.x, y, return_dict=True, **given)
        renamed = {_keras_name(name): values for name, values in got.items()}
        assert renamed.keys() == wanted.keys()
        for name, values in wanted.items():
            np.testing.assert_allclose(renamed[name], values, rtol=2e-5, err_msg=name)
            np.testing.assert_allclose(
                result[{_keras_name(n): n for n in result}[name]], wanted_result[name], rtol=2e-5
            )


def _keras_name(name: str) -> str:
    # Keras knows the names of the layers of a list; a module returns it without names.
    return name.replace("output_0", "a").replace("output_1", "b")


def test_an_output_without_a_loss_trains_nothing() -> None:
    before = TwoHeads().b(jnp.ones(FEATURES))
    for loss in ({"a": "mse"}, {"a": "mse", "b": None}):
        net = TwoHeads()
        model = make_model(mirrored(2), net, loss=loss)
        history = model.fit(make_data(8).x, _targets(8), batch_size=4, verbose=0).history
        assert list(history) == ["loss"]
        assert np.array_equal(net.b(jnp.ones(FEATURES)), before)


def test_a_function_of_all_outputs_is_still_one_loss() -> None:
    def loss(y_true: Any, y_pred: Any) -> jax.Array:
        losses = [jnp.mean((y_pred[n] - y_true[n]) ** 2, axis=1) for n in WIDTHS]
        return losses[0] + losses[1]

    data, targets = make_data(20), _targets(20)
    both = make_model(mirrored(2), TwoHeads(), loss=loss)
    each = make_model(mirrored(2), TwoHeads(), loss={"a": "mse", "b": "mse"})
    one = both.fit(data.x, targets, batch_size=8, shuffle=False, verbose=0).history
    two = each.fit(data.x, targets, batch_size=8, shuffle=False, verbose=0).history
    assert one["loss"] == pytest.approx(two["loss"])
    assert two["loss"][0] == pytest.approx(two["a_loss"][0] + two["b_loss"][0])


def test_a_worker_of_parameter_servers_trains_several_outputs_as_one_device() -> None:
    data, targets = make_data(24), _targets(24)
    found = []
    for strategy in (make_strategy(servers=2, workers=1), mirrored(1)):
        model = make_model(strategy, TwoHeads(), **_compile_args(is_list=False))
        model.fit(data.x, targets, batch_size=10, shuffle=False, verbose=0)
        found.append(model.evaluate(data.x, targets, batch_size=10, verbose=0, return_dict=True))
    assert found[0] == pytest.approx(found[1], rel=1e-5)


@pytest.mark.parametrize(
    ("compile_args", "error", "message"),
    [
        ({"loss": {"a": None}}, ArgumentError, "loss={'a': None}"),
        ({"loss": {}}, ArgumentError, "At least one output has a loss"),
        ({"loss": "mse", "loss_weights": {"a": 1.0}}, ArgumentError, "and one loss"),
        ({"loss": {"a": "mse"}, "loss_weights": 2.0}, ArgumentTypeError, "a dict or a list"),
        (
            {"loss": {"a": "mse", "b": "mae"}, "loss_weights": {"a": 1.0}},
            ArgumentError,
            "loss_weights of the outputs ['a'], and losses of ['a', 'b']",
        ),
        (
            {"loss": {"a": "mse"}, "loss_weights": {"a": float("nan")}},
            ArgumentError,
            "loss_weights['a']",
        ),
        (
            {"loss": {"a": "mse", "b": "mae"}, "metrics": ["mae"]},
            ArgumentTypeError,
            "metrics is a dict",
        ),
        ({"loss": ["mse", "mae"], "metrics": ["mae"]}, ArgumentTypeError, "2 losses, and 1"),
        ({"loss": {"a": "mse", "b": 3}}, ArgumentTypeError, "loss=3"),
        ({"loss": {"a": "mse", "b": "abc"}}, ArgumentError, "loss='abc'"),
        ({"loss": {"a": "mse"}, "metrics": {"a": ["abc"]}}, ArgumentError, "metrics['a'][0]='abc'"),
    ],
)  # fmt: skip
def test_losses_by_output_that_do_not_fit_together_are_refused(
    compile_args: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=re.escape(message)):
        make_model(mirrored(1), TwoHeads(), **compile_args)


@pytest.mark.parametrize(
    ("compile_args", "message"),
    [
        ({"loss": {"a": "mse", "c": "mse"}}, "loss of the output 'c': y is a dict with ['a', 'b']"),
        ({"loss": ["mse", "mse"]}, "the loss of the output 0: y is a dict with ['a', 'b']"),
        ({"loss": {"a": "mse"}, "metrics": {"c": "mae"}}, "the metric 'c_mae': y is a dict"),
    ],
)
def test_an_output_that_is_not_there_is_named(compile_args: dict[str, Any], message: str) -> None:
    model = make_model(mirrored(2), TwoHeads(), **compile_args)
    with pytest.raises(ArgumentError, match=re.escape(message)):
        model.fit(make_data(8).x, _targets(8), verbose=0)


def test_a_model_that_returns_one_array_has_no_outputs_by_name() -> None:
    module = nnx.Linear(FEATURES, 2, rngs=nnx.Rngs(0))
    model = make_model(mirrored(2), module, optimizer=optax.sgd(0.1), loss={"a": "mse"})
    with pytest.raises(ArgumentError, match="what the model returns is"):
        model.fit(make_data(8).x, _targets(8), verbose=0)
