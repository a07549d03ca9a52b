"""A task is called by one address for the whole job, wherever it is."""

import json
import os
import pathlib
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from jaxdist._parameter_server.transport import Message, connect, serve
from jaxdist.errors import ClusterError, DeadlineExceededError, UnavailableError
from tests.ports import find_free_ports
from tests.strategies.oracle import refused

NAME = "10.255.255.1:5000"  # Nobody is there.


@pytest.fixture
def book(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> pathlib.Path:
    """The file of addresses, which the environment names."""
    path = tmp_path / "addresses.json"
    path.write_text("{}")
    monkeypatch.setenv("JAXDIST_ADDRESSES", str(path))
    return path


def _write(book: pathlib.Path, address: str) -> None:
    part = book.with_suffix(".part")
    part.write_text(json.dumps({NAME: address}))
    part.rename(book)


def _make_free_address() -> str:
    return f"127.0.0.1:{find_free_ports(1)[0]}"


def _answer(text: str):
    return {"who": lambda request: Message("who", {"is": text})}


def test_a_channel_follows_its_task_to_another_address(book: pathlib.Path) -> None:
    _write(book, _make_free_address())
    first = serve(NAME, _answer("first"), layer="grpc")
    channel = connect(NAME, layer="grpc", name="ps 0")
    assert channel.call(Message("who")).fields == {"is": "first"}
    first.stop()
    with pytest.raises(UnavailableError):
        channel.call(Message("who"))
    _write(book, _make_free_address())
    second = serve(NAME, _answer("second"), layer="grpc")
    try:
        assert second.address != first.address
        channel.wait_until_ready(20)
        assert channel.call(Message("who")).fields == {"is": "second"}
        assert channel.address == second.address
    finally:
        channel.close()
        second.stop()


def test_who_waits_for_a_task_finds_it_where_it_comes_up(book: pathlib.Path) -> None:
    _write(book, _make_free_address())
    channel = connect(NAME, layer="grpc", name="ps 0")
    with ThreadPoolExecutor(1) as threads:
        waiting = threads.submit(channel.wait_until_ready, 30)
        _write(book, _make_free_address())
        listener = serve(NAME, _answer("here"), layer="grpc")
        try:
            waiting.result(30)
        finally:
            channel.close()
            listener.stop()


def test_nobody_at_any_address_is_a_deadline_and_a_closed_channel_an_error(
    book: pathlib.Path,
) -> None:
    _write(book, _make_free_address())
    channel = connect(NAME, layer="grpc", name="ps 0")
    with pytest.raises(DeadlineExceededError):
        channel.wait_until_ready(1.2)
    channel.close()
    with pytest.raises(UnavailableError):
        channel.wait_until_ready(5)


def test_a_call_that_waits_where_its_task_was_is_ended_when_another_finds_it(
    book: pathlib.Path,
) -> None:
    has_come, may_go = threading.Event(), threading.Event()

    def wait(request: Message) -> Message:
        has_come.set()
        may_go.wait(60)
        return request

    _write(book, _make_free_address())
    first = serve(NAME, {"wait": wait}, layer="grpc")
    channel = connect(NAME, layer="grpc", name="ps 0")
    with ThreadPoolExecutor(1) as threads:
        waiting = threads.submit(channel.call, Message("wait"), 60)
        assert has_come.wait(30)
        _write(book, _make_free_address())
        second = serve(NAME, _answer("second"), layer="grpc")
        try:
            assert channel.call(Message("who"), 20).fields == {"is": "second"}
            with pytest.raises(UnavailableError, match="channel was closed"):
                waiting.result(20)
        finally:
            may_go.set()
            channel.close()
            first.stop()
            second.stop()


def test_an_address_that_is_not_in_the_file_is_used_as_it_is(book: pathlib.Path) -> None:
    listener = serve("127.0.0.1:0", _answer("here"), layer="grpc")
    channel = connect(listener.address, layer="grpc", name="ps 0")
    try:
        assert channel.call(Message("who")).fields == {"is": "here"}
        assert channel.address == listener.address
    finally:
        channel.close()
        listener.stop()


@pytest.mark.parametrize("content", [None, "no JSON", "[1]"])
def test_a_file_without_addresses_is_named(book: pathlib.Path, content: str | None) -> None:
    if content is None:
        os.remove(book)
    else:
        book.write_text(content)
    with refused(ClusterError, "JAXDIST_ADDRESSES", str(book), "no addresses"):
        connect(NAME, layer="grpc", name="ps 0")
