"""`Farewell`: reports to the other processes at once that an exception ends this one."""

import contextlib
import os
import sys
import threading
from types import TracebackType

from jaxdist._compat import find_line_of_error
from jaxdist._processes.store import Store
from jaxdist._processes.watching.collective_errors import is_collective_error
from jaxdist._processes.watching.doctor import Doctor
from jaxdist._processes.watching.observer import LEFT
from jaxdist.errors import OtherProcessError

_MOST_CHARACTERS = 400


class Farewell:
    """Writes an uncaught exception to the store, before Python prints it.

    Args:
        doctor: The doctor of this process.
        store: The store of the job.
    """

    def __init__(self, doctor: Doctor, store: Store) -> None:
        self._doctor = doctor
        self._store = store
        self._before = sys.excepthook
        self._before_in_threads = threading.excepthook

    def install(self) -> None:
        """Set Python's exception hooks; they call the previous hooks afterwards."""
        sys.excepthook = self._announce
        threading.excepthook = self._announce_of_thread

    def uninstall(self) -> None:
        """Restore the previous hooks, unless other code has set new ones."""
        if sys.excepthook == self._announce:
            sys.excepthook = self._before
        if threading.excepthook == self._announce_of_thread:
            threading.excepthook = self._before_in_threads

    def _announce(
        self,
        kind: type[BaseException],
        error: BaseException,
        traceback: TracebackType | None,
    ) -> None:
        # An interactive interpreter continues after an exception.
        goes_on = hasattr(sys, "ps1") or sys.flags.interactive
        # Without the service the others cannot be reached.
        with contextlib.suppress(Exception):
            self._say(error, has_ended=not goes_on)
        self._before(kind, error, traceback)

    def _announce_of_thread(self, args: threading.ExceptHookArgs) -> None:
        if args.exc_value is not None:
            with contextlib.suppress(Exception):
                self._say(args.exc_value, has_ended=False)
        self._before_in_threads(args)

    def _say(self, error: BaseException, has_ended: bool) -> None:
        if isinstance(error, OtherProcessError):
            self._doctor.here.blame(error.processes)
        elif is_collective_error(error):
            self._doctor.here.blame(())
        text = describe_exception(error)
        if not has_ended:
            self._doctor.raised = text
        # Before the note of the end: a process that reads this note also needs to know the blame.
        self._doctor.publish()
        if has_ended:
            with contextlib.suppress(KeyError):
                self._store.set(f"{LEFT}/{self._doctor.process.index}", text)


def describe_exception(error: BaseException) -> str:
    """Return an exception in one line, such as "ValueError: no rows, at train.py:31 (main)"."""
    lines = str(error).splitlines()
    text = f"{type(error).__name__}: {lines[0] if lines else ''}"[:_MOST_CHARACTERS]
    file, _, rest = find_line_of_error(error).rpartition(":")
    where = f"{os.path.basename(file)}:{rest}" if file else rest
    return f"{text.rstrip(': ')}, at {where}"
