"""Threads that answer calls, and end with the process."""

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Executor, Future
from typing import Any, ParamSpec, TypeVar

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
            # A thread that takes work while all are busy is counted as free and is not. Then all
            # have been started, so nothing depends on the number.
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
            # What is cancelled before it starts never runs.
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
