"""The connections to workers: in this process, or in another one."""

import itertools
import logging
import threading
import weakref
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np

from jaxdist._called import called
from jaxdist._parameter_server.closures.program import ClosureProgram
from jaxdist._parameter_server.closures.traced import Traced
from jaxdist._parameter_server.coordinator import IteratorOf, on_worker
from jaxdist._parameter_server.strategy.losses import LossReport
from jaxdist._parameter_server.strategy.prepare import LeafOf, Made, OwnIndex, Prepared
from jaxdist._parameter_server.transport import Channel
from jaxdist._parameter_server.transport.calls import make_error
from jaxdist._parameter_server.transport.requests import R, Request, call, make_message, read_reply
from jaxdist._parameter_server.worker.datasets import (
    BatchIterator,
    describe_tree,
    list_leaves,
    make_template,
    name_dataset,
    put_back,
)
from jaxdist._parameter_server.worker.functions import describe_script, list_names
from jaxdist._parameter_server.worker.worker import ClosureRun, Worker
from jaxdist._parameter_server.worker_protocol import (
    Answer,
    Cancel,
    HelloWorker,
    Load,
    Make,
    Run,
    TracedClosure,
    WaitForAttempt,
)
from jaxdist.errors import (
    ClusterError,
    DeadlineExceededError,
    JaxdistError,
    PSUnavailableError,
    UnavailableError,
    UnsupportedError,
    WorkerUnavailableError,
)

_LOG = logging.getLogger("jaxdist")
_CANCEL_SECONDS = 5.0

T = TypeVar("T")
_MOST_SHAPES = 8


class RemoteWorkerLink:
    """A worker in another process. A thread of the coordinator calls it.

    Args:
        index: The index of the worker.
        channel: To the worker.
        greeting: The first request to it.
        find_server: Returns the number of the server of a variable.
        losses: Where it notes which servers have counted a closure.

    Attributes:
        client: The id of the coordinator's run.
        platform: The platform of the worker, as `jax.export` names it; known after `hello`.
    """

    def __init__(
        self,
        index: int,
        channel: Channel,
        greeting: HelloWorker,
        find_server: Callable[[str], int],
        losses: LossReport,
    ) -> None:
        self.index, self._channel, self._greeting = index, channel, greeting
        self._find_server, self._losses = find_server, losses
        self.client = greeting.client
        self._attempts, self._numbers = itertools.count(1), itertools.count(1)
        self._incarnation = ""
        self.platform = ""
        self._loaded: set[str] = set()
        # The closure of each program that the last batches of this worker were for.
        self._latest: weakref.WeakKeyDictionary[ClosureProgram, tuple[Traced, Sequence[Any]]]
        self._latest = weakref.WeakKeyDictionary()
        self._to_forget: deque[int] = deque()

    @property
    def address(self) -> str:
        """The present address of the worker."""
        return self._channel.address

    def hello(self, seconds: float | None = None) -> None:
        """Greet the worker. One that was started again has nothing of what it was sent before.

        Raises:
            WorkerUnavailableError: It does not answer.
            ClusterError: Another task answers.
        """
        found = self._call(self._greeting, seconds)
        check_task(self.address, f"worker:{self.index}", found.task)
        self.platform = found.platform
        if found.incarnation != self._incarnation:
            self._incarnation = found.incarnation
            self._loaded.clear()
            self._to_forget.clear()

    def run(self, prepared: Prepared, number: int, fence: int, done_below: int) -> Any:
        """Run a closure, and return its results."""
        program = prepared.program
        known = self._latest.get(program)
        if known is None:
            first = [[describe_tree("A batch", b) for b in own] for own in program.first_batches]
            known = program.first, first
        references, arguments = self._split_arguments(prepared.arguments)
        iterators = [values.of(self.index).number for values in prepared.iterators]
        for _ in range(_MOST_SHAPES):
            traced, shapes = known
            closure = traced.closure
            if closure.digest not in self._loaded:
                self._load(closure, shapes)
            self._latest[program] = known
            answer = self._exchange(
                Run(
                    client=self.client,
                    attempt=next(self._attempts),
                    digest=closure.digest,
                    number=number,
                    fence=fence,
                    done_below=done_below,
                    iterators=iterators,
                    references=references,
                    arguments=arguments,
                    forget=self._take_forgotten(),
                )
            )
            if answer.state == "done":
                self._losses.note(number, answer.counted, answer.read)
                return traced.build(answer.results)
            if answer.state == "unknown":
                self._loaded.discard(closure.digest)
            else:
                templates = [[make_template(b) for b in own] for own in answer.shapes]
                known = program.find(templates), answer.shapes
        raise UnsupportedError(
            f"{program.first.closure.name} could not be run on worker {self.index}: its program "
            f"was sent {_MOST_SHAPES} times.\n\nA program is for batches of one shape, and no two "
            "batches had the same shape.\n\nPad the batches in the dataset."
        )

    def wait_until_back(self, seconds: float) -> bool:
        """Wait up to some seconds for a lost worker, and return whether it is back."""
        try:
            self.hello(seconds)
        except WorkerUnavailableError:
            return False
        return True

    @called("ClusterCoordinator.create_per_worker_dataset")
    def create_resource(self, resource: Any) -> Made:
        """Make a dataset, or an iterator over one."""
        is_iterator = isinstance(resource, IteratorOf)
        request = Make(
            client=self.client,
            attempt=next(self._attempts),
            number=next(self._numbers),
            functions=() if is_iterator else list_names(resource),
            script="" if is_iterator else describe_script(),
            dataset=resource.dataset.number if is_iterator else None,
            forget=self._take_forgotten(),
        )
        tree = self._exchange(request).tree
        template = None if tree is None else make_template(tree)
        # A dataset is not a value here: it stays on the worker.
        value = template if tree is not None else _OnWorker()
        made = Made(value=None if is_iterator else value, template=template, number=request.number)
        weakref.finalize(made, self._to_forget.append, request.number)
        return made

    def cancel(self, number: int) -> None:
        """Ask the worker not to begin a closure, in a thread of its own."""
        threading.Thread(target=self._cancel, args=(number,), daemon=True).start()

    def _cancel(self, number: int) -> None:
        try:
            call(self._channel, Cancel(self.client, number), _CANCEL_SECONDS)
        except JaxdistError as error:
            # The thread of the worker will get the error, too.
            _LOG.debug("Worker %d: %s", self.index, error)

    def _load(self, closure: TracedClosure, shapes: Sequence[Any]) -> None:
        places = {name: self._find_server(name) for name in closure.variables}
        answer = self._call(Load(self.client, closure, places, shapes))
        self._check_state(answer)
        self._loaded.add(closure.digest)

    def _split_arguments(
        self, arguments: Sequence[Any]
    ) -> tuple[list[tuple[int, int] | None], list[np.ndarray]]:
        """Return references to values of the worker, and the arrays that are sent."""
        references: list[tuple[int, int] | None] = []
        arrays = []
        for given in arguments:
            if isinstance(given, LeafOf):
                references.append((given.values.of(self.index).number, given.number))
                continue
            references.append(None)
            own = given.find(self.index) if isinstance(given, OwnIndex) else given
            arrays.append(np.asarray(own))
        return references, arrays

    def _take_forgotten(self) -> list[int]:
        taken = []
        while self._to_forget:
            taken.append(self._to_forget.popleft())
        return taken

    def _exchange(self, request: Run | Make) -> Answer:
        """Start something on the worker, and wait for its end as long as the worker answers."""
        message = make_message(request.method, request)
        # Results are numbers most often. The worker keeps those that are longer.
        found = self._reach(lambda: self._channel.call_briefly(message))
        wait = WaitForAttempt(self.client, request.attempt)
        answer = self._call(wait) if found is None else read_reply(Answer, found)
        while answer.state == "running":
            answer = self._call(wait)
        self._check_state(answer)
        if answer.error is not None:
            raise make_error(answer.error)
        return answer

    def _check_state(self, answer: Answer) -> None:
        if answer.state in ("stranger", "old"):
            raise WorkerUnavailableError(
                f"worker {self.index} at {self._channel.address} was started again, or works for "
                "another coordinator.\n\nIt has nothing that this coordinator has sent.\n\n"
                "The coordinator sends it again.",
                [self.index],
            )

    def _call(self, request: Request[R], seconds: float | None = None) -> R:
        return self._reach(lambda: call(self._channel, request, seconds))

    def _reach(self, send: Callable[[], T]) -> T:
        try:
            return send()
        except (UnavailableError, DeadlineExceededError) as error:
            raise WorkerUnavailableError(str(error), [self.index]) from error


