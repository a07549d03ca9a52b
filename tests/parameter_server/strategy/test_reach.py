"""Waiting for tasks that have not started yet: who is waited for is said early."""

import logging
import threading
from typing import Any

import pytest

from jaxdist._called import call_as, called
from jaxdist._parameter_server.strategy import tasks
from jaxdist.errors import DeadlineExceededError


class _Channel:
    def __init__(self, answers: bool) -> None:
        self._answers, self.released = answers, threading.Event()

    def wait_until_ready(self, seconds: float | None = None) -> None:
        if not self._answers and not self.released.wait(seconds):
            raise DeadlineExceededError("no answer\n\nrule\n\nremedy")


@pytest.mark.parametrize("comes", [True, False])
@called("Strategy")
def test_tasks_that_do_not_answer_are_logged_while_they_are_waited_for(
    comes: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, "jaxdist")
    monkeypatch.setattr(tasks, "_FIRST_REPORT_SECONDS", 0.05)
    late = _Channel(answers=False)
    channels: Any = {"ps 0 at a:1": _Channel(answers=True), "worker 1 at b:2": late}
    found: list[list[str]] = []
    seconds = 30.0 if comes else 0.5

    def wait() -> None:
        found.append(call_as("Strategy", tasks.wait_for_tasks, channels, seconds))

    thread = threading.Thread(target=wait)
    thread.start()
    end = threading.Event()
    while not caplog.records and thread.is_alive():
        end.wait(0.01)
    if comes:
        late.released.set()
    thread.join(30)
    assert found == [[] if comes else ["worker 1 at b:2"]]
    (text,) = [r.getMessage() for r in caplog.records]
    assert text.startswith("Strategy waits for worker 1 at b:2 since ")
    assert f"gives up after {seconds:g} s (JAXDIST_JOIN_SECONDS)" in text
