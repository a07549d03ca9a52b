"""`WorkerService`: the handlers of a worker."""

import logging
import secrets
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import msgspec

from jaxdist._parameter_server.tasks.session import Session
from jaxdist._parameter_server.transport import Handler, Message, connect
from jaxdist._parameter_server.variables.remote_server import RemoteServer
from jaxdist._parameter_server.variables.servers import Servers
from jaxdist._parameter_server.worker.messages import (
    ClientFields,
    HelloFields,
    LoadFields,
    MakeFields,
    RunFields,
    read_load,
)
from jaxdist._processes import get_settings
from jaxdist.errors import ArgumentError

_LOG = logging.getLogger("jaxdist")
# A longer run is told by "running", so that a worker that is stopped is told from one at work.
_LONGEST_WAIT = 10.0

F = TypeVar("F", bound=msgspec.Struct)


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
        handlers: Mapping[str, tuple[Any, Callable[[Any, Message], Message]]] = {
            "hello": (HelloFields, self._hello),
            "load": (LoadFields, self._load),
            "run": (RunFields, self._run),
            "make": (MakeFields, self._make),
            "wait": (ClientFields, self._wait),
            "cancel": (ClientFields, self._cancel),
            "end": (ClientFields, self._end_with_client),
        }
        return {name: _make_handler(name, *pair) for name, pair in handlers.items()}

    def close(self) -> None:
        """Run nothing more."""
        with self._lock:
            session, self._session = self._session, None
        if session is not None:
            session.close()

    def _hello(self, fields: HelloFields, message: Message) -> Message:
        if fields.servers is None:
            # Its error names both tasks.
            return Message("hello", {"task": self._task})
        with self._lock:
            if self._session is None or self._session.client != fields.client:
                if self._session is not None:
                    _LOG.warning("%s works for another coordinator from now on.", self._task)
                    self._session.close()
                self._session = self._begin(fields, fields.servers)
            platform = self._session.platform
        told = {"task": self._task, "incarnation": self._incarnation, "platform": platform}
        return Message("hello", told)

    def _begin(self, fields: HelloFields, given: list[str]) -> Session:
        own = self._servers if len(self._servers) == len(given) else given
        channels = [connect(a, layer="grpc", name=f"ps {n}") for n, a in enumerate(own)]
        servers = Servers([RemoteServer(c, n) for n, c in enumerate(channels)], fields.client)
        return Session(
            fields.client,
            self._index,
            servers,
            fields.max_staleness,
            self._modules,
            self._log,
        )

    def _log(self, method: str, error: BaseException) -> None:
        _LOG.error("%s: %r raised:", self._task, method, exc_info=error)

    def _load(self, fields: LoadFields, message: Message) -> Message:
        session = self._find(fields.client)
        if session is None:
            return _STRANGER
        session.load(fields, read_load(fields, message.arrays))
        return Message("load", {"state": "done"})

    def _run(self, fields: RunFields, message: Message) -> Message:
        session = self._find(fields.client)
        return _STRANGER if session is None else session.run(fields, message.arrays, _get_wait())

    def _make(self, fields: MakeFields, message: Message) -> Message:
        session = self._find(fields.client)
        return _STRANGER if session is None else session.make(fields, _get_wait())

    def _wait(self, fields: ClientFields, message: Message) -> Message:
        session = self._find(fields.client)
        return _STRANGER if session is None else session.wait(fields.attempt, _get_wait())

    def _cancel(self, fields: ClientFields, message: Message) -> Message:
        session = self._find(fields.client)
        if session is not None:
            session.cancel(fields.number)
        return Message("cancel", {"state": "done"})

    def _end_with_client(self, fields: ClientFields, message: Message) -> Message:
        if self._find(fields.client) is None:
            return _STRANGER
        self._end()
        return Message("end", {"state": "done"})

    def _find(self, client: str) -> Session | None:
        session = self._session
        return session if session is not None and session.client == client else None


_STRANGER = Message("", {"state": "stranger"})


def _get_wait() -> float:
    return min(_LONGEST_WAIT, get_settings().rpc_seconds / 2)


def _make_handler(
    method: str, fields_type: type[F], answer: Callable[[F, Message], Message]
) -> Handler:
    def handle(message: Message) -> Message:
        try:
            fields = msgspec.convert(dict(message.fields), fields_type)
        except msgspec.ValidationError as error:
            raise ArgumentError(
                f"{method} was given fields that are not valid: {error}.\n\n"
                f"Its fields are {', '.join(fields_type.__struct_fields__)}.\n\n"
                "Coordinator and worker are of one version of jaxdist: compare `jaxdist --version`."
            ) from error
        return answer(fields, message)

    return handle
