"""SIGTERM to one process of a job: all save at one step, and end with the configured code."""

import json
import os
import pathlib
import signal
import subprocess
import sys

import pytest

from tests.preemption.steps import train, train_without_handler, watch
from tests.processes.job import ROOT, Job, Outcome, results_of_job, start_job


def _files(folder: pathlib.Path) -> list[tuple[int, int, float]]:
    """Who saved after which run, and what."""
    found = []
    for path in folder.glob("*-*"):
        index, _, runs = path.name.partition("-")
        if index.isdigit():
            found.append((int(index), int(runs), float(path.read_text())))
    return sorted(found)


def _codes(outcomes: list[Outcome]) -> list[int]:
    codes = [outcome.exit_code for outcome in outcomes]
    if set(codes) != {42}:
        print("\n".join(outcome.describe() for outcome in outcomes))
    return codes


def _wait_for_all(job: Job, count: int, line: str) -> None:
    for index in range(count):
        job.wait_for_line(index, line)


@pytest.mark.parametrize(("count", "culprits"), [(2, [0]), (2, [1]), (3, [2]), (2, [0, 1])])
def test_all_processes_save_after_the_same_run_and_end_with_the_code(
    count: int, culprits: list[int], tmp_path: pathlib.Path
) -> None:
    with start_job(train, count, args=(tmp_path, 10000)) as job:
        _wait_for_all(job, count, "run 5")
        for culprit in culprits:
            job.kill(culprit, signal.SIGTERM)
        assert _codes(job.wait()) == [42] * count
    saved = _files(tmp_path)
    assert [index for index, _, _ in saved] == list(range(count))
    (runs,) = {runs for _, runs, _ in saved}
    assert runs > 5
    # Each run adds 2 for each process.
    assert {x for _, _, x in saved} == {2.0 * count * runs}


def test_a_job_whose_process_0_hosts_the_service_saves_too(tmp_path: pathlib.Path) -> None:
    with start_job(train, 2, args=(tmp_path, 10000), service=False) as job:
        _wait_for_all(job, 2, "run 5")
        job.kill(0, signal.SIGTERM)
        assert _codes(job.wait()) == [42, 42]
    assert len({runs for _, runs, _ in _files(tmp_path)}) == 1


def _train(folder: pathlib.Path, runs: int, how: dict[str, object]) -> object:
    return train(folder, runs, **how)  # type: ignore[arg-type]


def test_the_handler_restores_in_all_processes_and_the_job_goes_on_there(
    tmp_path: pathlib.Path,
) -> None:
    with start_job(_train, 2, args=(tmp_path, 10000, {"whole": True})) as job:
        _wait_for_all(job, 2, "run 5")
        job.kill(1, signal.SIGTERM)
        assert _codes(job.wait()) == [42, 42]
        done = [int(job.lines(index)[-1].split()[1]) for index in range(2)]
    assert done[0] == done[1]
    results = results_of_job(_train, 2, args=(tmp_path, done[0] + 5, {"whole": True}))
    assert [result["first"] for result in results] == done
    assert [result["x"] for result in results] == [4.0 * (done[0] + 5)] * 2


def test_with_a_grace_period_all_save_twice_after_the_same_runs(tmp_path: pathlib.Path) -> None:
    with start_job(_train, 2, args=(tmp_path, 10000, {"grace": 4.0, "seconds": 0.05})) as job:
        _wait_for_all(job, 2, "run 5")
        job.kill(1, signal.SIGTERM)
        assert _codes(job.wait()) == [42, 42]
    saved = _files(tmp_path)
    first, last = sorted({runs for _, runs, _ in saved})
    assert [(index, runs) for index, runs, _ in saved] == [
        (0, first),
        (0, last),
        (1, first),
        (1, last),
    ]
    assert last > first + 5


def test_the_notice_of_a_function_in_one_process_is_that_of_all(tmp_path: pathlib.Path) -> None:
    with start_job(_train, 2, args=(tmp_path, 10000, {"by_file": True})) as job:
        _wait_for_all(job, 2, "run 5")
        (tmp_path / "notice-1").touch()
        assert _codes(job.wait()) == [42, 42]
    assert len({runs for _, runs, _ in _files(tmp_path)}) == 1


