"""Input in the style of version 1 of `tf.distribute`: iterators instead of datasets."""

import inspect
from collections.abc import Callable, Iterator
from typing import Any

from jaxdist._called import refuse, refuse_type
from jaxdist._typing import PyTree
from jaxdist._validate import log_without_effect
from jaxdist.data import DistributedIterator, Examples, InputContext, InputReplicationMode
from jaxdist.errors import OutOfRangeError


def check_iterator(name: str, iterator: Any) -> None:
    """Raise an error if `iterator` is not an iterator of a distributed dataset."""
    if not isinstance(iterator, DistributedIterator):
        raise refuse_type(
            f"{name}={iterator!r:.200}, of type {type(iterator).__name__}.",
            "Its batches have to be shared out over the replicas.",
            "Pass iter(strategy.experimental_distribute_dataset(dataset)), or "
            "strategy.make_dataset_iterator(dataset).",
        )


def check_per_worker(mode: Any) -> None:
    """Raise an error for a replication mode other than PER_WORKER."""
    if mode is not InputReplicationMode.PER_WORKER:
        raise refuse(
            f"replication_mode={mode!r}.",
            f"It knows {InputReplicationMode.PER_WORKER} alone, as in tf.distribute.",
            "For a dataset of each replica use distribute_datasets_from_function with "
            "InputOptions(experimental_replication_mode=InputReplicationMode.PER_REPLICA).",
        )


def make_dataset_fn(
    input_fn: Callable[[InputContext], Any],
) -> Callable[[InputContext], Any]:
    """Return `input_fn` as a `dataset_fn`: `input_fn` may also return a function of one element."""

    def dataset_fn(context: InputContext) -> Any:
        made = input_fn(context)
        # Dataset objects may be callable too, so only plain functions and methods count as element
        # functions. A call of a generator function returns an iterable, not one element.
        is_function = inspect.isfunction(made) or inspect.ismethod(made)
        if is_function and not inspect.isgeneratorfunction(made):
            return lambda: _call_repeatedly(made)
        return made

    return dataset_fn


def _call_repeatedly(function: Callable[[], PyTree]) -> Iterator[PyTree]:
    while True:
        try:
            element = function()
        except (StopIteration, OutOfRangeError):
            return
        yield element


def make_examples(numpy_input: PyTree, session: Any) -> Examples:
    """Return arrays in memory as a dataset of single examples."""
    if session is not None:
        log_without_effect("session", "there are no sessions")
    return Examples(numpy_input)
