"""`WorkerService`: a worker as a task, and what it holds for one coordinator."""

import contextlib
import logging
import secrets
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as NotYet
from typing import Any

import jax

from jaxdist import _mesh
from jaxdist._parameter_server.coordinator import on_worker
from jaxdist._parameter_server.transport import Handler, connect
from jaxdist._parameter_server.transport.calls import describe_failure
from jaxdist._parameter_server.transport.requests import Reply, make_handlers
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
# Errors of jaxdist whose cause is one of a dataset.
_OF_USERS = (ClosureInputError, UnknownError)
_LOG = logging.getLogger("jaxdist")
# After this, answer "running", so that the caller can tell a busy worker from a stopped one.
_LONGEST_WAIT = 10.0
_REQUESTS = (HelloWorker, Load, Run, Make, WaitForAttempt, Cancel, End)
_DONE = Answer(state="done")


class Session:
    """What a worker holds for one coordinator: programs, datasets, and kept values.

    Args:
        client: The id of the coordinator's run.
        index: The number of this worker.
        servers: The parameter servers.
        max_staleness: Their bound.
        modules: The modules whose functions the coordinator may name.
        log: Is called with errors that are none of jaxdist.

    Attributes:
        platform: The platform of this worker, as `jax.export` names it.
    """

    def __init__(
        self,
        client: str,
        index: int,
        servers: Servers,
        max_staleness: int | None,
        modules: Sequence[str],
        log: Callable[[str, BaseException], None],
    ) -> None:
        self.client = client
        self._index, self._servers, self._modules, self._log = index, servers, modules, log
        layout = _mesh.build(jax.local_devices()[:1])
        self.platform = find_platform(layout)
        self._worker = Worker(servers, layout, max_staleness)
        self._programs: OrderedDict[str, tuple[TracedClosure, Sequence[Any]]] = OrderedDict()
        self._made: dict[int, Any] = {}
        self._names: dict[int, str] = {}
        self._cancelled = 0
        # One at a time, in one thread: closures of a worker do not compete.
        self._thread = ThreadPoolExecutor(1, "jaxdist-closures")
        self._lock = threading.Lock()
        self._attempt, self._future = 0, Future[Answer]()

    def load(self, request: Load) -> Answer:
        """Keep a closure for later runs."""
        closure = request.closure
        self._servers.learn(request.places)
        with self._lock:
            self._programs[closure.digest] = closure, request.shapes
            while len(self._programs) > _PROGRAMS:
                self._programs.popitem(last=False)
        return Answer(state="done")

    def run(self, request: Run, seconds: float) -> Answer:
        """Run a closure; the answer says within some seconds what has become of it."""
        return self._start(request, seconds, lambda: self._run(request))

    def make(self, request: Make, seconds: float) -> Answer:
        """Make a dataset, or an iterator."""
        return self._start(request, seconds, lambda: self._make(request))

    def wait(self, attempt: int, seconds: float) -> Answer:
        """Wait for an attempt that was started before."""
        with self._lock:
            future = self._future if attempt == self._attempt else None
        return Answer(state="old") if future is None else _answer(future, seconds)

    def cancel(self, number: int) -> None:
        """Do not run a closure, if it has not begun."""
        self._cancelled = number

    def close(self) -> None:
        """Run nothing more, and end the connections."""
        self._thread.shutdown(wait=False, cancel_futures=True)
        self._servers.close()

    def _start(self, request: Run | Make, seconds: float, call: Callable[[], Answer]) -> Answer:
        with self._lock:
            # The same message twice, or one that was late: its caller waits for another one.
            if request.attempt <= self._attempt:
                return Answer(state="old")
            self._attempt = request.attempt
            try:
                self._future = future = self._thread.submit(self._catch, request.method, call)
            except RuntimeError:  # Another coordinator has come.
                return Answer(state="stranger")
        return _answer(future, seconds)

    def _catch(self, method: str, call: Callable[[], Answer]) -> Answer:
        try:
            return call()
        except BaseException as error:  # Also SystemExit: the coordinator waits.
            if not isinstance(error, JaxdistError):
                self._log(method, error)
            elif isinstance(error, _OF_USERS) and error.__cause__ is not None:
                self._log(method, error.__cause__)
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
                next(sent) if x is None else self._find_leaf(*x) for x in request.references
            ]
            finished = self._worker.run(
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
        return Answer(
            state="done",
            counted=finished.counted,
            read=finished.read,
            results=finished.results,
        )

    def _find_leaf(self, number: int, leaf: int) -> Any:
        return jax.tree.leaves(self._made[number])[leaf]

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


def _answer(future: "Future[Answer]", seconds: float) -> Answer:
    try:
        return future.result(seconds)
    except NotYet:
        return Answer(state="running")


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
