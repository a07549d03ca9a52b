"""Turns the error of a collective into an error that names the process that caused it."""

import contextlib
import os
import re
import sys
import threading
import time
from types import TracebackType

import jax

from jaxdist._compat import find_line_of_error
from jaxdist._processes.store import Store
from jaxdist._processes.watching.diagnosis import Diagnosis, diagnose, diagnose_lost
from jaxdist._processes.watching.doctor import Doctor
from jaxdist._processes.watching.observer import GONE, LEFT, SILENT_SECONDS, has_launcher
from jaxdist.errors import DeadlineExceededError, OtherProcessError, UnavailableError

_OF_COLLECTIVE = re.compile(
    r"gloo|nccl|connection (closed|reset) by peer|timed out waiting|broken pipe", re.IGNORECASE
)
_OF_TIME = re.compile(r"timed out|timeout", re.IGNORECASE)
# An error inside the call that dispatches a program is a ValueError that begins with its status.
_STATUS = re.compile(r"[A-Z_]+: ")


def is_collective_error(error: BaseException) -> bool:
    """Whether an exception says that a collective between processes has failed."""
    text = str(error)
    of_jax = isinstance(error, jax.errors.JaxRuntimeError) or (
        isinstance(error, ValueError) and _STATUS.match(text) is not None
    )
    return of_jax and _OF_COLLECTIVE.search(text) is not None


def is_time_limit(error: BaseException) -> bool:
    """Whether an error of a collective says that it timed out."""
    return _OF_TIME.search(str(error)) is not None


_NAP = 0.05
_SECONDS_OF_LAUNCHER = 1.0
# When a network has been down, TCP may take some seconds to resend what was lost, such as the
# packet that closes the connection of an ended process.
_SECONDS_OF_NETWORK = 3.0
_RULE = "All processes take part in each collective, so it cannot complete without one of them."


def explain_error(call: str, error: Exception, doctor: Doctor | None) -> OtherProcessError:
    """Return the error that says which process made a collective fail.

    Cost:
        A process that ended on this machine, or that wrote why it ends, is found at once. One on
        another machine is found when it has sent no news for 3 s.

    Args:
        call: What was called.
        error: The error of the collective.
        doctor: The doctor of this process; None if the process has joined no job.
    """
    found = Diagnosis((), "The processes of this job are not watched.")
    if doctor is not None:
        try:
            found = _find_cause(error, doctor)
        except Exception as unreachable:
            found = Diagnosis((), f"The coordination service did not answer: {unreachable}")
    message = (
        f"{call}: {found.text}\n\n{_RULE} JAX says: {str(error).splitlines()[0]}\n\n"
        "This process can continue without collectives: save its state, then restart the job."
    )
    if found.have_ended or not (is_time_limit(error) or found.behind):
        return UnavailableError(message, found.behind)
    return DeadlineExceededError(message, found.behind)


def describe_deadline(call: str, seconds: float, found: Diagnosis) -> DeadlineExceededError:
    """Return the error of a call whose time limit has passed."""
    return DeadlineExceededError(
        f"{call} has waited for {seconds:g} s: {found.text}\n\n"
        f"{_RULE} The limit is timeout_seconds={seconds:g}.\n\n"
        "Look at what that process does; pass a larger timeout_seconds if it only needs more time. "
        "Collectives between these processes fail from now on: save, then start the job again.",
        found.behind,
    )


def _find_cause(error: Exception, doctor: Doctor) -> Diagnosis:
    own = doctor.process.index
    if is_time_limit(error):
        return diagnose(doctor.observer.look_until_fresh(), own)
    # The connection of a process closes a little before its end can be seen.
    end = time.monotonic() + SILENT_SECONDS + _SECONDS_OF_NETWORK
    while True:
        table = doctor.observer.look()
        found = diagnose_lost(table, own)
        if time.monotonic() >= end:
            return found
        if found.behind:
            # A launcher notes the signal or exit code a little after the process has ended.
            if not (has_launcher() and any(table[i].ended == GONE for i in found.behind)):
                return found
            end = min(end, time.monotonic() + _SECONDS_OF_LAUNCHER)
        time.sleep(_NAP)


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
