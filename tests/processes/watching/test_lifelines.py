"""The end of a process on another host is seen by its connection."""

import json
import socket
import time
from collections.abc import Callable, Iterator

import pytest

from jaxdist._processes import LocalStore, Process
from jaxdist._processes.watching import lifelines
from jaxdist._processes.watching.lifelines import Lifelines
from jaxdist._processes.watching.observer import GONE, LEFT, PREFIX, ProcessState


@pytest.fixture(autouse=True)
def short_silence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lifelines, "SILENT_SECONDS", 0.2)
    monkeypatch.setattr(lifelines, "_SECONDS_BETWEEN_LOOKS", 0.02)


@pytest.fixture
def store() -> LocalStore:
    return LocalStore()


@pytest.fixture
def first(store: LocalStore) -> Iterator[Lifelines]:
    watched = Lifelines(Process(0, 3), store, "127.0.0.1")
    watched.start()
    yield watched
    watched.stop()


def _connect(store: LocalStore, said: bytes) -> socket.socket:
    line = socket.create_connection(json.loads(store.get("jaxdist/lifelines") or ""))
    line.sendall(said)
    return line


def _wait_until(is_true: Callable[[], object]) -> None:
    deadline = time.monotonic() + 20
    while not is_true():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def test_a_process_whose_connection_is_closed_and_that_is_silent_has_ended(
    store: LocalStore, first: Lifelines
) -> None:
    with _connect(store, b"1\n"), _connect(store, b"2\n") as other:
        _wait_until(lambda: sorted(n for n in first._lines.values() if n is not None) == [1, 2])
        other.close()
        _wait_until(lambda: store.get(f"{LEFT}/2"))
        assert store.list(LEFT) == {f"{LEFT}/2": GONE}


def test_a_reason_that_the_process_has_given_stays(store: LocalStore, first: Lifelines) -> None:
    store.set(f"{LEFT}/1", "ValueError: no")
    line = _connect(store, b"1\n")
    _wait_until(lambda: 1 in first._lines.values())
    line.close()
    _wait_until(lambda: not first._lines and not first._lost)
    assert store.get(f"{LEFT}/1") == "ValueError: no"


def test_a_process_that_sends_news_lives_although_its_connection_was_closed(
    store: LocalStore, first: Lifelines
) -> None:
    def send(news: int) -> None:
        store.set(f"{PREFIX}/1", ProcessState(1, news=news).to_text(), overwrite=True)

    send(1)
    line = _connect(store, b"1\n")
    _wait_until(lambda: 1 in first._lines.values())
    line.close()
    _wait_until(lambda: 1 in first._lost)
    send(2)
    _wait_until(lambda: not first._lost)
    assert store.list(LEFT) == {}


@pytest.mark.parametrize("said", [b"GET / HTTP/1.1\n", b"3\n", b"-1\n", b"\n"])
def test_a_stranger_is_nobody(store: LocalStore, first: Lifelines, said: bytes) -> None:
    with _connect(store, said) as stranger:
        stranger.settimeout(20)
        assert stranger.recv(1) == b""
    with _connect(store, b"1\n"):
        _wait_until(lambda: 1 in first._lines.values())
    _wait_until(lambda: store.get(f"{LEFT}/1"))


def test_others_notice_the_end_of_process_0(store: LocalStore, first: Lifelines) -> None:
    second = Lifelines(Process(1, 3), store, "127.0.0.1")
    second.start()
    _wait_until(lambda: 1 in first._lines.values())
    first.stop()
    _wait_until(lambda: store.get(f"{LEFT}/0"))
    second.stop()


def test_a_process_that_cannot_connect_goes_on_without(store: LocalStore) -> None:
    with socket.create_server(("127.0.0.1", 0)) as nobody:
        port = nobody.getsockname()[1]
    store.set("jaxdist/lifelines", json.dumps(["127.0.0.1", port]))
    second = Lifelines(Process(1, 3), store, "127.0.0.1")
    second.start()
    _wait_until(lambda: not second._thread.is_alive())
    second.stop()
    assert store.list(LEFT) == {}


def test_a_process_that_waits_for_process_0_can_stop(store: LocalStore) -> None:
    second = Lifelines(Process(1, 3), store, "127.0.0.1")
    second.start()
    second.stop()
    assert not second._thread.is_alive()
