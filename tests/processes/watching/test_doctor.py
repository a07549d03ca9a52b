"""Doctors of several processes in one, over a store in memory."""

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from jaxdist import _processes
from jaxdist._processes import LocalStore, Process, Settings
from jaxdist._processes.watching.current import get_doctor
from jaxdist._processes.watching.doctor import Doctor
from jaxdist._processes.watching.hang import HangReports
from jaxdist._processes.watching.observer import Observer, ProcessState
from jaxdist._processes.watching.whereabouts import Doing, Whereabouts
from jaxdist.errors import UnavailableError


def _wait_until(is_true: Callable[[], bool]) -> None:
    end = time.monotonic() + 30
    while not is_true():
        assert time.monotonic() < end, "nothing happened for 30 s"
        time.sleep(0.01)


@contextlib.contextmanager
def _doctor(store: Any, index: int, here: Whereabouts, **times: float) -> Iterator[Doctor]:
    doctor = Doctor(Process(index, 2), store, Settings(**times), here)
    doctor.start()
    try:
        yield doctor
    finally:
        doctor.stop()


def _read(store: LocalStore, index: int) -> ProcessState:
    return ProcessState.from_text(store.get(f"jaxdist/here/{index}") or '{"index": -1}')


def test_the_state_of_a_process_is_in_the_store() -> None:
    store, here = LocalStore(), Whereabouts()
    here.enter("reduce (call 3)", 7, in_wait=True)
    with _doctor(store, 1, here) as doctor:
        _wait_until(lambda: _read(store, 1).index == 1)
        state = _read(store, 1)
        assert (state.place, state.step, state.in_wait) == ("reduce (call 3)", 7, True)
        assert "(_wait_until)" in state.line or "test_doctor.py" in state.line
        _wait_until(lambda: _read(store, 1).news > 1)
        here.leave()
        here.blame([0])
        doctor.publish()
        assert _read(store, 1).blames == (0,)
        _wait_until(lambda: not _read(store, 1).in_wait)


def test_a_stopped_doctor_leaves_no_thread() -> None:
    before = set(threading.enumerate())
    with _doctor(LocalStore(), 0, Whereabouts()):
        pass
    # Other rooms have threads of their own, which other tests may have started.
    names = [thread.name for thread in set(threading.enumerate()) - before]
    assert not any(name.startswith("jaxdist-") for name in names)


class _Gone(LocalStore):
    def set(self, key: str, text: str, *, overwrite: bool = False) -> None:
        raise UnavailableError("The service has gone.\n\nMore.")


def test_without_the_service_the_thread_ends_with_one_line(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.INFO, "jaxdist"), _doctor(_Gone(), 0, Whereabouts()) as doctor:
        _wait_until(lambda: not doctor._threads[0].is_alive())
    assert [record.getMessage() for record in caplog.records] == [
        "This process is not watched any more: The service has gone."
    ]


class _Limit:
    def __init__(self, seconds: float) -> None:
        self.ends_at = time.monotonic() + seconds
        self.expired_at: float | None = None

    def expire(self) -> None:
        self.expired_at = time.monotonic()


def test_limits_expire_on_time_unless_they_are_forgotten() -> None:
    with _doctor(LocalStore(), 0, Whereabouts()) as doctor:
        _wait_until(lambda: doctor._news > 0)
        limit, forgotten = _Limit(0.2), _Limit(0.1)
        doctor.watch_limit(limit)
        doctor.watch_limit(forgotten)
        doctor.forget_limit(forgotten)
        _wait_until(lambda: limit.expired_at is not None)
        assert limit.expired_at is not None
        assert 0 <= limit.expired_at - limit.ends_at < 5
        assert forgotten.expired_at is None


def _reports(store: LocalStore, index: int, **times: Any) -> HangReports:
    process = Process(index, 2)
    return HangReports(process, store, Settings(**times), Observer(process, store))


def _write(store: LocalStore, state: ProcessState) -> None:
    store.set(f"jaxdist/here/{state.index}", state.to_text(), overwrite=True)


WAITS = Doing(1, "reduce (call 2)", 7, 0.0, True)
OUTSIDE = Doing(1, "outside of jaxdist", 7, 0.0, False)


def test_a_hang_is_reported_once_and_the_next_one_again(caplog: pytest.LogCaptureFixture) -> None:
    store = LocalStore()
    waiting, late = _reports(store, 0, quiet_seconds=5.0), _reports(store, 1)
    _write(store, ProcessState(0, in_wait=True, place="reduce (call 2)"))
    _write(store, ProcessState(1, line="train.py:31 (main)"))
    waiting.check(WAITS, 0.5, "reduce (call 2)")
    waiting.check(WAITS, 4.0, "reduce (call 2)")
    late.check(OUTSIDE, None, "")
    assert not caplog.records
    for _ in range(2):
        waiting.check(WAITS, 6.0, "reduce (call 2)")
        late.check(OUTSIDE, None, "")
    texts = [record.getMessage() for record in caplog.records]
    assert len(texts) == 2
    assert all(text.startswith("process 1 is behind: it is at train.py:31") for text in texts)
    assert texts[0].endswith("Process 0 has waited for 6 s in reduce (call 2).")
    assert texts[1].endswith("The other processes wait for this one.")
    waiting.check(Doing(1, "reduce (call 3)", 8, 9.0, True), 6.0, "reduce (call 3)")
    assert len(caplog.records) == 3


def test_a_long_local_computation_is_no_hang(caplog: pytest.LogCaptureFixture) -> None:
    store = LocalStore()
    waiting = _reports(store, 0, quiet_seconds=5.0)
    _write(store, ProcessState(0, in_wait=True))
    _write(store, ProcessState(1, in_wait=True))
    waiting.check(OUTSIDE, 100.0, "float(array)")
    assert not caplog.records
    waiting.check(WAITS, 100.0, "reduce (call 2)")
    assert caplog.records[0].getMessage().startswith("No process is known to be behind")


def test_who_is_not_behind_does_not_answer_the_alarm(caplog: pytest.LogCaptureFixture) -> None:
    store = LocalStore()
    late = _reports(store, 1)
    store.set("jaxdist/alarm", '{"behind": [0], "text": "process 0", "abort": false}')
    late.check(OUTSIDE, None, "")
    assert not caplog.records


def test_a_process_alone_is_not_watched() -> None:
    _processes.start_watching(Process(0, 1), LocalStore(), Settings())
    assert get_doctor() is None
    _processes.stop_watching()
