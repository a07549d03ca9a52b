"""`configs/digits_multi_worker.toml` on 2 processes with 2 devices, under `jaxdist launch`."""

import io
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console

import jaxdist
from jaxdist.errors import ConfigError
from jaxdist.jobs import count_cpu_devices, load_job_config, make_strategy, train

ROOT = Path(__file__).parents[3]
CONFIG = ROOT / "configs" / "digits_multi_worker.toml"
_SMALL = (
    "model.channels=[4]",
    "model.hidden=8",
    "training.log_every=5",
    "training.evaluate_every=10",
    "checkpoint.every=10",
    "optimizer.schedule=constant",
    "output.picture=",
)


def _list_overrides(folder: Path, steps: int) -> list[str]:
    here = [f"output.directory='{folder}'", f"checkpoint.directory='{folder / 'checkpoints'}'"]
    return [*_SMALL, *here, f"training.steps={steps}"]


def _launch(folder: Path, steps: int, *options: str, **environment: str) -> str:
    """Launch 2 processes with 2 devices each, and return what they print."""
    sets = [word for o in _list_overrides(folder, steps) for word in ("--set", o)]
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("XLA_FLAGS", "JAXDIST_"))}
    kept |= {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu", **environment}
    kept["JAX_DISABLE_MOST_OPTIMIZATIONS"] = "1"
    program = [str(Path(__file__).parent / "dying.py")] if environment else []
    ended = subprocess.run(
        [sys.executable, "-m", "jaxdist", "launch", "-n", "2", "--devices-per-process", "2"]
        + [*options, *program, "train", str(CONFIG), *sets],
        env=kept,
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=250,
        check=False,
    )
    assert ended.returncode == 0, ended.stdout[-3000:] + ended.stderr[-5000:]
    return ended.stdout


def _train_alone(folder: Path, steps: int) -> dict[str, Any]:
    """Train on 4 devices of this process, and return the metrics."""
    loaded = load_job_config(str(CONFIG), _list_overrides(folder, steps))
    strategy = jaxdist.MirroredStrategy([f"cpu:{i}" for i in range(4)])
    train(loaded, strategy, console=Console(file=io.StringIO()))
    return _read_metrics(folder)


def _read_metrics(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "metrics.json").read_text())
    return found


def _compare(found: dict[str, Any], alone: dict[str, Any]) -> None:
    np.testing.assert_allclose(found["losses"], alone["losses"], atol=1e-5)
    assert found["replicas"] == 4
    assert [e["step"] for e in found["evaluations"]] == [e["step"] for e in alone["evaluations"]]
    for mine, other in zip(found["evaluations"], alone["evaluations"], strict=True):
        assert mine["accuracy"] == pytest.approx(other["accuracy"], abs=1e-5)
        assert mine["loss"] == pytest.approx(other["loss"], abs=1e-5)


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_two_processes_train_as_one_with_as_many_devices_and_resume(tmp_path: Path) -> None:
    (tmp_path / "two").mkdir()
    out = _launch(tmp_path / "two", 20)
    lines = [line for line in out.splitlines() if "Gloo" not in line]
    # Only the first process shows the progress.
    assert any(line.startswith("[0] step 20: held-out accuracy") for line in lines)
    assert [line for line in lines if line.startswith("[1]") and "step" in line] == []
    assert sorted(p.name for p in (tmp_path / "two").glob("[!.]*")) == [
        "checkpoints",
        "metrics.json",
    ]
    out = _launch(tmp_path / "two", 30)
    assert "[0] resumed from step 20" in out
    _compare(_read_metrics(tmp_path / "two"), _train_alone(tmp_path / "one", 30))
    # A finished run changes nothing, and one process says so.
    out = _launch(tmp_path / "two", 30)
    assert sum("accuracy" in line for line in out.splitlines()) == 1


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize("victim", [0, 1])
def test_a_restart_after_a_kill_loses_the_step_in_flight_and_no_more(
    tmp_path: Path, victim: int
) -> None:
    (tmp_path / "two").mkdir()
    killed = {"VICTIM": str(victim), "AT_STEP": "17"}
    out = _launch(tmp_path / "two", 20, "--restarts", "1", **killed)
    assert "[0] resumed from step 17" in out
    _compare(_read_metrics(tmp_path / "two"), _train_alone(tmp_path / "one", 20))


def test_without_a_cluster_it_trains_on_the_devices_of_one_process() -> None:
    config = load_job_config(str(CONFIG)).values
    assert count_cpu_devices(config) == 4
    strategy = make_strategy(config)
    assert isinstance(strategy, jaxdist.MultiWorkerMirroredStrategy)
    assert not strategy.layout.is_shared


@pytest.mark.parametrize(
    ("entry", "text"),
    [
        ("devices=['cpu:0']", "strategy.devices is "),
        ("logical_devices=2", "strategy.logical_devices is 2"),
        ("virtual_devices='v5e:2x4'", "Set strategy.virtual_devices to 8"),
        ("slices=2", "strategy.slices is 2"),
    ],
)
def test_entries_for_the_devices_of_one_process_are_refused(entry: str, text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_job_config(str(CONFIG), [f"strategy.{entry}"])
    assert text in str(caught.value)
    assert "strategy.kind is 'multi_worker_mirrored'" in str(caught.value)
