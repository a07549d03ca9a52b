"""A path with a scheme is an error where it is given, and never a local folder of that name."""

import json
import pathlib
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from flax import nnx

import jaxdist
from jaxdist import cost, estimator, fit, jobs, training
from jaxdist.cli import main
from jaxdist.errors import ArgumentError, ConfigError
from jaxdist.training import Checkpoints


def _make_model() -> fit.Model:
    model = fit.Model(nnx.Linear(2, 1, rngs=nnx.Rngs(0)))
    model.compile("sgd", "mse")
    return model


def _make_estimator(**given: Any) -> Any:
    return estimator.Estimator(lambda features, labels, mode: None, **given)


def _draw(path: Any) -> Any:
    return jaxdist.explain(jaxdist.MirroredStrategy()).save_png(path)


def _watch(path: Any) -> Any:
    return jaxdist.experimental.PreemptionCheckpointHandler(
        jaxdist.cluster_resolver.SimpleClusterResolver(jaxdist.cluster_resolver.ClusterSpec({})),
        {"w": np.zeros(2)},
        checkpoint_dir=path,
    )


def _serve(path: Any) -> Any:
    return jaxdist.Server(
        {"ps": ["127.0.0.1:0"], "worker": ["127.0.0.1:0"]}, "ps", 0, snapshot_directory=path
    )


CONFIG = pathlib.Path(__file__).parents[1] / "configs" / "digits_mirrored.toml"


def _load(entry: str) -> Callable[[Any], Any]:
    return lambda path: jobs.load_job_config(CONFIG, [f"{entry}={path}"])


def _read_back(path: str) -> str:
    """Return the local path that a job understands."""
    given = f"output.metrics={json.dumps(path)}"
    return jobs.load_job_config(CONFIG, [given]).values.output.metrics


WAYS: dict[str, Callable[[Any], Any]] = {
    "CSVLogger": fit.CSVLogger,
    "JSONLogger": fit.JSONLogger,
    "TensorBoard": fit.TensorBoard,
    "Profiler": fit.Profiler,
    "save_png": _draw,
    "Server": _serve,
    "save_links": lambda path: cost.save_links(path, ()),
    "load_links": cost.load_links,
    "load_config": jobs.load_job_config,
    "output.metrics": _load("output.metrics"),
    "output.picture": _load("output.picture"),
}
# These can be in a bucket.
PLACES: dict[str, Callable[[Any], Any]] = {
    "Checkpoints": Checkpoints,
    "ModelCheckpoint": fit.ModelCheckpoint,
    "Model.save": lambda path: _make_model().save(path),
    "Model.load": lambda path: _make_model().load(path),
    "Model.export_weights": lambda path: _make_model().export_weights(path),
    "Model.load_weights": lambda path: _make_model().load_weights(path),
    "export_weights": lambda path: training.export_weights({"w": np.zeros(2)}, path),
    "export_weights(like)": lambda path: training.export_weights({}, "x", like=path),
    "load_weights": lambda path: training.load_weights({"w": np.zeros(2)}, path),
    "PreemptionCheckpointHandler": _watch,
    "checkpoint.directory": _load("checkpoint.directory"),
    "output.directory": _load("output.directory"),
    "Estimator": lambda path: _make_estimator(model_dir=path),
    "RunConfig": lambda path: estimator.RunConfig(model_dir=path),
    "warm_start_from": lambda path: _make_estimator(warm_start_from=path),
    "read_eval_metrics": estimator.experimental.read_eval_metrics,
    "load_export": estimator.load_export,
}
COMMANDS = {
    "new": "new gs://bucket/flowers",
    "trace": f"trace {CONFIG} --directory gs://bucket/run",
    "train": "train gs://bucket/job.toml",
    "bench": "bench collectives --save gs://bucket/links.json",
    "launch": "launch --ps 1 --workers 1 --snapshot-directory gs://bucket/run -m timeit",
}
PATHS: dict[str, Any] = {
    "gs": "gs://bucket/run",
    "s3": "s3://bucket/run.csv",
    "memory": "memory://bucket/run",
    "path": pathlib.Path("gs://bucket/run"),
    "upper": "GS://bucket/run",
    "host": "file://elsewhere/run",
}


