"""Functions that take turns in threads of their own, and meet where they have to."""

import contextlib
import contextvars
import ctypes
import threading
from collections.abc import Callable, Sequence
from typing import Any

# How long a thread that is told to stop may take before it is told again, in seconds.
_PATIENCE = 1.0


class _StoppedError(BaseException):
    """Ends a thread whose results are no longer wanted; `except Exception` does not catch it."""


class ThreadScheduler:
    """Runs one function for each replica; one at a time, the first one first.

    A function gives up its turn where it calls `meet`, and gets the next one when all are there.
    Whatever goes wrong in one of them, or in the caller (Ctrl-C), ends all of them before it is
    raised in the caller.
    """

    def __init__(self, bodies: Sequence[Callable[[], Any]]) -> None:
        self._players = [_Player(self, number, body) for number, body in enumerate(bodies)]
        self._came_back = _Baton()
        self.is_stopping = False

    def run(self, settle: Callable[[list[Any]], Sequence[Any]]) -> list[Any]:
        """Results of all functions.

        Args:
            settle: Given what each of them brought to a meeting (`Finished` for those that are
                done), says what each takes along.

        Raises:
            Exception: What a function raised, with a note that names its replica.
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
        """Called by function `number`: wait for the others, and take what is settled for it."""
        return self._players[number].meet(brought)

    def came_back(self) -> None:
        """Called by a function whose turn is over."""
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
    """Given by one thread and taken by another.

    A plain lock: semaphores and events are written in Python, where Ctrl-C, or an exception from
    another thread, can come in the middle and leave them locked for ever.
    """

    __slots__ = ("_lock",)

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._lock.acquire()

    def give(self) -> None:
        # It may be there already, when threads are being stopped.
        with contextlib.suppress(RuntimeError):
            self._lock.release()

    def take(self) -> None:
        # Another thread may be given a signal of the process, and the main thread, whose it is to
        # handle, is not woken by that: it looks for itself from time to time.
        while not self._lock.acquire(timeout=_PATIENCE):
            pass


class Finished:
    """Stands for a function that returned without coming to a meeting."""


class _Player:
    """One function in its thread."""

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
        # A thread that hangs in a call that Python cannot interrupt must not keep the process.
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
        """End the thread, wherever it is."""
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
        """Raise in the thread where it runs Python."""
        ctypes.pythonapi.PyThreadState_SetAsyncExc(
            ctypes.c_ulong(self._thread.ident or 0), ctypes.py_object(_StoppedError)
        )
