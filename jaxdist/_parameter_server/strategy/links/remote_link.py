"""`RemoteWorkerLink`: a worker in another process."""

import itertools
import logging
import threading
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import numpy as np

from jaxdist._parameter_server.closures.program import ClosureProgram
from jaxdist._parameter_server.closures.traced import TracedClosure
from jaxdist._parameter_server.coordinator import IteratorOf
from jaxdist._parameter_server.strategy.links.loss_report import LossReport
from jaxdist._parameter_server.strategy.prepare import LeafOf, OwnIndex, Prepared
from jaxdist._parameter_server.strategy.resources import Made
from jaxdist._parameter_server.transport import Channel, Message
from jaxdist._parameter_server.transport.failures import Failure, make_error
from jaxdist._parameter_server.worker.functions import describe_script, list_names
from jaxdist._parameter_server.worker.messages import (
    HelloFields,
    MakeFields,
    RunFields,
    list_variables,
    make_load,
    to_fields,
)
from jaxdist._parameter_server.worker.structures import describe_tree, make_template
from jaxdist.errors import (
    ClusterError,
    DeadlineExceededError,
    JaxdistError,
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
        greeting: What it is told first.
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
        greeting: HelloFields,
        find_server: Callable[[str], int],
        losses: LossReport,
    ) -> None:
        self._index, self._channel, self._greeting = index, channel, greeting
        self._find_server, self._losses = find_server, losses
        self.client = greeting.client
        self._attempts, self._numbers = itertools.count(1), itertools.count(1)
        self._incarnation = ""
        self.platform = ""
        self._loaded: set[str] = set()
        # The closure of each program that the last batches of this worker were for.
        self._latest: weakref.WeakKeyDictionary[ClosureProgram, tuple[TracedClosure, list[Any]]]
        self._latest = weakref.WeakKeyDictionary()
        self._to_forget: deque[int] = deque()

    @property
    def index(self) -> int:
        """The index of the worker."""
        return self._index

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
        fields = self._call(Message("hello", to_fields(self._greeting)), seconds).fields
        if fields.get("task") != f"worker:{self._index}":
            raise make_wrong_task_error(
                self._channel.address, f"worker:{self._index}", fields.get("task")
            )
        self.platform = fields["platform"]
        if fields["incarnation"] != self._incarnation:
            self._incarnation = fields["incarnation"]
            self._loaded.clear()
            self._to_forget.clear()

    def run(self, closure: Prepared, number: int, fence: int, done_below: int) -> Any:
        """Run a closure, and return its results."""
        program = closure.program
        known = self._latest.get(program)
        if known is None:
            first = [[describe_tree("A batch", b) for b in own] for own in program.first_batches]
            known = program.first, first
        references, arrays = self._split_arguments(closure.arguments)
        iterators = [values.of(self._index).number for values in closure.iterators]
        for _ in range(_MOST_SHAPES):
            traced, shapes = known
            if traced.digest not in self._loaded:
                self._load(traced, shapes)
            self._latest[program] = known
            fields = RunFields(
                client=self.client,
                attempt=next(self._attempts),
                digest=traced.digest,
                number=number,
                fence=fence,
                done_below=done_below,
                iterators=iterators,
                arguments=references,
                forget=self._take_forgotten(),
            )
            reply = self._exchange("run", fields, arrays)
            state = reply.fields["state"]
            if state == "done":
                counted, read = (
                    {int(n): inc for n, inc in reply.fields[key].items()}
                    for key in ("counted", "read")
                )
                self._losses.note(number, counted, read)
                return traced.structure.build(list(reply.arrays))
            if state == "unknown":
                self._loaded.discard(traced.digest)
            else:
                found = reply.fields["shapes"]
                templates = [[make_template(b) for b in own] for own in found]
                known = program.find(templates), found
        raise UnsupportedError(
            f"{program.first.name} could not be run on worker {self._index}: its program was sent "
            f"{_MOST_SHAPES} times.\n\nA program is for batches of one shape, and no two batches "
            "had the same.\n\nPad the batches in the dataset."
        )

    def wait_until_back(self, seconds: float) -> bool:
        """Wait up to some seconds for a lost worker, and return whether it is back."""
        try:
            self.hello(seconds)
        except WorkerUnavailableError:
            return False
        return True

    def create_resource(self, resource: Any) -> Made:
        """Make a dataset, or an iterator over one."""
        fields = MakeFields(
            client=self.client,
            attempt=next(self._attempts),
            number=next(self._numbers),
            forget=self._take_forgotten(),
        )
        is_iterator = isinstance(resource, IteratorOf)
        if is_iterator:
            fields.dataset = resource.dataset.number
        else:
            caller = "ClusterCoordinator.create_per_worker_dataset"
            fields.functions, fields.script = list_names(caller, resource), describe_script()
        tree = self._exchange("make", fields, ()).fields["tree"]
        template = None if tree is None else make_template(tree)
        # A dataset is no value here: it stays on the worker.
        value = template if tree is not None else _OnWorker()
        made = Made(value=None if is_iterator else value, template=template, number=fields.number)
        weakref.finalize(made, self._to_forget.append, fields.number)
        return made

    def cancel(self, number: int) -> None:
        """Ask the worker not to begin a closure, in a thread of its own."""
        threading.Thread(target=self._cancel, args=(number,), daemon=True).start()

    def close(self) -> None:
        """Close the connection."""
        self._channel.close()

    def _cancel(self, number: int) -> None:
        message = Message("cancel", {"client": self.client, "number": number})
        try:
            self._channel.call(message, _CANCEL_SECONDS)
        except JaxdistError as error:
            # Its thread finds out by itself what is wrong with the worker.
            _LOG.debug("Worker %d: %s", self._index, error)

    def _load(self, traced: TracedClosure, shapes: Sequence[Any]) -> None:
        places = {name: self._find_server(name) for name in list_variables(traced)}
        reply = self._call(make_load(self.client, traced, places, shapes))
        self._check_state(reply)
        self._loaded.add(traced.digest)

    def _split_arguments(
        self, arguments: Sequence[Any]
    ) -> tuple[list[tuple[int, int] | None], list[np.ndarray]]:
        """Return references to values of the worker, and the arrays that are sent."""
        references: list[tuple[int, int] | None] = []
        arrays = []
        for given in arguments:
            if isinstance(given, LeafOf):
                references.append((given.values.of(self._index).number, given.number))
            elif isinstance(given, OwnIndex):
                references.append(None)
                arrays.append(np.asarray(given.find(self._index)))
            else:
                references.append(None)
                arrays.append(np.asarray(given))
        return references, arrays

    def _take_forgotten(self) -> list[int]:
        taken = []
        while self._to_forget:
            taken.append(self._to_forget.popleft())
        return taken

    def _exchange(
        self, method: str, fields: RunFields | MakeFields, arrays: Sequence[np.ndarray]
    ) -> Message:
        """Start something on the worker, and wait for its end as long as the worker answers."""
        message = Message(method, to_fields(fields), tuple(arrays))
        # Results are numbers most often. The worker keeps those that are longer.
        found = self._reach(lambda: self._channel.call_briefly(message))
        wait = {"client": self.client, "attempt": fields.attempt}
        reply = self._call(Message("wait", wait)) if found is None else found
        while reply.fields["state"] == "running":
            reply = self._call(Message("wait", wait))
        self._check_state(reply)
        if reply.fields["state"] == "failed":
            raise make_error(Failure(*reply.fields["error"]))
        return reply

    def _check_state(self, reply: Message) -> None:
        if reply.fields["state"] in ("stranger", "old"):
            raise WorkerUnavailableError(
                f"worker {self._index} at {self._channel.address} was started again, or works for "
                "another coordinator.\n\nIt has nothing of what this coordinator has sent.\n\n"
                "The coordinator sends it again.",
                [self._index],
            )

    def _call(self, message: Message, seconds: float | None = None) -> Message:
        return self._reach(lambda: self._channel.call(message, seconds))

    def _reach(self, call: Callable[[], T]) -> T:
        try:
            return call()
        except (UnavailableError, DeadlineExceededError) as error:
            raise WorkerUnavailableError(str(error), [self._index]) from error


class _OnWorker:
    """Stands for a dataset on a worker."""


def make_wrong_task_error(address: str, wanted: str, found: Any) -> ClusterError:
    """Return the error for an address at which another task answers."""
    return ClusterError(
        f"At {address} there is the task {found!r}, and not {wanted!r}.\n\n"
        "All tasks have the same list of addresses.\n\n"
        "Compare TF_CONFIG, or the cluster resolvers, of this task and of that one."
    )
