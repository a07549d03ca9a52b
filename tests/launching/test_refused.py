"""What `jaxdist launch` cannot start is an error before any process starts."""

import os
import pathlib
import sys
from collections.abc import Sequence

import pytest

from jaxdist import _launching
from jaxdist._called import called
from jaxdist._launching import ClusterJob, Job, find_free_ports, make_command
from jaxdist._launching.child import Child
from jaxdist._launching.environment import make_environments
from jaxdist.cli import main
from jaxdist.errors import ArgumentError, LaunchError
from tests.launching.launcher import run_launcher
from tests.strategies.oracle import refused

CONFIG = str(pathlib.Path(__file__).parents[2] / "configs" / "digits_mirrored.toml")


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[Job]:
    """The jobs that would have been started."""
    jobs: list[Job] = []

    def launch(job: Job) -> int:
        jobs.append(job)
        return 0

    monkeypatch.setattr(_launching, "launch", launch)
    return jobs


@pytest.mark.parametrize(
    ("argv", "parts"),
    [
        (["-n", "2"], ["was given no script", "jaxdist launch -n 2 script.py"]),
        (["-n", "2", "--"], ["was given no script"]),
        (["-n", "0", __file__], ["-n=0", "from 1"]),
        (["-n", "513", __file__], ["-n=513", "512"]),
        (["-n", "2", "--devices-per-process", "0", __file__], ["devices_per_process=0"]),
        (["-n", "2", "--restarts", "-1", __file__], ["restarts=-1"]),
        (["-n", "2", "--report-seconds", "-1", __file__], ["report_seconds=-1"]),
        (["-n", "2", "--grace-seconds", "nan", __file__], ["grace_seconds=nan"]),
        ([__file__], ["no number of processes", "jaxdist launch -n 2"]),
        (["-n", "2", "--elastic", "1:2", __file__], ["-n 2 and --elastic 1:2"]),
        (["--elastic", "2", __file__], ["--elastic 2.", "--elastic 2:4"]),
        (["--elastic", "2:x", __file__], ["--elastic 2:x."]),
        (["--elastic", "3:2", __file__], ["the first number of --elastic=3", "2"]),
        (["--elastic", "0:2", __file__], ["the first number of --elastic=0"]),
        (["--elastic", "1:513", __file__], ["the second number of --elastic=513", "512"]),
        (["-n", "2", "no_such.py"], ["'no_such.py'", "no such file", "current folder"]),
        (["-n", "2", os.path.dirname(__file__)], ["is a folder"]),
        (
            ["-n", "2", "-m", "no_such.module"],
            ["-m no_such.module", "the module 'no_such' does not exist"],
        ),
        (["-n", "2", "train", "no_such.toml"], ["'no_such.toml'"]),
        (["-n", "2", "train", CONFIG, "--set", "train.no_such=1"], ["no_such"]),
        (
            ["-n", "2", "train", CONFIG],
            ["given -n 2, and strategy.kind", "is 'auto'", "strategy.kind=multi_worker_mirrored"],
        ),
        (
            ["--elastic", "1:3", "train", CONFIG],
            ["given -n 3, and strategy.kind", "train alone", "or -n 1."],
        ),
        (
            ["-n", "2", "train", CONFIG, "--set", "strategy.kind=parameter_server"],
            ["given -n, and strategy.kind", "is 'parameter_server'", "Pass --ps and --workers, or"],
        ),
        (
            ["--ps", "1", "--workers", "2", "train", CONFIG],
            ["given --ps and --workers, and", "is 'auto'", "strategy.kind=parameter_server."],
        ),
    ],
)
def test_what_cannot_start_is_refused(
    argv: list[str], parts: list[str], started: list[Job], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["launch", *argv]) == 2
    assert started == []
    message = capsys.readouterr().err
    assert message.startswith("jaxdist launch")
    for part in parts:
        assert part in message


