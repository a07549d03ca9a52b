"""The interfaces of a strategy and of the connection to a worker, for the coordinator."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from jaxdist._parameter_server.variables.servers import Fence


@dataclasses.dataclass(frozen=True)
class IteratorOf:
    """A request to `WorkerLink.create_resource`: a new iterator over a dataset of this worker.

    Args:
        dataset: What `create_resource` returned for the dataset.
    """

    dataset: Any


class WorkerLink(Protocol):
    """The connection to one worker. One thread calls it; only `cancel` comes from other threads.

    A link does not refer to the strategy or to the coordinator, so that both can be deleted while
    the thread of the worker runs.

    Attributes:
        index: The index of the worker.
    """

    index: int

    def run(self, closure: Any, /, number: int, fence: int, done_below: int) -> Any:
        """Run a closure on the worker, and return its results.

        Each `PerWorkerValues` among the arguments of the closure stands for `values.of(index)`.

        Args:
            closure: What `CoordinatedStrategy.prepare` returned.
            number: The number of the closure. It is the same when the closure is run again.
            fence: Values that the worker kept from before it are read again.
            done_below: All closures with lower numbers are finished.

        Returns:
            A pytree of arrays.

        Raises:
            WorkerUnavailableError: The worker was lost, or does not answer; the closure runs again.
            PSUnavailableError: A parameter server does not answer; the closure runs again.
            DeadlineExceededError: A server did not answer in time; the closure runs again.
            CancelledError: `cancel` was called.
            Exception: What the closure itself raised.
        """

    def wait_until_back(self, seconds: float) -> bool:
        """Wait up to some seconds for a lost worker, and return whether it is back."""

    def create_resource(self, resource: Any) -> Any:
        """Make a dataset, an iterator or a value on the worker.

        Args:
            resource: What `CoordinatedStrategy.make_per_worker` returned, or an `IteratorOf`.

        Returns:
            What `run` needs to find it. The link frees the resource when this object is deleted.

        Raises:
            WorkerUnavailableError: As for `run`.
            PSUnavailableError: As for `run`.
            DeadlineExceededError: As for `run`.
            Exception: What the dataset function raised.
        """

    def cancel(self, number: int) -> None:
        """Ask the worker to stop a closure; `run` then raises `CancelledError`, or returns.

        It does not wait. `run` returns within the deadline of a call, also when the worker is
        stuck. It is not an error if the closure has already ended.
        """


@dataclasses.dataclass(frozen=True)
class ServerReport:
    """What the parameter servers have counted.

    Args:
        staleness: Staleness of a change -> number of changes.
        lost: Closures whose changes were lost, because a server came back from a snapshot.
        lost_changes: Changes of the coordinator itself that were lost so.
    """

    staleness: Mapping[int, int] = dataclasses.field(default_factory=dict)
    lost: int = 0
    lost_changes: int = 0


class Joining(Protocol):
    """Adds workers to a training that runs. It does not refer to the strategy.

    Attributes:
        has_announcements: Whether workers can announce themselves, so that `find_new` has to be
            asked.
    """

    has_announcements: bool

    def add(self, address: str | None) -> tuple[WorkerLink, bool]:
        """Add a worker; return the connection to it, and whether it is new.

        Raises:
            JaxdistError: The worker cannot join.
        """

    def find_new(self) -> Sequence[WorkerLink]:
        """Return the connections to workers that have announced themselves since the last call."""


class CoordinatedStrategy(Protocol):
    """What a strategy offers to its coordinator."""

    # The coordinator of the strategy; None until there is one.
    _cluster_coordinator: Any
    # The coordinator increases it, and so does whoever reads or changes a variable on it.
    _fence: Fence

    def links(self) -> Sequence[WorkerLink]:
        """Return the connections to the workers, in the order of their indices."""

    def joining(self) -> Joining:
        """Return what adds workers."""

    def prepare(
        self, fn: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Any:
        """Trace a function with its arguments, and return what `WorkerLink.run` takes.

        A `PerWorkerValues` among the arguments is traced as that of the first worker.
        """

    def make_per_worker(self, dataset_or_fn: Any) -> Any:
        """Check a dataset or a dataset function, and return what workers make datasets of.

        Raises:
            ArgumentError: It is neither a dataset nor a function.
        """

    def report_of_servers(self) -> ServerReport:
        """Return what the servers have counted."""
