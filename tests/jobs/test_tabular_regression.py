"""The regression on a table with missing values: NumPy is the oracle, on any replicas."""

import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from flax import nnx
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from rich.console import Console

import jaxdist
from jaxdist import PerReplica, jobs
from jaxdist.cli import main
from jaxdist.data import batches
from jaxdist.errors import ConfigError
from jaxdist.jobs.tabular_regression import TableTask, _model, _task
from jaxdist.training import evaluate

SHIPPED = Path(__file__).parents[2] / "configs" / "tabular_regression.toml"
SMALL = [
    "data.rows=300",
    "model.hidden=8",
    "optimizer.schedule=constant",
    "optimizer.warmup_steps=0",
    "training.steps=20",
]


def _make(*overrides: str) -> TableTask:
    task = jobs.load_job(SHIPPED, overrides)
    assert isinstance(task, TableTask)
    return task


def _strategy(replicas: int) -> jaxdist.MirroredStrategy:
    return jaxdist.MirroredStrategy([f"cpu:{i}" for i in range(replicas)])


def _train(folder: Path, *overrides: str, replicas: int = 2) -> tuple[dict[str, Any], str]:
    """Run the job in `folder`. Return its metrics and its output."""
    here = [f"output.directory='{folder}'", f"checkpoint.directory='{folder / 'checkpoints'}'"]
    loaded = jobs.load_job_config(SHIPPED, [*here, "output.picture=", *overrides])
    out = io.StringIO()
    jobs.train(loaded, _strategy(replicas), console=Console(file=out, width=200))
    metrics: dict[str, Any] = json.loads((folder / "metrics.json").read_text())
    return metrics, out.getvalue()


# Missing values


@given(
    hnp.arrays(
        np.float64,
        st.tuples(st.integers(1, 12), st.integers(2, 4)),
        elements=st.one_of(st.just(np.nan), st.integers(-50, 50).map(float)),
    )
)
def test_known_numbers_are_scaled_and_the_mean_replaces_missing_ones(table: np.ndarray) -> None:
    rows = _task.Scale.of(table).apply(table)
    values = np.column_stack([rows["features"][:, : table.shape[1] - 1], rows["target"]])
    known = ~np.isnan(table)
    np.testing.assert_array_equal(rows["features"][:, table.shape[1] - 1 :], known[:, :-1])
    np.testing.assert_array_equal(rows["is_known"], known[:, -1])
    assert not values[~known].any()
    for column, where, given_column in zip(values.T, known.T, table.T, strict=True):
        # Missing numbers are at the mean, so they do not move it.
        assert abs(column.mean()) < 1e-5
        if len(set(given_column[where])) > 1:
            np.testing.assert_allclose(column[where].std(), 1, rtol=1e-5)


def test_held_out_rows_change_no_training_example(monkeypatch: pytest.MonkeyPatch) -> None:
    before, table = _make().data, _task.make_table(2000, 0.15)
    _, held_out = _task.split_rows(np.arange(2000), 0.2, 0)
    table[held_out] = 1e6 * (1 + np.arange(len(held_out)))[:, None]
    monkeypatch.setattr(_task, "make_table", lambda rows, missing: table)
    after = _make().data
    for name, examples in before.train.items():
        assert examples.tobytes() == after.train[name].tobytes(), name
    assert before.held_out["target"].max() < 10 < after.held_out["target"].max()


def test_the_table_has_the_configured_part_of_missing_numbers_and_no_other_nan() -> None:
    task = _make("data.missing=0.4")
    train, held_out = task.data.train, task.data.held_out
    assert len(train["target"]) + len(held_out["target"]) == 2000
    flags = np.concatenate([part["features"][:, 8:] for part in (train, held_out)])
    assert 1 - flags.mean() == pytest.approx(0.4, abs=0.01)
    assert all(np.isfinite(x).all() for x in jax.tree.leaves((train, held_out)))
    whole = _make("data.missing=0").data
    assert whole.train["is_known"].all()
    assert whole.train["features"][:, 8:].all()


def test_too_few_known_targets_are_an_error_with_both_numbers() -> None:
    with pytest.raises(ConfigError, match=r"train on, and 0 held out(.|\n)*data\.rows higher"):
        _ = _make("data.rows=10", "data.missing=0.9", "data.test_fraction=0.1").data


