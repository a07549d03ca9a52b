"""The index of the worker that runs this code."""

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar
from typing import Any, NoReturn

from jaxdist._values import IN_DATASET_FUNCTION
from jaxdist.errors import ContextError, InputContextError

_INDEX: ContextVar[Any] = ContextVar("jaxdist_worker_index", default=None)


def set_worker_index(index: Any) -> None:
    """Set the index for all code that this thread runs from now on."""
    _INDEX.set(index)


@contextlib.contextmanager
def on_worker(index: Any) -> Iterator[None]:
    """Set the index of the worker while a closure or a dataset function runs or is traced.

    Args:
        index: The index, or a function that returns the traced value that represents it.
    """
    token = _INDEX.set(index)
    # A closure is traced, and has an error of its own.
    in_function = IN_DATASET_FUNCTION.set(isinstance(index, int))
    try:
        yield
    finally:
        IN_DATASET_FUNCTION.reset(in_function)
        _INDEX.reset(token)


def is_on_worker() -> bool:
    """Whether this code is part of a closure or of a dataset function."""
    return _INDEX.get() is not None


def experimental_get_current_worker_index() -> Any:
    """Return the index of the worker that runs the current scheduled function or dataset function.

    Returns:
        An int; a traced value where the function is traced once for all workers.

    Raises:
        ContextError: The caller is not part of a scheduled function or of a dataset function.

    Cost:
        Less than a microsecond.

    Example:
        >>> from jaxdist.cluster_resolver import ClusterSpec, SimpleClusterResolver
        >>> cluster = ClusterSpec({"worker": ["w:1", "w:2"], "ps": ["p:1"]})
        >>> strategy = jaxdist.ParameterServerStrategy(
        ...     SimpleClusterResolver(cluster, rpc_layer="local"))
        >>> coordinator = jaxdist.coordinator.ClusterCoordinator(strategy)
        >>> get_index = jaxdist.coordinator.experimental_get_current_worker_index
        >>> int(coordinator.schedule(lambda: get_index()).fetch()) in (0, 1)
        True

    Source:
        `tf.distribute.coordinator.experimental_get_current_worker_index`.
    """
    index = _INDEX.get()
    if index is None:
        raise_outside()
    return index() if callable(index) else index


def raise_outside() -> NoReturn:
    """Raise the error for code that no worker runs."""
    raise ContextError(
        "experimental_get_current_worker_index was called outside of a function that runs "
        "on a worker.\n\n"
        "They are those given to ClusterCoordinator.schedule and "
        "create_per_worker_dataset, and have the index of their worker.\n\n"
        "Call it inside of such a function."
    )


def check_on_worker() -> None:
    """Raise an error if the next batch of a distributed dataset is read by the coordinator.

    Raises:
        InputContextError: No worker reads it.
    """
    if is_on_worker():
        return
    raise InputContextError(
        "next() of a distributed dataset of a ParameterServerStrategy was called on the "
        "coordinator.\n\n"
        "Workers read batches: each one has a dataset of its own.\n\n"
        "Pass the dataset, or a function that makes it, to "
        "ClusterCoordinator.create_per_worker_dataset, and schedule a function with its iterator."
    )
