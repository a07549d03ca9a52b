"""What cannot be printed is an error that says what to do."""

import os
import pathlib

import pytest

from jaxdist.cli import main
from tests.launching.files.printed import SCRIPT


@pytest.mark.parametrize(
    ("argv", "parts"),
    [
        (["--image", "a", SCRIPT], ["--image a, and no --print", "Add --print jobset"]),
        (["--time", "1:00:00", SCRIPT], ["--time 1:00:00, and no --print"]),
        (["--print", "slurm", "--grace-seconds", "3", SCRIPT], ["--grace-seconds 3.0", "starts"]),
        (["--print", "slurm", "--image", "a", SCRIPT], ["--image a", "plugin"]),
        (["--print", "jobset", "--hosts", "2", SCRIPT], ["--hosts 2", "Each process is a pod"]),
        (["--print", "jobset", "--partition", "p", SCRIPT], ["--partition p", "Slurm"]),
        (["--print", "skypilot", "--partition", "p", SCRIPT], ["--partition p", "Slurm"]),
        (["--print", "skypilot", "--time", "1:00:00", SCRIPT], ["no time limit"]),
        (["--print", "skypilot", "--gpu", "any", SCRIPT], ["--gpu any", "show-gpus"]),
        (["--print", "slurm", "--hosts", "3", SCRIPT], ["4 processes and --hosts 3", "Pass -n 6"]),
        (["--print", "slurm", "--time", "60", SCRIPT], ["--time 60", "--time 2:30:00"]),
        (["--print", "slurm", "--name", "My_Job", SCRIPT], ["--name My_Job", "--name my-job"]),
        (["--print", "slurm", "--memory", "0", SCRIPT], ["--memory=0"]),
        (["--print", "slurm", "--restarts", "-1", SCRIPT], ["restarts=-1"]),
        (["--print", "slurm", "--install", "a", SCRIPT], ["--install a", "Leave out"]),
        (["--print", "jobset", "--install", "a", "--image", "b", SCRIPT], ["--image b and --inst"]),
        (["--print", "jobset", "-m", "timeit"], ["-m timeit", "Pass --image"]),
        (["--print", "jobset", "no_such.py"], ["no such file exists"]),
    ],
)
def test_what_cannot_be_printed_is_refused(
    argv: list[str], parts: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["launch", "-n", "4", *argv]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    for part in parts:
        assert part in printed.err


def test_elastic_jobs_are_not_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["launch", "--elastic", "1:2", "--print", "slurm", SCRIPT]) == 2
    assert "--print slurm and --elastic 1:2" in capsys.readouterr().err


def test_a_file_outside_of_the_folder_that_skypilot_copies_is_refused(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["launch", "-n", "2", "--print", "skypilot", SCRIPT]) == 2
    assert f"or call jaxdist launch in {os.path.dirname(SCRIPT)}." in capsys.readouterr().err


@pytest.mark.parametrize("content", [b"\xff", b"#" * 1_000_001])
def test_a_script_that_a_manifest_cannot_hold_is_refused(
    tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str], content: bytes
) -> None:
    script = tmp_path / "script.py"
    script.write_bytes(content)
    assert main(["launch", "-n", "2", "--print", "jobset", str(script)]) == 2
    message = capsys.readouterr().err
    assert f"{len(content)} bytes" in message
    assert "Pass --image" in message


def test_devices_given_in_two_ways_are_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XLA_FLAGS", "--xla_force_host_platform_device_count=8")
    argv = ["launch", "-n", "2", "--print", "slurm", "--devices-per-process", "2", SCRIPT]
    assert main(argv) == 2
    assert "Remove --xla_force" in capsys.readouterr().err


def test_settings_of_this_shell_belong_to_the_job(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XLA_FLAGS", "--xla_a=1 --xla_b")
    monkeypatch.setenv("JAXDIST_QUIET_SECONDS", "7")
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", "/shared/cache")
    monkeypatch.setenv("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
    monkeypatch.setenv("JAXDIST_SERVICE", "here:1")
    assert main(["launch", "-n", "2", "--print", "slurm", SCRIPT]) == 0
    script = capsys.readouterr().out
    assert "export JAX_COMPILATION_CACHE_DIR=/shared/cache" in script
    assert "export JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS=0" in script
    assert "export XLA_FLAGS='--xla_a=1 --xla_b'" in script
    assert "export JAXDIST_QUIET_SECONDS=7" in script
    assert "here:1" not in script
