"""A model in a bucket: what is in a folder otherwise is there, and the numbers are the same."""

import json
import os
import pathlib
import re
import signal
import types
import uuid
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from jaxdist import estimator as est
from jaxdist._buckets import BucketPath
from jaxdist._checkpoints import list_steps
from jaxdist.errors import BucketError, CheckpointError
from jaxdist.estimator._running.folder import CheckpointChoice, ModelFolder
from jaxdist.estimator._running.progress import Summaries, read_summaries
from tests.checkpoints.buckets.stores import BUCKET, SCHEMES, Proxy, be_impatient, use_store
from tests.estimator.job_script import WANTED
from tests.estimator.models import Record, X, Y, batches, model_fn, read_weights
from tests.estimator.test_summaries import _read_events
from tests.launching.launcher import start_launcher, wait_until

JOB_SCRIPT = pathlib.Path(__file__).with_name("job_script.py")


@pytest.fixture(params=SCHEMES)
def store(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Proxy]:
    proxy = use_store(request.param, monkeypatch)
    forget = be_impatient(monkeypatch)
    yield proxy
    proxy.reset()
    forget()


@pytest.fixture
def url(store: Proxy) -> str:
    return f"{store.scheme}://{BUCKET}/{uuid.uuid4().hex}"


def _make(folder: Any, **config: Any) -> est.Estimator:
    given: dict[str, Any] = {"save_checkpoints_steps": 2, "save_summary_steps": 1, **config}
    return est.Estimator(model_fn, config=est.RunConfig(folder, **given))


def _get(url: str) -> BucketPath:
    scheme, _, rest = url.partition("://")
    bucket, _, key = rest.partition("/")
    return BucketPath(scheme, bucket, key)


def _list_steps(estimator: est.Estimator) -> tuple[int, ...]:
    folder = ModelFolder(_get(estimator.model_dir), None, 1)
    with folder.open() as checkpoints:
        return checkpoints.steps()


def _features() -> Any:
    return np.zeros((1, 3), np.float32)


