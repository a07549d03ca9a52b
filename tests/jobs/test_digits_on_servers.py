"""`configs/digits_parameter_server.toml`: one server and two workers in this process."""

import io
import json
import logging
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from jaxdist import ParameterServerStrategy
from jaxdist._parameter_server.protocol import Hello
from jaxdist.cli._train import format_interrupted_line
from jaxdist.data import batches
from jaxdist.errors import ConfigError, InputContextError, NonFiniteLossError
from jaxdist.jobs import TrainingReport, load_job_config, make_strategy, train
from jaxdist.jobs._run.train import ServerRun

ROOT = Path(__file__).parents[2]
CONFIG = ROOT / "configs" / "digits_parameter_server.toml"
SMALL = (
    "model.channels=[4]",
    "model.hidden=8",
    "data.batch_size=64",
    "optimizer.schedule=constant",
    "optimizer.warmup_steps=0",
    "training.log_every=5",
    "training.evaluate_every=10",
    "checkpoint.every=10",
    "output.picture=",
)


def _train(folder: Path, *overrides: str, config: Path = CONFIG) -> tuple[TrainingReport, str]:
    here = [f"output.directory='{folder}'", f"checkpoint.directory='{folder / 'checkpoints'}'"]
    loaded = load_job_config(config, [*here, *overrides])
    out = io.StringIO()
    report = train(loaded, make_strategy(loaded.values), console=Console(file=out, width=200))
    return report, out.getvalue()


def _read_metrics(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "metrics.json").read_text())
    return found


@pytest.fixture(scope="module")
def whole_losses(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """The losses of 20 steps of one worker without a stop."""
    folder = tmp_path_factory.mktemp("whole")
    _train(folder, *SMALL, "strategy.workers=1", "training.steps=20")
    losses: list[float] = _read_metrics(folder)["losses"]
    return losses


def _interrupt_at(monkeypatch: pytest.MonkeyPatch, step: int, is_lost: bool = False) -> None:
    """Let Ctrl-C come when a step is scheduled; `is_lost`: before anybody knows of the step."""
    schedule = ServerRun._step
    calls: list[int] = []

    def interrupted(self: ServerRun, state: None, batch: Any) -> Any:
        calls.append(1)
        out = schedule(self, state, batch)
        if len(calls) == step and is_lost:
            raise KeyboardInterrupt
        if len(calls) == step:
            signal.raise_signal(signal.SIGINT)
        return out

    monkeypatch.setattr(ServerRun, "_step", interrupted)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_it_reaches_the_accuracy_of_the_synchronous_job(tmp_path: Path) -> None:
    _, out = _train(tmp_path / "servers")
    assert "on 1 server(s), 2 asynchronous worker(s), 128 images a step" in out
    # The same steps, of which each is computed by one replica.
    alone = ["strategy.kind=auto", "strategy.virtual_devices=1", "output.picture="]
    _train(tmp_path / "alone", *alone)
    found, alone_found = _read_metrics(tmp_path / "servers"), _read_metrics(tmp_path / "alone")
    assert found["accuracy"] > 0.97
    assert found["accuracy"] == pytest.approx(alone_found["accuracy"], abs=0.01)
    assert (tmp_path / "servers" / "learning_curve.png").stat().st_size > 10_000
    counts = found["parameter_servers"]
    assert (counts["scheduled"], counts["applied"], counts["lost"]) == (600, 600, 0)
    # Otherwise the workers would have been in step with each other.
    assert sum(n for late, n in counts["staleness"].items() if int(late) > 0) > 0


def test_metrics_have_every_step_and_evaluations_warn_of_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "jaxdist"):
        report, out = _train(tmp_path, *SMALL, "training.steps=20")
    assert [r.getMessage() for r in caplog.records] == []
    assert (report.steps, report.was_interrupted) == (20, False)
    found = _read_metrics(tmp_path)
    assert len(found["losses"]) == 20
    assert found["losses"][-1] < found["losses"][0]
    assert [e["step"] for e in found["evaluations"]] == [10, 20]
    counts = found["parameter_servers"]
    assert (counts["scheduled"], counts["applied"], counts["lost"]) == (20, 20, 0)
    # Each step changes each of the 6 parameters and the count of steps once.
    assert sum(counts["staleness"].values()) == 20 * 7
    assert "step 20: held-out accuracy" in out
    # A finished run trains nothing again.
    report, out = _train(tmp_path, *SMALL, "training.steps=20")
    assert report.steps == 20
    assert "worker(s)" not in out


def test_one_worker_has_the_losses_of_one_replica(tmp_path: Path) -> None:
    one = [*SMALL, "training.steps=10", "optimizer.weight_decay=1e-2"]
    _train(tmp_path / "servers", *one, "strategy.workers=1", "strategy.servers=3")
    _train(tmp_path / "alone", *one, "strategy.kind=auto", "strategy.virtual_devices=1")
    found, alone = _read_metrics(tmp_path / "servers"), _read_metrics(tmp_path / "alone")
    assert found["losses"] == pytest.approx(alone["losses"], rel=1e-4)
    assert found["evaluations"][-1]["loss"] == pytest.approx(
        alone["evaluations"][-1]["loss"], rel=1e-4
    )


def test_no_change_is_staler_than_the_bound(tmp_path: Path) -> None:
    bounded = [*SMALL, "training.steps=20", "strategy.workers=3", "strategy.max_staleness=1"]
    _train(tmp_path, *bounded)
    counts = _read_metrics(tmp_path)["parameter_servers"]
    assert (counts["scheduled"], counts["applied"]) == (20, 20)
    assert max(map(int, counts["staleness"])) <= 1


