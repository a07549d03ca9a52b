"""`train_and_evaluate` in one process, and which tasks of a cluster it refuses."""

import itertools
import json
import pathlib
import shutil
import threading
from typing import Any

import numpy as np
import optax
import pytest
from flax import nnx

import jaxdist
from jaxdist import estimator as est
from jaxdist.errors import (
    ArgumentError,
    ArgumentTypeError,
    CheckpointError,
    ClusterError,
    ShapeError,
)
from jaxdist.estimator._train_and_evaluate import Evaluations, evaluate_checkpoint, tell_end
from tests.estimator.models import X, Y, batches, descend, model_fn, read_weights


def _make(folder: pathlib.Path, **config: Any) -> est.Estimator:
    given: dict[str, Any] = {"save_checkpoints_steps": 2, **config}
    return est.Estimator(model_fn, config=est.RunConfig(folder, **given))


def _features() -> Any:
    return np.zeros((1, 3), np.float32)


def test_each_checkpoint_is_evaluated_and_the_last_one_is_the_result(
    tmp_path: pathlib.Path,
) -> None:
    estimator = _make(tmp_path)
    exporters = [
        est.FinalExporter("final", _features),
        est.LatestExporter("latest", _features, exports_to_keep=2),
        est.BestExporter("best", _features, exports_to_keep=None),
    ]
    spec = est.EvalSpec(batches(7), steps=None, exporters=exporters, throttle_secs=0)
    found, exports = est.train_and_evaluate(estimator, est.TrainSpec(batches(5), max_steps=7), spec)
    results = est.experimental.read_eval_metrics(estimator.eval_dir())
    assert list(results) == [2, 4, 6, 7]
    assert found is not None
    assert found == {**results[7], "global_step": 7}
    errors = X @ read_weights(estimator) - Y
    np.testing.assert_allclose(found["loss"], (errors**2).mean(), rtol=1e-4)
    counts = {e.name: len(list((tmp_path / "export" / e.name).glob("[0-9]*"))) for e in exporters}
    assert counts == {"final": 1, "latest": 2, "best": 4}
    # The loss is not better than itself, so the last call of the best exporter exports nothing.
    assert [path is None for path in exports] == [False, False, True]
    exported = est.load_export(exports[0])
    assert exported.global_step == 7
    np.testing.assert_allclose(exported(X)["y"], X @ read_weights(estimator), rtol=1e-4, atol=1e-5)
    # A second call trains nothing, and evaluates.
    again, _ = est.train_and_evaluate(estimator, est.TrainSpec(batches(5), max_steps=7), spec)
    assert again == found


def test_what_killed_exports_have_left_is_deleted_with_old_exports(tmp_path: pathlib.Path) -> None:
    estimator = _make(tmp_path / "model").train(batches(5))
    exporter = est.LatestExporter("latest", _features, exports_to_keep=1)
    folder, checkpoint = tmp_path / "exports", str(estimator.latest_checkpoint())

    def export() -> int:
        path = exporter.export(estimator, str(folder), checkpoint, {}, False)
        return int(pathlib.Path(str(path)).name)

    first = export()
    for number in first - 1, first + 1, first + 10**6:
        (folder / f"{number}.partial" / "weights").mkdir(parents=True)
    # It is newer than all that exists, complete or not.
    assert export() == first + 10**6 + 1
    assert [path.name for path in folder.iterdir()] == [str(first + 10**6 + 1)]


def test_evaluations_are_throttled(tmp_path: pathlib.Path) -> None:
    estimator = _make(tmp_path)
    spec = est.EvalSpec(batches(7), throttle_secs=3600)
    est.train_and_evaluate(estimator, est.TrainSpec(batches(5)), spec)
    # The first checkpoint after step 0, and the last one.
    assert list(est.experimental.read_eval_metrics(estimator.eval_dir())) == [2, 8]


class _Custom(est.Exporter):
    def __init__(self) -> None:
        super().__init__("custom")
        self.seen: list[Any] = []

    def export(
        self,
        estimator: Any,
        export_path: str,
        checkpoint_path: str,
        eval_result: Any,
        is_the_final_export: bool,
    ) -> str | None:
        self.seen.append((pathlib.Path(checkpoint_path).name, is_the_final_export))
        return export_path


