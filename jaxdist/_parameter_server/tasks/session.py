"""`Session`: what a worker holds for one coordinator."""

import contextlib
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as NotYet
from typing import Any

import jax
import numpy as np

from jaxdist import _mesh
from jaxdist._parameter_server.closures.traced import TracedClosure
from jaxdist._parameter_server.coordinator import on_worker
from jaxdist._parameter_server.transport import Message
from jaxdist._parameter_server.transport.failures import describe_failure
from jaxdist._parameter_server.variables.servers import Servers
from jaxdist._parameter_server.worker.dataset_errors import name_dataset
from jaxdist._parameter_server.worker.functions import find_function
from jaxdist._parameter_server.worker.iterators import BatchIterator, put_back
from jaxdist._parameter_server.worker.messages import LoadFields, MakeFields, RunFields
from jaxdist._parameter_server.worker.platforms import find_platform
from jaxdist._parameter_server.worker.requests import Request
from jaxdist._parameter_server.worker.structures import describe_tree, is_value, list_leaves
from jaxdist._parameter_server.worker.worker import Worker
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
_Answer = tuple[dict[str, Any], Sequence[np.ndarray]]


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
        self._programs: OrderedDict[str, tuple[TracedClosure, list[Any]]] = OrderedDict()
        self._made: dict[int, Any] = {}
        self._names: dict[int, str] = {}
        self._cancelled = 0
        # One at a time, in one thread: closures of a worker do not compete.
        self._thread = ThreadPoolExecutor(1, "jaxdist-closures")
        self._lock = threading.Lock()
        self._attempt, self._future = 0, Future[_Answer]()

    def load(self, fields: LoadFields, closure: TracedClosure) -> None:
        """Keep a closure for later runs."""
        self._servers.learn(fields.places)
        with self._lock:
            self._programs[closure.digest] = closure, fields.shapes
            while len(self._programs) > _PROGRAMS:
                self._programs.popitem(last=False)

    def run(self, fields: RunFields, arrays: Sequence[np.ndarray], seconds: float) -> Message:
        """Run a closure; the reply says within some seconds what has become of it."""
        return self._start("run", fields.attempt, seconds, lambda: self._run(fields, arrays))

    def make(self, fields: MakeFields, seconds: float) -> Message:
        """Make a dataset, or an iterator."""
        return self._start("make", fields.attempt, seconds, lambda: self._make(fields))

    def wait(self, attempt: int, seconds: float) -> Message:
        """Wait for an attempt that was started before."""
        with self._lock:
            future = self._future if attempt == self._attempt else None
        return Message("wait", {"state": "old"}) if future is None else _answer(future, seconds)

    def cancel(self, number: int) -> None:
        """Do not run a closure, if it has not begun."""
        self._cancelled = number

    def close(self) -> None:
        """Run nothing more, and end the connections."""
        self._thread.shutdown(wait=False, cancel_futures=True)
        self._servers.close()

    def _start(
        self, method: str, attempt: int, seconds: float, call: Callable[[], _Answer]
    ) -> Message:
        with self._lock:
            # The same message twice, or one that was late: its caller waits for another one.
            if attempt <= self._attempt:
                return Message(method, {"state": "old"})
            self._attempt = attempt
            try:
                self._future = future = self._thread.submit(self._catch, method, call)
            except RuntimeError:  # Another coordinator has come.
                return Message(method, {"state": "stranger"})
        return _answer(future, seconds)

    def _catch(self, method: str, call: Callable[[], _Answer]) -> _Answer:
        try:
            return call()
        except BaseException as error:  # Also SystemExit: the coordinator waits.
            if not isinstance(error, JaxdistError):
                self._log(method, error)
            elif isinstance(error, _OF_USERS) and error.__cause__ is not None:
                self._log(method, error.__cause__)
            failure = describe_failure(error, method)
            told = [failure.name, failure.text, list(failure.processes)]
            return {"state": "failed", "error": told}, ()

    def _run(self, fields: RunFields, arrays: Sequence[np.ndarray]) -> _Answer:
        self._forget(fields.forget)
        known = self._programs.get(fields.digest)
        if known is None:
            return {"state": "unknown"}, ()
        if self._cancelled == fields.number:
            raise CancelledError(
                f"Function {fields.number} was cancelled before worker {self._index} ran it.\n\n"
                "Another function had failed.\n\nSchedule it again."
            )
        closure, shapes = known
        iterators: list[BatchIterator] = [self._made[n] for n in fields.iterators]
        taken: list[list[Any]] = []
        try:
            for iterator, count in zip(iterators, closure.batches, strict=True):
                taken.append(iterator.take(closure.name, count))
            found = [[describe_tree("A batch", b) for b in own] for own in taken]
            if found != shapes:
                put_back(iterators, taken)
                return {"state": "shapes", "shapes": found}, ()
            sent = iter(arrays)
            arguments = [next(sent) if x is None else self._find_leaf(*x) for x in fields.arguments]
            finished = self._worker.run(
                Request(
                    closure,
                    arguments,
                    dict(list_leaves(taken)),
                    fields.number,
                    fields.fence,
                    fields.done_below,
                    fields.client,
                )
            )
        except (PSUnavailableError, DeadlineExceededError):
            # The closure runs again.
            put_back(iterators, taken)
            raise
        counted, read = (
            {str(place): incarnation for place, incarnation in found.items()}
            for found in (finished.counted, finished.read)
        )
        return {"state": "done", "counted": counted, "read": read}, finished.results

    def _find_leaf(self, number: int, leaf: int) -> Any:
        return jax.tree.leaves(self._made[number])[leaf]

    def _make(self, fields: MakeFields) -> _Answer:
        self._forget(fields.forget)
        if fields.dataset is not None:
            dataset, name = self._made[fields.dataset], self._names[fields.dataset]
            with _send_text():
                iterator = BatchIterator(dataset, self._index, name)
            self._made[fields.number] = iterator
            return {"state": "done", "tree": describe_tree("A batch", iterator.first)}, ()
        function = find_function(fields.functions, fields.script, self._modules, self._index)
        with on_worker(self._index), _send_text():
            value = self._made[fields.number] = function()
        self._names[fields.number] = name_dataset(function)
        tree = describe_tree("A per-worker value", value) if is_value(value) else None
        return {"state": "done", "tree": tree}, ()

    def _forget(self, numbers: Sequence[int]) -> None:
        for number in numbers:
            self._made.pop(number, None)
            self._names.pop(number, None)


@contextlib.contextmanager
def _send_text() -> Iterator[None]:
    """Let the coordinator get the text of what a dataset raises: it has not its class."""
    try:
        yield
    except JaxdistError:
        raise
    except Exception as error:
        raise UnknownError(f"{type(error).__name__}: {error}") from error


def _answer(future: "Future[_Answer]", seconds: float) -> Message:
    try:
        fields, arrays = future.result(seconds)
    except NotYet:
        return Message("", {"state": "running"})
    return Message("", fields, tuple(arrays))