@pytest.mark.parametrize("step", [1, 13])
def test_ctrl_c_saves_the_steps_of_the_queue_and_the_next_run_trains_the_missing_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, whole_losses: list[float], step: int
) -> None:
    one = [*SMALL, "strategy.workers=1", "training.steps=20"]
    _interrupt_at(monkeypatch, step)
    report, out = _train(tmp_path / "stopped", *one)
    monkeypatch.undo()
    assert (report.was_interrupted, report.steps, report.next_step) == (True, step, step)
    assert f"step {step}: saved " in out
    assert f"after step {step}, which was saved" in format_interrupted_line(report, tmp_path)
    assert not (tmp_path / "stopped" / "metrics.json").exists()
    report, out = _train(tmp_path / "stopped", *one)
    assert f"resumed from step {step}: " in out
    found = _read_metrics(tmp_path / "stopped")
    assert found["resumed_from_step"] == step
    counts = found["parameter_servers"]
    assert (counts["scheduled"], counts["applied"]) == (20 - step, 20 - step)
    # One worker is in step with itself, so the losses are those of a run that was not stopped.
    assert found["losses"] == pytest.approx(whole_losses, rel=1e-4)


def test_a_step_that_ctrl_c_lets_nobody_count_is_not_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, whole_losses: list[float]
) -> None:
    one = [*SMALL, "strategy.workers=1", "training.steps=12", "checkpoint.every=5"]
    _interrupt_at(monkeypatch, 7, is_lost=True)
    report, _ = _train(tmp_path / "stopped", *one)
    monkeypatch.undo()
    assert (report.was_interrupted, report.steps, report.next_step) == (True, 6, 5)
    _train(tmp_path / "stopped", *one)
    losses = _read_metrics(tmp_path / "stopped")["losses"]
    assert losses == pytest.approx(whole_losses[:12], rel=1e-4)


def test_a_loss_that_is_not_finite_ends_the_run_and_is_named(tmp_path: Path) -> None:
    with pytest.raises(NonFiniteLossError, match=r"The loss of step \d+ is (nan|inf)"):
        _train(tmp_path, *SMALL, "training.steps=20", "optimizer.learning_rate=1e30")


def test_the_entries_make_the_tasks_of_the_strategy() -> None:
    config = load_job_config(CONFIG, ["strategy.servers=2", "strategy.workers=3"]).values
    strategy = make_strategy(config)
    assert isinstance(strategy, ParameterServerStrategy)
    jobs = strategy.cluster_resolver.cluster_spec().as_dict()
    assert {job: len(tasks) for job, tasks in jobs.items()} == {"chief": 1, "ps": 2, "worker": 3}
    assert [link.call(Hello()).max_staleness for link in strategy.storage.links] == [None, None]
    strategy = make_strategy(load_job_config(CONFIG, ["strategy.max_staleness=0"]).values)
    assert isinstance(strategy, ParameterServerStrategy)
    assert strategy.storage.links[0].call(Hello()).max_staleness == 0


def test_a_cluster_without_servers_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = {"chief": ["a:1"], "worker": ["b:1"]}
    task = {"type": "chief", "index": 0}
    monkeypatch.setenv("TF_CONFIG", json.dumps({"cluster": cluster, "task": task}))
    with pytest.raises(ConfigError, match="no parameter servers"):
        make_strategy(load_job_config(CONFIG).values)


@pytest.mark.parametrize(
    ("entry", "text"),
    [
        ("strategy.devices=['cpu:0']", "strategy.devices is "),
        ("strategy.logical_devices=2", "strategy.logical_devices is 2"),
        ("strategy.slices=2", "strategy.slices is 2"),
        ("strategy.deterministic=true", "strategy.deterministic is True"),
        ("strategy.partition=fsdp", "strategy.partition is 'fsdp'"),
        ("optimizer.update=sharded", "optimizer.update is 'sharded'"),
        ("optimizer.clip_norm=1.0", "optimizer.clip_norm is 1.0"),
    ],
)
def test_entries_that_servers_cannot_have_are_refused(entry: str, text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_job_config(CONFIG, [entry])
    assert text in str(caught.value)
    assert "strategy.kind is 'parameter_server'" in str(caught.value)
    assert 'or strategy.kind to "auto"' in str(caught.value)


@pytest.mark.parametrize(
    ("entry", "text"),
    [
        ("servers=0", "strategy.servers must lie between 1 and"),
        ("workers=0", "strategy.workers must lie between 1 and"),
        ("max_staleness=-1", "strategy.max_staleness must"),
        ("max_staleness=none", "strategy.max_staleness must"),
    ],
)
def test_numbers_of_tasks_and_bounds_out_of_range_are_named(entry: str, text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        load_job_config(CONFIG, [f"strategy.{entry}"])


def test_a_job_reads_batches_in_this_process_and_other_programs_do_not() -> None:
    strategy = make_strategy(load_job_config(CONFIG).values)
    assert isinstance(strategy, ParameterServerStrategy)
    data = iter(strategy.experimental_distribute_dataset(batches(np.arange(4), 2)))
    with data, pytest.raises(InputContextError, match="was called on the coordinator"):
        next(data)
    strategy._allow_work_here()
    with iter(strategy.experimental_distribute_dataset(batches(np.arange(4), 2))) as data:
        assert next(data).tolist() == [0, 1]
