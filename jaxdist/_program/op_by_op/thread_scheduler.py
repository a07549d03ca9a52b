"""Threads for the replicas of a step: one runs at a time, until all wait at a meeting."""

import contextlib
import contextvars
import ctypes
import threading
from collections.abc import Callable, Sequence
from typing import Any

# Seconds to wait for a thread that was interrupted, before interrupting it again.
_PATIENCE = 1.0


class _StoppedError(BaseException):
    """Ends a replica's thread after an error; `except Exception` in user code does not catch it."""


class ThreadScheduler:
    """A scheduler that runs one function for each replica, one at a time.

    A function runs until it calls `meet`, and continues when all others have done so too. An
    exception in one function, or in the caller (Ctrl-C), ends all threads; then it is raised in
    the caller.

    Args:
        bodies: The functions.
        order: Their numbers, in the order in which they run.
    """

    def __init__(self, bodies: Sequence[Callable[[], Any]], order: Sequence[int]) -> None:
        self._order = order
        self._threads = [_ReplicaThread(self, number, body) for number, body in enumerate(bodies)]
        # Set in the thread of a function, to return control to the scheduler.
        self.paused = _Signal()
        self.is_stopping = False

    def run(self, settle: Callable[[list[Any]], Sequence[Any]]) -> list[Any]:
        """Run all functions, and return their results.

        Args:
            settle: Called with the request of each function (`Finished` for those that have
                returned); returns the answer for each function.

        Raises:
            Exception: The exception of a function, with a note that names its replica.
        """
        try:
            while True:
                for number in self._order:
                    self._run_until_pause(self._threads[number])
                if all(p.is_done for p in self._threads):
                    return [p.result for p in self._threads]
                for thread, answer in zip(
                    self._threads, settle([p.request for p in self._threads]), strict=True
                ):
                    thread.answer = answer
        finally:
            self._stop()

    def meet(self, number: int, request: Any) -> Any:
        """Wait in function `number` for the others; return the answer of `settle` for it."""
        return self._threads[number].meet(request)

    def _run_until_pause(self, thread: "_ReplicaThread") -> None:
        thread.resume()
        self.paused.wait()
        if thread.error is not None:
            error, thread.error = thread.error, None
            error.add_note(f"Raised on replica {thread.number} of {len(self._threads)}.")
            raise error

    def _stop(self) -> None:
        self.is_stopping = True
        for thread in self._threads:
            thread.stop()


class _Signal:
    """A signal from one thread to another.

    It is a plain lock. Semaphores and events are written in Python, so Ctrl-C, or an exception from
    another thread, can interrupt them halfway and leave them locked forever.
    """

    __slots__ = ("_lock",)

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._lock.acquire()

    def set(self) -> None:
        # While threads are being stopped, the signal may already be set.
        with contextlib.suppress(RuntimeError):
            self._lock.release()

    def wait(self) -> None:
        # The operating system may deliver Ctrl-C to another thread. That does not wake the main
        # thread, which has to handle it, so the main thread wakes up by itself from time to time.
        while not self._lock.acquire(timeout=_PATIENCE):
            pass


class Finished:
    """The request of a function that has returned."""


class _ReplicaThread:
    """One function and its thread."""

    def __init__(self, scheduler: ThreadScheduler, number: int, body: Callable[[], Any]) -> None:
        self.number = number
        self.request: Any = None
        self.answer: Any = None
        self.result: Any = None
        self.error: BaseException | None = None
        self.is_done = False
        self._scheduler = scheduler
        self._body = body
        self._resumed = _Signal()
        self._is_running = False
        context = contextvars.copy_context()
        # A daemon: a thread that hangs in a call that Python cannot interrupt must not keep the
        # process alive.
        self._thread = threading.Thread(
            target=context.run,
            args=(self._run_body,),
            name=f"jaxdist-replica-{number}",
            daemon=True,
        )

    def resume(self) -> None:
        self._is_running = True
        if self._thread.ident is None:
            self._thread.start()
        else:
            self._resumed.set()

    def meet(self, request: Any) -> Any:
        if self._scheduler.is_stopping:
            raise _StoppedError
        self.request = request
        self._is_running = False
        self._scheduler.paused.set()
        self._resumed.wait()
        if self._scheduler.is_stopping:
            raise _StoppedError
        answer, self.answer = self.answer, None
        return answer

    def _run_body(self) -> None:
        if self._scheduler.is_stopping:
            return
        with contextlib.suppress(_StoppedError):
            try:
                self.result = self._body()
                self.request = Finished()
                self.is_done = True
            except _StoppedError:
                raise
            except BaseException as error:
                self.error = error
            finally:
                self._is_running = False
                self._scheduler.paused.set()

    def stop(self) -> None:
        """End the thread, whether it runs or waits."""
        if self._thread.ident is None:
            return
        if self._is_running:
            self._interrupt()
        self._resumed.set()
        self._thread.join(_PATIENCE)
        while self._thread.is_alive():
            self._interrupt()
            self._thread.join(_PATIENCE)

    def _interrupt(self) -> None:
        """Raise `_StoppedError` in the thread, at its next Python instruction."""
        ctypes.pythonapi.PyThreadState_SetAsyncExc(
            ctypes.c_ulong(self._thread.ident or 0), ctypes.py_object(_StoppedError)
        )
