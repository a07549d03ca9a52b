"""`LongCalls`: calls that may take longer than the deadline of a message."""

import threading
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as NotYet

from jaxdist._parameter_server.protocol import Pending
from jaxdist._parameter_server.transport.requests import Reply

RUNNING, UNKNOWN = Pending("running"), Pending("unknown")
_KEEP = 256
_THREADS = 8


class LongCalls:
    """Calls that may take longer than the deadline of a message.

    Each has an id. A message starts the call, and is answered after some seconds in any case; the
    caller asks for its end with further messages. So every message has a short deadline, by which a
    server that was stopped is noticed; and a message that comes twice starts nothing.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._calls: OrderedDict[str, Future[Reply]] = OrderedDict()
        self._threads = ThreadPoolExecutor(_THREADS, "jaxdist-long-calls")

    def run(self, request: str, seconds: float, call: Callable[[], Reply]) -> Reply:
        """Start a call, if it was not started before; return its reply, or `RUNNING`.

        Args:
            request: Its id; without one it is run at once, however long it takes.
            seconds: When to answer.
            call: What it does.
        """
        if not request:
            return call()
        with self._lock:
            future = self._calls.get(request)
            if future is None:
                future = self._calls[request] = self._threads.submit(call)
                # Those that have ended were answered long ago.
                while len(self._calls) > _KEEP and next(iter(self._calls.values())).done():
                    self._calls.popitem(last=False)
        return _wait(future, seconds)

    def wait(self, request: str, seconds: float) -> Reply:
        """Return the reply of a call that was started before, `RUNNING`, or `UNKNOWN`."""
        with self._lock:
            future = self._calls.get(request)
        return UNKNOWN if future is None else _wait(future, seconds)


def _wait(future: "Future[Reply]", seconds: float) -> Reply:
    try:
        return future.result(seconds)
    except NotYet:
        return RUNNING
