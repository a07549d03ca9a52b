"""`WorkerService`: a worker as a task, and what it holds for one coordinator."""

import contextlib
import logging
import secrets
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import jax

from jaxdist import _mesh
from jaxdist._parameter_server.coordinator import on_worker
from jaxdist._parameter_server.transport import Handler, connect
from jaxdist._parameter_server.transport.calls import describe_failure
from jaxdist._parameter_server.transport.requests import Reply, find_result, make_handlers
from jaxdist._parameter_server.variables.remote_server import RemoteServer
from jaxdist._parameter_server.variables.servers import Servers
from jaxdist._parameter_server.worker.datasets import (
    BatchIterator,
    describe_tree,
    is_value,
    list_leaves,
    name_dataset,
    put_back,
)
from jaxdist._parameter_server.worker.devices import find_platform
from jaxdist._parameter_server.worker.functions import find_function
from jaxdist._parameter_server.worker.worker import ClosureRun, Worker
from jaxdist._parameter_server.worker_protocol import (
    Answer,
    Cancel,
    End,
    HelloWorker,
    Load,
    Make,
    Run,
    TracedClosure,
    WaitForAttempt,
    WorkerInfo,
)
from jaxdist._processes import get_settings
from jaxdist.errors import (
    CancelledError,
    ClosureInputError,
    DeadlineExceededError,
    JaxdistError,
    PSUnavailableError,
    UnknownError,
)

_PROGRAMS = 256
# Errors of jaxdist whose cause is an error of a dataset.
_OF_USERS = (ClosureInputError, UnknownError)
_LOG = logging.getLogger("jaxdist")
# After this, answer "running", so that the caller can tell a busy worker from a stopped one.
_LONGEST_WAIT = 10.0
_REQUESTS = (HelloWorker, Load, Run, Make, WaitForAttempt, Cancel, End)
_DONE, _RUNNING = Answer(state="done"), Answer(state="running")


