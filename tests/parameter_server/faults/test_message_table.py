"""The k-th message of a short job is harmed, for each k to its end, by a proxy between processes.

No process has died, so each function counts once and nothing is lost; or the job stops with an
error that names a task.
"""

import contextlib
import json
import os
import pathlib
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from tests.parameter_server.faults.message_proxy import KINDS, Wire, start_proxies
from tests.parameter_server.tasks.cluster import ROOT, SECRET, Task, start_command
from tests.ports import find_free_ports
from tests.tables import sampled

RPC_SECONDS = 1.5
SERVER_SECONDS = 30.0
START = 100.0
# More than the job has; a test checks it.
MOST = 90
ROWS = [(kind, number) for kind in KINDS for number in range(1, MOST + 1)]


class Cluster:
    """Tasks that run all jobs of this file, with a proxy in front of each."""

    def __init__(self, stack: contextlib.ExitStack, folder: pathlib.Path) -> None:
        self.wire = Wire()
        self._jobs = 0
        own = [f"127.0.0.1:{port}" for port in find_free_ports(4)]
        targets = {
            "ps 0 for the chief": own[0],
            "ps 0 for worker 0": own[0],
            "ps 0 for worker 1": own[0],
            "worker 0": own[1],
            "worker 1": own[2],
        }
        through = stack.enter_context(start_proxies(self.wire, targets))
        workers = [through["worker 0"], through["worker 1"]]
        # Each task has its own addresses of the others.
        clusters = {
            ("ps", 0): {"ps": own[:1], "worker": workers, "chief": own[3:]},
            ("worker", 0): {"ps": [through["ps 0 for worker 0"]], "worker": own[1:3]},
            ("worker", 1): {"ps": [through["ps 0 for worker 1"]], "worker": own[1:3]},
            ("chief", 0): {"ps": [through["ps 0 for the chief"]], "worker": workers},
        }
        serve = [sys.executable, "-m", "jaxdist", "server"]
        module = ["--module", "tests.parameter_server.faults.batches"]
        commands = {
            ("ps", 0): [*serve, "--snapshot-directory", str(folder)],
            ("worker", 0): [*serve, *module],
            ("worker", 1): [*serve, *module],
            ("chief", 0): [sys.executable, "-m", "tests.parameter_server.faults.chief"],
        }
        tasks = {}
        for (job, index), command in commands.items():
            cluster = {"chief": own[3:], **clusters[job, index]}
            config = {"cluster": cluster, "task": {"type": job, "index": index}}
            environment = {
                **os.environ,
                "TF_CONFIG": json.dumps(config),
                "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
                "PYTHONUNBUFFERED": "1",
                "JAX_PLATFORMS": "cpu",
                "JAX_NUM_CPU_DEVICES": "1",
                "XLA_FLAGS": "",
                "JAXDIST_SECRET": SECRET,
                "JAXDIST_RPC_SECONDS": str(RPC_SECONDS),
                "JAXDIST_SERVER_SECONDS": str(SERVER_SECONDS),
                "JAXDIST_JOIN_SECONDS": str(START),
            }
            tasks[job, index] = Task(start_command(command, environment))
            stack.callback(tasks[job, index].close)
        self.chief = tasks["chief", 0]

    def run(self, kind: str, number: int) -> dict[str, Any]:
        """Run a whole job, in which one message is harmed; return what the chief counted."""
        self._jobs += 1
        self.wire.begin(kind, number, RPC_SECONDS * 1.2)
        assert self.chief.process.stdin is not None
        self.chief.process.stdin.write(f"{self._jobs}\n")
        self.chief.process.stdin.flush()
        return self.chief.wait_for("end", START)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """The tasks, which have run one job already: their programs are compiled."""
    with contextlib.ExitStack() as stack:
        made = Cluster(stack, tmp_path_factory.mktemp("snapshots"))
        made.run("none", 0)
        yield made


def _check(found: dict[str, Any], said: str) -> None:
    assert found["error"] is None, said
    assert found["applied"] == found["scheduled"] == 7, said
    assert found["lost"] == 0, said
    # The 100 are the change of the chief itself.
    assert found["count"] == 107, said
    assert found["total"] == 7, said
    assert found["sums"] == [3.0] * 6, said


@pytest.mark.slow
@pytest.mark.timeout(200)
def test_the_table_reaches_the_end_of_the_job(cluster: Cluster) -> None:
    found = cluster.run("none", 0)
    _check(found, str(found))
    assert 20 < len(cluster.wire.names) <= MOST, cluster.wire.names


@pytest.mark.slow
@pytest.mark.timeout(200)
@pytest.mark.parametrize("row", sampled(ROWS, 6, name=lambda row: f"{row[0]}-{row[1]}"))
def test_the_kth_message_is_harmed(cluster: Cluster, row: tuple[str, int]) -> None:
    kind, number = row
    found = cluster.run(kind, number)
    names = cluster.wire.names
    harmed = names[number - 1] if number <= len(names) else "none"
    _check(found, f"{kind} {number}: {harmed}\n{found}\n{names}")
