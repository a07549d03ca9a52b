"""`BatchIterator`: an iterator of a worker, from which closures take batches."""

import itertools
from collections import deque
from collections.abc import Iterable, Sequence

import jax

from jaxdist._parameter_server.variables.ports import make_zero
from jaxdist._parameter_server.worker.elements import read_elements
from jaxdist._typing import PyTree
from jaxdist.errors import OutOfRangeError


class BatchIterator:
    """An iterator whose first element was looked at, for its shapes.

    Args:
        dataset: What it iterates over.

    Raises:
        OutOfRangeError: The dataset has no element.
    """

    def __init__(self, dataset: Iterable[PyTree]) -> None:
        self._iterator = read_elements(dataset)
        self._next: deque[PyTree] = deque(itertools.islice(self._iterator, 1))
        if not self._next:
            raise OutOfRangeError(
                "A per-worker dataset has no element.\n\n"
                "The shapes of its elements are those of the first one.\n\n"
                "Let dataset_fn return a dataset with one batch or more."
            )

    def make_template(self) -> PyTree:
        """Return arrays with the shapes of the next element, which take no memory."""
        return jax.tree.map(lambda x: make_zero(x.shape, x.dtype), self._next[0])

    @property
    def first(self) -> PyTree:
        """The first element, before one was taken."""
        return self._next[0]

    def take(self, name: str, worker: int, count: int) -> list[PyTree]:
        """Return the next elements.

        Args:
            name: The function that asks for them, for errors.
            worker: The number of the worker, for errors.
            count: How many.

        Raises:
            OutOfRangeError: Fewer are left.
        """
        batches = [self._next.popleft() for _ in range(min(count, len(self._next)))]
        batches += itertools.islice(self._iterator, count - len(batches))
        if len(batches) < count:
            raise OutOfRangeError(
                f"{name} asks for {count} batch(es), and the dataset of worker {worker} has "
                f"ended: {len(batches)} were left.\n\n"
                "A call takes all its batches from the dataset of the worker that runs it.\n\n"
                "Schedule it as often as there are batches, or repeat the dataset."
            )
        return batches

    def put_back(self, batches: Sequence[PyTree]) -> None:
        """Let elements be the next ones again."""
        self._next.extendleft(reversed(batches))