# Least squares


def _solve(task: TableTask) -> np.ndarray:
    """The coefficients of least squares on the known training rows; the last one is the bias."""
    train = task.data.train
    known = train["is_known"]
    inputs = np.column_stack([train["features"], np.ones(len(known))])[known].astype(np.float64)
    return np.linalg.lstsq(inputs, train["target"][known].astype(np.float64), rcond=None)[0]


def _linear(task: TableTask) -> _model.Regressor:
    """The linear model with these coefficients."""
    net, solved = task.make_model(nnx.Rngs(0)), _solve(task).astype(np.float32)
    net.out.kernel[...] = jax.numpy.asarray(solved[:-1, None])
    bias = net.out.bias
    assert bias is not None
    bias[...] = jax.numpy.asarray(solved[-1:])
    return net


def _numpy_measures(task: TableTask) -> dict[str, float]:
    """RMSE in the units of the target, and R², of least squares on the held-out rows."""
    rows = _task.split_rows(np.arange(2000), 0.2, 0)
    train, held_out = (_task.make_table(2000, 0.15)[part] for part in rows)
    solved, known = _solve(task), ~np.isnan(held_out[:, -1])
    found = task.data.held_out["features"].astype(np.float64) @ solved[:-1] + solved[-1]
    found = found * np.nanstd(train[:, -1]) + np.nanmean(train[:, -1])
    target = held_out[known, -1]
    errors = ((found[known] - target) ** 2).sum()
    spread = ((target - target.mean()) ** 2).sum()
    return {
        "rows": float(known.sum()),
        "rmse": float(np.sqrt(errors / known.sum())),
        "r2": float(1 - errors / spread),
    }


@pytest.mark.parametrize("replicas", [1, 3, 8])
def test_an_evaluation_is_that_of_numpy_with_any_replicas_and_an_uneven_last_batch(
    replicas: int,
) -> None:
    task = _make("model.hidden=0")
    # 400 held-out rows in batches of 24: the 16 of the last one are no multiple of 3.
    held_out = batches(task.data.held_out, 24)
    means = evaluate(_strategy(replicas), task.evaluation_step, _linear(task), held_out)
    found = task.measures(means)
    expected = _numpy_measures(task)
    assert 300 < expected["rows"] < 400
    assert {n: found[n] for n in expected} == pytest.approx(expected, rel=1e-5)
    assert found["rmse"] < task.baseline
    assert f"R² {expected['r2']:.4f}" in task.headline.format(**found)


@pytest.mark.parametrize("seed", [1, 2])
def test_the_order_of_held_out_rows_changes_no_measure(seed: int) -> None:
    task = _make("model.hidden=0")
    net, strategy = _linear(task), _strategy(3)
    order = np.random.default_rng(seed).permutation(400)
    permuted = jax.tree.map(lambda x: x[order], task.data.held_out)
    one, other = (
        task.measures(evaluate(strategy, task.evaluation_step, net, batches(rows, 24)))
        for rows in (task.data.held_out, permuted)
    )
    assert other == pytest.approx(one, rel=1e-5)


def test_gradients_vanish_at_least_squares() -> None:
    task = _make("model.hidden=0")
    net = _linear(task)
    here = nnx.grad(_model.total_loss)(net, task.data.train)
    elsewhere = nnx.grad(_model.total_loss)(task.make_model(nnx.Rngs(0)), task.data.train)
    largest = [max(float(abs(x).max()) for x in jax.tree.leaves(g)) for g in (here, elsewhere)]
    assert largest[0] < 1e-4 * largest[1]


def test_a_linear_model_trains_to_least_squares(tmp_path: Path) -> None:
    entries = ["model.hidden=0", "optimizer.learning_rate=0.1", "optimizer.weight_decay=0"]
    entries += ["data.batch_size=1600", "training.steps=300", "checkpoint.every=300"]
    metrics, _ = _train(tmp_path, *entries)
    expected = _numpy_measures(_make("model.hidden=0"))
    assert metrics["evaluations"][-1]["rmse"] == pytest.approx(expected["rmse"], rel=1e-4)


# Steps


