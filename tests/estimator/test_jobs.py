"""`train_and_evaluate` in the tasks of a job, as processes of `jaxdist launch`."""

import contextlib
import json
import os
import pathlib
import re
import signal
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from jaxdist import estimator as est
from tests.estimator.job_script import WANTED
from tests.launching.launcher import is_gone, start_launcher, wait_until
from tests.processes.job import Job

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

SCRIPT = pathlib.Path(__file__).with_name("job_script.py")
_TASKS = {"ps 0", "chief 0", "worker 0", "worker 1", "evaluator 0"}


class _Run:
    """A job of chief, two workers, a parameter server and an evaluator."""

    def __init__(self, folder: pathlib.Path, job: Job) -> None:
        self.folder, self.model, self.job = folder, folder / "model", job

    def read_events(self) -> list[dict[str, Any]]:
        text = "\n".join(self.job.lines(0))
        found = re.findall(r"^\[\w+ \d+\] (\{.*\})$", text, re.MULTILINE)
        return [json.loads(line) for line in found]

    def find_pid(self, name: str) -> int:
        """Return the newest process of a task."""
        wait_until(lambda: any(e["name"] == name for e in self.read_events()), 120)
        return int([e["pid"] for e in self.read_events() if e["name"] == name][-1])

    def count_steps(self, name: str) -> int:
        path = self.folder / f"steps_{name}"
        return len(path.read_text().split()) if path.exists() else 0

    def list_evaluated(self) -> list[int]:
        return list(est.experimental.read_eval_metrics(self.model / "eval"))

    def check_end(self, most_steps: int) -> None:
        """Wait for the end, and check what is left."""
        (outcome,) = self.job.wait(200)
        assert outcome.exit_code == 0, outcome.describe()
        steps = sorted(
            int(p.name) for p in (self.model / "checkpoints").iterdir() if p.name.isdigit()
        )
        # Each of the three that train may take two steps more.
        assert most_steps <= steps[-1] <= most_steps + 6
        assert self.list_evaluated()[-1] == steps[-1]
        results = est.experimental.read_eval_metrics(self.model / "eval")
        losses = [values["loss"] for values in results.values()]
        assert losses[-1] < 0.5
        exports = list((self.model / "export" / "final").glob("[0-9]*"))
        assert len(exports) >= 1
        exported = est.load_export(max(exports, key=lambda p: int(p.name)))
        assert exported.global_step == steps[-1]
        x = np.eye(4, dtype=np.float32)
        assert np.abs(np.asarray(exported(x)) - WANTED).max() < 1.5
        assert {e["name"] for e in self.read_events()} == _TASKS
        assert all(is_gone(e["pid"]) for e in self.read_events())


@contextlib.contextmanager
def _start(folder: pathlib.Path, steps: int, seconds: float = 0.02) -> Iterator[_Run]:
    given = (str(folder / "model"), str(steps), str(seconds))
    options = ("--ps", "1", "--workers", "2", "--evaluator", "--restarts", "3")
    env: dict[str, str | None] = {"JAX_PLATFORMS": "cpu"}
    with start_launcher(*options, str(SCRIPT), *given, env=env) as job:
        run = _Run(folder, job)
        try:
            yield run
        finally:
            for event in run.read_events():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(event["pid"], signal.SIGKILL)


def test_chief_workers_server_and_evaluator_train_one_model_with_a_worker_and_the_chief_killed(
    tmp_path: pathlib.Path,
) -> None:
    # Long enough that a process which was killed is back before the others are ready.
    with _start(tmp_path, 1000, 0.05) as run:
        wait_until(lambda: run.count_steps("worker 1") > 5, 120)
        worker = run.find_pid("worker 1")
        os.kill(worker, signal.SIGKILL)
        wait_until(lambda: run.find_pid("worker 1") != worker, 60)
        # The others go on, and a checkpoint was saved.
        wait_until(lambda: len(list((run.model / "checkpoints").glob("[1-9]*"))) > 0, 60)
        chief = run.find_pid("chief 0")
        os.kill(chief, signal.SIGKILL)
        wait_until(lambda: run.find_pid("chief 0") != chief, 60)
        run.check_end(1000)
        taken = {n: run.count_steps(n) for n in ("chief 0", "worker 0", "worker 1")}
        assert all(taken.values())
        # A step whose process was killed may count on the server and not in its file.
        last = run.list_evaluated()[-1]
        assert last - 2 <= sum(taken.values()) <= last + 2
        begun = [e["step"] for e in run.read_events() if e["event"] == "begun"]
        # Those that were started again have found the values of the server.
        assert sum(step > 0 for step in begun) >= 2


@pytest.mark.parametrize(
    ("number", "moment"),
    [
        (signal.SIGKILL, "idle"),
        (signal.SIGSTOP, "evaluating"),
        (signal.SIGKILL, "waiting"),
        pytest.param(signal.SIGSTOP, "idle", marks=pytest.mark.long),
        pytest.param(signal.SIGKILL, "evaluating", marks=pytest.mark.long),
        pytest.param(signal.SIGSTOP, "waiting", marks=pytest.mark.long),
    ],
)
def test_an_evaluator_that_is_killed_or_stopped_evaluates_the_last_checkpoint(
    number: int, moment: str, tmp_path: pathlib.Path
) -> None:
    hold = tmp_path / "hold_evaluation"
    if moment == "evaluating":
        hold.touch()
    with _start(tmp_path, 150) as run:
        # Before there is a checkpoint; in an evaluation; when it waits for the next checkpoint.
        evaluator = run.find_pid("evaluator 0")
        if moment == "evaluating":
            wait_until(lambda: (tmp_path / "evaluating").exists(), 120)
        elif moment == "waiting":
            wait_until(lambda: len(run.list_evaluated()) > 0, 120)
        os.kill(evaluator, number)
        hold.unlink(missing_ok=True)
        if number == signal.SIGKILL:
            wait_until(lambda: run.find_pid("evaluator 0") != evaluator, 60)
        else:
            # The training does not wait for it.
            done = lambda: any(  # noqa: E731
                e["event"] == "done" and e["name"] == "chief 0" for e in run.read_events()
            )
            wait_until(done, 120)
            os.kill(evaluator, signal.SIGCONT)
        run.check_end(150)
