"""The jobs of the docs on three nodes of Slurm. `make test-hosts` installs Slurm."""

import json
import pathlib
import re
import shlex
import sys
from collections.abc import Iterator

import numpy as np
import pytest

from tests.hosts.clusters.slurm import Slurm, needs_slurm, start_slurm
from tests.hosts.hosts import make_hosts
from tests.hosts.training import make_settings, train
from tests.launching.files.printed import SCRIPT, print_file
from tests.processes.job import ROOT, results_of_job

pytestmark = [needs_slurm, pytest.mark.slow, pytest.mark.timeout(900)]

CONFIG = str(ROOT / "configs" / "digits_multi_worker.toml")
SERVERS = str(ROOT / "tests" / "parameter_server" / "tasks" / "job_script.py")
ELASTIC = str(ROOT / "tests" / "launching" / "elastic_script.py")


@pytest.fixture
def slurm(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Slurm]:
    """Three nodes. Jobs run in the folder of the test, which all see."""
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "slurm"
    folder.mkdir()
    with make_hosts(3) as hosts:
        for host in hosts:
            # As Debian writes it; the others have the names of a cluster's network.
            others = [f"{other.address} {other.name}" for other in hosts if other is not host]
            own = [f"127.0.1.1 {host.name}.local", f"{host.address} {host.name}"]
            host.write_names(["127.0.0.1 localhost", *own, *others])
        with start_slurm(hosts, folder) as started:
            yield started


def _write(name: str, text: str) -> str:
    pathlib.Path(name).write_text(text)
    return str(pathlib.Path(name).absolute())


def _read(pattern: str) -> str:
    (log,) = pathlib.Path().glob(pattern)
    return log.read_text()


def test_digits_on_three_nodes_have_the_losses_of_one_process(
    slurm: Slurm, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    together = tmp_path / "together"
    argv = ("-n", "3", "--print", "slurm", "--hosts", "3", "--name", "digits")
    file = _write(
        "job.sh",
        print_file(
            capsys, *argv, "train", CONFIG, *make_settings(together, tmp_path / "checkpoints")
        ),
    )
    state, code = slurm.wait(slurm.submit(file), 300)
    assert (state, code) == ("COMPLETED", 0), _read("digits-*.log")
    (alone,) = results_of_job(
        train, 1, args=(CONFIG, str(tmp_path / "alone")), env={"TF_CONFIG": None}, timeout=180
    )
    losses = json.loads((together / "metrics.json").read_text())["losses"]
    assert len(losses) == 20
    # 128 rows do not divide by 3.
    np.testing.assert_allclose(losses, alone[1], rtol=1e-4)


@pytest.mark.parametrize(
    ("variable", "layout"),
    [
        ("JAXDIST_CLUSTER=slurm", "--nodes=3"),
        ("NOTHING=1", "--nodes=3"),
        ("NOTHING=1", "--distribution=plane=2"),
        ("NOTHING=1", "--nodelist=host1,host2"),
    ],
    ids=["JAXDIST_CLUSTER=slurm", "found", "found with distribution plane", "found on two hosts"],
)
def test_the_tasks_of_a_step_meet(slurm: Slurm, variable: str, layout: str) -> None:
    options = ["srun", "--ntasks=4", "--export", f"ALL,{variable}", layout]
    done = slurm.call(*options, sys.executable, SCRIPT)
    assert done.returncode == 0, done.stderr
    said = re.findall(r"process (\d) of 4 total 4.0 by SlurmClusterResolver", done.stdout)
    assert sorted(said) == ["0", "1", "2", "3"], done.stdout


@pytest.mark.parametrize(
    ("start", "starts", "count"),
    [
        ("{}", 1, 1),
        ("srun --ntasks=1 --nodes=1 {}", 1, 1),
        ("srun {}", 3, 3),
        ("JAXDIST_CLUSTER=none srun {}", 3, 1),
    ],
    ids=["without srun", "a step with one task", "a step with three tasks", "JAXDIST_CLUSTER=none"],
)
def test_resolve_and_the_strategy_agree_in_a_batch_script(
    slurm: Slurm, start: str, starts: int, count: int
) -> None:
    program = start.format(shlex.join([sys.executable, SCRIPT]))
    resolve = start.format(shlex.join([sys.executable, "-m", "jaxdist", "resolve"]))
    # `resolve` has the exit code 1 where it warns of more tasks than it found.
    file = _write("job.sh", f"#!/bin/bash\n{program} || exit 1\n{resolve} || true\n")
    options = ["--ntasks=3", "--nodes=3", "--output=job-%j.log", f"--chdir={pathlib.Path.cwd()}"]
    state, code = slurm.wait(slurm.submit(file, *options), 120)
    log = _read("job-*.log")
    assert (state, code) == ("COMPLETED", 0), log
    totals = re.findall(r"process \d of (\d) total (\d)\.0", log)
    assert totals == [(str(count), str(count))] * starts, log
    found = re.findall(r"this process .*?process (\d) of (\d)", log)
    assert sorted(found) == sorted((str(i % count), str(count)) for i in range(starts)), log


def test_a_job_continues_after_a_task_was_killed(
    slurm: Slurm, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = ("-n", "3", "--print", "slurm", "--hosts", "3", "--restarts", "1", "--name", "steps")
    words = [ELASTIC, str(tmp_path), "8", "1", "5"]
    file = _write("job.sh", print_file(capsys, *argv, *words))
    state, code = slurm.wait(slurm.submit(file), 300)
    log = _read("steps-*.log")
    assert (state, code) == ("COMPLETED", 0), log
    assert "UnavailableError" in log, log
    rows = [line.split()[:3] for line in (tmp_path / "steps").read_text().splitlines()]
    first = [["1", str(step), "3"] for step in range(1, 5)]
    assert rows == first + [["2", str(step), "3"] for step in range(5, 9)]


def test_parameter_servers_count_each_function_once(
    slurm: Slurm, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = ("--ps", "1", "--workers", "2", "--print", "slurm", "--name", "servers")
    file = _write("job.sh", print_file(capsys, *argv, SERVERS, "40", "plain"))
    state, code = slurm.wait(slurm.submit(file), 300)
    log = _read("servers-*.log")
    assert (state, code) == ("COMPLETED", 0), log
    events = [json.loads(line) for line in re.findall(r"^\[chief 0\] (\{.*\})$", log, re.M)]
    end = events[-1]
    assert end["event"] == "end"
    assert end["count"] == end["applied"] == end["scheduled"] == 40, end
