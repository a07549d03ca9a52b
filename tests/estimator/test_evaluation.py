"""`Estimator.evaluate` and `predict`: every row counts once, from a checkpoint."""

import json
import pathlib
from typing import Any

import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxdist
from jaxdist import estimator as est
from jaxdist.errors import (
    ArgumentError,
    ArgumentTypeError,
    CheckpointError,
    ContextError,
    ShapeError,
)
from tests.estimator.models import Line, Record, X, Y, batches, model_fn, read_weights


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """A model after two steps."""
    made = tmp_path_factory.mktemp("model")
    est.Estimator(model_fn, made).train(batches(5), steps=2)
    return made


@pytest.mark.parametrize("replicas", [1, 2, 3])
@pytest.mark.parametrize("size", [1, 7, 40, 64])
@pytest.mark.parametrize("rows", [1, 7, 40])
def test_results_are_means_over_all_rows(
    replicas: int, size: int, rows: int, folder: pathlib.Path
) -> None:
    devices = [f"cpu:{n}" for n in range(replicas)]
    config = est.RunConfig(folder, eval_distribute=jaxdist.MirroredStrategy(devices))
    estimator = est.Estimator(model_fn, config=config)
    found = estimator.evaluate(batches(size, rows), name=f"{replicas}_{size}_{rows}")
    errors = X[:rows].astype(np.float64) @ read_weights(estimator) - Y[:rows]
    first = X[:rows, 0] > 0
    assert found["global_step"] == 2
    np.testing.assert_allclose(found["loss"], (errors**2).mean(), rtol=1e-5)
    np.testing.assert_allclose(found["error"], abs(errors).mean(), rtol=1e-5)
    np.testing.assert_allclose(found["first"], (errors**2)[first].mean(), rtol=1e-5)


def test_a_loss_of_each_row_and_a_mean_give_the_same(folder: pathlib.Path) -> None:
    def of_rows(features: Any, labels: Any, mode: str) -> est.EstimatorSpec:
        errors = (est.get_module(lambda rngs: Line(rngs))(features) - labels) ** 2
        return est.EstimatorSpec(mode, loss=errors, train_op=optax.sgd(1.0))

    strategy = jaxdist.MirroredStrategy(["cpu:0", "cpu:1"])
    config = est.RunConfig(folder, eval_distribute=strategy)
    one, other = (est.Estimator(f, config=config).evaluate(batches(7)) for f in (model_fn, of_rows))
    np.testing.assert_allclose(one["loss"], other["loss"], rtol=1e-6)


def test_steps_hooks_names_and_checkpoints_are_chosen(tmp_path: pathlib.Path) -> None:
    config = est.RunConfig(tmp_path, save_checkpoints_steps=1, keep_checkpoint_max=None)
    estimator = est.Estimator(model_fn, config=config).train(batches(5), steps=2)
    record = Record()
    found = estimator.evaluate(batches(5), steps=3, hooks=[record], name="few")
    middle = ["before_run", "after_run"] * 3
    assert record.calls == ["begin", "after_create_session", *middle, "end"]
    errors = X[:15] @ read_weights(estimator) - Y[:15]
    np.testing.assert_allclose(found["loss"], (errors**2).mean(), rtol=1e-4)
    line = json.loads((tmp_path / "eval_few" / "summaries.jsonl").read_text())
    assert (line["step"], line["loss"]) == (2, found["loss"])
    assert estimator.eval_dir("few") == str(tmp_path / "eval_few")
    first = estimator.evaluate(batches(40), checkpoint_path=tmp_path / "checkpoints" / "0")
    assert first["global_step"] == 0
    np.testing.assert_allclose(first["loss"], (Y**2).mean(), rtol=1e-5)
    # The same object then evaluates the newest one.
    assert estimator.evaluate(batches(40))["loss"] < first["loss"]


class _Stop(est.SessionRunHook):
    def after_run(self, run_context: Any, run_values: Any) -> None:
        run_context.request_stop()


def test_a_hook_ends_an_evaluation_and_a_prediction(folder: pathlib.Path) -> None:
    estimator = est.Estimator(model_fn, folder)
    errors = X[:5] @ read_weights(estimator) - Y[:5]
    found = estimator.evaluate(batches(5), hooks=[_Stop()], name="stop")
    np.testing.assert_allclose(found["loss"], (errors**2).mean(), rtol=1e-4)
    assert len(list(estimator.predict(batches(5), hooks=[_Stop()]))) == 5


