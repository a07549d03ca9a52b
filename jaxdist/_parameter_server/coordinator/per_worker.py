"""`PerWorkerValues`: datasets and iterators that each worker makes for itself."""

import itertools
from typing import Any, NoReturn

from jaxdist import _compat
from jaxdist._parameter_server.coordinator.protocols import IteratorOf
from jaxdist._parameter_server.worker.datasets import (
    find_line,
    make_input_error,
    name_dataset,
)
from jaxdist._validate import show
from jaxdist.errors import ClosureInputError, ContextError, UnsupportedError

_ORDER = itertools.count()
_MISSING: Any = object()


class PerWorkerValues:
    """A value that each worker makes for itself, such as an iterator.

    As an argument of `ClusterCoordinator.schedule` it stands for the value of the worker that runs
    the function. `iter(coordinator.create_per_worker_dataset(...))` makes one.

    Args:
        owner: The `Workers`, which make it now and whenever a worker comes back.
        resource: What the workers make it of.

    Example:
        >>> from jaxdist.cluster_resolver import ClusterSpec, SimpleClusterResolver
        >>> cluster = ClusterSpec({"worker": ["w:1", "w:2"], "ps": ["p:1"]})
        >>> strategy = jaxdist.ParameterServerStrategy(
        ...     SimpleClusterResolver(cluster, rpc_layer="local"))
        >>> coordinator = jaxdist.coordinator.ClusterCoordinator(strategy)
        >>> dataset = coordinator.create_per_worker_dataset(lambda: [np.arange(3)])
        >>> isinstance(iter(dataset), jaxdist.coordinator.PerWorkerValues)
        True

    Source:
        `tf.distribute.experimental.coordinator.PerWorkerValues`, and `PerWorkerValue`.
    """

    # What a worker that has an error could not do.
    _failed = "make the value"

    def __init__(self, owner: Any, resource: Any = _MISSING) -> None:
        if resource is _MISSING:
            raise UnsupportedError(
                f"{type(self).__name__} was called with {show(owner)}.\n\n"
                "A coordinator makes per-worker values, on its workers.\n\n"
                "Call coordinator.create_per_worker_dataset(lambda: values[index]) with index = "
                "jaxdist.coordinator.experimental_get_current_worker_index(), and pass what it "
                "returns in args of schedule."
            )
        # Made after what it depends on, so workers make them in this order.
        self.order = next(_ORDER)
        self.owner = owner
        self.resource = resource
        # Each worker makes it as if the thread that asks for it now had made it.
        self.settings = _compat.ThreadSettings()
        # By worker: what it has made, and None; or None, and why it could not.
        self._found: dict[int, tuple[Any, BaseException | None]] = {}

    def what_to_make(self, index: int) -> Any:
        """Return what `WorkerLink.create_resource` takes on one worker."""
        return self.resource

    def set(self, index: int, made: Any) -> None:
        """Set what one worker has made."""
        self._found[index] = made, None

    def set_error(self, index: int, error: BaseException) -> None:
        """Set why one worker could not make it."""
        self._found[index] = None, error

    def has(self, index: int) -> bool:
        """Whether one worker has made it, or has failed to."""
        return index in self._found

    def _list_made(self) -> list[int]:
        return [index for index, (_, error) in list(self._found.items()) if error is None]

    def find_any(self) -> int | None:
        """Return a worker that has made it, or else one that has failed to, or None."""
        return next(iter(self._list_made() or list(self._found)), None)

    def forget(self, index: int) -> None:
        """Forget what one worker has made, because it was lost."""
        self._found.pop(index, None)

    def of(self, index: int) -> Any:
        """Return what `WorkerLink.create_resource` returned on one worker.

        Raises:
            ClosureInputError: The worker could not make it.
        """
        made, error = self._found[index]
        if error is not None:
            # An iterator over a dataset that could not be made has the error of the dataset.
            if not isinstance(error, ClosureInputError):
                name = name_dataset(self.resource)
                error = make_input_error(index, self._failed, name, error)
            found = ClosureInputError(str(error), error.original_exception)
            # The traceback of an error of another process has no lines of the user.
            cause = found.original_exception
            raise found from (None if cause is None or find_line(cause) is None else cause)
        return made

    def __repr__(self) -> str:
        return f"{type(self).__name__}(workers={sorted(self._list_made())})"


class PerWorkerIterator(PerWorkerValues):
    """An iterator that each worker makes for itself.

    Example:
        >>> from jaxdist.cluster_resolver import ClusterSpec, SimpleClusterResolver
        >>> cluster = ClusterSpec({"worker": ["w:1", "w:2"], "ps": ["p:1"]})
        >>> strategy = jaxdist.ParameterServerStrategy(
        ...     SimpleClusterResolver(cluster, rpc_layer="local"))
        >>> coordinator = jaxdist.coordinator.ClusterCoordinator(strategy)
        >>> iterator = iter(coordinator.create_per_worker_dataset(lambda: [np.arange(3)]))
        >>> coordinator.schedule(lambda it: next(it) + 1, (iterator,)).fetch()
        array([1, 2, 3], dtype=int32)

    Args:
        dataset: The dataset that it iterates over.
    """

    _failed = "read the first batch"

    def __init__(self, dataset: "PerWorkerDataset") -> None:
        super().__init__(dataset.owner, dataset.resource)
        # Keeps the dataset on the workers.
        self._dataset = dataset
        self.owner.create(self)

    def what_to_make(self, index: int) -> Any:
        """Return an iterator over the dataset of one worker."""
        return IteratorOf(self._dataset.of(index))

    def __iter__(self) -> "PerWorkerIterator":
        return self

    def __next__(self) -> NoReturn:
        raise UnsupportedError(
            "next was called on the iterator of a per-worker dataset.\n\n"
            "Its batches are on the workers.\n\n"
            "Pass the iterator in args of ClusterCoordinator.schedule, and call next in the "
            "function."
        )


class PerWorkerDataset(PerWorkerValues):
    """A dataset that each worker makes for itself; `iter` returns an iterator for `schedule`.

    When a worker was lost and comes back, it makes its dataset again, and its iterators start
    from the beginning.

    Example:
        >>> from jaxdist.cluster_resolver import ClusterSpec, SimpleClusterResolver
        >>> cluster = ClusterSpec({"worker": ["w:1", "w:2"], "ps": ["p:1"]})
        >>> strategy = jaxdist.ParameterServerStrategy(
        ...     SimpleClusterResolver(cluster, rpc_layer="local"))
        >>> coordinator = jaxdist.coordinator.ClusterCoordinator(strategy)
        >>> coordinator.create_per_worker_dataset(lambda: [np.arange(3)]).resource()
        [array([0, 1, 2])]

    Args:
        owner: Makes the values on the workers.
        resource: What `CoordinatedStrategy.make_per_worker` returned.
    """

    _failed = "make the dataset"

    def __init__(self, owner: Any, resource: Any) -> None:
        super().__init__(owner, resource)
        owner.create(self)

    def __iter__(self) -> PerWorkerIterator:
        if _compat.is_inside_trace():
            raise ContextError(
                "iter was called on a per-worker dataset while a function is traced.\n\n"
                "The workers make the iterator, outside of all functions.\n\n"
                "Call iter first, and pass the iterator in args of ClusterCoordinator.schedule."
            )
        return PerWorkerIterator(self)
