"""`HangReports`: reports each hang once, and ends the process if `abort_seconds` is set."""

import json
import logging
import os
import sys
from typing import Any

from jaxdist._processes.process import Process
from jaxdist._processes.settings import Settings
from jaxdist._processes.store import Store
from jaxdist._processes.watching.diagnosis import Diagnosis, diagnose
from jaxdist._processes.watching.observer import Observer
from jaxdist._processes.watching.whereabouts import Doing

_LOG = logging.getLogger("jaxdist")
_ALARM = "jaxdist/alarm"
# EX_TEMPFAIL: the job can be started again.
ABORT_CODE = 75
# Look before the report is due, so that the report can say which process is silent.
_LOOK_AFTER_SECONDS = 1.0


class HangReports:
    """Logs which process is behind when this process has waited for `quiet_seconds`.

    Args:
        process: This process.
        store: The store of the job.
        settings: How long processes wait for each other.
        observer: Reads the states of the other processes.
    """

    def __init__(
        self, process: Process, store: Store, settings: Settings, observer: Observer
    ) -> None:
        self._process = process
        self._store = store
        self._settings = settings
        self._observer = observer
        self._reported: object = None
        self._alarm: str | None = store.get(_ALARM)

    def check(self, doing: Doing, waited: float | None, place: str) -> None:
        """Report if it is time.

        Args:
            doing: What this process does.
            waited: How many seconds it has waited for others; None if it does not wait.
            place: Name of the operation in which it waits.
        """
        if waited is None:
            self._answer_alarm()
            return
        if waited < _LOOK_AFTER_SECONDS:
            return
        table = self._observer.look()
        hang = (doing.thread, doing.since, doing.place)
        abort = self._settings.abort_seconds
        is_over = abort is not None and waited >= abort
        if waited < self._settings.quiet_seconds and not is_over:
            return
        if self._reported == hang and not is_over:
            return
        found = diagnose(table, self._process.index)
        # The user may also be waiting for an array of a long local computation.
        if not found.behind and not doing.in_wait:
            return
        if self._reported != hang:
            self._reported = hang
            _LOG.warning(
                "%s\n\nProcess %d has waited for %.0f s in %s.",
                found.text,
                self._process.index,
                waited,
                place,
            )
        self._raise_alarm(found, hang, is_over)
        if is_over:
            self._abort(f"it has waited for {waited:.0f} s in {place}")

    def _raise_alarm(self, found: Diagnosis, hang: object, is_over: bool) -> None:
        alarm = {
            "hang": f"{self._process.index} {hang}",
            "behind": found.behind,
            "text": found.text,
            "abort": is_over,
        }
        self._store.set(_ALARM, json.dumps(alarm), overwrite=True)

    def _answer_alarm(self) -> None:
        """Report a hang for which another process says that this one is behind."""
        text = self._store.get(_ALARM)
        if text is None or text == self._alarm:
            return
        self._alarm = text
        alarm: dict[str, Any] = json.loads(text)
        if self._process.index not in alarm["behind"]:
            return
        # Several processes may raise the alarm for one hang.
        if self._reported != tuple(alarm["behind"]):
            self._reported = tuple(alarm["behind"])
            _LOG.warning("%s\n\nThe other processes wait for this one.", alarm["text"])
        if alarm["abort"]:
            self._abort("the other processes have waited for it")

    def _abort(self, reason: str) -> None:
        _LOG.error(
            "Process %d ends with exit code %d, because %s and abort_seconds is %g.",
            self._process.index,
            ABORT_CODE,
            reason,
            self._settings.abort_seconds or 0,
        )
        logging.shutdown()
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        # The main thread is inside C++ code, so no exception reaches it.
        os._exit(ABORT_CODE)
