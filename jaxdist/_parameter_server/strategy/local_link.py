"""`LocalWorkerLink`: a worker in this process."""

from collections.abc import Callable, Mapping
from typing import Any

from jaxdist._parameter_server.coordinator import IteratorOf, on_worker
from jaxdist._parameter_server.strategy.prepare import Made, Prepared
from jaxdist._parameter_server.worker.datasets import BatchIterator, name_dataset, put_back
from jaxdist._parameter_server.worker.structures import list_leaves
from jaxdist._parameter_server.worker.worker import ClosureRun, Worker
from jaxdist.errors import DeadlineExceededError, PSUnavailableError

Note = Callable[[int, Mapping[int, str], Mapping[int, str]], None]


class LocalWorkerLink:
    """A worker in this process. A thread of the coordinator calls it.

    Args:
        index: The index of the worker.
        worker: The worker.
        client: The id of the job's run.
        note: Is told the number of each closure, and the incarnations of the servers that have
            counted it, and of those that it only reads, by the number of the server.
    """

    def __init__(
        self,
        index: int,
        worker: Worker,
        client: str,
        note: Note = lambda number, counted, read: None,
    ) -> None:
        self._index, self._worker, self._client, self._note = index, worker, client, note

    @property
    def index(self) -> int:
        """The index of the worker."""
        return self._index

    def run(self, closure: Prepared, number: int, fence: int, done_below: int) -> Any:
        """Run a closure, and return its results."""
        first = closure.program.first
        iterators: list[BatchIterator] = [v.of(self._index).iterator for v in closure.iterators]
        taken: list[list[Any]] = []
        try:
            for iterator, count in zip(iterators, first.batches, strict=True):
                taken.append(iterator.take(first.name, count))
            traced = closure.program.find(taken)
            leaves = dict(list_leaves(taken))
            arguments = closure.find_arguments(self._index)
            request = ClosureRun(traced, arguments, leaves, number, fence, done_below, self._client)
            finished = self._worker.run(request)
        except (PSUnavailableError, DeadlineExceededError):
            # The closure runs again.
            put_back(iterators, taken)
            raise
        self._note(number, finished.counted, finished.read)
        return traced.structure.build(finished.results)

    def wait_until_back(self, seconds: float) -> bool:
        """Return whether the worker is there: it ends with this process."""
        return True

    def create_resource(self, resource: Any) -> Made:
        """Make a dataset, or an iterator over one."""
        if isinstance(resource, IteratorOf):
            iterator = BatchIterator(resource.dataset.value, self._index, resource.dataset.name)
            return Made(iterator=iterator, template=iterator.make_template())
        with on_worker(self._index):
            return Made(value=_make_dataset(resource), name=name_dataset(resource))

    def cancel(self, number: int) -> None:
        """Do nothing: a program that runs cannot be stopped, and its end is waited for."""


def _make_dataset(resource: Callable[[], Any] | Any) -> Any:
    return resource() if callable(resource) else resource