def test_predictions_are_rows_or_batches_of_the_checkpoint(folder: pathlib.Path) -> None:
    estimator = est.Estimator(model_fn, folder)
    expected = X @ read_weights(estimator)
    rows = list(estimator.predict(batches(7)))
    np.testing.assert_allclose([row["y"] for row in rows], expected, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose([row["twice"] for row in rows], 2 * expected, rtol=1e-4, atol=1e-5)
    # Features alone, and some of the predictions.
    found = list(estimator.predict(lambda: [X[:4], X[4:]], ["twice"], yield_single_examples=False))
    assert [batch["twice"].shape for batch in found] == [(4,), (36,)]
    assert found[0].keys() == {"twice"}
    record = Record()
    next(estimator.predict(batches(7), hooks=[record]))
    assert record.calls == ["begin", "after_create_session", "before_run", "after_run"]


def test_hooks_of_the_spec_are_called(tmp_path: pathlib.Path) -> None:
    records = {n: Record() for n in ("training", "training_chief", "evaluation", "prediction")}

    def with_hooks(features: Any, labels: Any, mode: str) -> est.EstimatorSpec:
        predictions = est.get_module(lambda rngs: Line(rngs))(features)
        return est.EstimatorSpec(
            mode,
            predictions=predictions,
            loss=None if labels is None else jnp.mean((predictions - labels) ** 2),
            train_op=optax.sgd(0.1),
            **{f"{name}_hooks": [record] for name, record in records.items()},  # type: ignore[arg-type]
        )

    estimator = est.Estimator(with_hooks, tmp_path)
    estimator.train(batches(5), steps=2)
    estimator.evaluate(batches(20))
    assert len(list(estimator.predict(batches(20)))) == 40
    for record in records.values():
        middle = ["before_run", "after_run"] * 2
        assert record.calls == ["begin", "after_create_session", *middle, "end"]


def test_calls_that_do_not_fit_are_named_errors(
    tmp_path: pathlib.Path, folder: pathlib.Path
) -> None:
    new = est.Estimator(model_fn, tmp_path / "new")
    for call in (new.evaluate, new.predict, lambda f: new.export(tmp_path / "e", X)):
        with pytest.raises(CheckpointError, match="found no checkpoint"):
            call(batches(5))
    with pytest.raises(CheckpointError, match="found no checkpoint"):
        new.get_variable_names()
    estimator = est.Estimator(model_fn, folder)
    with pytest.raises(CheckpointError, match="given name='x'"):
        estimator.get_variable_value("x")
    with pytest.raises(ArgumentError, match="steps=0"):
        estimator.evaluate(batches(5), steps=0)
    with pytest.raises(ArgumentError, match="name='a/b'"):
        estimator.evaluate(batches(5), name="a/b")
    with pytest.raises(ArgumentTypeError, match="predict_keys="):
        estimator.predict(batches(5), predict_keys=[3])  # type: ignore[list-item]
    with pytest.raises(ArgumentError, match="no predictions 'z'"):
        list(estimator.predict(batches(5), predict_keys=["z"]))
    with pytest.raises(ShapeError, match="no element"):
        estimator.evaluate(list)
    with pytest.raises(ShapeError, match="no element"):
        list(estimator.predict(list))
    with pytest.raises(ShapeError, match="weights of 'first' that are all 0"):
        estimator.evaluate(lambda: [(-abs(X), Y)])
    with (
        jaxdist.MirroredStrategy(["cpu:0"]).scope(),
        pytest.raises(ContextError, match="in the scope"),
    ):
        estimator.evaluate(batches(5))
    (tmp_path / "5").mkdir()
    with pytest.raises(CheckpointError, match="not a checkpoint of an Estimator"):
        estimator.evaluate(batches(5), checkpoint_path=tmp_path / "5")


@pytest.mark.parametrize(
    ("metric", "kind", "said"),
    [
        ("x", ArgumentTypeError, "'x', of type str for eval_metric_ops"),
        (jnp.ones((5, 2)), ShapeError, r"values of shape \[5, 2\]"),
        ((jnp.ones(5), jnp.ones(2)), ShapeError, r"weights of shape \[2\]"),
    ],
)
def test_a_metric_has_a_value_for_each_row(
    metric: Any, kind: type[Exception], said: str, folder: pathlib.Path
) -> None:
    def function(features: Any, labels: Any, mode: str) -> est.EstimatorSpec:
        loss = jnp.mean(est.get_module(lambda rngs: Line(rngs))(features))
        return est.EstimatorSpec(mode, loss=loss, eval_metric_ops={"m": metric})

    with pytest.raises(kind, match=said):
        est.Estimator(function, folder).evaluate(batches(5))


def test_predictions_without_rows_or_names_are_named_errors(folder: pathlib.Path) -> None:
    def mean(features: Any, mode: str) -> est.EstimatorSpec:
        model = est.get_module(lambda rngs: Line(rngs))
        return est.EstimatorSpec(mode, predictions=model(features).mean())

    estimator = est.Estimator(mean, folder)
    with pytest.raises(ShapeError, match=r"prediction of model_fn has the shape \[\], for a batch"):
        list(estimator.predict(lambda: [X]))
    with pytest.raises(ArgumentError, match="Only a dict has keys"):
        list(estimator.predict(lambda: [X], ["y"]))
    [one] = estimator.predict(lambda: [X], yield_single_examples=False)
    assert one.shape == ()


@pytest.mark.parametrize(
    ("arguments", "kind", "said"),
    [
        ({"mode": "test"}, ArgumentError, "mode='test'"),
        ({"mode": "train", "loss": 1.0}, ArgumentError, "no train_op"),
        ({"mode": "eval"}, ArgumentError, "no loss"),
        ({"mode": "infer"}, ArgumentError, "no predictions"),
        ({"mode": "train", "loss": 1.0, "train_op": 3}, ArgumentTypeError, "train_op=3"),
        (
            {"mode": "train", "loss": 1.0, "train_op": optax.MultiSteps(optax.sgd(0.1), 2)},
            ArgumentTypeError,
            "train_op=steps.gradient_transformation()",
        ),
        (
            {"mode": "eval", "loss": 1.0, "eval_metric_ops": 3},
            ArgumentTypeError,
            "eval_metric_ops=3",
        ),
        (
            {"mode": "eval", "loss": 1.0, "eval_metric_ops": {"loss": 3}},
            ArgumentError,
            "the name 'loss'",
        ),
        (
            {"mode": "eval", "loss": 1.0, "evaluation_hooks": [3]},
            ArgumentTypeError,
            "evaluation_hooks=3",
        ),
    ],
)
def test_a_spec_that_lacks_something_is_a_named_error(
    arguments: dict[str, Any], kind: type[Exception], said: str
) -> None:
    with pytest.raises(kind, match=said):
        est.EstimatorSpec(**arguments)
