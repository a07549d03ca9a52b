"""Notices that this process will be ended, and `PreemptionWatcher`, which reports them."""

import contextlib
import json
import signal
import threading
import time
import weakref
from collections.abc import Callable
from types import FrameType
from typing import Any, cast

from jaxdist._called import called, name_call
from jaxdist._processes import (
    LocalStore,
    Process,
    Store,
    at_leaving,
    find_ended,
    get_process_of_job,
    get_store,
)
from jaxdist.errors import ContextError, OtherProcessError

_SECONDS_BETWEEN_QUESTIONS = 1.0
_STOP_SECONDS = 10.0


class Notices:
    """A source of notices. `time` is when the notice was received, by `time.monotonic`, or None.

    `reason` describes the notice, and `error` is an error that the user's function raised.
    """

    reason = ""
    time: float | None = None
    error: Exception | None = None

    def stop(self) -> None:
        """Stop listening."""


class Sigterm(Notices):
    """Listens for SIGTERM: the first one is a notice, and none ends the process.

    Args:
        caller: The class that listens, for the error.

    Raises:
        ContextError: This is not the main thread.
    """

    reason = "SIGTERM"

    def __init__(self) -> None:
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


class Questions(Notices):
    """Calls a function in a thread, once a second, until it returns True.

    Args:
        watch: The function.
        seconds: Time between two calls.
    """

    reason = "termination_watcher_fn"

    def __init__(
        self, watch: Callable[[], bool], seconds: float = _SECONDS_BETWEEN_QUESTIONS
    ) -> None:
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


_CALLER = "PreemptionWatcher"
_KEY = "jaxdist/preemption/message"
_LOOK_SECONDS = 0.1


class PreemptionWatcher:
    """Reports whether a process of the job got SIGTERM, the request to end.

    Make it after the strategy, in every process and in the main thread. While it exists, SIGTERM
    does not end the process: the program checks `preemption_message`, and ends by itself.

    Cost:
        In a job of several processes, a thread polls the store of the job ten times a second.

    Raises:
        ContextError: This is not the main thread.

    Example:
        >>> import signal
        >>> watcher = jaxdist.experimental.PreemptionWatcher()
        >>> print(watcher.preemption_message)
        None
        >>> signal.raise_signal(signal.SIGTERM)
        >>> watcher.preemption_message
        'process 0 received SIGTERM'
        >>> watcher.close()

    Source:
        `tf.distribute.experimental.PreemptionWatcher`.
    """

    def __init__(self) -> None:
        process = get_process_of_job() or Process(0, 1)
        self._watch = _Watch(get_store() or LocalStore(), process)
        at_leaving(self._watch.stop)
        self._close = cast("Any", weakref.finalize(self, _close, self._watch))
        self._close.atexit = False

    @property
    def preemption_message(self) -> str | None:
        """A message that names the first process that got SIGTERM; None if no process did."""
        return self._watch.get_message()

    def block_until_worker_exit(self) -> None:
        """Wait until the process that got SIGTERM has ended.

        In that process itself, and if no process got SIGTERM, it returns immediately.
        """
        culprit = self._watch.find_culprit()
        while culprit is not None and culprit not in find_ended():
            time.sleep(_LOOK_SECONDS)

    def close(self) -> None:
        """Stop listening: SIGTERM has its previous effect."""
        self._close()


class _Watch:
    """Reports SIGTERM of this process to the others, and reads their reports."""

    @called(_CALLER)
    def __init__(self, store: Store, process: Process) -> None:
        self.sigterm = Sigterm()
        self._store = store
        self._process = process
        self._culprit: int | None = None
        self._stopped = threading.Event()
        self._thread: threading.Thread | None = None
        if process.count > 1:
            self._thread = threading.Thread(
                target=self._run, name="jaxdist-preemption-watcher", daemon=True
            )
            self._thread.start()

    def get_message(self) -> str | None:
        if self._process.count == 1:
            self._look()
        if self._culprit is None:
            return None
        return f"process {self._culprit} received SIGTERM"

    def find_culprit(self) -> int | None:
        """Return the process that got SIGTERM, if it is another process; else None."""
        own = self._process.index
        return None if self._culprit in (None, own) else self._culprit

    def stop(self) -> None:
        self._stopped.set()
        if self._thread is not None:
            self._thread.join(_STOP_SECONDS)

    def _run(self) -> None:
        # If the service has ended, code that needs the other processes gets its own error.
        with contextlib.suppress(OtherProcessError):
            while not self._stopped.wait(_LOOK_SECONDS):
                self._look()

    def _look(self) -> None:
        if self._culprit is not None:
            return
        if self.sigterm.time is not None:
            # Another process may have written the key first.
            with contextlib.suppress(KeyError):
                self._store.set(_KEY, json.dumps(self._process.index))
        text = self._store.get(_KEY)
        if text is not None:
            self._culprit = int(json.loads(text))


def _close(watch: _Watch) -> None:
    watch.stop()
    watch.sigterm.stop()
