"""Losses and metrics that are functions: the order of arguments, and what they return."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from jaxdist import fit
from jaxdist.errors import ArgumentTypeError, ShapeError
from tests.fit.models import LOSS, make_data, make_model, mirrored

DATA = make_data(16)
# These are no functions of predictions and targets.
_OTHERS = {
    *("make_fenchel_young_loss", "smooth_labels", "triplet_margin_loss", "ntxent"),
    *("ctc_loss", "ctc_loss_with_forward_probs"),
}
LOSSES_OF_OPTAX = sorted(n for n in dir(optax.losses) if not n.startswith("_") and n not in _OTHERS)


class _Same(nnx.Module):
    """A module that returns what it gets."""

    def __call__(self, x: jax.Array) -> jax.Array:
        return x


@pytest.mark.parametrize("name", LOSSES_OF_OPTAX)
def test_losses_of_optax_get_the_predictions_first(name: str) -> None:
    model = fit.Model(_Same())
    model.compile("sgd", _stop_with_shapes(getattr(optax.losses, name)))
    with pytest.raises(_CalledError) as caught:
        model.evaluate(np.zeros((4, 3), np.float32), np.zeros((4, 2), np.float32), verbose=0)
    assert caught.value.args == ((4, 3), (4, 2))


class _CalledError(Exception):
    """A loss was called with arrays of these shapes."""


def _stop_with_shapes(function: Any) -> Any:
    @functools.wraps(function)
    def call(*args: Any) -> None:
        raise _CalledError(*(x.shape for x in args))

    return call


def test_functions_of_users_are_called_as_their_parameters_say() -> None:
    def swapped(pred: Any, target: Any) -> Any:
        return LOSS(pred, target)

    def named(scores_of_me: Any, labels: Any) -> Any:
        return LOSS(scores_of_me, labels)

    wanted = make_model(mirrored(2)).evaluate(DATA.x, DATA.y, verbose=0)
    for loss in (swapped, named, lambda labels, out: LOSS(out, labels)):
        assert make_model(mirrored(2), loss=loss).evaluate(DATA.x, DATA.y, verbose=0) == wanted


@pytest.mark.parametrize("label", [-1, 3, 7])
def test_top_k_counts_neither_nan_nor_what_is_no_class(label: int) -> None:
    loss = lambda y_true, y_pred: jnp.zeros(y_pred.shape[:1])  # noqa: E731
    model = make_model(mirrored(2), _Same(), loss=loss, metrics=[fit.TopKAccuracy(3)])
    x = np.ones((4, 3), np.float32)
    assert model.evaluate(x, np.full(4, label), verbose=0)[1] == 0.0
    assert model.evaluate(x * np.nan, np.zeros(4, np.int32), verbose=0)[1] == 0.0
    assert model.evaluate(x, np.zeros(4, np.int32), verbose=0)[1] == 1.0
    with pytest.raises(ShapeError, match=r"'top_3_accuracy' was given targets of shape \[2, 2\]"):
        model.evaluate(x, np.zeros((4, 2), np.int32), verbose=0)


class _Wrong(fit.Metric):
    """A metric whose sums are what it is given."""

    def __init__(self, sums: Any) -> None:
        super().__init__("wrong")
        self._sums = sums

    def sums(self, y_true: Any, y_pred: Any, weight: jax.Array) -> Any:
        return self._sums(y_true, y_pred, weight)

    def result(self, sums: Any) -> float:
        return float(np.sum(sums["all"]))


def test_sums_of_a_metric_are_arrays_whose_shapes_do_not_depend_on_the_batch() -> None:
    for sums, kind, words in (
        (lambda y, p, w: w, ArgumentTypeError, "its sums returned"),
        (lambda y, p, w: {"all": "text"}, ArgumentTypeError, "its sums returned"),
        (lambda y, p, w: {"all": w}, ShapeError, r"the sum 'all' has the shape \[4\]"),
    ):
        with pytest.raises(kind, match=words):
            make_model(mirrored(2), metrics=[_Wrong(sums)]).evaluate(DATA.x, DATA.y, 8)
    with pytest.raises(ArgumentTypeError, match=r"Create an object: fit.Accuracy"):
        make_model(mirrored(2), metrics=[fit.Accuracy])


def test_sums_may_have_other_shapes_for_other_data() -> None:
    loss = lambda y_true, y_pred: y_pred.mean(axis=-1)  # noqa: E731
    metric = _Wrong(lambda y, p, w: {"all": jnp.einsum("b,bc->c", w, p), "n": jnp.sum(w)})
    model = make_model(mirrored(2), _Same(), loss=loss, metrics=[metric])
    narrow, wide = np.ones((8, 2), np.float32), np.ones((8, 3), np.float32)
    found = [model.evaluate(x, DATA.y[:8], verbose=0)[1] for x in (narrow, wide, narrow)]
    assert found == [16.0, 24.0, 16.0]
