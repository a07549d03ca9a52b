"""The handlers of a server: what it answers to the messages of other tasks."""

import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from jaxdist._parameter_server import protocol
from jaxdist._parameter_server.protocol import Pending
from jaxdist._parameter_server.server.server import ANSWERS, VariableServer
from jaxdist._parameter_server.transport import Handler
from jaxdist._parameter_server.transport.requests import Done, Reply, Request, find_result
from jaxdist._parameter_server.transport.requests import make_handlers as make_handlers_of

RUNNING, UNKNOWN = Pending("running"), Pending("unknown")
_MOST_CALLS = 256
_THREADS = 8
_REQUESTS = (*ANSWERS, protocol.WaitForCall, protocol.Announce, protocol.ListAnnounced)
# Workers announce themselves every 2 s, so a worker that has ended is forgotten soon.
_KEEP_SECONDS = 10.0
_MOST_WORKERS = 1024


class LongCalls:
    """Calls that may take longer than the deadline of a message.

    Each has an id. A message starts the call, and is answered after some seconds in any case; the
    caller waits for its end with further messages. So every message has a short deadline, which
    reveals a server that was stopped; and a repeated message starts nothing.
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
            call: Does the work.
        """
        if not request:
            return call()
        with self._lock:
            future = self._calls.get(request)
            if future is None:
                future = self._calls[request] = self._threads.submit(call)
                # Those that have ended were answered long ago.
                while len(self._calls) > _MOST_CALLS and next(iter(self._calls.values())).done():
                    self._calls.popitem(last=False)
        return find_result(future, seconds, RUNNING)

    def wait(self, request: str, seconds: float) -> Reply:
        """Return the reply of a call that was started before, `RUNNING`, or `UNKNOWN`."""
        with self._lock:
            future = self._calls.get(request)
        return UNKNOWN if future is None else find_result(future, seconds, RUNNING)


def make_handlers(server: VariableServer) -> dict[str, Handler]:
    """Return the handlers of the messages of a server, by method.

    Raises:
        ArgumentError: From a handler: the fields are not those of the method.
        ShapeError: From a handler: the number of arrays is not what the fields say.
    """
    calls, announcements = LongCalls(), Announcements()

    def answer(request: Request[Any]) -> Reply:
        match request:
            case protocol.WaitForCall():
                return calls.wait(request.request, request.seconds)
            case protocol.LongRequest():
                return calls.run(request.request, request.seconds, lambda: server.call(request))
            case protocol.Announce():
                announcements.note(request.worker, request.address)
                return Done()
            case protocol.ListAnnounced():
                return protocol.Announced(announcements.list_present())
        return server.call(request)

    return make_handlers_of(_REQUESTS, answer, "Caller and server")


class Announcements:
    """The workers that have announced themselves to a server.

    A coordinator asks for them, and takes those that its cluster does not list. They are in no
    snapshot: each worker announces itself again and again.

    Args:
        clock: Returns seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        # The newest is the last one.
        self._found: OrderedDict[int, tuple[str, float]] = OrderedDict()

    def note(self, worker: int, address: str) -> None:
        """Note that a worker is alive.

        Args:
            worker: Its index.
            address: Where a coordinator reaches it.
        """
        with self._lock:
            self._found[worker] = address, self._clock()
            self._found.move_to_end(worker)
            while len(self._found) > _MOST_WORKERS:
                self._found.popitem(last=False)

    def list_present(self) -> dict[int, str]:
        """Return the address of each worker that was heard of in the last 10 s."""
        with self._lock:
            since = self._clock() - _KEEP_SECONDS
            return {n: address for n, (address, when) in self._found.items() if when >= since}
