"""`--print slurm --ps`: a script that bash runs, and whose tasks know each other."""

import json
import os
import pathlib
import re
from typing import Any

import pytest

from tests.launching.files.printed import (
    HERE,
    ROOT,
    add_program,
    check_syntax,
    clean_environment,
    print_file,
    start_bash,
)
from tests.launching.launcher import is_gone

SCRIPT = str(HERE / "tasks_script.py")
COUNTING = str(ROOT / "tests" / "parameter_server" / "tasks" / "job_script.py")
TASKS = ("--ps", "1", "--workers", "2", "--print", "slurm")


def _run(folder: pathlib.Path, script: str, **more: str) -> tuple[int, str]:
    """Run a script with a stand-in of srun, whose tasks are on this machine."""
    add_program(folder, "srun", [str(HERE / "fake_het_srun.py")])
    environment = {
        **clean_environment(),
        "PATH": f"{folder}{os.pathsep}{os.environ['PATH']}",
        "SLURM_JOB_ID": str(os.getpid()),
        "FAKE_LOG": str(folder / "steps"),
        # Of the shell that called sbatch.
        "TF_CONFIG": '{"cluster": {"worker": ["nowhere:1"]}}',
        "JAXDIST_SECRET": "of another job, but long enough",
        **more,
    }
    with start_bash(script, environment) as running:
        output, _ = running.communicate(timeout=150)
    return running.returncode, output


def _read(folder: pathlib.Path, name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / name).read_text())
    return found


def test_every_option_is_in_the_script(capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["--gpu", "h100", "--cpus", "8", "--memory", "16", "--partition", "big", "--time",
            "2:00:00", "--devices-per-process", "2", "--name", "a-job"]  # fmt: skip
    script = print_file(capsys, *TASKS, *argv, SCRIPT, "a b", "$HOME")
    check_syntax(script)
    options = re.findall(r"^#SBATCH (\S+)$", script, re.M)
    each = ["--cpus-per-task=8", "--mem-per-cpu=2048M"]
    end = ["--partition=big", "--time=2:00:00"]
    assert options == [
        "--job-name=a-job", "--ntasks=1", *each, *end,
        f"--chdir={os.getcwd()}", "--output=a-job-%j.log",
        "hetjob", "--ntasks=1", *each, *end,
        "hetjob", "--ntasks=2", *each, "--gpus-per-task=h100:2", *end,
    ]  # fmt: skip
    steps = re.findall(r"^ *(.*)srun --het-group=(\d) (.*) bash -c .* bash (\w+)", script, re.M)
    assert [(group, job) for _, group, _, job in steps] == [
        ("1", "ps"),
        ("2", "worker"),
        ("0", "chief"),
    ]
    assert ["JAX_PLATFORMS=cpu" in own for own, _, _, _ in steps] == [True, False, True]
    assert script.count(f"{SCRIPT} 'a b' '$HOME' &") == 3


@pytest.mark.parametrize("code", [0, 7])
def test_the_code_of_the_chief_is_that_of_the_script_and_nobody_is_left(
    tmp_path: pathlib.Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    code: int,
) -> None:
    monkeypatch.chdir(tmp_path)
    argv = ("--devices-per-process", "3", SCRIPT, str(tmp_path), str(code))
    found, output = _run(tmp_path, print_file(capsys, *TASKS, *argv))
    assert found == code, output
    names = ("chief_0", "ps_0", "worker_0", "worker_1")
    tasks = {name: _read(tmp_path, f"{name}.0") for name in names}
    assert len({json.dumps(task["cluster"]) for task in tasks.values()}) == 1
    addresses = [a for own in tasks["chief_0"]["cluster"].values() for a in own]
    assert len(set(addresses)) == 4
    (secret,) = {task["secret"] for task in tasks.values()}
    assert len(secret) > 30
    assert {task["snapshots"] for task in tasks.values()} == {
        str(tmp_path / f".tasks-script-{os.getpid()}" / "snapshots")
    }
    assert [tasks[name]["devices"] for name in names] == ["1", "1", "3", "3"]
    assert all(is_gone(task["pid"]) for task in tasks.values())
    assert not list(tmp_path.glob(".tasks-script-*"))
    assert sorted(line for line in output.splitlines() if "ready" in line) == sorted(
        f"[{name.replace('_', ' ')}] ready" for name in names
    )


def test_a_task_that_is_killed_starts_again_while_the_others_go_on(
    tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    argv = ("--snapshot-directory", "kept", SCRIPT, str(tmp_path), "0", "ps_0", "-9")
    code, output = _run(tmp_path, print_file(capsys, *TASKS, *argv))
    assert code == 0, output
    assert "[ps 0] was ended by signal 9, and is started again" in output
    assert _read(tmp_path, "ps_0.1")["snapshots"] == str(tmp_path / "kept")
    assert not (tmp_path / "worker_0.1").exists()


@pytest.mark.parametrize(("how", "code"), [("3", 3), ("0", 1)])
def test_a_worker_that_ends_by_itself_ends_the_job(
    tmp_path: pathlib.Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    how: str,
    code: int,
) -> None:
    monkeypatch.chdir(tmp_path)
    # The chief waits for another start, which does not come.
    script = print_file(capsys, *TASKS, SCRIPT, str(tmp_path), "0", "worker_1", how)
    found, output = _run(tmp_path, script)
    assert found == code, output
    assert f"[worker 1] ended with exit code {how} while the chief ran" in output
    assert (".join() in this task" in output) == (how == "0")
    assert f"the job ends with the exit code {code}" in output


def test_a_chief_that_fails_starts_again_as_often_as_it_may(
    tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    argv = ("--restarts", "1", SCRIPT, str(tmp_path), "4")
    code, output = _run(tmp_path, print_file(capsys, *TASKS, *argv))
    assert code == 0, output
    assert "attempt 1 of the chief ended with exit code 4" in output
    assert _read(tmp_path, "chief_0.1")["attempt"] == "2"
    assert not (tmp_path / "ps_0.1").exists()


@pytest.mark.slow
def test_the_steps_of_a_job_count_once(
    tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    code, output = _run(tmp_path, print_file(capsys, *TASKS, COUNTING, "200"))
    assert code == 0, output
    (end,) = [x for x in output.splitlines() if x.startswith('[chief 0] {"event": "end"')]
    found = json.loads(end.removeprefix("[chief 0] "))
    assert found["count"] == found["applied"] == found["scheduled"] == 200


def test_a_secret_of_this_shell_and_hosts(
    tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JAXDIST_SECRET_FILE", str(tmp_path / "my secret"))
    script = print_file(capsys, *TASKS, SCRIPT)
    assert f"export JAXDIST_SECRET_FILE='{tmp_path}/my secret'\n" in script
    assert "token_urlsafe" not in script
