"""`WorkerService`: the handlers of a worker."""

import logging
import secrets
import threading
from collections.abc import Callable, Sequence
from typing import Any

from jaxdist._parameter_server.tasks.session import Session
from jaxdist._parameter_server.transport import Handler, connect
from jaxdist._parameter_server.transport.requests import Reply, make_handlers
from jaxdist._parameter_server.variables.remote_server import RemoteServer
from jaxdist._parameter_server.variables.servers import Servers
from jaxdist._parameter_server.worker_protocol import (
    Answer,
    Cancel,
    End,
    HelloWorker,
    Load,
    Make,
    Run,
    WaitForAttempt,
    WorkerInfo,
)
from jaxdist._processes import get_settings

_LOG = logging.getLogger("jaxdist")
# A longer run is told by "running", so that a worker that is stopped is told from one at work.
_LONGEST_WAIT = 10.0

_REQUESTS = (HelloWorker, Load, Run, Make, WaitForAttempt, Cancel, End)
_DONE = Answer(state="done")


class WorkerService:
    """A worker: it runs closures for one coordinator at a time.

    A second coordinator takes the worker over. The first one is told so when it calls again.

    Args:
        task: The name of the task, such as `worker:0`.
        index: Its number.
        servers: The addresses of the parameter servers as this task reaches them; empty if the
            coordinator says them.
        modules: The modules whose functions a coordinator may name.
        end: Is called when the process of the coordinator ends. It does not wait.
    """

    def __init__(
        self,
        task: str,
        index: int,
        servers: Sequence[str],
        modules: Sequence[str],
        end: Callable[[], None],
    ) -> None:
        self._task, self._index = task, index
        self._servers, self._modules, self._end = list(servers), list(modules), end
        self._incarnation = secrets.token_hex(8)
        self._lock = threading.Lock()
        self._session: Session | None = None

    def make_handlers(self) -> dict[str, Handler]:
        """Return the handlers, by method."""
        return make_handlers(_REQUESTS, self._answer, "Coordinator and worker")

    def _answer(self, request: Any) -> Reply:
        if isinstance(request, HelloWorker):
            return self._hello(request)
        session = self._session
        if session is None or session.client != request.client:
            # Nobody waits for a closure that is cancelled.
            return _DONE if isinstance(request, Cancel) else Answer(state="stranger")
        seconds = min(_LONGEST_WAIT, get_settings().rpc_seconds / 2)
        match request:
            case Load():
                return session.load(request)
            case Run():
                return session.run(request, seconds)
            case Make():
                return session.make(request, seconds)
            case WaitForAttempt():
                return session.wait(request.attempt, seconds)
            case Cancel():
                session.cancel(request.number)
            case End():
                self._end()
        return _DONE

    def close(self) -> None:
        """Run nothing more."""
        with self._lock:
            session, self._session = self._session, None
        if session is not None:
            session.close()

    def _hello(self, request: HelloWorker) -> WorkerInfo:
        if request.servers is None:
            # Its error names both tasks.
            return WorkerInfo(self._task)
        with self._lock:
            if self._session is None or self._session.client != request.client:
                if self._session is not None:
                    _LOG.warning("%s works for another coordinator from now on.", self._task)
                    self._session.close()
                self._session = self._begin(request, request.servers)
            platform = self._session.platform
        return WorkerInfo(self._task, self._incarnation, platform)

    def _begin(self, request: HelloWorker, given: Sequence[str]) -> Session:
        own = self._servers if len(self._servers) == len(given) else given
        channels = [connect(a, layer="grpc", name=f"ps {n}") for n, a in enumerate(own)]
        servers = Servers([RemoteServer(c, n) for n, c in enumerate(channels)], request.client)
        return Session(
            request.client,
            self._index,
            servers,
            request.max_staleness,
            self._modules,
            self._log,
        )

    def _log(self, method: str, error: BaseException) -> None:
        _LOG.error("%s: %r raised:", self._task, method, exc_info=error)
