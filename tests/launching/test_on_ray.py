"""`--on ray`: the processes are actors of a local Ray. Run where Ray is installed (236 MB)."""

import importlib.util
import os
import pathlib
import re
import signal
import sys

import pytest

from jaxdist.cli import main
from tests.launching.launcher import (
    QUICK,
    check_nobody_is_left,
    find_pids,
    is_gone,
    start_launcher,
    wait_until,
    write_script,
)
from tests.launching.stand_in_ray import StandIn
from tests.processes.job import Outcome

FOLDER = pathlib.Path(__file__).parent
STEPS = str(FOLDER / "steps_script.py")
HAS_RAY = importlib.util.find_spec("ray") is not None
with_ray = pytest.mark.skipif(not HAS_RAY, reason="Ray is not installed, and not of the test extra")
# A local Ray has one CPU for each core unless it is told otherwise.
CPUS: dict[str, str | None] = {"RAY_OVERRIDE_RESOURCES": '{"CPU": 3}', "RAY_ADDRESS": None}


def _run(*argv: str, timeout: float = 100) -> Outcome:
    with start_launcher("--on", "ray", *argv, env=CPUS) as job:
        (outcome,) = job.wait(timeout)
    assert not outcome.timed_out, outcome.describe()
    return outcome


@with_ray
@pytest.mark.slow
def test_two_actors_with_two_devices_each_add_up() -> None:
    outcome = _run("-n", "2", "--devices-per-process", "2", STEPS, "3", "9", "stays")
    assert outcome.exit_code == 0, outcome.describe()
    for index in range(2):
        assert f"[{index}] total 8.0 of 4" in outcome.stdout
    assert "jaxdist launch" not in outcome.stderr
    check_nobody_is_left(outcome, 2)


@with_ray
@pytest.mark.slow
@pytest.mark.parametrize(
    ("leaver", "how", "code", "part"),
    [
        (0, "killed", 137, "process 0 was ended by signal SIGKILL"),
        (1, "raises", 1, "process 1 failed first, with exit code 1"),
        (1, "leaves", 1, "process 1 ended with exit code 0 in the middle of the job"),
    ],
)
def test_the_first_cause_is_last_and_the_code_is_that_of_one_machine(
    leaver: int, how: str, code: int, part: str
) -> None:
    outcome = _run("-n", "2", STEPS, "100000000", str(leaver), how)
    assert outcome.exit_code == code, outcome.describe()
    last = outcome.stderr[outcome.stderr.rindex("jaxdist launch: ") :]
    assert part in last, outcome.describe()
    assert ("ValueError: planted" in last) == (how == "raises")
    check_nobody_is_left(outcome, 2)


@with_ray
@pytest.mark.slow
def test_an_elastic_job_goes_on_with_the_actors_that_are_left(tmp_path: pathlib.Path) -> None:
    script = str(FOLDER / "elastic_script.py")
    outcome = _run("--elastic", "1:2", script, str(tmp_path), "8", "0", "5")
    assert outcome.exit_code == 0, outcome.describe()
    rows = [line.split()[:3] for line in (tmp_path / "steps").read_text().splitlines()]
    first = [["1", str(step), "2"] for step in range(1, 5)]
    assert rows == first + [["2", str(step), "1"] for step in range(5, 9)]
    assert "process 0 was lost. The job continues with 1 of 2" in outcome.stderr


@with_ray
@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_reaches_the_actors(tmp_path: pathlib.Path, number: signal.Signals) -> None:
    script = write_script(tmp_path, "print('ready', flush=True)\ntime.sleep(100)")
    with start_launcher("--on", "ray", "-n", "2", script, env=CPUS) as job:
        job.wait_for_line(0, "[0] ready", 60)
        job.wait_for_line(0, "[1] ready", 60)
        if number == signal.SIGINT:
            job.kill(0, number)  # also to the processes of the local Ray, as a terminal does
        else:
            os.kill(job.pids[0], number)
        (outcome,) = job.wait(40)
    assert outcome.exit_code == 128 + number, outcome.describe()
    check_nobody_is_left(outcome, 2)


