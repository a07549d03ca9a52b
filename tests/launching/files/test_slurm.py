"""`--print slurm`: a script that bash runs, and whose tasks meet."""

import os
import pathlib
import re

import pytest

from tests.launching.files.printed import (
    HERE,
    SCRIPT,
    add_program,
    check_syntax,
    clean_environment,
    print_file,
    start_bash,
)

ALL = ("--gpu", "h100", "--cpus", "8", "--memory", "16", "--hosts", "2", "--partition", "big",
       "--time", "2:00:00", "--devices-per-process", "2")  # fmt: skip


def _find_options(script: str) -> set[str]:
    return set(re.findall(r"^#SBATCH (\S+)$", script, re.M))


def test_every_option_is_in_the_script(capsys: pytest.CaptureFixture[str]) -> None:
    script = print_file(capsys, "-n", "4", *ALL, "--print", "slurm", SCRIPT, "a b", "$HOME")
    check_syntax(script)
    assert _find_options(script) == {
        "--job-name=cluster-script", "--ntasks=4", "--nodes=2", "--ntasks-per-node=2",
        "--cpus-per-task=8", "--mem=32G", "--gpus-per-task=h100:2", "--partition=big",
        "--time=2:00:00", f"--chdir={os.getcwd()}", "--output=cluster-script-%j.log",
    }  # fmt: skip
    assert f"{SCRIPT} 'a b' '$HOME'; then" in script
    # Slurm 22.05 gives tasks no GPUs of their own where a kind is asked for.
    assert " --gpu-bind=per_task:2 " in script


@pytest.mark.parametrize(
    ("argv", "option"),
    [
        (["--memory", "3"], "--mem-per-cpu=3072M"),
        (["--memory", "3", "--cpus", "4"], "--mem-per-cpu=768M"),
        (["--gpu", "any"], "--gpus-per-task=1"),
    ],
)
def test_options_in_slurms_words(
    capsys: pytest.CaptureFixture[str], argv: list[str], option: str
) -> None:
    script = print_file(capsys, "-n", "4", *argv, "--print", "slurm", SCRIPT)
    assert option in _find_options(script)


@pytest.mark.parametrize("arguments", [["a b"], ["fails-once"]])
def test_the_tasks_of_a_script_meet(
    tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str], arguments: list[str]
) -> None:
    options = ["-n", "2", "--devices-per-process", "2", "--cpus", "1", "--restarts", "1"]
    script = print_file(capsys, *options, "--print", "slurm", SCRIPT, *arguments)
    add_program(tmp_path, "srun", [str(HERE / "fake_srun.py")])
    steps = tmp_path / "steps"
    environment = {
        **clean_environment(),
        "PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}",
        "SLURM_JOB_ID": str(os.getpid()),
        "SLURM_NTASKS": "2",
        "FAKE_STEPS": str(steps),
        # Of the shell that called sbatch.
        "TF_CONFIG": '{"cluster": {"worker": ["nowhere:1", "nowhere:2"]}}',
        "JAX_NUM_CPU_DEVICES": "5",
    }
    with start_bash(script, environment) as running:
        output, _ = running.communicate(timeout=90)
    assert running.returncode == 0, output
    lines = [line for line in output.splitlines() if line.startswith("process ")]
    said = f"total 4.0 by SlurmClusterResolver {arguments}"
    assert sorted(lines) == [f"process {i} of 2 {said}" for i in range(2)], output
    has_failed = "attempt 1 ended with exit code 3" in output
    assert has_failed == (arguments == ["fails-once"])
    assert steps.read_text() == ("xx" if has_failed else "x")