def test_a_model_in_a_bucket_trains_and_evaluates_as_in_a_folder(
    url: str, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    inside, outside = _make(f"{url}/"), _make(tmp_path / "model")
    assert inside.model_dir == inside.config.model_dir == url
    for estimator in inside, outside:
        estimator.train(batches(5), steps=3).train(batches(5), max_steps=7)
    assert inside.latest_checkpoint() == f"{url}/checkpoints/7"
    np.testing.assert_array_equal(read_weights(inside), read_weights(outside))
    # Another process reads what is in the bucket.
    again = _make(url)
    results = [e.evaluate(batches(7), name="test") for e in (again, outside)]
    assert results[0] == results[1]
    older = again.evaluate(batches(7), checkpoint_path=f"{url}/checkpoints/5")
    assert older == outside.evaluate(batches(7), checkpoint_path=tmp_path / "model/checkpoints/5")
    rows = [np.stack([row["y"] for row in e.predict(batches(7))]) for e in (again, outside)]
    np.testing.assert_array_equal(rows[0], rows[1])
    assert again.get_variable_names() == outside.get_variable_names()
    found, wanted = (
        est.experimental.read_eval_metrics(e.eval_dir("test")) for e in (again, outside)
    )
    assert found == wanted == {7: {n: v for n, v in results[0].items() if n != "global_step"}}
    losses = [
        {step: values["loss"] for step, values in read_summaries(folder).items()}
        for folder in (_get(url), tmp_path / "model")
    ]
    assert losses[0] == losses[1]
    assert list(losses[0]) == [1, 2, 3, 4, 5, 6, 7]
    assert list(pathlib.Path().iterdir()) == []


def test_old_checkpoints_are_deleted_with_all_of_their_objects(url: str) -> None:
    estimator = _make(url, save_checkpoints_steps=1, keep_checkpoint_max=2)
    estimator.train(batches(5))
    assert _list_steps(estimator) == (7, 8)
    names = (_get(url) / "checkpoints").list_names()
    assert {n.partition("/")[0] for n in names if "/" in n} == {"7", "8"}


def test_one_checkpoint_in_some_hours_is_kept_for_ever(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = iter(range(1, 1000))
    hours = types.SimpleNamespace(time=lambda: 3600.0 * next(clock))
    monkeypatch.setattr("jaxdist.estimator._running.folder.time", hours)
    config: dict[str, Any] = {"save_checkpoints_steps": 1, "keep_checkpoint_max": 1}
    estimator = _make(url, keep_checkpoint_every_n_hours=4, **config)
    estimator.train(batches(5), steps=5)
    # A process that is started again goes on with what the bucket says.
    _make(url, keep_checkpoint_every_n_hours=4, **config).train(batches(5))
    assert _list_steps(estimator) == (3, 7, 11, 13)
    estimator.evaluate(batches(8), checkpoint_path=f"{url}/checkpoints/7")


def test_events_for_tensorboard_are_copied_with_the_numbers_of_the_lines(
    url: str, tmp_path: pathlib.Path
) -> None:
    pytest.importorskip("tensorboardX")
    _make(url).train(batches(5))
    for name in _get(url).list_names():
        if name.startswith("events.out.tfevents."):
            (tmp_path / name).write_bytes((_get(url) / name).read_bytes())
    events = _read_events(tmp_path)["loss"]
    lines = read_summaries(_get(url))
    assert list(events) == list(lines)
    for step, value in events.items():
        assert value == pytest.approx(lines[step]["loss"], rel=1e-6)


def test_lines_of_two_writers_and_of_a_killed_run_are_kept(store: Proxy, url: str) -> None:
    first, second = Summaries(_get(url) / "eval"), Summaries(_get(url) / "eval")
    for step in 1, 2:
        first.write(step, {"loss": step})
        second.write(10 * step, {"loss": step})
    first.close()
    second.close()
    assert list(read_summaries(_get(url) / "eval")) == [1, 10, 2, 20]
    # A kill: no line reaches the store any more.
    with pytest.raises(ValueError, match="the hook failed"):
        _make(url, save_checkpoints_steps=3).train(batches(5), hooks=[_BreakAt(store, 5)])
    store.reset()
    assert list(read_summaries(_get(url))) == [1, 2, 3]


def test_lines_collected_before_an_error_are_written_and_a_store_that_fails_hides_no_error(
    store: Proxy, url: str, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(ValueError, match="the hook failed"):
        _make(url).train(batches(5), hooks=[Record("after_run", at=4)])
    assert list(read_summaries(_get(url))) == [1, 2, 3, 4]

    with pytest.raises(ValueError, match="the hook failed"):
        _make(url).train(batches(5), hooks=[_BreakAt(store, 3)])
    assert "The last summaries were not written" in caplog.text


class _BreakAt(est.SessionRunHook):
    """Fails after some steps, with a store in which summaries cannot be written any more."""

    def __init__(self, store: Proxy, steps: int) -> None:
        self._store, self._left = store, steps

    def after_run(self, run_context: Any, run_values: Any) -> None:
        self._left -= 1
        if not self._left:
            self._store.fail = lambda number, method, key: 403 if "summaries" in key else None
            raise ValueError("the hook failed")


def test_exports_are_complete_or_absent_and_old_ones_are_deleted(url: str) -> None:
    estimator = _make(url)
    exporters = [
        est.FinalExporter("final", _features),
        est.LatestExporter("latest", _features, exports_to_keep=2),
        est.BestExporter("best", _features, exports_to_keep=None),
    ]
    spec = est.EvalSpec(batches(7), steps=None, exporters=exporters, throttle_secs=0)
    found, exports = est.train_and_evaluate(estimator, est.TrainSpec(batches(5), max_steps=7), spec)
    results = est.experimental.read_eval_metrics(estimator.eval_dir())
    assert list(results) == [2, 4, 6, 7]
    assert found == {**results[7], "global_step": 7}
    names = (_get(url) / "export").list_names()
    numbers = {e.name: {n.split("/")[1] for n in names if n.startswith(e.name)} for e in exporters}
    numbers["best"].remove("best.json")
    assert {name: len(found) for name, found in numbers.items()} == {
        "final": 1,
        "latest": 2,
        "best": 4,
    }
    path = exports[0]
    assert path is not None
    assert path.startswith(f"{url}/export/final/")
    exported = est.load_export(path)
    assert exported.global_step == 7
    np.testing.assert_allclose(exported(X)["y"], X @ read_weights(estimator), rtol=1e-4, atol=1e-5)
    # A better evaluation than all before, also of another process.
    best = json.loads((_get(url) / "export/best/best.json").read_bytes())
    assert best["loss"] == results[7]["loss"]
    # A process that was killed has begun an export.
    begun = _get(url) / "export/final/9999999999"
    (begun / "export.begun").write_bytes(b"1")
    (begun / "predict.bin").write_bytes(b"1")
    with pytest.raises(CheckpointError, match="found no export"):
        est.load_export(str(begun))
    assert estimator.export(f"{url}/export/final", _features()).endswith("/10000000000")


def test_what_killed_exports_have_left_is_deleted_with_old_exports(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    stopped = types.SimpleNamespace(time=lambda: 10.5)
    monkeypatch.setattr("jaxdist.estimator._export.time", stopped)
    estimator = _make(url).train(batches(5))
    folder = _get(url) / "exports"
    exporter = est.LatestExporter("latest", _features, exports_to_keep=2)

    def kill(number: int) -> None:
        for name in "export.begun", "weights/1/notes":
            (folder / str(number) / name).write_bytes(b"1")

    def export() -> list[int]:
        checkpoint = str(estimator.latest_checkpoint())
        path = exporter.export(estimator, str(folder), checkpoint, {}, False)
        assert est.load_export(str(path)).global_step == 8
        return sorted({int(name.partition("/")[0]) for name in folder.list_names()})

    kill(5)
    # Another process may still write it, and it would be one of the two that are kept.
    assert export() == [5, 10]
    kill(15)
    assert export() == [10, 15, 16]
    assert export() == [16, 17]


def test_two_exports_of_one_second_have_folders_of_their_own_where_listings_are_late(
    store: Proxy, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    stopped = types.SimpleNamespace(time=lambda: 5.5)
    monkeypatch.setattr("jaxdist.estimator._export.time", stopped)
    estimator = _make(url).train(batches(5))
    store.lag = 100
    paths = [estimator.export(f"{url}/exports", _features()) for _ in range(2)]
    assert paths == [f"{url}/exports/5", f"{url}/exports/6"]


@pytest.mark.parametrize("part", ["", "/checkpoints/4"])
def test_a_model_begins_with_the_values_of_one_in_a_bucket(
    url: str, tmp_path: pathlib.Path, part: str
) -> None:
    source = _make(url).train(batches(5), steps=4)
    wanted = read_weights(source)
    if part:
        source.train(batches(5), steps=2)
    other = est.Estimator(
        model_fn,
        tmp_path,
        est.RunConfig(save_checkpoints_steps=1, keep_checkpoint_max=None),
        warm_start_from=f"{url}{part}",
    )
    other.train(batches(5), steps=1)
    first = CheckpointChoice(tmp_path / "checkpoints", 0)
    found = first.read("modules.model.weights")
    np.testing.assert_array_equal(found, wanted)


def test_an_early_stopping_hook_reads_evaluations_in_a_bucket(url: str) -> None:
    estimator = _make(url).train(batches(5), steps=1)
    estimator.evaluate(batches(7))
    for eval_dir in None, f"{url}/eval":
        hook = est.experimental.stop_if_lower_hook(
            estimator, "loss", 1e9, eval_dir, run_every_secs=None, run_every_steps=1
        )
        before = estimator.latest_checkpoint()
        estimator.train(batches(5), hooks=[hook])
        assert before is not None
        assert estimator.latest_checkpoint() == f"{url}/checkpoints/{int(before[-1]) + 1}"


def test_tf_config_names_a_bucket(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TF_CONFIG", json.dumps({"model_dir": f"{url}/"}))
    assert est.RunConfig().model_dir == est.RunConfig(url).model_dir == url
    assert est.Estimator(model_fn).train(batches(5)).latest_checkpoint() == f"{url}/checkpoints/8"


# Several tasks


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_tasks_that_share_only_a_bucket_train_one_model_with_the_chief_killed(
    url: str, tmp_path: pathlib.Path
) -> None:
    def read_events() -> list[dict[str, Any]]:
        text = "\n".join(job.lines(0))
        found = re.findall(r"^\[\w+ \d+\] (\{.*\})$", text, re.MULTILINE)
        return [json.loads(line) for line in found]

    def list_pids(name: str) -> list[int]:
        return [e["pid"] for e in read_events() if (e["name"], e["event"]) == (name, "start")]

    options = ("--ps", "1", "--workers", "1", "--evaluator", "--restarts", "3")
    given = (url, "300", "0.05", str(tmp_path))
    # With an id of the job, a chief that is started again does not wait for its own lock.
    env: dict[str, str | None] = {"JAX_PLATFORMS": "cpu", "JAXDIST_JOB_ID": url}
    folder = _get(url) / "checkpoints"
    with start_launcher(*options, str(JOB_SCRIPT), *given, env=env) as job:
        wait_until(lambda: len(list_steps(folder)) > 1, 120)
        (chief,) = list_pids("chief 0")
        os.kill(chief, signal.SIGKILL)
        (outcome,) = job.wait(200)
        assert outcome.exit_code == 0, outcome.describe()
        assert len(list_pids("chief 0")) == 2
    steps = list_steps(folder)
    assert 300 <= steps[-1] <= 304
    results = est.experimental.read_eval_metrics(f"{url}/eval")
    assert list(results)[-1] == steps[-1]
    assert results[steps[-1]]["loss"] < 0.5
    names = {n.partition("/")[0] for n in (_get(url) / "export/final").list_names()}
    exported = est.load_export(f"{url}/export/final/{max(names, key=int)}")
    assert exported.global_step == steps[-1]
    found = np.asarray(exported(np.eye(4, dtype=np.float32)))
    assert np.abs(found - WANTED).max() < 1.5


# Stores that fail


def test_a_bucket_that_does_not_exist_is_named(
    store: Proxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = f"{store.scheme}://missing/run"
    estimator = _make(url)
    with pytest.raises(BucketError, match=rf"{store.scheme}://missing/(.|\n)*make it"):
        estimator.train(batches(5))
    with pytest.raises(BucketError, match=rf"{store.scheme}://missing/(.|\n)*make it"):
        estimator.evaluate(batches(5))
    with pytest.raises(BucketError, match=rf"{store.scheme}://missing/(.|\n)*make it"):
        _make(f"{store.scheme}://missing/b").train(batches(5))
    # An evaluator would wait forever for a checkpoint.
    cluster = {"chief": ["localhost:1"]}
    task = {"cluster": cluster, "task": {"type": "evaluator", "index": 0}}
    monkeypatch.setenv("TF_CONFIG", json.dumps(task))
    spec = est.TrainSpec(batches(5), max_steps=4), est.EvalSpec(batches(7))
    with pytest.raises(BucketError, match=rf"{store.scheme}://missing/(.|\n)*make it"):
        est.train_and_evaluate(_make(url), *spec)


@pytest.mark.parametrize("method", ["GET", "PUT POST", "DELETE"])
def test_a_request_that_is_not_allowed_is_named_and_the_checkpoints_are_whole(
    store: Proxy, url: str, method: str
) -> None:
    _make(url).train(batches(5), steps=3)
    store.fail = lambda number, found, key: 403 if found in method.split() else None
    with pytest.raises(CheckpointError) as caught:
        _make(url, keep_checkpoint_max=1).train(batches(5), steps=4)
    assert "role" in str(caught.value) or "AWS_ACCESS_KEY_ID" in str(caught.value)
    store.reset()
    estimator = _make(url)
    estimator.evaluate(batches(7))
    before = estimator.latest_checkpoint()
    assert before is not None
    assert int(before.rpartition("/")[2]) >= 3
    assert estimator.train(batches(5), steps=1).latest_checkpoint() != before


@pytest.mark.parametrize("status", [503, 0])
def test_requests_that_fail_now_and_then_change_nothing(
    store: Proxy, url: str, tmp_path: pathlib.Path, status: int
) -> None:
    store.fail = lambda number, method, key: status if number % 3 == 0 else None
    spec = est.TrainSpec(batches(5), max_steps=7), est.EvalSpec(batches(7), throttle_secs=0)
    found, _ = est.train_and_evaluate(_make(url), *spec)
    assert found == est.train_and_evaluate(_make(tmp_path), *spec)[0]
    assert list(read_summaries(_get(url))) == [1, 2, 3, 4, 5, 6, 7]
    np.testing.assert_allclose(Y, X @ read_weights(_make(url)), atol=3)
