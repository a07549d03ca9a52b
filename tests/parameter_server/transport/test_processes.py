"""A real server process that is killed, stopped and started again."""

import signal
import socket
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from jaxdist._parameter_server.transport import Message, connect, serve
from jaxdist.errors import ClusterError, DeadlineExceededError, UnavailableError
from tests.parameter_server.transport.task import poll, start_task


def test_a_killed_server_is_unavailable_at_once_and_found_again_after_a_restart() -> None:
    with start_task() as task:
        channel = connect(task.address, layer="grpc", name="ps 0")
        first = channel.call(Message("pid")).fields["pid"]
        with ThreadPoolExecutor(2) as pool:
            small = pool.submit(channel.call, Message("wait", {"seconds": 60.0}), 60)
            values = (np.zeros(3_000_000),)
            large = pool.submit(channel.call, Message("wait", {"seconds": 60.0}, values), 60)
            poll(lambda: channel.call(Message("running"), 20).fields == {"running": 2})
            began = time.monotonic()
            task.kill()
            for call in (small, large):
                with pytest.raises(UnavailableError, match=f"ps 0 at {task.address}"):
                    call.result(30)
            assert time.monotonic() - began < 5
        began = time.monotonic()
        with pytest.raises(UnavailableError, match=r"'pid'(.|\n)*last answered"):
            channel.call(Message("pid"), 60)
        assert time.monotonic() - began < 5
        port = int(task.address.rpartition(":")[2])
        with start_task(port):
            began = time.monotonic()
            poll(lambda: _answers_with_another(channel, first))
            assert time.monotonic() - began < 3
        channel.close()


def _answers_with_another(channel, first: int) -> bool:
    try:
        return channel.call(Message("pid"), 5).fields["pid"] != first
    except UnavailableError:
        return False


def test_a_stopped_server_is_noticed_by_the_deadline_and_answers_when_it_goes_on() -> None:
    with start_task() as task:
        channel = connect(task.address, layer="grpc", name="ps 0")
        channel.call(Message("pid"))
        task.signal(signal.SIGSTOP)
        for values in ((), (np.zeros(3_000_000),)):
            began = time.monotonic()
            with pytest.raises(DeadlineExceededError, match=rf"ps 0 at {task.address}(.|\n)*last"):
                channel.call(Message("count", {}, values), 1.0)
            assert 0.9 < time.monotonic() - began < 4
        task.signal(signal.SIGCONT)
        assert channel.call(Message("count"), 20).fields == {"count": 0}
        channel.close()


def test_a_channel_to_a_stopped_server_is_closed_at_once() -> None:
    with start_task() as task:
        channel = connect(task.address, layer="grpc", name="ps 0")
        channel.call(Message("pid"))
        task.signal(signal.SIGSTOP)
        # More than the sockets take: the call ends, and what it was sending does not.
        with pytest.raises(DeadlineExceededError):
            channel.call(Message("count", {}, (np.zeros(8_000_000),)), 1.0)
        began = time.monotonic()
        channel.close()
        assert time.monotonic() - began < 5
        with pytest.raises(UnavailableError, match="this channel is closed"):
            channel.call(Message("count"), 1.0)


def test_a_task_ends_although_a_handler_does_not() -> None:
    with start_task() as task:
        channel = connect(task.address, layer="grpc", name="ps 0")
        with ThreadPoolExecutor(1) as pool:
            call = pool.submit(channel.call, Message("wait", {"seconds": 300.0}), 60)
            poll(lambda: channel.call(Message("running"), 20).fields == {"running": 1})
            assert task.process.stdin is not None
            task.process.stdin.close()
            with pytest.raises(UnavailableError, match="ps 0 at"):
                call.result(30)
        assert task.process.wait(30) == 0
        channel.close()


def test_a_proxy_of_the_environment_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    with start_task() as task:
        for name in ("http_proxy", "grpc_proxy"):
            monkeypatch.setenv(name, "http://127.0.0.1:1")
        for name in ("no_proxy", "no_grpc_proxy"):
            monkeypatch.delenv(name, raising=False)
        channel = connect(task.address, layer="grpc", name="ps 0")
        assert channel.call(Message("count"), 20).fields == {"count": 0}
        channel.close()


def test_a_port_that_is_used_at_one_address_of_a_name_is_an_error() -> None:
    """`localhost` is 127.0.0.1 and ::1. Clients would reach the other program at one of them."""
    with socket.socket(socket.AF_INET) as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        address = f"localhost:{other.getsockname()[1]}"
        with pytest.raises(ClusterError, match=rf"{address} \(127\.0\.0\.1\), and cannot"):
            serve(address, {}, layer="grpc")
