"""The main job: it learns, it resumes, and the number of replicas changes nothing."""

import contextlib
import dataclasses
import errno
import io
import json
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console

import jaxdist
from jaxdist import Program
from jaxdist.data import batches
from jaxdist.data._prefetch import THREAD_NAME
from jaxdist.errors import (
    CheckpointError,
    ConfigError,
    MissingExtraError,
    NonFiniteLossError,
    SavedProgramError,
)
from jaxdist.jobs import DigitsConfig, TrainingReport, load_config, load_job, make_strategy, train
from jaxdist.jobs._config.checks import check_job
from jaxdist.jobs._run import metrics, run
from jaxdist.jobs.digits._task import load_digits

SHIPPED = Path(__file__).parents[2] / "configs" / "digits_mirrored.toml"


@pytest.fixture(autouse=True)
def _no_thread_is_left() -> Iterator[None]:
    """Check that the threads that read batches ahead end with each run."""
    before = set(threading.enumerate())
    yield
    left = set(threading.enumerate()) - before
    assert [t.name for t in left if t.name == THREAD_NAME] == []


def _strategy(replicas: int) -> jaxdist.MirroredStrategy:
    return jaxdist.MirroredStrategy([f"cpu:{i}" for i in range(replicas)])


def _train(
    folder: Path, *overrides: str, replicas: int = 8, skip_damaged: bool = False
) -> tuple[TrainingReport, str]:
    """Run the job in `folder`. Return its report and its output."""
    here = [f"output.directory='{folder}'", f"checkpoint.directory='{folder / 'checkpoints'}'"]
    loaded = load_config(DigitsConfig, SHIPPED, [*here, "output.picture=", *overrides])
    out = io.StringIO()
    console = Console(file=out, width=200)
    report = train(loaded, _strategy(replicas), console=console, skip_damaged=skip_damaged)
    return report, out.getvalue()


# A net that compiles fast, in runs too short to warm up.
_SMALL = (
    "model.channels=[4]",
    "model.hidden=8",
    "data.batch_size=64",
    "optimizer.schedule=constant",
    "optimizer.warmup_steps=0",
    "checkpoint.every=5",
)


