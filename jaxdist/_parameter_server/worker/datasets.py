"""The datasets of a worker: iterators over them, their structure as JSON, and their errors."""

import itertools
import os
import traceback
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import jax
import numpy as np

from jaxdist._called import called
from jaxdist._integers import check_all_fit
from jaxdist._parameter_server.variables.ports import make_zero
from jaxdist._parameter_server.worker.worker_index import on_worker
from jaxdist._typing import PyTree
from jaxdist._validate import show
from jaxdist._values import copy_writable_leaves
from jaxdist.errors import (
    ArgumentTypeError,
    ClosureInputError,
    OtherProcessError,
    OutOfRangeError,
    UnknownError,
    UnsupportedError,
)

_PACKAGE = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))


def name_dataset(dataset_or_fn: Any) -> str:
    """Return how errors call a dataset: by the function that makes it, or by its type."""
    name = getattr(dataset_or_fn, "__name__", None)
    return f"{name}()" if isinstance(name, str) else f"a {type(dataset_or_fn).__name__}"


def make_input_error(
    worker: int, failed: str, dataset: str, error: BaseException
) -> ClosureInputError:
    """Return the error of a function that needs what a dataset could not give.

    Args:
        worker: The number of the worker.
        failed: What it could not do.
        dataset: What `name_dataset` returns.
        error: What the dataset raised.
    """
    # An error of another process already has the name of its class in its text.
    is_told = isinstance(error, UnknownError)
    text = str(error) if is_told else f"{type(error).__name__}: {error}"
    line = "its log has the traceback" if is_told else find_line(error)
    return ClosureInputError(
        f"Worker {worker} could not {failed} of {dataset}: {text}"
        f"{'' if line is None else f' ({line})'}\n\n"
        "A function needs the value of the worker that runs it.\n\n"
        "Correct the function that was given to create_per_worker_dataset, and create the "
        "dataset again.",
        error,
    )


def find_line(error: BaseException) -> str | None:
    """Return the last line outside of jaxdist that an error passed; None without such a line."""
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if not frame.filename.startswith(_PACKAGE + os.sep):
            return f"{frame.filename}:{frame.lineno}, in {frame.name}"
    return None


def read_elements(dataset: Iterable[Any]) -> Iterator[PyTree]:
    """Return the elements of a dataset; numbers in them become arrays of NumPy.

    Raises:
        ArgumentTypeError: An element holds something that is neither a number nor an array.
        ArgumentError: It holds integers that JAX would cut off.
    """
    return map(_convert, itertools.count(), iter(dataset))


@called(lambda number: f"element {number} of a per-worker dataset")
def _convert(number: int, element: Any) -> PyTree:
    arrays = jax.tree.map(_convert_leaf, element)
    check_all_fit("batch", arrays)
    return arrays


def _convert_leaf(leaf: Any) -> Any:
    if isinstance(getattr(leaf, "dtype", None), np.dtype):
        return leaf
    array = np.asarray(leaf)
    if array.dtype.kind in "OSUMm":
        raise ArgumentTypeError(
            f"A per-worker dataset has an element that contains {show(leaf)}.\n\n"
            "Functions take arrays and numbers from it.\n\n"
            "Leave it out in dataset_fn, or replace strings by numbers."
        )
    return array


