"""Calls of a server that take longer than the deadline of a message."""

import pathlib
import threading
from typing import Any

import numpy as np
import pytest

from jaxdist._parameter_server.protocol import (
    Create,
    Creation,
    Saved,
    WriteSnapshot,
)
from jaxdist._parameter_server.server import VariableServer, make_handlers
from jaxdist._parameter_server.server.handlers import RUNNING, UNKNOWN, LongCalls
from jaxdist._parameter_server.transport import Message, connect, serve
from jaxdist._parameter_server.transport.requests import Done
from jaxdist._parameter_server.variables.remote_server import RemoteServer
from jaxdist.errors import ArgumentError


def test_a_message_that_comes_twice_starts_nothing() -> None:
    calls, go_on = LongCalls(), threading.Event()
    started: list[int] = []

    def work() -> Any:
        started.append(1)
        go_on.wait(30)
        return Saved(len(started), 0)

    assert calls.wait("a", 0) is UNKNOWN
    assert calls.run("a", 0.01, work) is RUNNING
    assert calls.run("a", 0.01, work) is RUNNING
    assert calls.wait("a", 0.01) is RUNNING
    go_on.set()
    assert calls.wait("a", 30) == Saved(1, 0)
    assert calls.run("a", 30, work) == Saved(1, 0)
    assert calls.run("", 0, work) == Saved(2, 0)


def test_an_error_is_raised_for_each_who_asks() -> None:
    calls = LongCalls()

    def fail() -> Any:
        raise ArgumentError("not so")

    for _ in range(2):
        with pytest.raises(ArgumentError, match="not so"):
            calls.run("a", 30, fail)


def test_old_calls_are_forgotten() -> None:
    calls = LongCalls()
    for n in range(300):
        calls.run(f"{n}", 30, lambda: Done())
    assert calls.wait("0", 0) is UNKNOWN
    assert calls.wait("299", 0) == Done()


def test_a_snapshot_that_takes_longer_than_a_message_is_waited_for(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JAXDIST_RPC_SECONDS", "2")
    server = VariableServer(snapshot_directory=tmp_path)
    handlers = make_handlers(server)
    seen: list[str] = []
    go_on = threading.Event()
    save = server.snapshot

    def save_slowly() -> Any:
        go_on.wait(30)
        return save()

    server.snapshot = save_slowly  # type: ignore[method-assign]

    def note(method: str) -> Any:
        def handle(message: Message) -> Message:
            seen.append(method)
            if seen.count("wait") == 2:
                go_on.set()
            return handlers[method](message)

        return handle

    listener = serve("127.0.0.1:0", {m: note(m) for m in handlers}, layer="grpc")
    caller = RemoteServer(connect(listener.address, layer="grpc", name="ps 0"), 0)
    caller.call(Create([Creation("v", np.zeros(2, np.float32))]))
    caller.call(WriteSnapshot())
    assert seen.count("snapshot") == 1
    assert seen.count("wait") >= 2
    caller.close()
    listener.stop()
    server.close()


def test_a_call_that_the_server_has_forgotten_is_made_again() -> None:
    server = VariableServer()
    first, handlers = make_handlers(server), make_handlers(server)
    seen: list[str] = []

    def create(message: Message) -> Message:
        seen.append("create")
        # The first one is answered by a server that ends then.
        if len(seen) == 1:
            return Message("create", {"state": "running"})
        return handlers["create"](message)

    listener = serve("127.0.0.1:0", {**first, "create": create}, layer="local")
    caller = RemoteServer(connect(listener.address, layer="local", name="ps 0"), 0)
    assert caller.call(Create([Creation("v", np.zeros(2, np.float32))])).made == {"v": (True, 0)}
    assert len(seen) == 2
    listener.stop()