class _OnWorker:
    """Stands for a dataset on a worker."""


def check_task(address: str, wanted: str, found: str) -> None:
    """Raise if another task answers at an address.

    Raises:
        ClusterError: It is not the one that is wanted.
    """
    if found != wanted:
        raise ClusterError(
            f"The task at {address} is {found!r}, and not {wanted!r}.\n\n"
            "All tasks have the same list of addresses.\n\n"
            "Compare TF_CONFIG, or the cluster resolvers, of this task and of that one."
        )


Note = Callable[[int, Mapping[int, str], Mapping[int, str]], None]


class LocalWorkerLink:
    """A worker in this process. A thread of the coordinator calls it.

    Args:
        index: The index of the worker.
        worker: The worker.
        client: The id of the job's run.
        note: Called with the number of each closure, and the incarnations of the servers that have
            counted it, and of those that it only reads, by the number of the server.
    """

    def __init__(
        self,
        index: int,
        worker: Worker,
        client: str,
        note: Note = lambda number, counted, read: None,
    ) -> None:
        self.index, self._worker, self._client, self._note = index, worker, client, note

    def run(self, prepared: Prepared, number: int, fence: int, done_below: int) -> Any:
        """Run a closure, and return its results."""
        first, index = prepared.program.first.closure, self.index
        iterators: list[BatchIterator] = [v.of(index).iterator for v in prepared.iterators]
        taken: list[list[Any]] = []
        try:
            for iterator, count in zip(iterators, first.batches, strict=True):
                taken.append(iterator.take(first.name, count))
            traced = prepared.program.find(taken)
            request = ClosureRun(
                traced.closure,
                prepared.find_arguments(index),
                dict(list_leaves(taken)),
                number,
                fence,
                done_below,
                self._client,
            )
            finished = self._worker.run(request)
        except (PSUnavailableError, DeadlineExceededError):
            # The closure runs again.
            put_back(iterators, taken)
            raise
        self._note(number, finished.counted, finished.read)
        return traced.build(finished.results)

    def wait_until_back(self, seconds: float) -> bool:
        """Return whether the worker is there: it ends with this process."""
        return True

    def create_resource(self, resource: Any) -> Made:
        """Make a dataset, or an iterator over one."""
        if isinstance(resource, IteratorOf):
            iterator = BatchIterator(resource.dataset.value, self.index, resource.dataset.name)
            return Made(iterator=iterator, template=iterator.make_template())
        with on_worker(self.index):
            value = resource() if callable(resource) else resource
            return Made(value=value, name=name_dataset(resource))

    def cancel(self, number: int) -> None:
        """Do nothing: a program that runs cannot be stopped, and its end is waited for."""