@pytest.fixture(autouse=True)
def _in_an_empty_folder(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def _list_made(folder: pathlib.Path) -> list[str]:
    return [path.name for path in folder.iterdir()]


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("way", WAYS)
def test_a_scheme_is_an_error_where_the_path_is_given(
    way: str, path: str, tmp_path: pathlib.Path
) -> None:
    with pytest.raises(
        (ArgumentError, ConfigError), match=r"has the scheme '(?i:gs|s3|memory|file)'"
    ):
        WAYS[way](PATHS[path])
    assert _list_made(tmp_path) == []


@pytest.mark.parametrize("path", ["memory", "host"])
@pytest.mark.parametrize("way", PLACES)
def test_checkpoints_are_not_written_to_other_addresses(
    way: str, path: str, tmp_path: pathlib.Path
) -> None:
    with pytest.raises((ArgumentError, ConfigError), match=r"(.|\n)*buckets, with gs:// or s3://"):
        PLACES[way](PATHS[path])
    assert _list_made(tmp_path) == []


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_prints_the_error(
    command: str, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(COMMANDS[command].split()) == 2
    assert "has the scheme 'gs'" in capsys.readouterr().err
    assert _list_made(tmp_path) == []


def test_the_environment_names_no_bucket_for_snapshots(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JAXDIST_SNAPSHOT_DIRECTORY", "gs://bucket/run")
    with pytest.raises(ArgumentError, match=r"JAXDIST_SNAPSHOT_DIRECTORY is 'gs://bucket/run'"):
        jaxdist.Server({"ps": ["127.0.0.1:0"]}, start=False)
    assert _list_made(tmp_path) == []


@pytest.mark.parametrize("make", [lambda f: f.as_uri(), lambda f: f"file:{f}", pathlib.Path])
def test_a_file_address_is_the_local_folder(
    make: Callable[[pathlib.Path], Any], tmp_path: pathlib.Path
) -> None:
    folder = tmp_path / "a run"
    with Checkpoints(make(folder)) as checkpoints:
        checkpoints.save(1, {"w": np.arange(3.0)})
    assert _list_made(tmp_path) == ["a run"]
    assert _list_made(folder)
    model = _make_model()
    log = folder / "log.csv"
    x = np.ones((4, 2), "float32")
    model.fit(x, x[:, :1], verbose=0, callbacks=[fit.CSVLogger(make(log))])
    assert log.exists()
    config = jobs.load_job_config(CONFIG, [f"output.directory={make(folder)}"]).values
    assert config.output.directory == str(folder)


@pytest.mark.parametrize(
    ("given", "found"),
    [
        ("file:///runs/a#1", "/runs/a#1"),
        ("file:///runs/what?", "/runs/what?"),
        ("file:///100%25/a%20b", "/100%/a b"),
        ("file://localhost/runs", "/runs"),
        ("FILE:/runs", "/runs"),
        ("file:///", "/"),
    ],
)
def test_the_whole_name_of_a_file_address_is_kept(given: str, found: str) -> None:
    assert _read_back(given) == found


@pytest.mark.parametrize(
    ("path", "found", "meant"),
    [
        ("gs:bucket/run", "has no // after gs:", "'gs://bucket/run'"),
        ("S3:bucket", "has no // after S3:", "'S3://bucket'"),
        ("file:run", "has no // after file:", "'file:///run'"),
        (" gs://bucket/run", "begins with a space", "'gs://bucket/run'"),
        ("\tmemory:/run", "begins with a space", "'memory:/run'"),
    ],
)
@pytest.mark.parametrize("way", ["CSVLogger", "ModelCheckpoint", "Checkpoints", "Model.save"])
def test_a_mistyped_address_makes_no_local_folder(
    way: str, path: str, found: str, meant: str, tmp_path: pathlib.Path
) -> None:
    with pytest.raises(ArgumentError) as caught:
        {**WAYS, **PLACES}[way](path)
    assert f"which {found}." in str(caught.value)
    assert str(caught.value).endswith(
        f"Write {meant}, or './{path}' for a local file of this name."
    )
    assert _list_made(tmp_path) == []
    assert _read_back(f"./{path}") == f"./{path}"


@pytest.mark.parametrize(
    "path", ["a:b", " a b", "files:x", "gs", "runs/gs://x", "C:/runs", "x:y/z", "2://x"]
)
def test_other_paths_are_local(path: str) -> None:
    assert _read_back(path) == path