@pytest.mark.parametrize(
    "argv", [["-n", "two", __file__], ["-n", "2", "--no-such", __file__],
             ["-n", "2", "train"], ["-n", "2", "train", CONFIG, "--no-such"]],
)  # fmt: skip
def test_arguments_that_are_not_understood_exit_with_2(
    argv: list[str], started: list[Job], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["launch", *argv])
    assert ended.value.code == 2
    assert started == []
    assert "usage: jaxdist" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("program", "command"),
    [
        ([__file__, "-n", "3", "--x"], [__file__, "-n", "3", "--x"]),
        (["--", __file__], [__file__]),
        (["-m", "timeit", "-n", "1"], ["-m", "timeit", "-n", "1"]),
        (["-m", "sys"], ["-m", "sys"]),
        (["train", CONFIG, "--set", "strategy.kind=multi_worker_mirrored"],
         ["-m", "jaxdist", "train", CONFIG, "--set", "strategy.kind=multi_worker_mirrored"]),
    ],
)  # fmt: skip
def test_the_command_of_each_process(
    program: Sequence[str], command: list[str], started: list[Job]
) -> None:
    assert main(["launch", "-n", "2", "--devices-per-process", "3", *program]) == 0
    (job,) = started
    assert list(job.command) == [sys.executable, *command]
    assert (job.count, job.devices_per_process, job.restarts) == (2, 3, 0)


def test_a_script_that_cannot_be_read_is_refused(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = tmp_path / "script.py"
    script.touch()
    # Root can read every file.
    monkeypatch.setattr(os, "access", lambda *_: False)
    with refused(LaunchError, "cannot read", "chmod u+r"):
        make_command(str(script), [])


@pytest.mark.parametrize("count", [-1, 2])
def test_there_is_at_most_one_evaluator(count: int) -> None:
    with refused(ArgumentError, f"--evaluator={count}"):
        ClusterJob(["python"], ["python"], 1, 1, evaluators=count)


def test_a_command_that_the_system_refuses_is_an_error(tmp_path: pathlib.Path) -> None:
    with refused(LaunchError, "could not start process 3", "ulimit"):
        Child(3, [sys.executable, "x" * 10_000_000], {}, (lambda _: None,) * 2, tmp_path)


@called("jaxdist launch")
def test_devices_given_in_two_ways_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XLA_FLAGS", "--xla_force_host_platform_device_count=8 --xla_foo")
    with refused(LaunchError, "given 2 devices", "Remove --xla_force"):
        make_environments([0], 2, [1], "127.0.0.1:2", 1)
    (alone,) = make_environments([0], None, [1], "127.0.0.1:2", 1)
    assert "JAX_NUM_CPU_DEVICES" not in alone


@called("launch")
def test_the_environment_of_each_process() -> None:
    first, second = make_environments([0, 1], 3, [5, 6], "127.0.0.1:7", 4)
    workers = '{"cluster": {"worker": ["127.0.0.1:5", "127.0.0.1:6"]}, '
    assert first["TF_CONFIG"] == workers + '"task": {"type": "worker", "index": 0}}'
    assert second["TF_CONFIG"] == workers + '"task": {"type": "worker", "index": 1}}'
    assert second["JAXDIST_SERVICE"] == "127.0.0.1:7"
    assert second["JAXDIST_ATTEMPT"] == "4"
    assert second["JAXDIST_DEVICES_PER_PROCESS"] == second["JAX_NUM_CPU_DEVICES"] == "3"
    assert second["PATH"] == os.environ["PATH"]


def test_no_port_is_given_twice() -> None:
    ports = find_free_ports(50) + find_free_ports(50)
    assert len(set(ports)) == 100


def test_a_number_that_is_none_is_refused() -> None:
    with refused(ArgumentError, "-n=0"):
        _launching.Job(["x"], 0)


def test_an_error_that_a_command_prints_without_a_traceback_is_the_cause() -> None:
    outcome = run_launcher("-n", "2", "-m", "jaxdist", "train", "no_such.toml")
    assert outcome.exit_code == 2
    last = outcome.stderr[outcome.stderr.rindex("jaxdist launch: process") :]
    assert "failed first, with exit code 2:\nThe configuration file 'no_such.toml'" in last
