"""`LocalWorkerLink`: a worker in this process."""

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import jax

from jaxdist._parameter_server.coordinator import IteratorOf, on_worker
from jaxdist._parameter_server.strategy.prepare import Prepared
from jaxdist._parameter_server.strategy.resources import Made
from jaxdist._parameter_server.variables.ports import make_zero
from jaxdist._parameter_server.worker.elements import read_elements
from jaxdist._parameter_server.worker.worker import Request, Worker
from jaxdist._typing import PyTree
from jaxdist.errors import OutOfRangeError


class LocalWorkerLink:
    """A worker in this process. A thread of the coordinator calls it.

    Args:
        index: The index of the worker.
        worker: The worker.
        client: The id of the job's run.
    """

    def __init__(self, index: int, worker: Worker, client: str) -> None:
        self._index, self._worker, self._client = index, worker, client

    @property
    def index(self) -> int:
        """The index of the worker."""
        return self._index

    def run(self, closure: Prepared, number: int, fence: int, done_below: int) -> Any:
        """Run a closure, and return its results."""
        batches = [
            self._draw(closure, values.of(self._index).iterator, count)
            for values, count in zip(closure.iterators, closure.program.first.batches, strict=True)
        ]
        traced = closure.program.find(batches)
        leaves: dict[tuple[int, ...], Any] = {
            (source, batch, leaf): value
            for source, own in enumerate(batches)
            for batch, element in enumerate(own)
            for leaf, value in enumerate(jax.tree.leaves(element))
        }
        arguments = closure.find_arguments(self._index)
        request = Request(traced, arguments, leaves, number, fence, done_below, self._client)
        return traced.structure.build(self._worker.run(request).results)

    def wait_until_back(self, seconds: float) -> bool:
        """Return whether the worker is there: it ends with this process."""
        return True

    def create_resource(self, resource: Any) -> Made:
        """Make a dataset, or an iterator over one."""
        if isinstance(resource, IteratorOf):
            iterator = _Peeked(read_elements(resource.dataset.value))
            return Made(iterator=iterator, template=iterator.template)
        with on_worker(self._index):
            return Made(value=_make_dataset(resource))

    def cancel(self, number: int) -> None:
        """Do nothing: a program that runs cannot be stopped, and its end is waited for."""

    def _draw(self, closure: Prepared, iterator: Any, count: int) -> list[PyTree]:
        batches = list(itertools.islice(iterator, count))
        if len(batches) < count:
            raise OutOfRangeError(
                f"{closure.program.first.name} asks for {count} batch(es), and the dataset of "
                f"worker {self._index} has ended: {len(batches)} were left.\n\n"
                "A call takes all its batches from the dataset of the worker that runs it.\n\n"
                "Schedule it as often as there are batches, or repeat the dataset."
            )
        return batches


class _Peeked(Iterator[PyTree]):
    """An iterator whose first element was looked at, for its shapes."""

    def __init__(self, iterator: Iterator[PyTree]) -> None:
        self._iterator = iterator
        self._first = list(itertools.islice(iterator, 1))
        if not self._first:
            raise OutOfRangeError(
                "A per-worker dataset has no element.\n\n"
                "The shapes of its elements are those of the first one.\n\n"
                "Let dataset_fn return a dataset with one batch or more."
            )
        self.template = jax.tree.map(lambda x: make_zero(x.shape, x.dtype), self._first[0])

    def __next__(self) -> PyTree:
        return self._first.pop() if self._first else next(self._iterator)


def _make_dataset(resource: Callable[[], Any] | Any) -> Any:
    return resource() if callable(resource) else resource
