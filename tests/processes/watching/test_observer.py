"""What a process sees of the others: news, silence, ends."""

import os
import pathlib
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import pytest

from jaxdist._processes import LocalStore, Process
from jaxdist._processes.watching import observer as observer_module
from jaxdist._processes.watching import observer as state_module
from jaxdist._processes.watching.observer import (
    Observer,
    ProcessState,
    describe_this_machine,
    get_machine,
    read_process,
)

needs_proc = pytest.mark.skipif(not get_machine(), reason="needs /proc")


def _write(store: LocalStore, state: ProcessState) -> None:
    store.set(f"jaxdist/here/{state.index}", state.to_text(), overwrite=True)


def test_a_state_is_the_same_after_it_was_sent() -> None:
    full = ProcessState(1, 2, "run", "a.py:3 (f)", 4, 5.5, True, "stack", (0, 2), host="h", pid=9)
    for state in (full, ProcessState(0), ProcessState(0, blames=())):
        assert ProcessState.from_text(state.to_text()) == state


def test_a_process_is_silent_when_its_number_of_news_does_not_change(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(observer_module, "SILENT_SECONDS", 0.2)
    store = LocalStore()
    observer = Observer(Process(0, 3), store)
    _write(store, ProcessState(1, news=1))
    assert not observer.look()[1].is_silent
    time.sleep(0.3)
    _write(store, ProcessState(2, news=1))
    table = observer.look()
    assert (table[1].is_silent, table[2].is_silent) == (True, False)
    assert table[0].state is None
    _write(store, ProcessState(1, news=2))
    assert not observer.look()[1].is_silent


def test_fresh_news_are_awaited() -> None:
    store = LocalStore()
    observer = Observer(Process(0, 2), store)
    _write(store, ProcessState(1, news=1, place="old"))
    later = threading.Timer(0.3, _write, [store, ProcessState(1, news=2, place="new")])
    later.start()
    state = observer.look_until_fresh(patience=20.0)[1].state
    later.join()
    assert state is not None
    assert state.place == "new"


def test_fresh_news_of_a_silent_process_are_not_awaited_for_ever() -> None:
    began = time.monotonic()
    table = Observer(Process(0, 2), LocalStore()).look_until_fresh(patience=0.2)
    assert table[1].state is None
    assert time.monotonic() - began >= 0.2


def test_a_process_that_has_left_says_why() -> None:
    store = LocalStore()
    store.set("jaxdist/left/1", "ValueError: no rows")
    assert Observer(Process(0, 2), store).look_until_fresh()[1].ended == "ValueError: no rows"


def test_the_launcher_says_how_a_process_has_ended(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JAXDIST_LAUNCHER", str(tmp_path))
    (tmp_path / "1.ended").write_text("signal SIGKILL\n")
    store = LocalStore()
    table = Observer(Process(0, 3), store).look()
    assert (table[1].ended, table[2].ended) == ("signal SIGKILL", None)
    store.set("jaxdist/left/1", "KeyError: 3")
    assert Observer(Process(0, 3), store).look()[1].ended == "KeyError: 3, signal SIGKILL"


@pytest.fixture
def child() -> Iterator[subprocess.Popen[bytes]]:
    """A process that sleeps."""
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(100)"])
    yield process
    process.kill()
    process.wait()


def _state_of(process: subprocess.Popen[bytes], started: str | None = None) -> ProcessState:
    began = read_process(process.pid)[1] if started is None else started
    return ProcessState(1, machine=get_machine(), pid=process.pid, started=began)


@needs_proc
def test_a_stopped_process_of_this_machine_is_known_at_once(
    child: subprocess.Popen[bytes],
) -> None:
    store = LocalStore()
    _write(store, _state_of(child))
    observer = Observer(Process(0, 2), store)
    assert not observer.look()[1].is_silent
    child.send_signal(signal.SIGSTOP)
    end = time.monotonic() + 10
    while not observer.look()[1].is_stopped and time.monotonic() < end:
        time.sleep(0.01)
    seen = observer.look()[1]
    assert (seen.is_stopped, seen.is_silent, seen.ended) == (True, True, None)


@needs_proc
def test_a_killed_process_of_this_machine_is_known_before_it_is_reaped(
    child: subprocess.Popen[bytes],
) -> None:
    store = LocalStore()
    _write(store, _state_of(child))
    observer = Observer(Process(0, 2), store)
    child.kill()
    end = time.monotonic() + 10
    while observer.look()[1].ended is None and time.monotonic() < end:
        time.sleep(0.01)
    assert observer.look()[1].ended == "its process is gone"
    child.wait()
    assert observer.look()[1].ended == "its process is gone"


@needs_proc
def test_a_process_that_got_the_id_of_another_is_not_taken_for_it(
    child: subprocess.Popen[bytes],
) -> None:
    store = LocalStore()
    _write(store, _state_of(child, started="1"))
    assert Observer(Process(0, 2), store).look()[1].ended == "its process is gone"


def test_processes_of_other_machines_are_not_looked_up() -> None:
    store = LocalStore()
    _write(store, ProcessState(1, machine="another", pid=1, started="1"))
    assert Observer(Process(0, 2), store).look()[1].ended is None


def test_this_machine_is_described() -> None:
    described = describe_this_machine()
    assert (described["host"], described["pid"]) == (socket.gethostname(), os.getpid())


def test_a_machine_without_proc_has_no_name(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: str) -> str:
        raise OSError(path)

    monkeypatch.setattr(state_module.os, "readlink", refuse)
    assert get_machine() == ""