@with_ray
@pytest.mark.slow
def test_an_actor_that_is_lost_is_the_cause(tmp_path: pathlib.Path) -> None:
    script = write_script(
        tmp_path,
        """
        print("actor", os.getppid(), flush=True)
        if index == 1:
            os.kill(os.getppid(), signal.SIGKILL)
        time.sleep(100)
        """,
    )
    outcome = _run("-n", "2", *QUICK, script)
    assert outcome.exit_code == 1, outcome.describe()
    last = outcome.stderr[outcome.stderr.rindex("jaxdist launch: ") :]
    assert "process 1 failed first, with exit code 1:\nRay has lost the actor" in last
    actors = [int(pid) for pid in re.findall(r"^\[\d\] actor (\d+)$", outcome.stdout, re.M)]
    # The process ends with its actor.
    wait_until(lambda: all(map(is_gone, [*actors, *find_pids(outcome.stdout)])))


@with_ray
@pytest.mark.slow
def test_a_cluster_that_is_too_small_is_an_error(tmp_path: pathlib.Path) -> None:
    script = write_script(tmp_path, "")
    env = {**CPUS, "JAXDIST_JOIN_SECONDS": "6"}
    with start_launcher("--on", "ray", "-n", "5", script, env=env) as job:
        (outcome,) = job.wait(60)
    assert outcome.exit_code == 2, outcome.describe()
    said = "5 CPUs (3 of 3 in the cluster are free)"
    assert f"jaxdist launch: waiting for {said}." in outcome.stderr
    assert f"waited 6 s for {said}." in outcome.stderr


def test_a_client_outside_of_the_cluster_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "ray://head:10001")
    assert main(["launch", "--on", "ray", "-n", "2", STEPS]) == 2
    assert "ray job submit" in capsys.readouterr().err


def test_without_ray_the_error_has_the_command_that_installs_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)  # As if it were not installed.
    assert main(["launch", "--on", "ray", "-n", "2", STEPS]) == 2
    assert "pip install ray" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("has_room", "parts", "actors"),
    [
        (False, ["for 2 CPUs (1 of 3 in the cluster are free)", "`ray status`"], 0),
        (True, ["could not start its actors: No module named 'jaxdist'", "on every node"], 2),
    ],
)
def test_a_cluster_that_starts_no_actors_is_an_error_that_says_why(
    has_room: bool,
    parts: list[str],
    actors: int,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setenv("JAXDIST_JOIN_SECONDS", "1")
    cluster = StandIn(has_room)
    cluster.install(monkeypatch)
    assert main(["launch", "--on", "ray", "-n", "2", STEPS]) == 2
    said = capsys.readouterr().err
    for part in parts:
        assert part in said
    # Nothing is left on the cluster.
    assert (cluster.killed, cluster.removed, cluster.has_left) == (actors, 1, True)


@pytest.mark.parametrize(
    ("cause", "parts"),
    [
        ("RPC error: InvalidAuthToken: missing", ["asks for a token", "Set RAY_AUTH_MODE=token"]),
        ("Deadline Exceeded", ["Failed to connect to Ray cluster at head:6379", "`ray status`"]),
    ],
)
def test_a_cluster_that_cannot_be_reached_is_an_error_that_says_why(
    cause: str,
    parts: list[str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def connect(**_: object) -> None:
        raise ConnectionError("Failed to connect to Ray cluster at head:6379") from RuntimeError(
            cause
        )

    monkeypatch.setenv("RAY_ADDRESS", "head:6379")
    monkeypatch.delenv("RAY_AUTH_MODE", raising=False)
    StandIn(has_room=True).install(monkeypatch)
    monkeypatch.setattr(sys.modules["ray"], "init", connect)
    assert main(["launch", "--on", "ray", "-n", "2", STEPS]) == 2
    said = capsys.readouterr().err
    assert "cannot connect to the Ray cluster at head:6379" in said
    for part in parts:
        assert part in said