def test_an_exporter_of_ones_own_is_called(tmp_path: pathlib.Path) -> None:
    custom = _Custom()
    spec = est.EvalSpec(batches(7), exporters=custom, throttle_secs=0)
    _, exports = est.train_and_evaluate(
        _make(tmp_path), est.TrainSpec(batches(5), max_steps=3), spec
    )
    assert custom.seen == [("2", False), ("3", False), ("3", True)]
    assert exports == [str(tmp_path / "export" / "custom")]
    with pytest.raises(NotImplementedError):
        est.Exporter("base").export(None, "", "", {}, False)


def test_the_best_exporter_remembers_and_compares_as_it_is_told(tmp_path: pathlib.Path) -> None:
    estimator = _make(tmp_path).train(batches(5))
    path = str(tmp_path / "export")

    def is_larger(best_eval_result: Any, current_eval_result: Any) -> bool:
        return bool(best_eval_result["a"] < current_eval_result["a"])

    seen = []
    for value in (1.0, 3.0, 2.0):
        # Another object, as in another process.
        best = est.BestExporter("b", _features, compare_fn=is_larger)
        found = best.export(
            estimator, path, str(estimator.latest_checkpoint()), {"a": value}, False
        )
        seen.append(found is not None)
    assert seen == [True, True, False]


def test_an_export_takes_any_number_of_rows_or_one(tmp_path: pathlib.Path) -> None:
    estimator = _make(tmp_path).train(batches(5))
    some = est.load_export(estimator.export(tmp_path / "e", X[:4], any_batch=False))
    assert some(X[:4])["y"].shape == (4,)
    with pytest.raises(ValueError, match="shape"):
        some(X[:5])
    with pytest.raises(CheckpointError, match="found no export in"):
        est.load_export(tmp_path)
    with pytest.raises(ArgumentError, match=r"features=\{\}"):
        estimator.export(tmp_path / "e", {})
    with pytest.raises(ArgumentTypeError, match="features with 3"):
        estimator.export(tmp_path / "e", 3)
    with pytest.raises(ArgumentError, match=r"features=array.*the model raised TypeError"):
        estimator.export(tmp_path / "e", np.zeros((2, 7), np.float32))
    with pytest.raises(ShapeError, match="gave the features"):
        estimator.export(tmp_path / "e", np.zeros((), np.float32), any_batch=False)
    # Nothing is left of an export that failed.
    assert len(list((tmp_path / "e").iterdir())) == 1


@pytest.mark.parametrize(
    ("make", "kind", "said"),
    [
        (lambda: est.TrainSpec(3), ArgumentTypeError, "input_fn=3"),  # type: ignore[arg-type]
        (lambda: est.TrainSpec(list, max_steps=0), ArgumentError, "max_steps=0"),
        (lambda: est.TrainSpec(list, hooks=[3]), ArgumentTypeError, "hooks=3"),  # type: ignore[list-item]
        (lambda: est.EvalSpec(list, steps=0), ArgumentError, "steps=0"),
        (lambda: est.EvalSpec(list, start_delay_secs=-1), ArgumentError, "start_delay_secs=-1"),
        (lambda: est.EvalSpec(list, throttle_secs=-1), ArgumentError, "throttle_secs=-1"),
        (lambda: est.EvalSpec(list, name=3), ArgumentTypeError, "name=3"),  # type: ignore[arg-type]
        (lambda: est.EvalSpec(list, exporters=3), ArgumentTypeError, "exporters=3"),
        (lambda: est.EvalSpec(list, exporters=[3]), ArgumentTypeError, "exporters=3"),
        (
            lambda: est.EvalSpec(list, exporters=[est.Exporter("a"), est.Exporter("a")]),
            ArgumentError,
            "two exporters with the name 'a'",
        ),
        (lambda: est.FinalExporter("a", 3), ArgumentTypeError, "receiver_fn=3"),  # type: ignore[arg-type]
        (lambda: est.LatestExporter("a", list, exports_to_keep=0), ArgumentError, "to_keep=0"),
        (lambda: est.BestExporter("a", list, compare_fn=3), ArgumentTypeError, "compare_fn=3"),  # type: ignore[arg-type]
        (
            lambda: est.train_and_evaluate(3, est.TrainSpec(list), est.EvalSpec(list)),  # type: ignore[arg-type]
            ArgumentTypeError,
            "estimator=3",
        ),
    ],
)
def test_arguments_that_do_not_fit_are_named_errors(
    make: Any, kind: type[Exception], said: str
) -> None:
    with pytest.raises(kind, match=said):
        make()


