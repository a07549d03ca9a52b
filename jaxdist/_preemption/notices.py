"""Notices that this process will be ended: SIGTERM, or a function that is polled."""

import signal
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import Any, Protocol

from jaxdist._called import name_call
from jaxdist.errors import ContextError

_SECONDS_BETWEEN_QUESTIONS = 1.0
_STOP_SECONDS = 10.0


class Notices(Protocol):
    """A source of notices. `time` is when the notice was received, by `time.monotonic`, or None.

    `reason` describes the notice, and `error` is an error that the user's function raised.
    """

    reason: str
    time: float | None
    error: Exception | None

    def stop(self) -> None:
        """Stop listening."""


class Sigterm:
    """Listens for SIGTERM: the first one is a notice, and none ends the process.

    Args:
        caller: The class that listens, for the error.

    Raises:
        ContextError: This is not the main thread.
    """

    reason = "SIGTERM"
    error: Exception | None = None

    def __init__(self) -> None:
        self.time: float | None = None
        if not _is_main_thread():
            raise ContextError(
                f"{name_call()} was made in the thread {threading.current_thread().name!r}.\n\n"
                "It listens to SIGTERM, and Python handles signals in the main thread only.\n\n"
                "Make it in the main thread, or pass "
                "TerminationConfig(termination_watcher_fn=...)."
            )
        if signal.getsignal(signal.SIGTERM) is not _note:
            _before[:] = [signal.signal(signal.SIGTERM, _note)]
        _listening.append(self)

    def stop(self) -> None:
        """Stop listening; without any listener, SIGTERM has its previous effect."""
        if self in _listening:
            _listening.remove(self)
        # The garbage collector may call this in any thread. Then `_note` does the same later.
        if not _listening and _is_main_thread():
            _give_back()


# All listeners, and the handler that was installed before the first listener.
_listening: list[Sigterm] = []
_before: list[Any] = []


def _note(number: int, frame: FrameType | None) -> None:
    if not _listening:
        _give_back()
        signal.raise_signal(number)
    # Do nothing else: the signal may have interrupted a thread that holds a lock.
    for sigterm in (*_listening,):
        if sigterm.time is None:
            sigterm.time = time.monotonic()


def _give_back() -> None:
    # Other code may have set another handler since then.
    if signal.getsignal(signal.SIGTERM) is _note:
        # None means that a handler was installed outside of Python.
        before = _before.pop()
        signal.signal(signal.SIGTERM, signal.SIG_DFL if before is None else before)


def _is_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()


class Questions:
    """Calls a function in a thread, once a second, until it returns True.

    Args:
        watch: The function.
        seconds: Time between two calls.
    """

    reason = "termination_watcher_fn"

    def __init__(
        self, watch: Callable[[], bool], seconds: float = _SECONDS_BETWEEN_QUESTIONS
    ) -> None:
        self.time: float | None = None
        self.error: Exception | None = None
        self._watch = watch
        self._seconds = seconds
        self._stopped = threading.Event()
        self._thread = threading.Thread(
            target=self._ask, name="jaxdist-termination-watcher", daemon=True
        )
        self._thread.start()

    def _ask(self) -> None:
        while not self._stopped.is_set():
            try:
                if self._watch():
                    self.time = time.monotonic()
                    return
            except Exception as error:
                # The next call of the handler raises it.
                self.error = error
                return
            self._stopped.wait(self._seconds)

    def stop(self) -> None:
        """End the thread."""
        self._stopped.set()
        if self._thread is not threading.current_thread():
            self._thread.join(_STOP_SECONDS)
