"""Everything that saves checkpoints takes the address of a bucket."""

import uuid
from typing import Any

import jax
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType

import jaxdist
from jaxdist import fit, partition
from jaxdist.cli import main
from jaxdist.errors import CheckpointError
from jaxdist.training import Checkpoints
from tests.checkpoints.buckets.stores import BUCKET, SCHEMES, use_store

_X = np.random.default_rng(0).normal(size=(16, 3)).astype(np.float32)
_Y = _X @ np.ones((3, 2), np.float32)


@pytest.fixture(params=SCHEMES)
def url(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    use_store(request.param, monkeypatch)
    return f"{request.param}://{BUCKET}/{uuid.uuid4().hex}"


def _make_model(seed: int) -> fit.Model:
    model = fit.Model(nnx.Linear(3, 2, rngs=nnx.Rngs(seed)))
    model.compile("adam", "mse")
    return model


def _fit(model: fit.Model, epochs: int, *callbacks: Any) -> fit.History:
    return model.fit(_X, _Y, batch_size=4, epochs=epochs, verbose=0, callbacks=list(callbacks))


def test_fit_resumes_from_a_bucket_as_if_it_had_not_stopped(url: str) -> None:
    whole = _fit(_make_model(0), 4)
    _fit(_make_model(0), 2, fit.ModelCheckpoint(url, resume=True, save_freq=3))
    other = _make_model(1)
    resumed = _fit(other, 4, fit.ModelCheckpoint(url, resume=True, save_freq=3))
    assert resumed.epoch == [2, 3]
    assert resumed.history["loss"] == whole.history["loss"][2:]
    with pytest.raises(CheckpointError, match="resume=True"):
        _fit(_make_model(0), 1, fit.ModelCheckpoint(url, save_freq=3))


def test_a_model_is_saved_and_loaded(url: str) -> None:
    model, other = _make_model(0), _make_model(1)
    with pytest.raises(CheckpointError, match="which has no model"):
        other.load(url)
    model.save(url)
    model.save(url)
    other.load(url)
    for a, b in zip(model.get_weights(), other.get_weights(), strict=True):
        np.testing.assert_array_equal(a, b)


def test_stacks_of_layers_get_other_chunks(url: str) -> None:
    mesh = jax.make_mesh((2, 4), ("data", "stage"), axis_types=(AxisType.Auto,) * 2)
    strategy = jaxdist.MirroredStrategy(mesh=mesh, replica_axes=("data",))
    stack = np.random.default_rng(0).normal(size=(2, 4, 3)).astype(np.float32)
    rules = [("layers", partition.Stage(chunks=2)), ("head", partition.Replicate())]
    like = {"layers": np.zeros((8, 3), np.float32), "head": np.zeros(2, np.float32)}
    placed = partition.place(strategy, {**like, "layers": stack}, rules)
    rules[0] = ("layers", partition.Stage())
    with Checkpoints(url) as checkpoints:
        checkpoints.save(1, placed)
        other: Any = partition.place(strategy, like, rules)
        found = checkpoints.restore(1, like=other, stacks="layers").state["layers"]
    assert found.sharding == other["layers"].sharding
    np.testing.assert_array_equal(found, stack.reshape(8, 3))


def test_a_handler_of_preemptions_saves_and_restores(url: str) -> None:
    saved: list[int] = []
    runs = 0
    config = jaxdist.experimental.TerminationConfig(
        termination_watcher_fn=lambda: runs >= 3, exit_fn=lambda: saved.append(runs)
    )
    model = nnx.Linear(3, 2, rngs=nnx.Rngs(0))
    handler = jaxdist.experimental.PreemptionCheckpointHandler(
        None, model, checkpoint_dir=url, termination_config=config
    )
    while not saved:
        handler.run(lambda: None)
        runs = handler.total_run_calls
    handler.close()
    other = nnx.Linear(3, 2, rngs=nnx.Rngs(1))
    again = jaxdist.experimental.PreemptionCheckpointHandler(None, other, checkpoint_dir=url)
    assert again.total_run_calls >= saved[0] >= 3
    np.testing.assert_array_equal(other.kernel[...], model.kernel[...])
    again.close()


def test_a_configured_job_resumes_from_a_bucket(
    url: str, tmp_path: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    sets = [f"checkpoint.directory={url}", "checkpoint.every=4"]
    sets += ["output.picture=", "optimizer.warmup_steps=0"]

    def train(steps: int, *more: str) -> int:
        given = [*sets, f"training.steps={steps}", *more]
        return main(["train", "digits_mirrored", *(x for s in given for x in ("--set", s))])

    assert train(8) == 0
    assert train(12) == 0
    printed = capsys.readouterr().out
    assert f"resumed from step 8: {url}/8" in printed
    assert train(12) == 0
    assert "steps 12" in capsys.readouterr().out
    assert train(12, "checkpoint.resume=false") != 0
    assert f"{url} holds checkpoints" in capsys.readouterr().err
    assert [p.name for p in tmp_path.iterdir()] == ["runs"]
