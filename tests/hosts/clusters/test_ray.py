"""The jobs of the docs on three nodes of Ray. `make test-hosts` installs Ray."""

import contextlib
import json
import pathlib
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence

import numpy as np
import pytest

from tests.hosts.clusters.ray_nodes import make_environment, needs_ray, start_ray
from tests.hosts.hosts import Host, end_processes_of, make_hosts
from tests.hosts.training import make_settings, train
from tests.launching.files.printed import SCRIPT, clean_environment
from tests.launching.launcher import run_main
from tests.processes.job import ROOT, Job, Outcome, results_of_job, start_job

pytestmark = [needs_ray, pytest.mark.slow, pytest.mark.timeout(900)]

CONFIG = str(ROOT / "configs" / "digits_multi_worker.toml")
SERVERS = str(ROOT / "tests" / "parameter_server" / "tasks" / "job_script.py")
ELASTIC = str(pathlib.Path(__file__).with_name("elastic_script.py"))
FAULTS = ("SIGKILL", "exit 0", "SIGSTOP", "a cut link", "a host that is gone")


@pytest.fixture
def nodes(tmp_path: pathlib.Path) -> Iterator[Sequence[Host]]:
    """Three nodes; the launcher runs on the first."""
    with make_hosts(3) as hosts, start_ray(hosts, tmp_path, cores=1):
        yield hosts


def _start(nodes: Sequence[Host], *argv: str, **env: str) -> contextlib.AbstractContextManager[Job]:
    variables: dict[str, str | None] = {"TF_CONFIG": None, **make_environment(nodes[0]), **env}
    arguments = (["launch", "--on", "ray", *argv],)
    holders = [nodes[0].holder]
    return start_job(run_main, 1, args=arguments, env=variables, holders=holders)


def _run(nodes: Sequence[Host], *argv: str, timeout: float = 300, **env: str) -> Outcome:
    with _start(nodes, *argv, **env) as job:
        (outcome,) = job.wait(timeout)
    assert not outcome.timed_out, outcome.describe()
    return outcome


def test_digits_on_three_nodes_have_the_losses_of_one_process(
    nodes: Sequence[Host], tmp_path: pathlib.Path
) -> None:
    together = tmp_path / "together"
    outcome = _run(
        nodes, "-n", "3", "train", CONFIG, *make_settings(together, tmp_path / "checkpoints")
    )
    assert outcome.exit_code == 0, outcome.describe()
    (alone,) = results_of_job(
        train, 1, args=(CONFIG, str(tmp_path / "alone")), env={"TF_CONFIG": None}, timeout=180
    )
    losses = json.loads((together / "metrics.json").read_text())["losses"]
    assert len(losses) == 20
    # 128 rows do not divide by 3.
    np.testing.assert_allclose(losses, alone[1], rtol=1e-4)


def test_a_job_is_submitted_from_elsewhere(nodes: Sequence[Host]) -> None:
    address = {"RAY_API_SERVER_ADDRESS": f"http://{nodes[0].address}:8265"}
    ray = [sys.executable, "-m", "ray.scripts.scripts", "job", "submit"]
    command = [sys.executable, "-m", "jaxdist", "launch", "-n", "3", "--on", "ray", SCRIPT]
    done = subprocess.run(
        nodes[1].enter([*ray, "--", *command]),
        env=clean_environment() | make_environment(nodes[0]) | address,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    said = re.findall(r"process (\d) of 3 total 3.0", done.stdout)
    assert sorted(said) == ["0", "1", "2"], done.stdout + done.stderr
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("fault", FAULTS)
def test_an_elastic_job_continues_with_the_remaining_processes(
    nodes: Sequence[Host], tmp_path: pathlib.Path, fault: str
) -> None:
    env = {"JAXDIST_COLLECTIVE_SECONDS": "20", "JAXDIST_JOIN_SECONDS": "60"}
    argv = ("--elastic", "2:3", ELASTIC, str(tmp_path), "8", fault)
    with _start(nodes, *argv, **env) as job:
        if fault in ("a cut link", "a host that is gone"):
            job.wait_for_line(0, "] reached", 120)
            nodes[2].cut()
            if fault == "a host that is gone":
                end_processes_of(nodes[2].holder)
        (outcome,) = job.wait(300)
    assert not outcome.timed_out, outcome.describe()
    assert outcome.exit_code == 0, outcome.describe()
    rows = [line.split() for line in (tmp_path / "steps").read_text().splitlines()]
    first = [["1", str(step), "3"] for step in range(1, 5)]
    assert rows == first + [["2", str(step), "2"] for step in range(5, 9)], outcome.describe()
    (lost,) = re.findall(r"^\[(\d)\] reached$", outcome.stdout, re.MULTILINE)
    said = f"process {lost} was lost. The job continues with 2 of 3"
    assert said in outcome.stderr, outcome.describe()


def test_parameter_servers_count_each_function_once(
    nodes: Sequence[Host], tmp_path: pathlib.Path
) -> None:
    # A chief, a server and a worker: one on each node.
    argv = ("--ps", "1", "--workers", "1", "--snapshot-directory", str(tmp_path))
    outcome = _run(nodes, *argv, SERVERS, "40", "plain")
    assert outcome.exit_code == 0, outcome.describe()
    events = re.findall(r"^\[chief 0\] (\{.*\})$", outcome.stdout, re.MULTILINE)
    end = json.loads(events[-1])
    assert end["event"] == "end", outcome.describe()
    assert end["count"] == end["applied"] == end["scheduled"] == 40, end