@pytest.fixture(scope="module")
def whole_losses(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """The losses of 30 small steps without a stop; 22 of them fill an epoch."""
    folder = tmp_path_factory.mktemp("whole")
    _train(folder, *_SMALL, "training.steps=30")
    losses: list[float] = _metrics(folder)["losses"]
    return losses


def test_a_saved_program_trains_the_same_and_its_options_are_those_of_the_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = (*_SMALL, "training.steps=4", "training.donate=true")
    options = ("compiler.xla_cpu_enable_fast_math=false",)
    _train(tmp_path / "compiled", *asked, *options)
    program = tmp_path / "step.program"
    job = load_job(SHIPPED, [*asked, *options])
    job.lower(_strategy(8), 8, "replicated").compile().save(program)
    compiled = []

    def compile_and_note(self: Program, *args: Any) -> Any:
        compiled.append((self.name, dict(self.asked_options)))
        return compiled_by(self, *args)

    compiled_by = Program.compiled
    monkeypatch.setattr(Program, "compiled", compile_and_note)
    saved = f"training.program='{program}'"
    _train(tmp_path / "loaded", *asked, *options, saved)
    assert "train_step" not in [name for name, _ in compiled]
    losses = [_metrics(tmp_path / name)["losses"] for name in ("compiled", "loaded")]
    assert losses[0] == losses[1]
    with pytest.raises(SavedProgramError, match="xla_cpu_enable_fast_math=false"):
        _train(tmp_path / "other", *asked, saved)
    _train(tmp_path / "again", *asked, *options)
    assert ("train_step", {"xla_cpu_enable_fast_math": False}) in compiled


def _contents(folder: Path) -> dict[str, tuple[bytes, int]]:
    """Every file below, with its bytes and when it was written."""
    files = (p for p in sorted(folder.rglob("*")) if p.is_file())
    return {str(p): (p.read_bytes(), p.stat().st_mtime_ns) for p in files}


def _metrics(folder: Path) -> dict[str, Any]:
    metrics: dict[str, Any] = json.loads((folder / "metrics.json").read_text())
    return metrics


@pytest.mark.slow
def test_the_shipped_job_reaches_97_percent_and_leaves_its_files(tmp_path: Path) -> None:
    report, out = _train(tmp_path, "output.picture=curve.png")
    assert report.evaluation is not None
    accuracy = report.evaluation["accuracy"]
    assert accuracy >= 0.97
    assert (report.steps, report.num_replicas, report.next_step) == (600, 8, 600)
    assert "step 600/600  loss" in out
    assert (tmp_path / "curve.png").read_bytes().startswith(b"\x89PNG")
    metrics = _metrics(tmp_path)
    assert len(metrics["losses"]) == 600
    assert [e["step"] for e in metrics["evaluations"]] == [100, 200, 300, 400, 500, 600]
    assert {e["images"] for e in metrics["evaluations"]} == {359}
    assert metrics["accuracy"] == accuracy
    assert len(metrics["devices"]) == metrics["replicas"] == 8
    assert metrics["config"]["data"]["batch_size"] == 128
    assert metrics["versions"]["jax"]
    assert metrics["images_per_s"] > 0
    # 359 images: the accuracy is a whole number of them.
    assert accuracy * 359 == pytest.approx(round(accuracy * 359), abs=1e-6)


@pytest.mark.slow
def test_losses_of_1_2_4_and_8_replicas_agree_over_the_first_100_steps(tmp_path: Path) -> None:
    losses = {}
    for replicas in 1, 2, 4, 8:
        folder = tmp_path / str(replicas)
        _train(folder, "training.steps=100", "checkpoint.every=1000", replicas=replicas)
        losses[replicas] = np.asarray(_metrics(folder)["losses"])
    assert losses[1].shape == (100,)
    assert losses[1][-1] < losses[1][0] / 4
    for replicas in 2, 4, 8:
        np.testing.assert_allclose(losses[replicas], losses[1], rtol=1e-4)


@pytest.mark.parametrize("donate", ["false", "true"])
def test_a_run_that_stops_and_resumes_has_the_losses_of_one_that_does_not(
    tmp_path: Path, whole_losses: list[float], donate: str
) -> None:
    common = [*_SMALL, f"training.donate={donate}"]
    _train(tmp_path, *common, "training.steps=25")  # inside the second epoch
    report, out = _train(tmp_path, *common, "training.steps=30")
    assert f"resumed from step 25: {tmp_path / 'checkpoints' / '25'}" in out
    assert report.steps == 30
    assert _metrics(tmp_path)["losses"] == whole_losses
    assert _metrics(tmp_path)["resumed_from_step"] == 25


def test_a_run_resumes_on_another_number_of_replicas(
    tmp_path: Path, whole_losses: list[float]
) -> None:
    _train(tmp_path, *_SMALL, "training.steps=15", replicas=4)
    _train(tmp_path, *_SMALL, "training.steps=30", replicas=2)
    np.testing.assert_allclose(_metrics(tmp_path)["losses"], whole_losses, rtol=1e-4)


def test_a_sharded_update_has_the_losses_of_the_replicated_one_and_resumes_elsewhere(
    tmp_path: Path,
) -> None:
    large = [*_SMALL, "model.hidden=1024"]
    _train(tmp_path / "replicated", *large, "training.steps=10", replicas=4)
    large.append("optimizer.update=sharded")
    _train(tmp_path / "sharded", *large, "training.steps=5", replicas=4)
    _train(tmp_path / "sharded", *large, "training.steps=10", replicas=2)
    losses = [_metrics(tmp_path / how)["losses"] for how in ("replicated", "sharded")]
    np.testing.assert_allclose(losses[1], losses[0], rtol=1e-5)


@pytest.mark.slow
def test_gradients_in_8_bits_reach_the_accuracy_of_those_in_32(tmp_path: Path) -> None:
    steps = ["training.steps=300", "checkpoint.every=300", "training.evaluate_every=300"]
    exact, _ = _train(tmp_path / "exact", *steps)
    few = ["optimizer.update=compressed", "optimizer.compression=int8", "optimizer.workers=4"]
    found, _ = _train(tmp_path / "few", *steps, *few)
    assert exact.evaluation is not None
    assert found.evaluation is not None
    assert exact.evaluation["accuracy"] > 0.95
    assert found.evaluation["accuracy"] >= exact.evaluation["accuracy"] - 0.003


def test_evaluation_does_not_depend_on_the_number_of_replicas(tmp_path: Path) -> None:
    # 90 held-out images in batches of 24: the 18 of the last one are no multiple of 8.
    job = [*_SMALL, "training.steps=1", "data.batch_size=24", "data.test_fraction=0.05"]
    found = {}
    for replicas in 1, 3, 8:
        folder = tmp_path / str(replicas)
        _train(folder, *job, replicas=replicas)
        (found[replicas],) = _metrics(folder)["evaluations"]
    assert found[1]["images"] == 90
    for replicas in 3, 8:
        assert found[replicas] == {**found[1], "loss": pytest.approx(found[1]["loss"], rel=1e-5)}


def _record_batches(
    monkeypatch: pytest.MonkeyPatch, seen: list[np.ndarray], *, error_at: int | None = None
) -> None:
    """Keep the images of each step, and raise in the one that is numbered `error_at` from 0."""
    step = run.Run._step

    def recorded(self: Any, state: None, batch: Any) -> Any:
        if len(seen) == error_at:
            raise RuntimeError("planted")
        seen.append(np.concatenate([np.asarray(v) for v in _values(batch["image"])]))
        return step(self, state, batch)

    monkeypatch.setattr(run.Run, "_step", recorded)


def _values(leaf: Any) -> tuple[Any, ...]:
    return leaf.values if isinstance(leaf, jaxdist.PerReplica) else (leaf,)


def test_an_error_in_a_step_and_a_resume_on_other_replicas_lose_and_repeat_no_batch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[np.ndarray] = []
    _record_batches(monkeypatch, seen, error_at=23)
    with pytest.raises(RuntimeError, match="planted"):
        _train(tmp_path, *_SMALL, "checkpoint.every=20", "training.steps=30", replicas=4)
    monkeypatch.undo()
    del seen[20:]  # steps after the checkpoint are done again
    _record_batches(monkeypatch, seen)
    _train(tmp_path, *_SMALL, "checkpoint.every=20", "training.steps=30", replicas=1)
    images = load_digits(0.2, seed=0).train["image"]
    whole = iter(batches(images, 64, shuffle=True, seed=0, drop_remainder=True, repeat=None))
    expected = [next(whole) for _ in range(30)]
    np.testing.assert_array_equal(np.stack(seen), np.stack(expected))


def test_a_run_that_is_done_trains_no_step_and_says_so(tmp_path: Path) -> None:
    first, _ = _train(tmp_path, *_SMALL, "training.steps=5", replicas=1)
    before = _contents(tmp_path)
    second, out = _train(tmp_path, *_SMALL, "training.steps=5", replicas=1)
    assert "finished before, at step 5: nothing was trained or written" in out
    assert f"{tmp_path / 'metrics.json'}; --set training.steps=" in out
    assert (second.steps, second.evaluation, second.was_finished) == (5, first.evaluation, True)
    assert second.headline == first.headline
    assert second.units_per_s is None
    assert _contents(tmp_path) == before


def test_a_damaged_checkpoint_is_an_error_and_with_the_flag_the_one_before_is_used(
    tmp_path: Path, whole_losses: list[float]
) -> None:
    _train(tmp_path, *_SMALL, "training.steps=10")
    damaged = tmp_path / "checkpoints" / "10" / "state" / "manifest.ocdbt"
    damaged.write_bytes(b"not what was written")
    with pytest.raises(CheckpointError) as caught:
        _train(tmp_path, *_SMALL, "training.steps=10")
    assert str(damaged) in str(caught.value)
    assert "--resume-from-previous" in str(caught.value)
    report, out = _train(tmp_path, *_SMALL, "training.steps=10", skip_damaged=True)
    assert "resumed from step 5" in out
    assert f"moved to {tmp_path / 'checkpoints' / 'damaged' / '10'}" in out
    assert report.steps == report.next_step == 10
    assert _metrics(tmp_path)["losses"] == whole_losses[:10]


def test_a_checkpoint_that_does_not_belong_to_the_run_is_refused(tmp_path: Path) -> None:
    small = [*_SMALL, "training.steps=5"]
    _train(tmp_path, *small, replicas=1)
    with pytest.raises(CheckpointError, match=r"model\.hidden: saved 8, now 9"):
        _train(tmp_path, *small, "model.hidden=9")
    with pytest.raises(CheckpointError, match=r"data\.seed: saved 0, now 1"):
        _train(tmp_path, *small, "data.seed=1")
    with pytest.raises(CheckpointError, match=r"data\.seed: saved 0, now 1"):
        _train(tmp_path, *small, "data.seed=1", "training.steps=6")
    with pytest.raises(CheckpointError, match=r"training\.steps is 4(.|\n)*to 5 or more"):
        _train(tmp_path, *small, "training.steps=4")
    with pytest.raises(CheckpointError, match=r"steps \[5\], and checkpoint\.resume is false"):
        _train(tmp_path, *small, "checkpoint.resume=false")


@pytest.mark.parametrize("k", [1, 7])
def test_ctrl_c_in_the_kth_step_saves_nothing_half_way_and_the_next_run_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, whole_losses: list[float], k: int
) -> None:
    small = [*_SMALL, "training.steps=10"]
    step = run.Run._step
    calls = []

    def interrupted(self: Any, state: None, batch: Any) -> Any:
        calls.append(1)
        out = step(self, state, batch)  # the state is updated, and nobody knows yet
        if len(calls) == k:
            raise KeyboardInterrupt
        return out

    monkeypatch.setattr(run.Run, "_step", interrupted)
    report, _ = _train(tmp_path, *small)
    monkeypatch.undo()
    assert report.was_interrupted
    assert report.steps == k - 1
    assert report.next_step == ((k - 1) // 5 * 5 or None)
    assert not (tmp_path / "metrics.json").exists()
    report, _ = _train(tmp_path, *small)
    assert not report.was_interrupted
    assert _metrics(tmp_path)["losses"] == whole_losses[:10]


def test_ctrl_c_that_python_loses_in_a_callback_ends_training_after_the_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    step = run.Run._step

    def interrupted(self: Any, state: None, batch: Any) -> Any:
        with contextlib.suppress(KeyboardInterrupt):  # as a callback of the garbage collector does
            signal.raise_signal(signal.SIGINT)
        return step(self, state, batch)

    monkeypatch.setattr(run.Run, "_step", interrupted)
    handler = signal.getsignal(signal.SIGINT)
    report, _ = _train(tmp_path, *_SMALL, "training.steps=10", replicas=2)
    assert (report.was_interrupted, report.steps, report.next_step) == (True, 1, None)
    assert signal.getsignal(signal.SIGINT) is handler


# Entries that do not go together


def _check(*overrides: str, replicas: int = 8) -> None:
    loaded = load_config(DigitsConfig, SHIPPED, overrides)
    check_job(loaded, num_replicas=replicas, num_examples=1438, examples="images")


def test_a_batch_that_replicas_cannot_share_names_the_option_and_the_nearest_that_they_can(
    tmp_path: Path,
) -> None:
    here = f"output.directory='{tmp_path}'"
    _check(here, "data.batch_size=100")
    with pytest.raises(ConfigError) as caught:
        _check(here, "data.batch_size=100", "strategy.deterministic=true")
    message = str(caught.value)
    assert "--set data.batch_size=100: data.batch_size is 100, and there are 8 replicas" in message
    assert "Set data.batch_size to 96 or 104, or strategy.deterministic to false." in message
    with pytest.raises(ConfigError, match=r"batch_size to 8 or more\."):
        _check(here, "data.batch_size=3")
    with pytest.raises(ConfigError, match=r"1438 images(.|\n)*to 1432 or less"):
        _check(here, "data.batch_size=2000")


def test_a_batch_of_the_file_is_named_with_its_line(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"digits_mirrored\.toml, line \d+: data\.batch_size"):
        _check(f"output.directory='{tmp_path}'", replicas=200)


def test_a_warm_up_that_outlasts_training_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"warmup_steps is 20(.|\n)*warmup_steps to 1 or"):
        _check(f"output.directory='{tmp_path}'", "training.steps=10")