class BatchIterator:
    """An iterator whose first element was looked at, for its shapes.

    The code of a dataset runs only in its methods, with the index of the worker.

    Args:
        dataset: What it iterates over.
        worker: The number of the worker.
        name: What `name_dataset` returns for the dataset.

    Raises:
        OutOfRangeError: The dataset has no element.
        Exception: What the dataset raised.
    """

    def __init__(self, dataset: Iterable[PyTree], worker: int, name: str) -> None:
        self._worker, self._name = worker, name
        self._error: ClosureInputError | None = None
        with on_worker(worker):
            self._iterator = read_elements(dataset)
            first = map(copy_writable_leaves, itertools.islice(self._iterator, 1))
            self._next: deque[PyTree] = deque(first)
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

    def take(self, function: str, count: int) -> list[PyTree]:
        """Return the next elements.

        Args:
            function: The function that asks for them, for errors.
            count: How many.

        Raises:
            OutOfRangeError: Fewer are left.
            ClosureInputError: The dataset raised an error.
            OtherProcessError: It needs a task that does not answer.
        """
        batches = [self._next.popleft() for _ in range(min(count, len(self._next)))]
        try:
            with on_worker(self._worker):
                for batch in itertools.islice(self._iterator, count - len(batches)):
                    # A dataset may write the next batch into the same arrays.
                    batches.append(copy_writable_leaves(batch))
                    self._error = None
        except Exception as error:
            self.put_back(batches)
            if isinstance(error, OtherProcessError):
                # The dataset may read from a lost server: the function runs again.
                raise
            self._error = make_input_error(self._worker, "read a batch", self._name, error)
            raise self._error from error
        if len(batches) == count:
            return batches
        if self._error is not None:
            # After an error, a generator looks as if it had ended.
            self.put_back(batches)
            raise ClosureInputError(str(self._error), self._error.original_exception)
        left = f"{len(batches)} {'was' if len(batches) == 1 else 'were'} left"
        raise OutOfRangeError(
            f"{function} asks for {count} {'batch' if count == 1 else 'batches'}, and the dataset "
            f"of worker {self._worker} has ended: {left}.\n\n"
            "A call takes all its batches from the dataset of the worker that runs it.\n\n"
            "Schedule it as often as there are batches, or repeat the dataset."
        )

    def put_back(self, batches: Sequence[PyTree]) -> None:
        """Let elements be the next ones again."""
        self._next.extendleft(reversed(batches))


def put_back(iterators: Sequence[BatchIterator], taken: Sequence[Sequence[PyTree]]) -> None:
    """Let the elements that were taken from iterators be the next ones again."""
    for iterator, batches in zip(iterators, taken, strict=False):
        iterator.put_back(batches)


# A list with more arrays than this is a dataset.
_MOST_LEAVES = 256
_ARRAYS = (np.ndarray, np.generic, jax.Array)
_KINDS = {dict: "dict", list: "list", tuple: "tuple"}


def is_value(value: Any) -> bool:
    """Return whether a value can be an argument of closures, and is not a dataset."""
    if not isinstance(value, (dict, list, tuple, *_ARRAYS)):
        return False
    leaves = jax.tree.leaves(value)
    return 0 < len(leaves) <= _MOST_LEAVES and all(isinstance(x, _ARRAYS) for x in leaves)


def describe_tree(what: str, tree: PyTree) -> Any:
    """Return the structure of a pytree of arrays, and their shapes and dtypes, as JSON.

    Args:
        what: What it is, for errors.
        tree: Dicts with strings as keys, lists, tuples and None, with arrays as leaves.

    Raises:
        UnsupportedError: It has another container.

    Example:
        >>> from jaxdist._parameter_server.worker.datasets import describe_tree
        >>> describe_tree("a batch", {"x": np.zeros((2, 3), np.float32)})
        ['dict', [['x', ['float32', [2, 3]]]]]
    """
    if tree is None:
        return None
    kind = _KINDS.get(type(tree))
    if kind == "dict" and all(isinstance(key, str) for key in tree):
        return [kind, [[key, describe_tree(what, tree[key])] for key in sorted(tree)]]
    if kind in ("list", "tuple"):
        return [kind, [describe_tree(what, item) for item in tree]]
    if not jax.tree_util.all_leaves([tree]):
        raise UnsupportedError(
            f"{what} contains a {type(tree).__name__}.\n\n"
            "Workers in other processes read dicts with strings as keys, lists, tuples "
            "and None, with arrays in them: the coordinator has to know its structure.\n\n"
            "Make a dict or a tuple of it, for instance in dataset_fn."
        )
    array = tree if hasattr(tree, "dtype") else np.asarray(tree)
    return [np.dtype(array.dtype).name, list(map(int, np.shape(array)))]


def make_template(described: Any) -> PyTree:
    """Return a pytree of zeros that `describe_tree` has described. They take no memory."""
    if described is None:
        return None
    kind, content = described
    if kind == "dict":
        return {key: make_template(item) for key, item in content}
    if kind == "list":
        return [make_template(item) for item in content]
    if kind == "tuple":
        return tuple(make_template(item) for item in content)
    return make_zero(tuple(content), jax.numpy.dtype(kind))


def list_leaves(batches: list[list[PyTree]]) -> Iterator[tuple[tuple[int, ...], Any]]:
    """Return the leaves of batches, with the numbers of iterator, batch and leaf."""
    for source, own in enumerate(batches):
        for batch, element in enumerate(own):
            for leaf, value in enumerate(jax.tree.leaves(element)):
                yield (source, batch, leaf), value
