"""Modules that a model function makes: by `get_module`, or not."""

import pathlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jaxdist
from jaxdist import estimator as est
from jaxdist.errors import ArgumentError
from tests.estimator.models import X, Y, batches


class _Two(nnx.Module):
    """A module whose parts are made in `__init__` of one another."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.inner = nnx.Linear(3, 1, rngs=rngs)

    def __call__(self, x: Any) -> Any:
        return self.inner(x)[:, 0]


def _make_model_fn(predict: Any) -> Any:
    def model_fn(features: Any, labels: Any, mode: str) -> est.EstimatorSpec:
        predictions = predict(features)
        loss = jnp.mean((predictions - labels) ** 2)
        return est.EstimatorSpec(mode, predictions=predictions, loss=loss, train_op=optax.sgd(0.1))

    return model_fn


def _predict_beside(make: Any) -> Any:
    def predict(x: Any) -> Any:
        model = est.get_module(lambda rngs: _Two(rngs))
        return model(x) + make(x)

    return predict


def _draw(x: Any) -> Any:
    return nnx.Dropout(0.5, rngs=nnx.Rngs(0))(x)[:, 0]


_MADE = {
    "_Two": lambda x: _Two(nnx.Rngs(0))(x),
    "Linear": lambda x: nnx.Linear(3, 1, rngs=nnx.Rngs(0))(x)[:, 0],
    "nnx.Param": lambda x: x @ nnx.Param(jnp.ones(3))[...],
    "Dropout": _draw,
    "BatchNorm": lambda x: nnx.BatchNorm(3, use_bias=False, use_scale=False, rngs=nnx.Rngs(0))(x)[
        :, 0
    ],
}


@pytest.mark.parametrize("name", _MADE)
@pytest.mark.parametrize("alone", [False, True], ids=["beside another", "alone"])
def test_a_module_that_is_made_without_get_module_is_an_error_with_its_class(
    name: str, alone: bool, tmp_path: pathlib.Path
) -> None:
    predict = _MADE[name] if alone else _predict_beside(_MADE[name])
    estimator = est.Estimator(_make_model_fn(predict), tmp_path)
    with pytest.raises(ArgumentError, match=rf"model_fn made an? {name} without get_module") as e:
        estimator.train(batches(10))
    assert "neither trained nor saved" in str(e.value)
    assert "get_module(lambda rngs:" in str(e.value)


def test_a_module_that_only_an_evaluation_makes_is_an_error_too(tmp_path: pathlib.Path) -> None:
    def model_fn(features: Any, labels: Any, mode: str) -> est.EstimatorSpec:
        model = est.get_module(lambda rngs: _Two(rngs))
        predictions = model(features)
        if mode == est.ModeKeys.EVAL:
            predictions += nnx.Linear(3, 1, rngs=nnx.Rngs(0))(features)[:, 0]
        loss = jnp.mean((predictions - labels) ** 2)
        return est.EstimatorSpec(mode, loss=loss, train_op=optax.sgd(0.1))

    estimator = est.Estimator(model_fn, tmp_path).train(batches(10))
    with pytest.raises(ArgumentError, match="made a Linear without get_module"):
        estimator.evaluate(batches(10))


class _ManyCalls(nnx.Module):
    """A module whose call uses transformations of NNX, and makes keys."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        @nnx.vmap(in_axes=0, out_axes=0)
        def make(keys: Any) -> nnx.Linear:
            return nnx.Linear(3, 3, rngs=nnx.Rngs(keys))

        self.layers = make(jax.random.split(rngs.params(), 2))
        self.dropout = nnx.Dropout(0.5, rngs=rngs)
        self.out = nnx.Linear(3, 1, rngs=rngs)

    def __call__(self, x: Any) -> Any:
        @nnx.scan(in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
        def forward(x: Any, layer: nnx.Linear) -> Any:
            return layer(x)

        x = nnx.remat(forward)(x, self.layers)
        again = nnx.clone(self.out)
        graph, state = nnx.split(self.out)
        keys = nnx.Rngs(0).fork()
        noise = 0.0 * jax.random.normal(keys(), x.shape)
        return nnx.merge(graph, state)(self.dropout(x) + noise)[:, 0] + 0.0 * again(x)[:, 0]


@pytest.mark.parametrize("replicas", [1, 2])
def test_a_module_of_get_module_may_use_all_of_nnx_in_its_call(
    replicas: int, tmp_path: pathlib.Path
) -> None:
    def predict(x: Any) -> Any:
        model = est.get_module(lambda rngs: _ManyCalls(rngs))
        slopes = nnx.grad(lambda m: m(x).sum())(model)
        return model(x) + 0.0 * sum(jnp.sum(s) for s in jax.tree.leaves(slopes))

    strategy = jaxdist.MirroredStrategy([f"cpu:{n}" for n in range(replicas)])
    config = est.RunConfig(train_distribute=strategy)
    estimator = est.Estimator(_make_model_fn(predict), tmp_path, config)
    before = estimator.train(batches(10), steps=1).get_variable_value("modules.model.out.kernel")
    estimator.train(batches(10), steps=1)
    after = estimator.get_variable_value("modules.model.out.kernel")
    assert np.abs(np.asarray(before) - np.asarray(after)).max() > 0
    assert len(X) == len(Y)


def test_outside_of_a_model_function_modules_are_made_as_always() -> None:
    model = nnx.Linear(3, 1, rngs=nnx.Rngs(0))
    assert nnx.Param(jnp.ones(2)).shape == (2,)
    assert model(jnp.ones((2, 3))).shape == (2, 1)
