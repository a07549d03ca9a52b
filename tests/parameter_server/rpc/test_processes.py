"""A server in a process of its own, which is killed, stopped and started again."""

import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from jaxdist.errors import UnavailableError
from jaxdist.experimental import rpc
from tests.parameter_server.rpc.serving import start_server_process
from tests.parameter_server.transport.task import poll


def _connect(address: str, name: str = "") -> Any:
    return rpc.Client.create("grpc", address, name, timeout_in_ms=30_000)


def test_several_clients_change_a_variable_of_another_process() -> None:
    with start_server_process() as task:
        clients = [_connect(task.address, f"client {n}") for n in range(3)]
        assert clients[0].pid_blocking() == task.process.pid != os.getpid()

        def work(client: Any) -> None:
            assert all(result.is_ok() for result in [client.count(2) for _ in range(30)])

        with ThreadPoolExecutor(3) as pool:
            list(pool.map(work, clients))
        assert [int(client.read_blocking()) for client in clients] == [180] * 3
        for client in clients:
            client.close()


def test_calls_of_a_killed_server_end_at_once_and_a_restarted_one_is_found() -> None:
    with start_server_process() as task:
        client = _connect(task.address, "trainer")
        assert client.count_blocking(5) == 5
        waiting = client.hang()
        began = time.monotonic()
        task.kill()
        code, text = waiting.get_error()
        assert code == 14
        assert f"client 'trainer' at {task.address}" in text
        assert client.count(1).get_error()[0] == 14
        with pytest.raises(UnavailableError, match="'count'"):
            client.count_blocking(1)
        assert time.monotonic() - began < 5
        port = int(task.address.rpartition(":")[2])
        with start_server_process(port):
            poll(lambda: client.read().is_ok())
            assert client.read_blocking() == 0
        client.close()


def test_a_stopped_server_is_noticed_by_the_deadline_of_the_call() -> None:
    with start_server_process() as task:
        client = _connect(task.address)
        assert client.count_blocking(1) == 1
        task.signal(signal.SIGSTOP)
        began = time.monotonic()
        assert client.count(1, timeout_in_ms=500).get_error()[0] == 4
        assert 0.4 < time.monotonic() - began < 5
        task.signal(signal.SIGCONT)
        assert client.read(timeout_in_ms=30_000).is_ok()
        client.close()


def test_a_server_process_ends_although_a_function_does_not() -> None:
    with start_server_process() as task:
        client = _connect(task.address)
        waiting = client.hang()
        assert task.process.stdin is not None
        task.process.stdin.close()
        assert waiting.get_error()[0] == 14
        assert task.process.wait(30) == 0
        client.close()
