"""The chief's own reads and changes of variables, while a server is started again."""

import pathlib
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

import jaxdist
from jaxdist._parameter_server.protocol import (
    Change,
    ChangeVariables,
    Create,
    Creation,
    GetStatistics,
    Read,
    Release,
    WriteSnapshot,
)
from jaxdist._parameter_server.strategy.patient_server import PatientServer
from jaxdist._parameter_server.transport import Channel, Message, connect
from jaxdist.cluster_resolver import ClusterSpec
from jaxdist.errors import DeadlineExceededError, PSUnavailableError, UnavailableError
from tests.parameter_server.transport.task import poll
from tests.ports import find_free_ports


class _Channel:
    """Calls the server, and does something before or after each call."""

    def __init__(self, channel: Channel) -> None:
        self.inner, self.address = channel, channel.address
        self.before: Callable[[str], None] = lambda method: None
        self.after: Callable[[str], None] = lambda method: None
        self.calls: list[str] = []

    def call(self, message: Message, seconds: float | None = None) -> Message:
        self.calls.append(message.method)
        self.before(message.method)
        reply = self.inner.call(message, seconds)
        self.after(message.method)
        return reply

    def call_briefly(self, message: Message, seconds: float | None = None) -> Message | None:
        return self.call(message, seconds)

    def wait_until_ready(self, seconds: float | None = None) -> None:
        self.inner.wait_until_ready(seconds)

    def close(self) -> None:
        self.inner.close()


class _Case:
    """A server that can be stopped and started, and the caller."""

    def __init__(self, folder: pathlib.Path) -> None:
        address = f"127.0.0.1:{find_free_ports(1)[0]}"
        spec = ClusterSpec({"ps": [address]})
        self.server = jaxdist.Server(spec, "ps", 0, snapshot_directory=folder)
        self.channel = _Channel(connect(address, layer="grpc", name="ps 0"))
        self.caller = PatientServer(self.channel, 0)
        self.caller.call(Create([Creation("v", np.zeros(2, np.float32))]))

    def add(self, value: float) -> None:
        self.caller.call(ChangeVariables([Change("add", "v", (np.full(2, value, np.float32),))]))

    def read(self) -> float:
        return float(self.caller.call(Read(["v"])).values["v"][0])


@pytest.fixture
def case(tmp_path: pathlib.Path) -> Iterator[_Case]:
    made = _Case(tmp_path)
    yield made
    made.caller.close()
    made.server.stop()


def _lose(case: _Case, calls: int, *, is_reply: bool) -> None:
    """Lose some requests to change variables, or the replies to them."""
    left = [calls]

    def lose(method: str) -> None:
        if method == "change" and left[0]:
            left[0] -= 1
            raise UnavailableError("This server does not answer.")

    setattr(case.channel, "after" if is_reply else "before", lose)


@pytest.mark.parametrize("is_reply", [False, True])
def test_a_change_whose_request_or_reply_is_lost_counts_once(case: _Case, is_reply: bool) -> None:
    for n in range(1, 4):
        _lose(case, 2, is_reply=is_reply)
        case.add(1.0)
        assert case.read() == n
    found = case.caller.call(GetStatistics())
    assert found.applied == 3
    assert found.already_counted == (6 if is_reply else 0)


def test_reads_and_changes_wait_for_a_server_that_is_started_again(case: _Case) -> None:
    case.add(1.0)
    for use in (lambda: case.add(1.0), case.read):
        case.server.stop()
        before = len(case.channel.calls)
        with ThreadPoolExecutor(1) as pool:
            waiting = pool.submit(use)
            # It was tried, and there is nobody.
            poll(lambda before=before: len(case.channel.calls) >= before + 2)
            assert not waiting.done()
            case.server.start()
            waiting.result(30)
    assert case.read() == 2


def test_a_server_that_does_not_come_back_is_named(
    case: _Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JAXDIST_SERVER_SECONDS", "0.3")
    case.server.stop()
    began = time.monotonic()
    requests: list[Any] = [GetStatistics(), WriteSnapshot()]
    ask, save = (lambda r=r: case.caller.call(r) for r in requests)
    for use in (lambda: case.add(1.0), case.read, save, ask):
        with pytest.raises(
            PSUnavailableError, match=r"^ps 0 at .*\n\n'\w+' was tried \d+ times"
        ) as e:
            use()
        assert e.value.processes == (0,)
        assert "JAXDIST_SERVER_SECONDS=0.6" in str(e.value)
    assert time.monotonic() - began < 10


def test_a_server_that_does_not_reply_is_named(
    case: _Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JAXDIST_SERVER_SECONDS", "0.1")

    def be_late(method: str) -> None:
        raise DeadlineExceededError("ps 0 at 127.0.0.1:1 did not reply within 60 s.")

    case.channel.before = be_late
    with pytest.raises(DeadlineExceededError, match=r"did not reply(.|\n)*JAXDIST_SERVER_SECONDS"):
        case.read()


def test_who_waits_for_a_server_is_woken_when_the_connection_is_closed(case: _Case) -> None:
    case.server.stop()
    found: list[Exception] = []

    def read() -> None:
        try:
            case.read()
        except PSUnavailableError as error:
            found.append(error)

    thread = threading.Thread(target=read)
    thread.start()
    poll(lambda: len(case.channel.calls) >= 4)
    case.caller.close()
    thread.join(20)
    assert len(found) == 1


def test_a_release_waits_for_nobody(case: _Case) -> None:
    case.server.stop()
    with pytest.raises(PSUnavailableError):
        case.caller.call(Release("c", 1))
    assert case.channel.calls[-1:] == ["release"]
    assert case.channel.calls.count("release") == 1
