"""Tasks in one process: arrays are handed over, and a thread of the listener answers."""

import contextlib
import itertools
import threading
from collections.abc import Mapping
from concurrent.futures import Future, InvalidStateError

import msgspec

from jaxdist._called import called
from jaxdist._parameter_server.transport.calls import (
    Failure,
    Peer,
    answer,
    describe_failure,
    get_seconds,
    make_error,
)
from jaxdist._parameter_server.transport.limits import Limits, Threads
from jaxdist._parameter_server.transport.message import Handler, Message, get_plain
from jaxdist.errors import ClusterError, JaxdistError

_Answer = tuple[Message, Failure | None]
# Its result is the answer, or None if the listener was stopped or the channel was closed.
_Future = Future[_Answer | None]

_LISTENERS: dict[str, "LocalListener"] = {}
_CHANGE = threading.Condition()
_PORTS = itertools.count(1)


class LocalListener:
    """A task of this process that answers.

    Args:
        address: Host and port; for port 0 a free number is taken.
        handlers: A function for each method.
        limits: The largest messages, and how many calls, it accepts.

    Raises:
        ClusterError: Another listener of this process has the address.
    """

    def __init__(self, address: str, handlers: Mapping[str, Handler], limits: Limits) -> None:
        self._handlers, self._limits = dict(handlers), limits
        self._threads = Threads(limits.calls, f"answers at {address}")
        self._waiting: set[_Future] = set()
        self._is_stopped = False
        with _CHANGE:
            if address.endswith(":0"):
                host = address.removesuffix("0")
                address = next(a for n in _PORTS if (a := f"{host}{n}") not in _LISTENERS)
            if address in _LISTENERS:
                raise ClusterError(
                    f"A task was to listen on {address}, and another task of this process does.\n\n"
                    "An address belongs to one task.\n\n"
                    "Choose another one, or stop the other task first."
                )
            self.address = address
            _LISTENERS[address] = self
            _CHANGE.notify_all()

    def stop(self) -> None:
        """Stop answering, and free the address. Calls that wait raise `UnavailableError`."""
        with _CHANGE:
            if _LISTENERS.get(self.address) is self:
                del _LISTENERS[self.address]
        self._is_stopped = True
        _settle_all(self._waiting)
        self._threads.shutdown()

    @called("Channel.call")
    def take(self, request: Message) -> _Future:
        """Start to answer; the result is None if the listener stops before."""
        self._limits.check(request.arrays)
        future: _Future = Future()
        _keep_until_done(self._waiting, future)
        if self._is_stopped:
            _settle(future, None)
        self._threads.submit(self._answer, request, future)
        return future

    @called(lambda request: f"The reply of {request.method}")
    def _answer(self, request: Message, future: _Future) -> None:
        # Before a thread was free, the caller gave up or the listener was stopped.
        if future.done():
            return
        reply, failure = answer(self._handlers, request)
        if failure is None:
            try:
                reply = receive(reply, self._limits)
            except JaxdistError as error:
                reply, failure = Message(request.method), describe_failure(error, request.method)
        _settle(future, (reply, failure))


class LocalChannel:
    """The caller's side.

    Args:
        address: Where the task listens, or will listen.
        name: Of the task, for errors.
        limits: The most that a reply may have.
    """

    def __init__(self, address: str, name: str, limits: Limits) -> None:
        self.address, self._limits = address, limits
        self._peer = Peer(name, address)
        self._waiting: set[_Future] = set()
        self._is_closed = False

    @called("Channel.call")
    def call(self, message: Message, seconds: float | None = None) -> Message:
        """Call a method of the other task; see `Channel.call`."""
        seconds = get_seconds(seconds)
        method = message.method
        request = receive(message, self._limits)
        listener = _LISTENERS.get(self.address)
        if self._is_closed or listener is None:
            why = "this channel is closed" if self._is_closed else "nobody listens there"
            raise self._peer.make_unavailable(method, why)
        future = listener.take(request)
        _keep_until_done(self._waiting, future)
        if self._is_closed:
            _settle(future, None)
        try:
            found = future.result(max(seconds, 0))
        except TimeoutError:
            raise self._peer.make_deadline(method, seconds) from None
        finally:
            # The caller waits no longer.
            _settle(future, None)
        if found is None:
            why = "this channel was closed" if self._is_closed else "it was stopped"
            raise self._peer.make_unavailable(method, why)
        self._peer.note_answer()
        reply, failure = found
        if failure is not None:
            raise make_error(failure)
        return reply

    def call_briefly(self, message: Message, seconds: float | None = None) -> Message | None:
        """Call a method; see `Channel.call_briefly`. Here a reply has any length."""
        return self.call(message, seconds)

    def wait_until_ready(self, seconds: float | None = None) -> None:
        """Wait until the other task listens; see `Channel.wait_until_ready`."""
        seconds = get_seconds(seconds)
        with _CHANGE:
            came = _CHANGE.wait_for(
                lambda: self._is_closed or self.address in _LISTENERS, max(seconds, 0)
            )
        if self._is_closed:
            raise self._peer.make_unavailable("wait_until_ready", "this channel is closed")
        if not came:
            raise self._peer.make_deadline("wait_until_ready", seconds)

    def close(self) -> None:
        """Close the connection; calls that wait raise `UnavailableError`."""
        self._is_closed = True
        _settle_all(self._waiting)
        with _CHANGE:
            _CHANGE.notify_all()


def receive(message: Message, limits: Limits) -> Message:
    """Return a message as its receiver gets it: other fields, the same arrays without copies."""
    arrays = tuple(get_plain(array).view() for array in message.arrays)
    for array in arrays:
        array.flags.writeable = False
    limits.check(arrays)
    fields = msgspec.msgpack.decode(msgspec.msgpack.encode(message.fields))
    return Message(message.method, fields, arrays)


def _settle(future: _Future, result: _Answer | None) -> None:
    # The reply, the end of the listener and the caller's deadline may come at the same time.
    with contextlib.suppress(InvalidStateError):
        future.set_result(result)


def _settle_all(waiting: set[_Future]) -> None:
    for future in list(waiting):
        _settle(future, None)


def _keep_until_done(waiting: set[_Future], future: _Future) -> None:
    # Each of these operations on a set is atomic. The caller checks for the end after it has added
    # the future, and the end settles all futures that were added before.
    waiting.add(future)
    future.add_done_callback(waiting.discard)
