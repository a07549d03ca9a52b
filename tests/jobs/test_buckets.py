"""`output.directory` in a bucket: metrics, picture and lock, and stores that fail."""

import io
import json
import pathlib
import uuid
from collections.abc import Iterator
from typing import Any

import pytest
from rich.console import Console

import jaxdist
from jaxdist import jobs
from jaxdist._buckets import BucketPath
from jaxdist._checkpoints import lock_folder
from jaxdist.cli import main
from jaxdist.errors import BucketError, CheckpointError, ConfigError
from tests.checkpoints.buckets.stores import BUCKET, SCHEMES, Proxy, be_impatient, use_store

CONFIG = pathlib.Path(__file__).parents[2] / "configs" / "digits_mirrored.toml"
_CHANGING = {"wall_time_s", "images_per_s", "config"}


@pytest.fixture(params=SCHEMES)
def store(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path
) -> Iterator[Proxy]:
    proxy = use_store(request.param, monkeypatch)
    forget = be_impatient(monkeypatch)
    monkeypatch.chdir(tmp_path)
    yield proxy
    proxy.reset()
    forget()


@pytest.fixture
def url(store: Proxy) -> str:
    return f"{store.scheme}://{BUCKET}/{uuid.uuid4().hex}"


def _get(url: str) -> BucketPath:
    scheme, _, rest = url.partition("://")
    bucket, _, key = rest.partition("/")
    return BucketPath(scheme, bucket, key)


def _load(output: str, *more: str) -> Any:
    sets = [f"output.directory={output}", f"checkpoint.directory={output}/checkpoints"]
    sets += ["checkpoint.every=2", "training.steps=4", "optimizer.warmup_steps=0"]
    return jobs.load_job_config(CONFIG, [*sets, "output.picture=", *more])


def _train(output: str, *more: str) -> str:
    printed = io.StringIO()
    loaded = _load(output, *more)
    jobs.train(loaded, jaxdist.OneDeviceStrategy("cpu:0"), console=Console(file=printed, width=200))
    return printed.getvalue()


def _read(path: Any) -> dict[str, Any]:
    found = json.loads(path.read_bytes())
    return {name: value for name, value in found.items() if name not in _CHANGING}


def test_metrics_and_picture_in_a_bucket_are_those_of_a_folder(
    url: str, tmp_path: pathlib.Path
) -> None:
    pytest.importorskip("matplotlib")
    picture = "output.picture=pictures/curve.png"
    told = _train(f"{url}/", picture)
    assert f"wrote {url}/metrics.json and {url}/pictures/curve.png" in told
    _train(str(tmp_path / "run"), picture)
    assert _read(_get(url) / "metrics.json") == _read(tmp_path / "run" / "metrics.json")
    assert (_get(url) / "pictures" / "curve.png").read_bytes().startswith(b"\x89PNG")
    assert [p.name for p in tmp_path.iterdir()] == ["run"]


def test_a_finished_run_is_seen_and_a_longer_one_continues(
    url: str, capsys: pytest.CaptureFixture[str], tmp_path: pathlib.Path
) -> None:
    def train(*more: str) -> str:
        sets = [f"output.directory={url}", f"checkpoint.directory={url}", "output.picture="]
        sets += ["checkpoint.every=2", "optimizer.warmup_steps=0", *more]
        assert main(["train", "digits_mirrored", *(x for s in sets for x in ("--set", s))]) == 0
        return capsys.readouterr().out

    train("training.steps=4")
    before = (_get(url) / "metrics.json").read_bytes()
    again = train("training.steps=4")
    assert (
        "finished before, at step 4: nothing was trained or written. The metrics are in " in again
    )
    assert f"{url}/metrics.json" in again
    assert (_get(url) / "metrics.json").read_bytes() == before
    # Without its picture a run is not finished.
    assert (
        jobs.finished_run(_load(url, f"checkpoint.directory={url}", "output.picture=a.png")) is None
    )
    assert f"resumed from step 4: {url}/4" in train("training.steps=6")
    assert _read(_get(url) / "metrics.json")["resumed_from_step"] == 4
    assert list(tmp_path.iterdir()) == []


def test_metrics_of_another_run_are_not_written_over(url: str) -> None:
    _train(url)
    with pytest.raises(ConfigError, match=rf"'{url}/metrics.json' holds the metrics of another"):
        _train(url, f"checkpoint.directory={url}/other")


def test_one_job_writes_into_a_folder_at_a_time(
    url: str, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JAXDIST_JOB_ID", "first")
    with lock_folder(_get(url)):
        monkeypatch.setenv("JAXDIST_JOB_ID", "second")
        with pytest.raises(CheckpointError, match=rf"Another job uses '{url}'"):
            _train(url, f"checkpoint.directory={tmp_path}")
        monkeypatch.setenv("JAXDIST_JOB_ID", "first")


@pytest.mark.parametrize("name", ["/tmp/metrics.json", "../metrics.json", "a/../../b.json"])
def test_a_file_outside_of_the_folder_is_refused(url: str, name: str) -> None:
    with pytest.raises(ConfigError, match=r"output.metrics is (.|\n)* below output.directory"):
        _train(url, f"output.metrics={name}")
    assert _get(url).list_names() == []


# Stores that fail


def test_a_bucket_that_does_not_exist_is_named_before_the_training(
    store: Proxy, tmp_path: pathlib.Path
) -> None:
    here = f"checkpoint.directory={tmp_path}"
    with pytest.raises(
        ConfigError, match=rf"{store.scheme}://missing/run/(.|\n)*make it"
    ) as caught:
        _train(f"{store.scheme}://missing/run", here)
    assert "output.directory" in str(caught.value)
    with pytest.raises(ConfigError, match=r"Correct the name of the bucket"):
        _train(f"{store.scheme}://No!Bucket/run", here)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("method", ["GET", "PUT POST", "DELETE"])
def test_a_bucket_that_may_not_be_used_is_named_before_the_training(
    store: Proxy, url: str, tmp_path: pathlib.Path, method: str
) -> None:
    store.fail = lambda number, found, key: 403 if found in method.split() else None
    with pytest.raises((ConfigError, BucketError)) as caught:
        _train(url, f"checkpoint.directory={tmp_path}")
    assert "role" in str(caught.value) or "AWS_ACCESS_KEY_ID" in str(caught.value)
    assert not list(tmp_path.glob("[0-9]*"))


def test_metrics_that_cannot_be_written_are_named_and_written_by_the_next_run(
    store: Proxy, url: str, tmp_path: pathlib.Path
) -> None:
    here = f"checkpoint.directory={tmp_path}/checkpoints"
    store.fail = lambda number, method, key: 403 if "metrics" in key and method != "GET" else None
    with pytest.raises(ConfigError, match=rf"'{url}' cannot be written(.|\n)*step 4 is complete"):
        _train(url, here)
    store.reset()
    told = _train(url, here)
    assert "resumed from step 4" in told
    assert f"wrote {url}/metrics.json" in told


@pytest.mark.parametrize("status", [503, 0])
def test_requests_that_fail_now_and_then_change_nothing(
    store: Proxy, url: str, tmp_path: pathlib.Path, status: int
) -> None:
    store.fail = lambda number, method, key: status if number % 5 == 0 else None
    _train(url)
    _train(str(tmp_path / "run"))
    store.reset()
    assert _read(_get(url) / "metrics.json") == _read(tmp_path / "run" / "metrics.json")