_CLUSTER = {"chief": ["a:1"], "worker": ["b:1"], "ps": ["c:1"]}


@pytest.mark.parametrize(
    ("task", "number", "strategy", "kind", "said"),
    [
        (
            "worker",
            0,
            None,
            ArgumentError,
            "worker 0 of a cluster, and config.train_distribute is NoneType",
        ),
        ("ps", 0, "mirrored", ArgumentError, "is MirroredStrategy"),
        ("chief", 0, "mirrored", ArgumentError, "a model of its own in one folder"),
        ("evaluator", 1, None, ClusterError, "evaluator 1"),
    ],
)
def test_tasks_that_would_not_train_one_model_are_named_errors(
    task: str,
    number: int,
    strategy: str | None,
    kind: type[Exception],
    said: str,
    tmp_path: pathlib.Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config = {"cluster": _CLUSTER, "task": {"type": task, "index": number}}
    monkeypatch.setenv("TF_CONFIG", json.dumps(config))
    given = None if strategy is None else jaxdist.MirroredStrategy(["cpu:0"])
    estimator = _make(tmp_path, train_distribute=given)
    with pytest.raises(kind, match=said):
        est.train_and_evaluate(estimator, est.TrainSpec(batches(5)), est.EvalSpec(batches(5)))


def _make_worker(
    folder: pathlib.Path, task: str, monkeypatch: pytest.MonkeyPatch, job: str = ""
) -> est.Estimator:
    # Servers of this process are found by their addresses.
    job = f"{folder.parent.name}.{folder.name}.{job}"
    cluster = {
        "chief": ["chief.estimator:1"],
        "worker": ["w.estimator:1"],
        "ps": [f"p.{job}:1", f"q.{job}:1"],
    }
    config = {"cluster": cluster, "task": {"type": task, "index": 0}, "rpc_layer": "local"}
    monkeypatch.setenv("TF_CONFIG", json.dumps(config))
    strategy = jaxdist.compat.v1.experimental.ParameterServerStrategy()
    return _make(folder, train_distribute=strategy, save_checkpoints_steps=5)


def _run_together(*calls: Any) -> None:
    errors: list[BaseException] = []

    def run(call: Any) -> None:
        try:
            call()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(call,), daemon=True) for call in calls]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert not any(thread.is_alive() for thread in threads)
    if errors:
        raise errors[0]


