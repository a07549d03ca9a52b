"""`PreemptionWatcher`, which reports whether a process of the job got SIGTERM."""

import json
import threading
import time
import weakref
from typing import Any, cast

from jaxdist._called import called
from jaxdist._preemption.notices import Sigterm
from jaxdist._processes import (
    LocalStore,
    Process,
    Store,
    at_leaving,
    find_ended,
    get_process_of_job,
    get_store,
)
from jaxdist.errors import OtherProcessError

_CALLER = "PreemptionWatcher"
_KEY = "jaxdist/preemption/message"
_LOOK_SECONDS = 0.1
_STOP_SECONDS = 10.0


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
        'process 0 was told to end (SIGTERM)'
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
        return f"process {self._culprit} was told to end (SIGTERM)"

    def find_culprit(self) -> int | None:
        """Return the process that got SIGTERM, if it is another process; else None."""
        own = self._process.index
        return None if self._culprit in (None, own) else self._culprit

    def stop(self) -> None:
        self._stopped.set()
        if self._thread is not None:
            self._thread.join(_STOP_SECONDS)

    def _run(self) -> None:
        try:
            while not self._stopped.wait(_LOOK_SECONDS):
                self._look()
        except OtherProcessError:
            # The service has ended; code that needs the other processes gets its own error.
            return

    def _look(self) -> None:
        if self._culprit is not None:
            return
        if self.sigterm.time is not None:
            try:
                self._store.set(_KEY, json.dumps(self._process.index))
            except KeyError:
                # Another process wrote the key first.
                pass
        text = self._store.get(_KEY)
        if text is not None:
            self._culprit = int(json.loads(text))


def _close(watch: _Watch) -> None:
    watch.stop()
    watch.sigterm.stop()
