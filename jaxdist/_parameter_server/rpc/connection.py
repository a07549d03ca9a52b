"""The connection to a server, the threads in which calls wait, and the result of a call."""

import math
import threading
import time
import weakref
from collections.abc import Callable
from concurrent.futures import Future

import msgspec

from jaxdist._called import called
from jaxdist._parameter_server.rpc.served import OK, Call, ListMethods, Result, get_code
from jaxdist._parameter_server.rpc.signature import Signature
from jaxdist._parameter_server.rpc.values import unflatten
from jaxdist._parameter_server.transport import Channel, connect
from jaxdist._parameter_server.transport.calls import get_seconds
from jaxdist._parameter_server.transport.limits import Threads
from jaxdist._parameter_server.transport.requests import call
from jaxdist._typing import PyTree
from jaxdist.errors import JaxdistError, OtherProcessError

# The calls of one client at a time; others wait. A server answers those of many clients.
_MOST_CALLS = 64


class Connection:
    """A channel to a server; it closes when no client and no result refers to it.

    Args:
        layer: `"grpc"` or `"local"`.
        address: Of the server.
        name: The server in errors.
        seconds: How long a call waits by default; None means `JAXDIST_RPC_SECONDS`.
    """

    @called("Client.create", replaces="connect")
    def __init__(self, layer: str, address: str, name: str, seconds: float | None) -> None:
        self._channel = connect(address, layer=layer, name=name)
        self._seconds = seconds
        self._threads = Threads(_MOST_CALLS, f"calls to {address}")
        self._lock = threading.Lock()
        self._is_closed = False
        self._close = weakref.finalize(self, _close, self._channel, self._threads)

    def list_methods(self) -> dict[str, Signature]:
        """Wait for the server, and return its methods.

        Raises:
            DeadlineExceededError: It did not answer in time.
        """
        seconds = get_seconds(self._seconds)
        deadline = time.monotonic() + seconds
        try:
            self._channel.wait_until_ready(seconds)
            found = call(self._channel, ListMethods(), _count_seconds(deadline))
        except OtherProcessError as error:
            raise _rename(error, ListMethods.method, "Client.create") from None
        for _, signature in found.methods:
            # Raises an error if the structure is not valid.
            unflatten(signature.structure, signature.leaves)
        return dict(found.methods)

    def start(self, request: Call, seconds: float | None) -> Future[Result]:
        """Start a call, and return what will be its reply."""
        seconds = get_seconds(self._seconds if seconds is None else seconds)
        work = (self._channel, request, time.monotonic() + seconds)
        with self._lock:
            if not self._is_closed:
                return self._threads.submit(_call, *work)
        # No thread would run it; the error of the channel says that it is closed.
        closed: Future[Result] = Future()
        try:
            closed.set_result(_call(*work))
        except Exception as error:
            closed.set_exception(error)
        return closed

    def close(self) -> None:
        """Close the channel; calls that wait end with `UnavailableError`."""
        with self._lock:
            self._is_closed = True
        self._close()


# No method of the connection: a thread that has finished its work would keep it alive.
@called("Client.call", replaces="Channel.call")
def _call(channel: Channel, request: Call, deadline: float) -> Result:
    left = _count_seconds(deadline)
    try:
        return call(channel, msgspec.structs.replace(request, seconds=left), left)
    except OtherProcessError as error:
        raise _rename(error, Call.method, request.name) from None


def _count_seconds(deadline: float) -> float:
    """Return the seconds until a deadline, in whole milliseconds."""
    return math.ceil(max(deadline - time.monotonic(), 0.0) * 1000) / 1000


def _rename(error: OtherProcessError, method: str, name: str) -> OtherProcessError:
    # The transport knows one method for all functions.
    text = str(error).replace(repr(method), repr(name))
    error.args = (text.replace("pass seconds=", "pass timeout_in_ms="),)
    return error


def _close(channel: Channel, threads: Threads) -> None:
    channel.close()
    threads.shutdown()


class StatusOrResult:
    """The result of a call, or the error that it ended with. `Client` makes it.

    A call does not wait; each method here waits until the call has ended, at most until its
    deadline.

    Example:
        >>> from jaxdist.experimental import rpc
        >>> server = rpc.Server.create("grpc", "localhost:0")
        >>> server.register("divide", lambda: 1 / 0)
        >>> server.start()
        >>> client = rpc.Client.create("grpc", server.address)
        >>> result = client.divide()
        >>> result.is_ok(), result.get_error()[0]
        (False, 2)
        >>> server.stop()

    Source:
        `tf.distribute.experimental.rpc.Client.call`.
    """

    def __init__(
        self, reply: Future[Result], read: Callable[[Result], PyTree], keep: object
    ) -> None:
        self._reply, self._read = reply, read
        # The connection, which closes when nothing refers to it.
        self._keep = keep

    def is_ok(self) -> bool:
        """Return whether the call was successful. Waits until it has ended.

        Returns:
            False if the call ended with an error, which `get_error` returns.
        """
        return self._wait() is None

    def get_error(self) -> tuple[int, str]:
        """Return the status code and the text of the error. Waits until the call has ended.

        Returns:
            `(0, "")` after a successful call. Otherwise a code of gRPC, such as 3 for arguments
            that do not fit, an unknown method or a `ValueError` of the function, 4 for a deadline,
            and 14 for a server that has ended; and what happened.

        Source:
            TensorFlow returns the text as bytes.
        """
        error = self._wait()
        return (OK, "") if error is None else (get_code(error), str(error))

    def get_value(self) -> PyTree:
        """Return the result of the function. Waits until the call has ended.

        Returns:
            The pytree of the result, with NumPy arrays of the dtypes that the function returned.
            Do not write into them. What `call` without `output_specs` returns is the list of its
            arrays.

        Raises:
            JaxdistError: The error that the call ended with.
            InvalidArgumentError: The result is not what `output_specs` describe.
        """
        error = self._wait()
        if error is not None:
            raise error
        return self._read(self._reply.result())

    def _wait(self) -> JaxdistError | None:
        error = self._reply.exception()
        if error is None or isinstance(error, JaxdistError):
            return error
        raise error

    def __repr__(self) -> str:
        if not self._reply.done():
            return "<StatusOrResult: the call has not ended>"
        error = self._wait()
        text = "ok" if error is None else str(error).splitlines()[0]
        return f"<StatusOrResult: {text}>"