def test_all_steps_of_all_workers_count_where_data_ends(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    chief = _make_worker(tmp_path, "chief", monkeypatch)
    worker = _make_worker(tmp_path, "worker", monkeypatch)
    specs = est.TrainSpec(batches(5)), est.EvalSpec(batches(7), throttle_secs=0)
    _run_together(*(lambda e=e: est.train_and_evaluate(e, *specs) for e in (chief, worker)))
    # 8 batches each; the chief waits for the worker, and saves the last state.
    assert str(chief.latest_checkpoint()).endswith("/16")
    errors = X @ read_weights(chief) - Y
    assert (errors**2).mean() < 0.1
    end = json.loads((tmp_path / "training_end.json").read_text())
    assert end["step"] == 16


def test_workers_end_together_at_max_steps_and_when_the_chief_stops_early(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    chief = _make_worker(tmp_path, "chief", monkeypatch)
    worker = _make_worker(tmp_path, "worker", monkeypatch)
    many = lambda: batches(5)() * 100  # noqa: E731
    _run_together(*(lambda e=e: e.train(many, max_steps=20) for e in (chief, worker)))
    step = int(str(chief.latest_checkpoint()).rpartition("/")[2])
    assert 20 <= step <= 24

    hook = est.experimental.make_early_stopping_hook(chief, lambda: True, None, 10)
    # So many that the worker does not reach them before the chief has made its first ones.
    most = 50_000
    endless = lambda: itertools.cycle(batches(5)())  # noqa: E731
    _run_together(
        lambda: chief.train(endless, steps=most, hooks=[hook]),
        lambda: worker.train(endless, steps=most),
    )
    assert step < int(str(chief.latest_checkpoint()).rpartition("/")[2]) < most


def test_a_chief_goes_on_from_what_is_newer_checkpoint_or_servers(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def train(job: str, steps: int) -> tuple[est.Estimator, int, np.ndarray]:
        estimator = _make_worker(tmp_path, "chief", monkeypatch, job)
        estimator.train(lambda: [(X, Y)] * 9, steps=steps)
        step = int(str(estimator.latest_checkpoint()).rpartition("/")[2])
        return estimator, step, read_weights(estimator)

    # Servers live as long as a strategy that uses them.
    old, step, weights = train("old", 3)
    new, step, weights = train("new", 6)
    assert step == 9
    # Servers with older values get those of the checkpoint, after a step that does not count.
    _, step, found = train("old", 2)
    assert step == 10
    weights = descend([(X, Y)], weights)
    np.testing.assert_allclose(found, weights, rtol=1e-5)
    # Servers with newer values than the checkpoint keep them.
    shutil.rmtree(tmp_path / "checkpoints" / "10")
    _, step, found = train("old", 1)
    assert step == 11
    np.testing.assert_allclose(found, descend([(X, Y)], weights), rtol=1e-5)
    del old, new


def test_an_evaluator_follows_the_checkpoints(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JAXDIST_LAUNCH_ID", "this run")
    cluster = {"chief": ["a:1"], "ps": ["c:1"]}
    config = {"cluster": cluster, "task": {"type": "evaluator", "index": 0}}
    monkeypatch.setenv("TF_CONFIG", json.dumps(config))
    evaluator = _make(tmp_path, eval_distribute=jaxdist.MirroredStrategy(["cpu:1"]))
    monkeypatch.delenv("TF_CONFIG")
    trained = _make(tmp_path)
    exporters = est.FinalExporter("final", _features)
    spec = est.EvalSpec(batches(7), exporters=exporters, start_delay_secs=0, throttle_secs=0)

    def train() -> None:
        trained.train(batches(5), steps=5)
        for _ in range(500):
            if 5 in est.experimental.read_eval_metrics(trained.eval_dir()):
                break
            threading.Event().wait(0.05)
        trained.train(batches(5))
        tell_end(str(tmp_path), 13)

    # What another run has left does not end this one.
    monkeypatch.setenv("JAXDIST_LAUNCH_ID", "another run")
    tell_end(str(tmp_path), 0)
    monkeypatch.setenv("JAXDIST_LAUNCH_ID", "this run")
    _run_together(train, lambda: est.train_and_evaluate(evaluator, est.TrainSpec(batches(5)), spec))
    steps = list(est.experimental.read_eval_metrics(trained.eval_dir()))
    assert steps[-1] == 13
    assert {5, 13} <= set(steps)
    assert 0 not in steps
    assert len(list((tmp_path / "export" / "final").iterdir())) == 1


def test_an_evaluator_skips_a_checkpoint_that_was_deleted_and_names_one_it_cannot_read(
    tmp_path: pathlib.Path,
) -> None:
    _make(tmp_path).train(batches(5), steps=1)
    folder = tmp_path / "checkpoints"

    class Deleted(Evaluations):
        def evaluate(self, checkpoint_path: str) -> dict[str, Any]:
            shutil.rmtree(checkpoint_path)
            return super().evaluate(checkpoint_path)

    spec = est.EvalSpec(batches(5))
    other = est.Estimator(
        nnx.Linear(3, 1, rngs=nnx.Rngs(0)),
        tmp_path,
        loss=lambda predictions, labels: predictions[:, 0] - labels,
        optimizer=optax.sgd(1.0),
    )
    with pytest.raises(CheckpointError, match=r"modules\.model\.kernel"):
        evaluate_checkpoint(Evaluations(other, spec), folder, 1)
    assert not evaluate_checkpoint(Deleted(_make(tmp_path), spec), folder, 1)