def test_a_notice_in_the_last_step_of_one_process_is_handled_by_all_at_the_end_of_the_scope(
    tmp_path: pathlib.Path,
) -> None:
    with start_job(_train, 2, args=(tmp_path, 3, {"scope": True})) as job:
        _wait_for_all(job, 2, "last")
        job.kill(0, signal.SIGTERM)
        (tmp_path / "go").touch()
        assert _codes(job.wait()) == [42, 42]
    assert {runs for _, runs, _ in _files(tmp_path)} == {3}


def test_after_an_exit_function_that_returns_training_goes_on_in_all(
    tmp_path: pathlib.Path,
) -> None:
    with start_job(_train, 2, args=(tmp_path, 200, {"exits": False})) as job:
        _wait_for_all(job, 2, "run 5")
        job.kill(1, signal.SIGTERM)
        outcomes = job.wait()
    assert [outcome.exit_code for outcome in outcomes] == [0, 0]
    assert [outcome.result["x"] for outcome in outcomes] == [800.0, 800.0]
    assert outcomes[0].result["saves"] == outcomes[1].result["saves"]


def test_a_job_without_a_handler_dies_of_sigterm() -> None:
    with start_job(train_without_handler, 2) as job:
        _wait_for_all(job, 2, "run")
        job.kill(1, signal.SIGTERM)
        outcomes = job.wait()
    assert outcomes[1].exit_code == -signal.SIGTERM
    assert outcomes[0].raised == "UnavailableError"


@pytest.mark.parametrize("culprit", [0, 1])
def test_every_process_learns_who_was_told_to_end_and_can_wait_for_it(culprit: int) -> None:
    with start_job(watch, 2, args=(culprit,)) as job:
        _wait_for_all(job, 2, "ready")
        job.kill(culprit, signal.SIGTERM)
        outcomes = job.wait()
    assert [outcome.exit_code for outcome in outcomes] == [0, 0]
    messages = {outcome.result["message"] for outcome in outcomes}
    assert messages == {f"process {culprit} received SIGTERM"}
    assert outcomes[1 - culprit].result["seconds"] > 0.9


SCRIPT = """
import pathlib, sys
from tests.preemption.steps import train

print(train(pathlib.Path(sys.argv[1]), 400, whole=True), flush=True)
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_the_launcher_starts_the_job_again_where_it_was(tmp_path: pathlib.Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    command = [sys.executable, "-m", "jaxdist", "launch", "-n", "2", "--restarts", "1"]
    paths = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    environment = {k: v for k, v in os.environ.items() if not k.startswith("JAXDIST_")}
    with subprocess.Popen(
        [*command, str(script), str(tmp_path)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        cwd=ROOT,
        env={**environment, "PYTHONPATH": paths, "JAX_PLATFORMS": "cpu"},
    ) as launcher:
        try:
            assert launcher.stdout is not None
            output = ""
            for line in launcher.stdout:
                output += line
                if line.strip() == "[1] run 5":
                    (child,) = _find_children(launcher.pid, "1")
                    os.kill(child, signal.SIGTERM)
            assert launcher.wait(60) == 0, output
        finally:
            launcher.kill()
    firsts = [int(part.split(",")[0]) for part in output.split("'first': ")[1:]]
    assert len(set(firsts)) == 1, output
    assert firsts[0] > 5, output
    assert output.count("'x': 1600.0") == 2, output
    assert "42" in output


def _find_children(launcher: int, index: str) -> list[int]:
    """Return the processes of a launcher with this number in their TF_CONFIG."""
    found = []
    for entry in pathlib.Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            parent = entry.joinpath("stat").read_text().rpartition(")")[2].split()[1]
            variables = entry.joinpath("environ").read_bytes().decode().split("\0")
        except (OSError, UnicodeDecodeError):
            continue
        config = next((v for v in variables if v.startswith("TF_CONFIG=")), "TF_CONFIG={}")
        task = json.loads(config.partition("=")[2]).get("task", {})
        if parent == str(launcher) and str(task.get("index")) == index:
            found.append(int(entry.name))
    return found
