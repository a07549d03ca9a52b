"""Requests that no client of jaxdist makes, to a live server: it goes on, and stays small."""

import os
import pathlib
import threading
from collections.abc import Callable, Iterator

import numpy as np
import pytest

from jaxdist._called import called
from jaxdist._parameter_server.transport import (
    Channel,
    Limits,
    Message,
    Security,
    connect,
    serve,
)
from jaxdist._parameter_server.transport.grpc_channel import (
    CALL_KEY,
    SECRET_KEY,
    SERVICE,
    WIRE,
    WIRE_KEY,
    load_grpc,
)
from jaxdist._parameter_server.transport.stream import REQUEST, Outgoing
from jaxdist.errors import UnavailableError
from tests.parameter_server.transport.stranger import Stranger
from tests.parameter_server.transport.task import Task, poll, start_task

SECRET = "correct horse battery staple"
MOST_MEMORY = 64 * 2**20


@pytest.fixture(scope="module")
def task() -> Iterator[Task]:
    """A task with a secret."""
    with start_task(environment={"JAXDIST_SECRET": SECRET}) as started:
        yield started


@pytest.mark.parametrize("count", [400, pytest.param(10_000, marks=pytest.mark.long)])
def test_malformed_requests_change_nothing_and_take_no_memory(
    task: Task, count: int, record_property: Callable[[str, object], None]
) -> None:
    channel = connect(task.address, layer="grpc", name="ps 0", security=Security(SECRET))
    # What a large message needs, and threads, are there before.
    for _ in range(3):
        channel.call(Message("echo", {}, (np.zeros(2**20, np.uint8),)), 30)
    before = resident(task.process.pid)
    most = 0
    stranger = Stranger(task.address, SECRET, count)
    for number in range(count):
        stranger.ask()
        if number % 20 == 0:
            most = max(most, resident(task.process.pid))
    record_property("bytes more than before", most - before)
    print(f"{count} requests: + {most - before:,} bytes")
    assert channel.call(Message("count"), 30).fields == {"count": 0}
    assert most - before <= MOST_MEMORY
    assert task.process.poll() is None
    stranger.close()
    channel.close()


def test_a_call_without_a_deadline_is_refused(task: Task) -> None:
    grpc = load_grpc()
    with grpc.insecure_channel(task.address) as raw:
        known = ((WIRE_KEY, WIRE), (CALL_KEY, bytes(16)), (SECRET_KEY, SECRET.encode()))
        call = raw.stream_stream(f"/{SERVICE}/Stream")(iter([b""]), metadata=known)
        with pytest.raises(grpc.RpcError, match="no deadline"):
            list(call)


def test_a_request_that_does_not_go_on_is_ended(task: Task) -> None:
    """The task gives 5 s to read a request, and this caller asks for a day."""
    grpc = load_grpc()
    release = threading.Event()

    def begin() -> Iterator[bytes]:
        release.wait(60)
        yield b""

    with grpc.insecure_channel(task.address) as raw:
        known = ((WIRE_KEY, WIRE), (CALL_KEY, bytes(16)), (SECRET_KEY, SECRET.encode()))
        call = raw.stream_stream(f"/{SERVICE}/Stream")(begin(), timeout=86400, metadata=known)
        with pytest.raises(grpc.RpcError) as caught:
            list(call)
        assert caught.value.code() is grpc.StatusCode.CANCELLED
        release.set()


def test_all_callers_together_have_a_number_of_bytes() -> None:
    grpc, size = load_grpc(), 2**20
    limits = Limits(message_bytes=size, bytes_in_flight=size, reading_seconds=2.0)
    handlers = {"size": lambda request: Message("", {"size": request.nbytes})}
    listener = serve("127.0.0.1:0", handlers, layer="grpc", security=Security(), limits=limits)
    channel = connect(listener.address, layer="grpc", security=Security())
    large, small = Message("size", {}, (np.zeros(size, np.int8),)), Message("size")
    release, begun = threading.Event(), threading.Event()

    @called("")
    def begin() -> Iterator[bytes]:
        chunks = Outgoing(large, Limits()).make_chunks(bytes(16), REQUEST)
        yield next(chunks)
        begun.set()
        release.wait(60)

    with grpc.insecure_channel(listener.address) as raw:
        known = ((WIRE_KEY, WIRE), (CALL_KEY, bytes(16)))
        call = raw.stream_stream(f"/{SERVICE}/Stream")(begin(), timeout=30, metadata=known)
        assert begun.wait(20)
        poll(lambda: _is_full(channel, large))
        assert channel.call(small, 20).fields == {"size": 0}
        call.cancel()
        release.set()
    assert channel.call(large, 20).fields == {"size": size}
    channel.close()
    listener.stop()


def _is_full(channel: Channel, large: Message) -> bool:
    try:
        channel.call(large, 20)
    except UnavailableError as error:
        return "too many bytes" in str(error)
    return False


def resident(pid: int) -> int:
    pages = int(pathlib.Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")
