"""`--on ray --ps`: parameter servers, workers and a chief are actors that Ray starts again."""

import importlib.util
import json
import os
import pathlib
import signal
import uuid
from typing import Any

import pytest

from tests.launching.launcher import is_gone, start_launcher, wait_until
from tests.processes.job import Job

ROOT = pathlib.Path(__file__).parents[2]
CONFIG = str(ROOT / "configs" / "digits_parameter_server.toml")
COUNTING = str(ROOT / "tests" / "parameter_server" / "tasks" / "job_script.py")
HAS_RAY = importlib.util.find_spec("ray") is not None
pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(500),
    pytest.mark.skipif(not HAS_RAY, reason="Ray is not installed, and not of the test extra"),
]
TASKS = ("--ps", "1", "--workers", "2")


class _Job:
    """A job on a local Ray of its own, whose processes are known by a mark."""

    def __init__(self) -> None:
        self.mark = f"JAXDIST_MARK={uuid.uuid4()}"

    def make_environment(self) -> dict[str, str | None]:
        name, _, value = self.mark.partition("=")
        return {
            "RAY_OVERRIDE_RESOURCES": '{"CPU": 4}',
            "RAY_ADDRESS": None,
            "JAX_PLATFORMS": "cpu",
            name: value,
        }

    def find(self, wanted: str = "") -> list[int]:
        """Return the processes of a task, such as `ps 0`; of all, Ray's too, without a name."""
        found = []
        for folder in pathlib.Path("/proc").glob("[0-9]*"):
            try:
                variables = (folder / "environ").read_bytes().decode().split("\0")
            except (OSError, UnicodeDecodeError):
                continue
            if self.mark not in variables:
                continue
            config = next((v for v in variables if v.startswith("TF_CONFIG=")), None)
            task = {} if config is None else json.loads(config.partition("=")[2])["task"]
            if not wanted or (task and f"{task['type']} {task['index']}" == wanted):
                found.append(int(folder.name))
        return found

    def kill_actor(self, task: str) -> None:
        """Kill the actor of a task, and wait until its process has ended with it."""
        (pid,) = self.find(task)
        stat = pathlib.Path(f"/proc/{pid}/stat").read_text()
        actor = int(stat.rpartition(")")[2].split()[1])
        assert "ray::" in pathlib.Path(f"/proc/{actor}/cmdline").read_text()
        os.kill(actor, signal.SIGKILL)
        wait_until(lambda: is_gone(actor) and is_gone(pid))

    def check_nobody_is_left(self) -> None:
        wait_until(lambda: all(map(is_gone, self.find())), 60)


def _read_events(job: Job) -> list[dict[str, Any]]:
    start = "[chief 0] {"
    return [json.loads(x[len(start) - 1 :]) for x in job.lines(0) if x.startswith(start)]


def test_the_main_job_finishes_with_the_right_count_after_its_actors_were_killed(
    tmp_path: pathlib.Path,
) -> None:
    ours = _Job()
    settings = [f"output.directory={tmp_path}", f"checkpoint.directory={tmp_path}/checkpoints",
                "output.picture=", "training.steps=400", "training.log_every=20",
                "optimizer.schedule=constant"]  # fmt: skip
    sets = [part for setting in settings for part in ("--set", setting)]
    argv = ("--on", "ray", *TASKS, "train", CONFIG, *sets)
    with start_launcher(*argv, env=ours.make_environment()) as job:
        job.wait_for_line(0, "step  40/", 240)
        ours.kill_actor("worker 1")
        job.wait_for_line(0, "step 120/", 240)
        ours.kill_actor("ps 0")
        (outcome,) = job.wait(300)
    assert outcome.exit_code == 0, outcome.describe()
    for task in ("worker 1", "ps 0"):
        said = f"{task} was ended by the end of its Ray actor, and is started again."
        assert said in outcome.stderr, outcome.describe()
    counts = json.loads((tmp_path / "metrics.json").read_text())["parameter_servers"]
    assert counts["scheduled"] == 400
    assert counts["applied"] + counts["lost"] == 400, counts
    assert counts["lost"] > 0, counts
    ours.check_nobody_is_left()


def test_a_counter_on_the_server_has_what_was_applied(tmp_path: pathlib.Path) -> None:
    ours = _Job()
    argv = ("--on", "ray", *TASKS, "--snapshot-directory", str(tmp_path), COUNTING, "4000")
    with start_launcher(*argv, env=ours.make_environment()) as job:
        job.wait_for_line(0, '"step": 1000', 240)
        ours.kill_actor("worker 0")
        job.wait_for_line(0, '"step": 2000', 240)
        ours.kill_actor("ps 0")
        (outcome,) = job.wait(300)
        events = _read_events(job)
    assert outcome.exit_code == 0, outcome.describe()
    end = events[-1]
    assert end["event"] == "end"
    assert end["applied"] + end["lost"] == end["scheduled"] == 4000, end
    assert end["count"] == end["applied"], end
    ours.check_nobody_is_left()


def test_ctrl_c_and_the_code_of_the_chief_end_all(tmp_path: pathlib.Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import json, os, pathlib, sys, time\n"
        "kind = json.loads(os.environ['TF_CONFIG'])['task']['type']\n"
        "print('ready', flush=True)\n"
        "while kind != 'chief' or not pathlib.Path(sys.argv[1]).exists():\n"
        "    time.sleep(0.05)\n"
        "sys.exit(7)\n"
    )
    for number in (0, signal.SIGINT):
        ours = _Job()
        end = tmp_path / f"end_{number}"
        argv = ("--on", "ray", "--ps", "1", "--workers", "1", "--chief", "1", str(script), str(end))
        with start_launcher(*argv, env=ours.make_environment()) as job:
            for task in ("ps 0", "worker 0", "chief 0"):
                job.wait_for_line(0, f"[{task}] ready", 120)
            if number:
                job.kill(0, number)
            else:
                end.touch()
            (outcome,) = job.wait(90)
        assert outcome.exit_code == (128 + number if number else 7), outcome.describe()
        ours.check_nobody_is_left()
