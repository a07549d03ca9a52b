"""All processes of a job, in the process of the test."""

import os
import pathlib
import signal
import sys
import threading
import time

import pytest

from jaxdist._launching import Job, Outcome, Patience, collect_signals, run_attempt
from tests.launching.launcher import find_pids, is_gone, write_script


def _run(script: str, count: int, patience: Patience) -> tuple[Outcome, str]:
    written: list[bytes] = []
    with collect_signals(()) as signals:
        job = Job([sys.executable, script], count, patience=patience)
        outcome = run_attempt(job, (written.append, written.append), signals)
    return outcome, b"".join(written).decode()


def test_processes_that_run_when_the_time_is_over_are_ended_and_named(
    tmp_path: pathlib.Path,
) -> None:
    script = write_script(tmp_path, "if index == 1:\n    time.sleep(100)")
    before = time.monotonic()
    outcome, written = _run(script, 3, Patience(job=3))
    assert outcome.late == (1,)
    assert outcome.cause is None
    assert time.monotonic() - before < 20
    pids = find_pids(written)
    assert len(pids) == 3
    assert all(map(is_gone, pids))


def test_a_system_without_pidfd_and_waitid_is_asked_again_and_again(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(os, "pidfd_open", raising=False)
    monkeypatch.delattr(os, "waitid", raising=False)
    script = write_script(tmp_path, "sys.exit(index)")
    outcome, _ = _run(script, 2, Patience())
    assert outcome.cause is not None
    assert (outcome.cause.index, outcome.cause.exit_code) == (1, 1)


def test_when_the_launcher_itself_fails_no_process_is_left(tmp_path: pathlib.Path) -> None:
    written: list[bytes] = []

    def write(lines: bytes) -> None:
        written.append(lines)
        if b"fail" in lines:
            raise BrokenPipeError("planted")

    script = write_script(tmp_path, "print('fail')\ntime.sleep(100)")
    job = Job([sys.executable, script], 1)
    with collect_signals(()) as signals, pytest.raises(BrokenPipeError):
        run_attempt(job, (write, write), signals)
    (pid,) = find_pids(b"".join(written).decode())
    assert is_gone(pid)


def test_handlers_are_put_back_and_ignored_signals_stay_ignored() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        term = signal.getsignal(signal.SIGTERM)
        with collect_signals() as signals:
            assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
            signal.raise_signal(signal.SIGTERM)
            assert signals.received == [signal.SIGTERM]
            signals.clear()
            signals.clear()
        assert signal.getsignal(signal.SIGTERM) is term
    finally:
        signal.signal(signal.SIGHUP, before)


def test_in_another_thread_no_signal_is_collected() -> None:
    term = signal.getsignal(signal.SIGTERM)
    seen: list[bool] = []

    def collect() -> None:
        with collect_signals():
            seen.append(signal.getsignal(signal.SIGTERM) is term)

    thread = threading.Thread(target=collect)
    thread.start()
    thread.join()
    assert seen == [True]