class Session:
    """The things that a worker holds for one coordinator: programs, datasets, and kept values.

    Args:
        greeting: The first request of the coordinator.
        index: The number of this worker.
        servers: The parameter servers.
        modules: The modules whose functions the coordinator may name.

    Attributes:
        platform: The platform of this worker, as `jax.export` names it.
    """

    def __init__(
        self, greeting: HelloWorker, index: int, servers: Servers, modules: Sequence[str]
    ) -> None:
        self.client = greeting.client
        self._index, self._servers, self._modules = index, servers, modules
        layout = _mesh.build(jax.local_devices()[:1])
        self.platform = find_platform(layout)
        self._worker = Worker(servers, layout, greeting.max_staleness)
        self._programs: OrderedDict[str, tuple[TracedClosure, Sequence[Any]]] = OrderedDict()
        self._made: dict[int, Any] = {}
        self._names: dict[int, str] = {}
        self._cancelled = 0
        # One at a time, in one thread: closures of a worker do not compete.
        self._thread = ThreadPoolExecutor(1, "jaxdist-closures")
        self._lock = threading.Lock()
        self._attempt, self._future = 0, Future[Answer]()

    def answer(self, request: Any) -> Answer:
        """Answer a request of the coordinator; within some seconds, if it takes longer."""
        match request:
            case Load():
                return self._load(request)
            case Run() | Make():
                return self._start(request)
            case WaitForAttempt():
                with self._lock:
                    future = self._future if request.attempt == self._attempt else None
                return Answer(state="old") if future is None else _wait(future)
            case Cancel():
                self._cancelled = request.number
        return _DONE

    def _load(self, request: Load) -> Answer:
        """Keep a closure for later runs."""
        closure = request.closure
        self._servers.learn(request.places)
        with self._lock:
            self._programs[closure.digest] = closure, request.shapes
            while len(self._programs) > _PROGRAMS:
                self._programs.popitem(last=False)
        return _DONE

    def close(self) -> None:
        """Run nothing more, and end the connections."""
        self._thread.shutdown(wait=False, cancel_futures=True)
        self._servers.close()

    def _start(self, request: Run | Make) -> Answer:
        with self._lock:
            # A repeated or late message: its caller waits for another one.
            if request.attempt <= self._attempt:
                return Answer(state="old")
            self._attempt = request.attempt
            try:
                self._future = future = self._thread.submit(self._work, request)
            except RuntimeError:  # Another coordinator has taken over.
                return Answer(state="stranger")
        return _wait(future)

    def _work(self, request: Run | Make) -> Answer:
        method = request.method
        try:
            return self._run(request) if isinstance(request, Run) else self._make(request)
        except BaseException as error:  # Also SystemExit, since the coordinator waits.
            cause = error.__cause__ if isinstance(error, _OF_USERS) else None
            logged = cause if isinstance(error, JaxdistError) else error
            if logged is not None:
                _LOG.error("worker:%d: %r raised:", self._index, method, exc_info=logged)
            return Answer(state="failed", error=describe_failure(error, method))

    def _run(self, request: Run) -> Answer:
        self._forget(request.forget)
        known = self._programs.get(request.digest)
        if known is None:
            return Answer(state="unknown")
        if self._cancelled == request.number:
            raise CancelledError(
                f"Function {request.number} was cancelled before worker {self._index} ran it.\n\n"
                "Another function had failed.\n\nSchedule it again."
            )
        closure, shapes = known
        iterators: list[BatchIterator] = [self._made[n] for n in request.iterators]
        taken: list[list[Any]] = []
        try:
            for iterator, count in zip(iterators, closure.batches, strict=True):
                taken.append(iterator.take(closure.name, count))
            found = [[describe_tree("A batch", b) for b in own] for own in taken]
            if found != shapes:
                put_back(iterators, taken)
                return Answer(state="shapes", shapes=found)
            sent = iter(request.arguments)
            arguments = [
                next(sent) if x is None else jax.tree.leaves(self._made[x[0]])[x[1]]
                for x in request.references
            ]
            return self._worker.run(
                ClosureRun(
                    closure,
                    arguments,
                    dict(list_leaves(taken)),
                    request.number,
                    request.fence,
                    request.done_below,
                    request.client,
                )
            )
        except (PSUnavailableError, DeadlineExceededError):
            # The closure runs again.
            put_back(iterators, taken)
            raise

    def _make(self, request: Make) -> Answer:
        self._forget(request.forget)
        if request.dataset is not None:
            dataset, name = self._made[request.dataset], self._names[request.dataset]
            with _send_text():
                iterator = BatchIterator(dataset, self._index, name)
            self._made[request.number] = iterator
            return Answer(state="done", tree=describe_tree("A batch", iterator.first))
        function = find_function(request.functions, request.script, self._modules, self._index)
        with on_worker(self._index), _send_text():
            value = self._made[request.number] = function()
        self._names[request.number] = name_dataset(function)
        tree = describe_tree("A per-worker value", value) if is_value(value) else None
        return Answer(state="done", tree=tree)

    def _forget(self, numbers: Sequence[int]) -> None:
        for number in numbers:
            self._made.pop(number, None)
            self._names.pop(number, None)


@contextlib.contextmanager
def _send_text() -> Iterator[None]:
    """Send errors of a dataset as text; the coordinator may not have their class."""
    try:
        yield
    except JaxdistError:
        raise
    except Exception as error:
        raise UnknownError(f"{type(error).__name__}: {error}") from error


def _wait(future: "Future[Answer]") -> Answer:
    return find_result(future, min(_LONGEST_WAIT, get_settings().rpc_seconds / 2), _RUNNING)


class WorkerService:
    """A worker: it runs closures for one coordinator at a time.

    A second coordinator takes the worker over. The first one learns it when it calls again.

    Args:
        index: The number of the worker.
        servers: The addresses of the parameter servers as this task reaches them; empty if the
            coordinator sends them.
        modules: The modules whose functions a coordinator may name.
        end: Called when the process of the coordinator ends. It does not wait.
    """

    def __init__(
        self,
        index: int,
        servers: Sequence[str],
        modules: Sequence[str],
        end: Callable[[], None],
    ) -> None:
        self._task, self._index = f"worker:{index}", index
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
        if isinstance(request, End):
            self._end()
        return session.answer(request)

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
        return Session(request, self._index, servers, self._modules)