@pytest.mark.parametrize(
    ("entry", "words"),
    [
        ("directory={}/file", r"--set output\.directory=.*written to '.*file' \(output\.dir"),
        ("metrics=../file/x.json", r"--set output\.metrics=(.|\n)*file' \(output\.metrics\)"),
        ("metrics=.", r"output\.metrics '\.' is a directory(.|\n)*name of a file"),
        ("picture=folder", r"output\.picture 'folder' is a directory"),
        ("picture=metrics.json", r"output\.picture and output\.metrics are one file"),
    ],
)
def test_files_that_cannot_be_written_are_named_before_training(
    tmp_path: Path, entry: str, words: str
) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "out" / "folder").mkdir(parents=True)
    with pytest.raises(ConfigError, match=words):
        _check(f"output.directory={tmp_path}/out", f"output.{entry.format(tmp_path)}")
    assert [p.name for p in (tmp_path / "out").iterdir()] == ["folder"]


def test_fewer_examples_than_replicas_is_an_error_that_no_batch_size_mends(tmp_path: Path) -> None:
    loaded = load_config(DigitsConfig, SHIPPED, [f"output.directory='{tmp_path}'"])
    with pytest.raises(ConfigError, match=r"3 images to train on, and 8 replicas(.|\n)*line \d\d"):
        check_job(loaded, num_replicas=8, num_examples=3, examples="images")


