"""Limits on the messages that a listener accepts, and the threads that answer callers."""

import dataclasses
import queue
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future
from typing import Any, ParamSpec, TypeVar

import numpy as np

from jaxdist._called import refuse


@dataclasses.dataclass(frozen=True)
class Limits:
    """The most that a listener, or the caller of a method, accepts.

    Args:
        message_bytes: Bytes of the arrays of one message.
        arrays: Arrays of one message.
        header_bytes: Bytes of the fields, and of the names, dtypes and shapes.
        bytes_in_flight: Bytes of all messages that are being received and are not complete.
        calls: Calls that are answered at one time.
        reading_seconds: How long a request may take to arrive, and a reply to be taken; None means
            `JAXDIST_RPC_SECONDS`.
    """

    message_bytes: int = 16 * 2**30
    arrays: int = 10_000
    header_bytes: int = 2**18
    bytes_in_flight: int = 32 * 2**30
    calls: int = 128
    reading_seconds: float | None = None

    def check(self, arrays: Sequence[np.ndarray]) -> None:
        """Raise `ArgumentError` if these are too many arrays, or too many bytes."""
        compare("arrays", len(arrays), self.arrays)
        nbytes = sum(array.nbytes for array in arrays)
        compare("bytes of arrays", nbytes, self.message_bytes)


DEFAULT = Limits()


def compare(what: str, found: int, most: int) -> None:
    """Raise `ArgumentError` if a number is above a limit."""
    if found > most:
        raise refuse(
            f"a message with {found:,} {what}, and {most:,} is the most.",
            "Limits keep a task from running out of memory.",
            "Send several messages, or an array in shards.",
        )


class Budget:
    """Bytes that all callers together may occupy.

    Args:
        most: That number of bytes.
    """

    def __init__(self, most: int) -> None:
        self.most = most
        self._free = most
        self._changed = threading.Condition()

    def take(self, count: int, seconds: float) -> bool:
        """Wait until so many bytes are free, and take them; False if they are not free in time."""
        # With its padding a message may be a little larger than the budget.
        count = min(count, self.most)
        deadline = time.monotonic() + seconds
        with self._changed:
            while self._free < count:
                left = deadline - time.monotonic()
                if left <= 0 or not self._changed.wait(left):
                    return False
            self._free -= count
            return True

    def give_back(self, count: int) -> None:
        """Return bytes that were taken."""
        with self._changed:
            self._free += min(count, self.most)
            self._changed.notify_all()


_P = ParamSpec("_P")
_T = TypeVar("_T")
_Work = tuple[Future[Any], Callable[..., Any], tuple[Any, ...], dict[str, Any]]


class Threads(Executor):
    """Up to `most` daemon threads, started when they are needed.

    Python waits for the threads of a `ThreadPoolExecutor` before it ends. A handler that hangs
    would keep the process alive.
    """

    def __init__(self, most: int, name: str) -> None:
        self._most, self._name = most, name
        self._work: queue.SimpleQueue[_Work | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._started = 0
        self._free = 0

    def submit(self, fn: Callable[_P, _T], /, *args: _P.args, **kwargs: _P.kwargs) -> Future[_T]:
        """Call a function in one of the threads; it waits while all of them are busy."""
        future: Future[_T] = Future()
        with self._lock:
            # A thread that takes work while all are busy is wrongly counted as free. By then all
            # threads have been started, so nothing depends on the number.
            if self._free:
                self._free -= 1
            elif self._started < self._most:
                self._started += 1
                name = f"{self._name} {self._started}"
                threading.Thread(target=self._run, name=name, daemon=True).start()
        self._work.put((future, fn, args, kwargs))
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Let the threads end when they have done their work; none is waited for."""
        with self._lock:
            count, self._most = self._started, 0
        for _ in range(count):
            self._work.put(None)

    def _run(self) -> None:
        while (work := self._work.get()) is not None:
            future, fn, args, kwargs = work
            # Work that is cancelled before it starts never runs.
            if future.set_running_or_notify_cancel():
                try:
                    result = fn(*args, **kwargs)
                except BaseException as error:
                    future.set_exception(error)
                else:
                    future.set_result(result)
            # Otherwise the last message would be kept until the next one.
            del work, future, fn, args, kwargs
            result = None
            with self._lock:
                self._free += 1