def _update(replicas: int, split: Callable[[Any], Any], batch: Any) -> tuple[float, Any]:
    task, strategy = _make(*SMALL), _strategy(replicas)
    model, optimizer = task.build(strategy)
    given_batch = jax.tree.map(split, batch)
    loss = strategy.run(task.train_step, (model, optimizer, given_batch))
    return float(loss), jax.tree.map(np.asarray, nnx.to_pure_dict(nnx.state(model, nnx.Param)))


def _batch() -> dict[str, np.ndarray]:
    """16 rows; the first 4, which are one replica's, have no known target."""
    rows = jax.tree.map(lambda x: x[:16].copy(), _make(*SMALL).data.train)
    rows["is_known"][:] = True
    rows["is_known"][[0, 1, 2, 3, 9]] = False
    return dict(rows)


def test_the_mean_loss_is_over_known_targets_also_if_a_replica_has_none() -> None:
    batch = _batch()
    known = jax.tree.map(lambda x: x[batch["is_known"]], batch)
    one = _update(1, lambda x: x, known)
    four = _update(4, lambda x: PerReplica(np.split(x, 4)), batch)
    np.testing.assert_allclose(four[0], one[0], rtol=1e-6)
    for many, single in zip(jax.tree.leaves(four[1]), jax.tree.leaves(one[1]), strict=True):
        np.testing.assert_allclose(many, single, rtol=1e-4, atol=1e-6)


def test_features_of_rows_without_a_target_change_no_bit() -> None:
    batch = _batch()
    other = {name: x.copy() for name, x in batch.items()}
    other["features"][~batch["is_known"]] = 1e3
    other["target"][~batch["is_known"]] = 7
    found = [_update(4, lambda x: PerReplica(np.split(x, 4)), rows) for rows in (batch, other)]
    assert found[0][0] == found[1][0]
    for one, two in zip(jax.tree.leaves(found[0][1]), jax.tree.leaves(found[1][1]), strict=True):
        assert one.tobytes() == two.tobytes()


# The job


def test_the_shipped_job_explains_most_of_the_variance_and_names_its_baseline(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sets = [f"output.directory={tmp_path}", f"checkpoint.directory={tmp_path}/c", "output.picture="]
    assert main(["train", str(SHIPPED), *(word for s in sets for word in ("--set", s))]) == 0
    out = capsys.readouterr().out
    metrics = json.loads((tmp_path / "metrics.json").read_text())
    linear = _numpy_measures(_make("model.hidden=0"))
    assert metrics["r2"] > linear["r2"] + 0.1
    assert metrics["evaluations"][-1]["rmse"] < 0.6 * metrics["baseline_rmse"]
    assert f"the mean of the training rows has RMSE {metrics['baseline_rmse']:.3f}" in out
    assert f"R² {metrics['r2']:.4f}  steps 800  replicas 8" in out
    table = _task.make_table(2000, 0.15)
    train, held_out = (table[rows, -1] for rows in _task.split_rows(np.arange(2000), 0.2, 0))
    assert metrics["baseline_rmse"] == pytest.approx(
        np.sqrt(np.nanmean((held_out - np.nanmean(train)) ** 2))
    )


def test_a_run_that_stops_resumes_on_other_replicas_with_the_losses_of_one_that_does_not(
    tmp_path: Path,
) -> None:
    small = [*SMALL, "data.batch_size=24", "checkpoint.every=10"]
    whole, _ = _train(tmp_path / "whole", *small)
    _train(tmp_path / "parts", *small, "training.steps=10")
    parts, out = _train(tmp_path / "parts", *small)
    assert "resumed from step 10" in out
    assert parts["losses"] == whole["losses"]
    _train(tmp_path / "others", *small, "training.steps=10")
    others, _ = _train(tmp_path / "others", *small, replicas=3)
    np.testing.assert_allclose(others["losses"], whole["losses"], rtol=1e-4)


def test_the_planned_step_is_the_one_that_is_trained() -> None:
    task, strategy = _make(*SMALL), _strategy(4)
    planned = task.lower(strategy, rows=4, rules="replicated")
    assert "data" not in vars(task)
    rows = jax.tree.map(lambda x: x[:16], task.data.train)
    batch = next(iter(strategy.experimental_distribute_dataset([rows])))
    real = strategy.lower(task.train_step, (*task.build(strategy), batch))
    assert planned.inputs == real.inputs
    assert planned.results == real.results
    assert [c.kind for c in planned.collectives] == [c.kind for c in real.collectives]