def test_a_run_says_what_it_trains_and_sends_and_where_its_files_are(tmp_path: Path) -> None:
    _, out = _train(tmp_path, *_SMALL, "training.steps=1", replicas=2)
    words = out.splitlines()
    # 3x3 kernels for 4 channels, 64 inputs of 8 units and 10 classes, with biases.
    # Beside their gradients, the loss and the number of images are summed.
    assert words[0] == "digits: 650 parameters on 2 replica(s) of 1 cpu device(s), 64 images a step"
    assert words[1] == f"each step: all-reduce of {4 * (650 + 2):,} bytes between 2 replicas"
    assert words[-1] == f"wrote {tmp_path / 'metrics.json'}"


def test_a_loss_that_is_not_finite_ends_training_before_anything_is_saved_of_it(
    tmp_path: Path,
) -> None:
    job = [*_SMALL, "checkpoint.every=1", "training.log_every=100", "training.steps=9"]
    job.append("optimizer.learning_rate=1e30")
    with pytest.raises(
        NonFiniteLossError, match=r"loss of step 2 is (nan|inf)(.|\n)*of step 1\."
    ) as caught:
        _train(tmp_path, *job, replicas=2)
    assert "--set optimizer.learning_rate=1e+29, or --set optimizer.clip_norm=1.0" in str(
        caught.value
    )
    assert not (tmp_path / "metrics.json").exists()
    assert [p.name for p in (tmp_path / "checkpoints").iterdir() if p.name.isdigit()] == ["1"]


