"""A job ends with code 0 in every process, also where process 0 hosts the coordination service."""

import json
import os
import signal
import socket
import time
from collections.abc import Iterator
from typing import Any

import pytest

from jaxdist._called import called
from jaxdist._processes import join
from jaxdist._processes.connections import can_list_connections, count_clients
from jaxdist._processes.joining import leaving
from tests.processes.job import results_of_job, start_job
from tests.tables import sampled

on_linux = pytest.mark.skipif(not can_list_connections(), reason="connections are not listed")


@called("test")
def join_and_end(lists_connections: bool = True) -> int:
    """Join the others, and end at once."""
    leaving.can_list_connections = lambda: lists_connections  # type: ignore[attr-defined]
    task = json.loads(os.environ["TF_CONFIG"])
    index = int(task["task"]["index"])
    join(task["cluster"]["worker"], index)
    return index


def join_and_stay() -> int:
    """Join the others; all but process 0 stay."""
    index = join_and_end()
    print("joined", flush=True)
    while index:
        time.sleep(0.01)
    return index


@pytest.mark.parametrize("attempt", sampled(list(range(100)), 5))
def test_a_job_that_ends_at_once_ends_well_in_every_process(attempt: int) -> None:
    assert results_of_job(join_and_end, 2, service=False) == [0, 1]


def test_a_job_ends_well_where_connections_are_not_listed() -> None:
    assert results_of_job(join_and_end, 3, service=False, args=(False,)) == [0, 1, 2]


@on_linux
def test_the_host_waits_for_the_others_and_says_for_whom() -> None:
    with start_job(join_and_stay, 3, service=False) as job:
        for index in range(3):
            job.wait_for_line(index, "joined")
        deadline = time.monotonic() + 30
        while "waits for process 1, process 2." not in job.errors(0):
            assert time.monotonic() < deadline, job.errors(0)
            time.sleep(0.01)
        assert job.exit_code(0) is None
        job.kill(1)
        job.kill(2)
        assert job.wait()[0].exit_code == 0


@on_linux
def test_the_host_leaves_a_process_that_is_stopped() -> None:
    with start_job(join_and_stay, 2, service=False, env={"JAXDIST_HEARTBEAT_SECONDS": "2"}) as job:
        job.wait_for_line(1, "joined")
        job.kill(1, signal.SIGSTOP)
        deadline = time.monotonic() + 30
        while job.exit_code(0) is None:
            assert time.monotonic() < deadline, job.errors(0)
            time.sleep(0.01)
        assert job.exit_code(0) == 0


@pytest.fixture(params=["127.0.0.1", "::1"])
def server(request: pytest.FixtureRequest) -> Iterator[socket.socket]:
    """A socket that listens."""
    try:
        made = socket.create_server(
            (request.param, 0),
            family=socket.AF_INET6 if ":" in request.param else socket.AF_INET,
        )
    except OSError:
        pytest.skip(f"this machine has no {request.param}")
    with made:
        yield made


def _connect_from_child(address: tuple[Any, ...]) -> tuple[int, int]:
    """Connect from another process, which ends when the file that is returned is closed."""
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(write)
        with socket.create_connection(address[:2]):
            os.read(read, 1)
        os._exit(0)
    os.close(read)
    return pid, write


@on_linux
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:os.fork:RuntimeWarning")
def test_connections_of_other_processes_that_have_said_something_are_counted(
    server: socket.socket,
) -> None:
    port = server.getsockname()[1]
    own = socket.create_connection(server.getsockname()[:2])
    accepted = [server.accept()[0]]
    assert count_clients(port, 1e9) == 0
    pid, end = _connect_from_child(server.getsockname())
    try:
        accepted.append(server.accept()[0])
        assert count_clients(port, 1e9) == 1
        deadline = time.monotonic() + 30
        while count_clients(port, 0.02):
            assert time.monotonic() < deadline
        assert count_clients(port + 1, 1e9) == 0
    finally:
        os.close(end)
        os.waitpid(pid, 0)
    while count_clients(port, 1e9):
        assert time.monotonic() < deadline
    for connection in (own, *accepted):
        connection.close()
