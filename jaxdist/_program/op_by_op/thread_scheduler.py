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
    """Ends the thread of a replica after an error; user code with `except Exception` misses it."""


class ThreadScheduler:
    """A scheduler that runs one function for each replica, one at a time, in order.

    A function runs until it calls `meet`, and continues when all others have done so too. An
    exception in one function, or in the caller (Ctrl-C), ends all threads; then it is raised in
    the caller.
    """

    def __init__(self, bodies: Sequence[Callable[[], Any]]) -> None:
        self._players = [_Player(self, number, body) for number, body in enumerate(bodies)]
        self._came_back = _Baton()
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
                for player in self._players:
                    self._turn_of(player)
                if all(p.is_done for p in self._players):
                    return [p.result for p in self._players]
                for player, answer in zip(
                    self._players, settle([p.brought for p in self._players]), strict=True
                ):
                    player.answer = answer
        finally:
            self._stop()

    def meet(self, number: int, brought: Any) -> Any:
        """Wait in function `number` for the others; return the answer of `settle` for it."""
        return self._players[number].meet(brought)

    def came_back(self) -> None:
        """Return control to the scheduler; called in the thread of a function."""
        self._came_back.give()

    def _turn_of(self, player: "_Player") -> None:
        player.go_on()
        self._came_back.take()
        if player.error is not None:
            error, player.error = player.error, None
            error.add_note(f"Raised on replica {player.number} of {len(self._players)}.")
            raise error

    def _stop(self) -> None:
        self.is_stopping = True
        for player in self._players:
            player.stop()


class _Baton:
    """A signal from one thread to another.

    It is a plain lock. Semaphores and events are written in Python, so Ctrl-C, or an exception from
    another thread, can interrupt them halfway and leave them locked forever.
    """

    __slots__ = ("_lock",)

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._lock.acquire()

    def give(self) -> None:
        # While threads are being stopped, the signal may already be set.
        with contextlib.suppress(RuntimeError):
            self._lock.release()

    def take(self) -> None:
        # The operating system may deliver Ctrl-C to another thread. That does not wake the main
        # thread, which has to handle it, so the main thread wakes up by itself from time to time.
        while not self._lock.acquire(timeout=_PATIENCE):
            pass


class Finished:
    """The request of a function that has returned."""


class _Player:
    """One function and its thread."""

    def __init__(self, turns: ThreadScheduler, number: int, body: Callable[[], Any]) -> None:
        self.number = number
        self.brought: Any = None
        self.answer: Any = None
        self.result: Any = None
        self.error: BaseException | None = None
        self.is_done = False
        self._turns = turns
        self._body = body
        self._may_go = _Baton()
        self._is_running = False
        context = contextvars.copy_context()
        # A daemon: a thread that hangs in a call that Python cannot interrupt must not keep the
        # process alive.
        self._thread = threading.Thread(
            target=context.run, args=(self._play,), name=f"jaxdist-replica-{number}", daemon=True
        )

    def go_on(self) -> None:
        self._is_running = True
        if self._thread.ident is None:
            self._thread.start()
        else:
            self._may_go.give()

    def meet(self, brought: Any) -> Any:
        if self._turns.is_stopping:
            raise _StoppedError
        self.brought = brought
        self._is_running = False
        self._turns.came_back()
        self._may_go.take()
        if self._turns.is_stopping:
            raise _StoppedError
        answer, self.answer = self.answer, None
        return answer

    def _play(self) -> None:
        if self._turns.is_stopping:
            return
        with contextlib.suppress(_StoppedError):
            try:
                self.result = self._body()
                self.brought = Finished()
                self.is_done = True
            except _StoppedError:
                raise
            except BaseException as error:
                self.error = error
            finally:
                self._is_running = False
                self._turns.came_back()

    def stop(self) -> None:
        """End the thread, whether it runs or waits."""
        if self._thread.ident is None:
            return
        if self._is_running:
            self._interrupt()
        self._may_go.give()
        self._thread.join(_PATIENCE)
        while self._thread.is_alive():
            self._interrupt()
            self._thread.join(_PATIENCE)

    def _interrupt(self) -> None:
        """Raise `_StoppedError` in the thread, at its next Python instruction."""
        ctypes.pythonapi.PyThreadState_SetAsyncExc(
            ctypes.c_ulong(self._thread.ident or 0), ctypes.py_object(_StoppedError)
        )