def test_a_disk_that_fills_up_while_files_are_written_is_told_with_what_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(metrics, "write_metrics", full)
    with pytest.raises(ConfigError, match=r"No space left(.|\n)*checkpoint of step 1 is complete"):
        _train(tmp_path, *_SMALL, "training.steps=1", replicas=2)


def test_a_missing_matplotlib_is_found_before_training_and_only_where_it_is_needed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(__import__("sys").modules, "matplotlib", None)
    here = f"output.directory='{tmp_path}'"
    with pytest.raises(MissingExtraError, match="pip install matplotlib"):
        _check(here)
    _check(here, "output.picture=")


# Data and devices


def test_train_and_held_out_images_are_all_images_once() -> None:
    digits = load_digits(0.2, seed=5)
    both = np.concatenate([digits.train["image"], digits.held_out["image"]])
    assert both.shape == (1797, 8, 8, 1)
    assert both.dtype == np.float32
    assert (both.min(), both.max()) == (0.0, 1.0)
    whole = load_digits(0.5, seed=1)
    other = np.concatenate([whole.train["image"], whole.held_out["image"]])
    order = np.lexsort(both.reshape(1797, -1).T)
    np.testing.assert_array_equal(both[order], other[np.lexsort(other.reshape(1797, -1).T)])
    assert len(load_digits(1e-9, seed=0).held_out["label"]) == 1
    assert len(load_digits(1 - 1e-9, seed=0).train["label"]) == 1


def test_devices_are_those_listed_or_as_many_virtual_ones_as_asked_for() -> None:
    config = DigitsConfig()
    for strategy_config, devices in [
        (dataclasses.replace(config.strategy, devices=("cpu:3", "cpu:1")), [3, 1]),
        (dataclasses.replace(config.strategy, virtual_devices=4), [0, 1, 2, 3]),
    ]:
        strategy = make_strategy(dataclasses.replace(config, strategy=strategy_config))
        assert [d.id for d in strategy.mesh.devices.ravel()] == devices
