"""One thread that keeps the next elements ready.

The thread never refers to the object that the consumer holds, so dropping that object is enough
to end it; the two sides share two queues, whose `put` may be called from a finalizer.
"""

import atexit
import contextvars
import queue
import threading
import weakref
from collections.abc import Callable
from typing import Any, Generic, TypeVar

import jax

T = TypeVar("T")

THREAD_NAME = "jaxdist-prefetch"

# A source that is blocked cannot be interrupted; after this long it is left to its thread, which
# is a daemon and ends as soon as the source answers.
_JOIN_S = 5.0


class _Stop:
    """What comes after the last element: the end of the data, or an error."""

    __slots__ = ("error",)

    def __init__(self, error: BaseException | None = None) -> None:
        self.error = error


class _Channel:
    """What the two threads share."""

    __slots__ = ("__weakref__", "is_stopped", "items", "permits", "thread")

    def __init__(self, depth: int) -> None:
        self.items: queue.SimpleQueue[Any] = queue.SimpleQueue()
        # One permit for each element that may be read ahead: no more than `depth` elements are
        # ever read beyond those that the consumer took.
        self.permits: queue.SimpleQueue[bool] = queue.SimpleQueue()
        self.is_stopped = False
        self.thread: threading.Thread | None = None
        for _ in range(depth):
            self.permits.put(True)

    def stop(self) -> None:
        self.is_stopped = True
        self.permits.put(False)

    def stop_and_join(self) -> None:
        self.stop()
        thread = self.thread
        if thread is not None and thread is not threading.current_thread():
            thread.join(_JOIN_S)


class Prefetcher(Generic[T]):
    """Elements of `produce`, made by a thread up to `depth` ahead of the consumer.

    With `depth` 0 there is no thread: elements are made when they are asked for.

    Args:
        produce: Makes the next element, or raises `StopIteration`.
        finish: Called once, where `produce` was called, after the last element.
        depth: Elements to keep ready.
    """

    def __init__(self, produce: Callable[[], T], finish: Callable[[], None], *, depth: int) -> None:
        self._produce = produce
        self._finish = finish
        self._channel = _Channel(depth)
        self._has_thread = depth > 0
        self._head: list[T] = []
        self._has_ended = False
        self._finalizer: weakref.finalize[..., Any] | None = None

    def peek(self) -> T:
        """The next element, which stays the next one; a thread is not started for it."""
        if not self._head:
            is_first = self._has_thread and self._finalizer is None
            if is_first and not self._has_ended:
                self._channel.permits.get()
                self._head.append(self._make())
            else:
                self._head.append(self._pull())
        return self._head[0]

    def take(self) -> T:
        """The next element; `StopIteration` after the last, or what `produce` raised."""
        item = self._head.pop() if self._head else self._pull()
        if self._has_thread:
            self._channel.permits.put(True)
            if self._finalizer is None:
                self._start()
        return item

    def close(self, *, waits: bool = True) -> None:
        """End the thread; elements that were read ahead are dropped.

        Args:
            waits: Whether to wait (a few seconds at most) until the thread has ended.
        """
        if not self._has_ended:
            self._has_ended = True
            self._head.clear()
            if self._finalizer is None:
                self._finish()
            elif waits:
                self._channel.stop_and_join()
            else:
                self._channel.stop()

    def join(self) -> None:
        """Wait for the thread, however long the source takes; nothing reads the source then."""
        if self._channel.thread is not None:
            self._channel.thread.join()

    def _pull(self) -> T:
        if self._has_ended:
            raise StopIteration
        if not self._has_thread:
            return self._make()
        if self._finalizer is None:
            self._start()
        item = self._channel.items.get()
        if not isinstance(item, _Stop):
            made: T = item
            return made
        self._has_ended = True
        self._channel.stop_and_join()
        try:
            raise item.error if item.error is not None else StopIteration
        finally:
            # The traceback holds this frame, and the frame would hold the error.
            del item

    def _make(self) -> T:
        """An element made here and now."""
        try:
            return self._produce()
        except BaseException:
            self._has_ended = True
            self._finish()
            raise

    def _start(self) -> None:
        channel = self._channel
        # The source runs as if the consumer had called it: in its context, and with its 64-bit
        # setting, which JAX keeps for each thread.
        context = contextvars.copy_context()
        x64 = bool(jax.config.jax_enable_x64)  # type: ignore[attr-defined]
        args = (channel, self._produce, self._finish, x64)
        channel.thread = threading.Thread(
            target=context.run, args=(_work, *args), name=THREAD_NAME, daemon=True
        )
        # Only a signal, no join: a finalizer may run in any thread, holding any lock.
        self._finalizer = weakref.finalize(self, channel.stop)
        # A daemon thread that is inside the JAX runtime while the interpreter goes down can
        # abort the process, so it is ended, not abandoned.
        atexit.register(channel.stop_and_join)
        channel.thread.start()


def _work(
    channel: _Channel, produce: Callable[[], Any], finish: Callable[[], None], x64: bool
) -> None:
    end = _Stop()
    try:
        with jax.enable_x64(x64):
            while channel.permits.get() and not channel.is_stopped:
                channel.items.put(produce())
    except StopIteration:
        pass
    except BaseException as error:  # delivered to the consumer, whatever it is
        end = _Stop(error)
    finally:
        try:
            finish()
        finally:
            channel.items.put(end)
            del end
            atexit.unregister(channel.stop_and_join)
