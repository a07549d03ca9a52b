"""Tasks in one process: arrays are handed over, and a thread of the listener answers."""

import itertools
import threading
from collections.abc import Mapping
from concurrent.futures import Future, InvalidStateError

import numpy as np

from jaxdist._called import called
from jaxdist._parameter_server.transport.calls import (
    Failure,
    Peer,
    answer,
    check_message,
    describe_failure,
    get_seconds,
    make_error,
)
from jaxdist._parameter_server.transport.limits import Limits, Threads
from jaxdist._parameter_server.transport.message import (
    Handler,
    Message,
    check_fields,
    copy_fields,
    get_plain,
)
from jaxdist.errors import ClusterError, JaxdistError

_Answer = tuple[Message, Failure | None]
# The answer; None where none comes.
_Future = Future[_Answer | None]

_LISTENERS: dict[str, "LocalListener"] = {}
_CHANGE = threading.Condition()
_PORTS = itertools.count(1)


class LocalListener:
    """A task of this process that answers.

    Args:
        address: Host and port; for port 0 a free number is taken.
        handlers: A function for each method.
        limits: The most that it takes in.

    Raises:
        ClusterError: Another listener of this process has the address.
    """

    def __init__(self, address: str, handlers: Mapping[str, Handler], limits: Limits) -> None:
        self._handlers, self._limits = dict(handlers), limits
        self._threads = Threads(limits.calls, f"answers at {address}")
        self._waiting: set[_Future] = set()
        self._lock = threading.Lock()
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
            self._address = address
            _LISTENERS[address] = self
            _CHANGE.notify_all()

    @property
    def address(self) -> str:
        """The address that it listens on."""
        return self._address

    def stop(self) -> None:
        """Stop to answer, and free the address. Calls that wait raise `UnavailableError`."""
        with _CHANGE:
            if _LISTENERS.get(self._address) is self:
                del _LISTENERS[self._address]
        with self._lock:
            self._is_stopped = True
            waiting, self._waiting = self._waiting, set()
        for future in waiting:
            _settle(future, None)
        self._threads.shutdown()

    @called("Channel.call")
    def take(self, request: Message) -> _Future:
        """Start to answer; the result is None if the listener stops before."""
        self._limits.check(request.arrays)
        future: _Future = Future()
        with self._lock:
            if self._is_stopped:
                future.set_result(None)
                return future
            self._waiting.add(future)
        self._threads.submit(self._answer, request, future)
        return future

    def forget(self, future: _Future) -> None:
        """Answer no longer: nobody waits."""
        with self._lock:
            self._waiting.discard(future)
        _settle(future, None)

    @called(lambda request: f"The reply of {request.method}")
    def _answer(self, request: Message, future: _Future) -> None:
        # The caller gave up, or the listener was stopped, before a thread was free.
        if future.done():
            return
        reply, failure = answer(self._handlers, request)
        if failure is None:
            try:
                reply = receive(reply, self._limits)
            except JaxdistError as error:
                reply, failure = Message(request.method), describe_failure(error, request.method)
        with self._lock:
            self._waiting.discard(future)
        _settle(future, (reply, failure))


class LocalChannel:
    """The caller's side.

    Args:
        address: Where the task listens, or will listen.
        name: Of the task, for errors.
        limits: The most that a reply may have.
    """

    def __init__(self, address: str, name: str, limits: Limits) -> None:
        self._address, self._limits = address, limits
        self._peer = Peer(name, address)
        self._waiting: dict[_Future, LocalListener] = {}
        self._lock = threading.Lock()
        self._is_closed = False

    @property
    def address(self) -> str:
        """The address of the other task."""
        return self._address

    @called("Channel.call")
    def call(self, message: Message, seconds: float | None = None) -> Message:
        """Call a method of the other task; see `Channel.call`."""
        seconds = get_seconds(seconds)
        check_message(message)
        method = message.method
        request = receive(message, self._limits)
        listener = _LISTENERS.get(self._address)
        if self._is_closed or listener is None:
            why = "this channel is closed" if self._is_closed else "nobody listens there"
            raise self._peer.make_unavailable(method, why)
        future = listener.take(request)
        with self._lock:
            self._waiting[future] = listener
        if self._is_closed:
            listener.forget(future)
        try:
            found = future.result(max(seconds, 0))
        except TimeoutError:
            raise self._peer.make_deadline(method, seconds) from None
        finally:
            with self._lock:
                self._waiting.pop(future, None)
            listener.forget(future)
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
                lambda: self._is_closed or self._address in _LISTENERS, max(seconds, 0)
            )
        if self._is_closed:
            raise self._peer.make_unavailable("wait_until_ready", "this channel is closed")
        if not came:
            raise self._peer.make_deadline("wait_until_ready", seconds)

    def close(self) -> None:
        """Close the connection; calls that wait raise `UnavailableError`."""
        with self._lock:
            self._is_closed = True
            waiting = dict(self._waiting)
        for future, listener in waiting.items():
            listener.forget(future)
        with _CHANGE:
            _CHANGE.notify_all()


def receive(message: Message, limits: Limits) -> Message:
    """Return a message as its receiver gets it: other fields, the same arrays without copies."""
    if not message.is_plain:
        check_fields(message.fields)
    arrays = tuple(_make_view(get_plain(array)) for array in message.arrays)
    limits.check(arrays)
    return Message(message.method, copy_fields(message.fields), arrays)


def _make_view(array: np.ndarray) -> np.ndarray:
    view = array.view()
    view.flags.writeable = False
    return view


def _settle(future: _Future, result: _Answer | None) -> None:
    # The reply, the end of the listener and the end of the caller's patience may meet.
    try:
        future.set_result(result)
    except InvalidStateError:
        pass
