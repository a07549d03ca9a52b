"""`jaxdist train` as real processes that are killed, interrupted, and run again."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from tests.jobs.own_task import write_own_task

ROOT = Path(__file__).parents[2]
SHIPPED = ROOT / "configs" / "digits_mirrored.toml"
_OF_DIGITS = ("model.channels=[4]", "model.hidden=8")
_OPTIONS = (
    "data.batch_size=64",
    "optimizer.warmup_steps=0",
    "optimizer.schedule=constant",
    "checkpoint.every=2",
    "checkpoint.directory=checkpoints",
    "output.directory=.",
    "output.picture=",
    "strategy.virtual_devices=2",
)

MODULE = ("-m", "jaxdist")

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


class _Trainings:
    """Starts `jaxdist train` in one folder, and ends the processes that it started."""

    def __init__(self, folder: Path, config: Path = SHIPPED, program: Sequence[str] = MODULE):
        self.folder, self.config, self.program = folder, config, program
        self.options = (*_OPTIONS, *(_OF_DIGITS if config is SHIPPED else ()))
        self.children: list[subprocess.Popen[str]] = []

    def start(self, steps: int) -> subprocess.Popen[str]:
        environment = {k: v for k, v in os.environ.items() if k != "XLA_FLAGS"}
        # What is compiled has to be the same each time, and not fast.
        environment.update(
            PYTHONPATH=str(ROOT), JAX_PLATFORMS="cpu", JAX_DISABLE_MOST_OPTIMIZATIONS="1"
        )
        sets = [word for o in (*self.options, f"training.steps={steps}") for word in ("--set", o)]
        child = subprocess.Popen(
            [sys.executable, *self.program, "train", str(self.config), *sets],
            cwd=self.folder,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.children.append(child)
        return child

    def finish(self, steps: int) -> str:
        """Run to the end, and return the output."""
        child = self.start(steps)
        out, err = child.communicate(timeout=200)
        assert child.returncode == 0, err[-3000:]
        return out

    def losses(self) -> list[float]:
        losses: list[float] = json.loads((self.folder / "metrics.json").read_text())["losses"]
        return losses

    def complete(self) -> list[int]:
        """Steps of the checkpoints that a new process would find."""
        folder = self.folder / "checkpoints"
        return sorted(int(p.name) for p in folder.iterdir() if p.name.isdigit())

    def end(self) -> None:
        for child in self.children:
            child.kill()
            child.communicate()


@pytest.fixture
def trainings(tmp_path: Path) -> Iterator[_Trainings]:
    """A folder to train in."""
    made = _Trainings(tmp_path)
    yield made
    made.end()


def _wait_for_line(child: subprocess.Popen[str], words: str, times: int) -> None:
    assert child.stdout is not None
    for line in child.stdout:
        times -= words in line
        if times == 0:
            return
    raise AssertionError(f"{words!r} was not printed: {child.communicate()[1][-3000:]}")


def _resumed_step(out: str) -> int:
    return int(out.split("resumed from step ")[1].split(":")[0])


def test_killed_after_the_kth_checkpoint_each_run_goes_on_from_the_last_complete_one(
    trainings: _Trainings,
) -> None:
    reached = 0
    for k in 1, 2, 3:
        child = trainings.start(steps=1000)
        _wait_for_line(child, ": saved checkpoints", times=k)
        child.send_signal(signal.SIGKILL)
        out, _ = child.communicate()
        assert child.returncode == -signal.SIGKILL
        now = trainings.complete()[-1]
        assert now >= reached + 2 * k
        reached = now
    steps = reached + 2
    out = trainings.finish(steps)
    assert _resumed_step(out) == reached
    resumed = trainings.losses()
    assert len(resumed) == steps

    whole = _Trainings(trainings.folder / "whole")
    whole.folder.mkdir()
    whole.finish(steps)
    assert whole.losses() == resumed


# As pip writes it: Python looks for modules in the folder of the script, not in the current one.
CONSOLE_SCRIPT = "import sys\nfrom jaxdist.cli import main\nsys.exit(main())\n"


@pytest.mark.parametrize("is_script", [True, False], ids=["script", "module"])
def test_a_task_in_a_file_of_the_user_is_killed_and_goes_on(
    is_script: bool, tmp_path: Path
) -> None:
    config = write_own_task(tmp_path)
    script = tmp_path / "bin" / "jaxdist"
    script.parent.mkdir()
    script.write_text(CONSOLE_SCRIPT)
    trainings = _Trainings(tmp_path, config, (str(script),) if is_script else MODULE)
    try:
        child = trainings.start(steps=100000)
        _wait_for_line(child, ": saved checkpoints", times=1)
        child.send_signal(signal.SIGKILL)
        child.communicate()
        reached = trainings.complete()[-1]
        out = trainings.finish(steps=reached + 2)
        assert _resumed_step(out) == reached
        assert "sine: 193 parameters on 2 replica(s)" in out
        assert len(trainings.losses()) == reached + 2
    finally:
        trainings.end()


def test_killed_while_a_checkpoint_is_written_the_next_run_takes_the_one_before(
    trainings: _Trainings,
) -> None:
    folder = trainings.folder / "checkpoints"
    child = trainings.start(steps=100000)
    _wait_for_line(child, ": saved checkpoints", times=1)
    # Poll for a directory that is being written, and stop the process at that moment.
    partial: list[Path] = []
    while not partial and child.poll() is None:
        partial = [p for p in folder.iterdir() if "tmp" in p.name]
    child.send_signal(signal.SIGKILL)
    child.communicate()
    assert partial
    before = trainings.complete()
    assert _resumed_step(trainings.finish(steps=before[-1] + 2)) == before[-1]
    assert not [p for p in folder.iterdir() if "tmp" in p.name]


def test_ctrl_c_exits_with_130_says_where_and_the_next_run_goes_on(trainings: _Trainings) -> None:
    child = trainings.start(steps=100000)
    _wait_for_line(child, ": saved checkpoints", times=1)
    child.send_signal(signal.SIGINT)
    _, err = child.communicate(timeout=60)
    assert child.returncode == 130
    assert "Traceback" not in err
    last = trainings.complete()[-1]
    assert "stopped by Ctrl-C after step" in err
    assert f"resumes from step {last}: checkpoints/{last}" in err
    assert not (trainings.folder / "metrics.json").exists()
    assert _resumed_step(trainings.finish(steps=last + 2)) == last


@pytest.mark.long
def test_a_second_job_in_one_folder_is_refused_while_the_first_trains_and_not_after(
    trainings: _Trainings,
) -> None:
    first = trainings.start(steps=100000)
    _wait_for_line(first, ": saved checkpoints", times=1)
    second = trainings.start(steps=100000)
    _, err = second.communicate(timeout=200)
    assert second.returncode == 2
    assert f"Another job uses 'checkpoints': process {first.pid} on" in err
    assert "Traceback" not in err
    assert first.poll() is None
    first.send_signal(signal.SIGKILL)
    first.communicate()
    last = trainings.complete()[-1]
    assert _resumed_step(trainings.finish(steps=last + 2)) == last


FINISHED = """
import sys
from jaxdist.cli import main
code = main(sys.argv[1:])
assert "sklearn" not in sys.modules and "matplotlib" not in sys.modules
from jaxdist._devices import runtime
runtime.virtual_devices(3)  # an error where JAX has started
sys.exit(code)
"""


def test_a_finished_run_says_so_before_data_is_loaded_and_before_jax_starts(
    trainings: _Trainings,
) -> None:
    trainings.finish(steps=2)
    before = {p: p.stat().st_mtime_ns for p in trainings.folder.rglob("*")}
    sets = [word for o in (*trainings.options, "training.steps=2") for word in ("--set", o)]
    done = subprocess.run(
        [sys.executable, "-c", FINISHED, "train", str(SHIPPED), *sets],
        cwd=trainings.folder,
        env={**os.environ, "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("finished before, at step 2: nothing was trained or written")
    assert "steps 2  replicas 2" in done.stdout.splitlines()[-1]
    assert {p: p.stat().st_mtime_ns for p in trainings.folder.rglob("*")} == before
