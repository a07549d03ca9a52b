"""A thread that prefetches elements.

# Note [No reference to the consumer]
The thread never refers to the object that the consumer holds. So Python collects that object when
the consumer drops it, and its finalizer stops the thread. If the thread referred to it, each loop
that ends with `break` would leave a thread and its batches behind. The two sides share two
`SimpleQueue`s: a finalizer may run while the same thread is inside `put`, and only
`SimpleQueue.put` is reentrant.
"""

import atexit
import contextvars
import queue
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any, Generic, TypeVar

from jaxdist import _compat

T = TypeVar("T")

THREAD_NAME = "jaxdist-prefetch"

# A blocked source cannot be interrupted, so `close` waits at most this many seconds for its thread.
# The thread is a daemon, and ends as soon as the source returns.
_JOIN_S = 5.0


class _Stop:
    """A marker after the last element: the end of the data, or an error."""

    __slots__ = ("error",)

    def __init__(self, error: BaseException | None = None) -> None:
        self.error = error


class _Channel:
    """The queues and flags that the two threads share."""

    def __init__(self, depth: int, interrupt: Callable[[], None]) -> None:
        # Only sets a flag, since `stop` runs in finalizers too.
        self.interrupt = interrupt
        self.items: queue.SimpleQueue[Any] = queue.SimpleQueue()
        # The thread takes one permit for each element. So it never reads more than `depth`
        # elements beyond those that the consumer took. A queue with a `maxsize` would allow one
        # more, which the thread holds while it waits in `put`.
        self.permits: queue.SimpleQueue[bool] = queue.SimpleQueue()
        self.is_stopped = False
        # When the consumer began to wait for an element, by `time.monotonic`.
        self.needed_since: float | None = None
        self.thread: threading.Thread | None = None
        for _ in range(depth):
            self.permits.put(True)

    def stop(self) -> None:
        self.is_stopped = True
        self.interrupt()
        # Wakes the thread if it waits for a permit.
        self.permits.put(False)

    def stop_and_join(self) -> None:
        self.stop()
        thread = self.thread
        # A source may close the iterator from inside the thread, and a thread cannot join itself.
        if thread is not None and thread is not threading.current_thread():
            thread.join(_JOIN_S)


class Prefetcher(Generic[T]):
    """The elements of `produce`, which a thread makes up to `depth` ahead of the consumer.

    With `depth` 0 there is no thread, and `take` makes the element.

    Args:
        produce: A function that returns the next element, or raises `StopIteration`.
        finish: A function that is called once, after the last element, in the thread that called
            `produce`.
        depth: Number of elements to prefetch.
        interrupt: A function that ends a wait of `produce` for other processes; it only sets a
            flag.
    """

    def __init__(
        self,
        produce: Callable[[], T],
        finish: Callable[[], None],
        *,
        depth: int,
        interrupt: Callable[[], None] = lambda: None,
    ) -> None:
        self._produce = produce
        self._finish = finish
        self._channel = _Channel(depth, interrupt)
        self._has_thread = depth > 0
        self._head: list[T] = []
        self._has_ended = False
        self._finalizer: weakref.finalize[..., Any] | None = None

    def find_needed_since(self) -> Callable[[], float | None]:
        """Return a function that returns when the consumer began to wait for an element, or None.

        It does not refer to this object; see Note [No reference to the consumer].
        """
        channel = self._channel
        return lambda: channel.needed_since

    def peek(self) -> T:
        """Return the next element without taking it. This starts no thread."""
        if not self._head:
            # Before the first `take` the element is made here, with its own permit. So code that
            # only reads `element_spec` leaves no thread behind.
            is_first = self._has_thread and self._finalizer is None
            if is_first and not self._has_ended:
                self._channel.permits.get()
                self._head.append(self._make())
            else:
                self._head.append(self._pull())
        return self._head[0]

    def take(self) -> T:
        """Return the next element.

        Raises:
            StopIteration: No element is left.
            BaseException: Any error that `produce` raised.
        """
        item = self._head.pop() if self._head else self._pull()
        if self._has_thread:
            self._channel.permits.put(True)
            if self._finalizer is None:
                self._start()
        return item

    def close(self, *, waits: bool = True) -> None:
        """End the thread; prefetched elements are dropped.

        Args:
            waits: Whether to wait (a few seconds at most) until the thread has ended.
        """
        if not self._has_ended:
            self._has_ended = True
            self._head.clear()
            # Without a thread, nothing else calls `finish`.
            if self._finalizer is None:
                self._finish()
            elif waits:
                self._channel.stop_and_join()
            else:
                self._channel.stop()

    def join(self) -> None:
        """Wait without a time limit until the thread has ended and no longer reads the source."""
        if self._channel.thread is not None:
            self._channel.thread.join()

    def _pull(self) -> T:
        if self._has_ended:
            raise StopIteration
        if not self._has_thread:
            return self._make()
        if self._finalizer is None:
            self._start()
        self._channel.needed_since = time.monotonic()
        try:
            item = self._channel.items.get()
        finally:
            self._channel.needed_since = None
        if not isinstance(item, _Stop):
            return item
        self._has_ended = True
        self._channel.stop_and_join()
        try:
            raise item.error if item.error is not None else StopIteration
        finally:
            # The error holds its traceback, which holds this frame. Without `del` the frame would
            # hold the error: a cycle that keeps the batch alive.
            del item

    def _make(self) -> T:
        """Make an element in this thread."""
        self._channel.needed_since = time.monotonic()
        try:
            return self._produce()
        except BaseException:
            self._has_ended = True
            self._finish()
            raise
        finally:
            self._channel.needed_since = None

    def _start(self) -> None:
        channel = self._channel
        # The source must run as if the consumer had called it: with the consumer's context
        # variables and its settings of JAX.
        context = contextvars.copy_context()
        args = (channel, self._produce, self._finish, _compat.ThreadSettings())
        channel.thread = threading.Thread(
            target=context.run, args=(_run_producer, *args), name=THREAD_NAME, daemon=True
        )
        # A signal without a join: a finalizer may run in any thread that holds any lock.
        self._finalizer = weakref.finalize(self, channel.stop)
        # A daemon thread that is inside the JAX runtime while the interpreter shuts down can abort
        # the process, so end the thread first.
        atexit.register(channel.stop_and_join)
        _RUNNING.add(channel)
        channel.thread.start()


_RUNNING: "weakref.WeakSet[_Channel]" = weakref.WeakSet()


def stop_all() -> None:
    """End all prefetch threads, before this process leaves the job."""
    running = list(_RUNNING)
    for channel in running:
        channel.stop()
    for channel in running:
        channel.stop_and_join()


def _run_producer(
    channel: _Channel,
    produce: Callable[[], Any],
    finish: Callable[[], None],
    settings: _compat.ThreadSettings,
) -> None:
    end = _Stop()
    try:
        with settings.use():
            while channel.permits.get() and not channel.is_stopped:
                channel.items.put(produce())
    except StopIteration:
        pass
    except BaseException as error:  # `take` raises it in the consumer's thread
        end = _Stop(error)
    finally:
        # `finish` first: a consumer that sees the end may open the source again.
        try:
            finish()
        finally:
            channel.items.put(end)
            # The traceback of the error holds this frame.
            del end
            atexit.unregister(channel.stop_and_join)
