"""`ClusterCoordinator`: gives functions to workers, which run them in no fixed order."""

import atexit
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax

from jaxdist import _compat
from jaxdist._called import called, refuse
from jaxdist._parameter_server.coordinator.doctor import ClosureDoctor
from jaxdist._parameter_server.coordinator.per_worker import PerWorkerDataset, PerWorkerValues
from jaxdist._parameter_server.coordinator.protocols import CoordinatedStrategy
from jaxdist._parameter_server.coordinator.remote_value import ClosureResult, RemoteValue
from jaxdist._parameter_server.coordinator.retries import read_wait_settings
from jaxdist._parameter_server.coordinator.scheduled import Scheduled, Statistics
from jaxdist._parameter_server.coordinator.workers import Workers, add_new_workers
from jaxdist._parameter_server.worker.worker_index import is_on_worker
from jaxdist._program import is_unit
from jaxdist._validate import check_call_arguments, check_callable, check_keys, show
from jaxdist.errors import ContextError

_CREATING = threading.Lock()
_EXIT_SECONDS = 2.0
_PASS_THE_FUNCTION = (
    "Pass the function itself, and its arguments in args: "
    "coordinator.schedule(step, args=(iterator,)), not coordinator.schedule(step(iterator))."
)


class ClusterCoordinator:
    """Gives functions to the workers of a parameter server strategy.

    A function that was scheduled runs on any worker, in any order. Each worker runs one at a time.
    When a worker is lost, its function runs on another one, and the servers count it once.

    A strategy has one coordinator: a second call with the same strategy returns the same object.
    Its threads end when the strategy and the coordinator are deleted.

    Args:
        strategy: A `ParameterServerStrategy`.

    Raises:
        ArgumentError: The strategy has no workers that run functions.

    Example:
        >>> from jaxdist.cluster_resolver import ClusterSpec, SimpleClusterResolver
        >>> cluster = ClusterSpec({"worker": ["w:1", "w:2"], "ps": ["p:1"]})
        >>> strategy = jaxdist.ParameterServerStrategy(
        ...     SimpleClusterResolver(cluster, rpc_layer="local"))
        >>> coordinator = jaxdist.coordinator.ClusterCoordinator(strategy)
        >>> def make_batches():
        ...     return [np.ones(3, np.float32)] * 5
        >>> iterator = iter(coordinator.create_per_worker_dataset(make_batches))
        >>> result = coordinator.schedule(lambda batches: next(batches).sum(), (iterator,))
        >>> result.fetch()
        array(3., dtype=float32)

    Source:
        `tf.distribute.coordinator.ClusterCoordinator`.
    """

    strategy: CoordinatedStrategy

    @called("ClusterCoordinator")
    def __new__(cls, strategy: CoordinatedStrategy) -> "ClusterCoordinator":
        """Return the coordinator of the strategy."""
        if not hasattr(strategy, "_cluster_coordinator"):
            raise refuse(
                f"strategy={show(strategy)}.",
                "Only the workers of a parameter server strategy run scheduled functions.",
                "Pass a ParameterServerStrategy, or call strategy.run(step, args).",
            )
        with _CREATING:
            found = strategy._cluster_coordinator
            if found is None:
                found = super().__new__(cls)
                found._set_up(strategy)
                strategy._cluster_coordinator = found
            return found

    def _set_up(self, strategy: CoordinatedStrategy) -> None:
        self.strategy = strategy
        self._workers = Workers(strategy.links(), strategy._fence, read_wait_settings())
        self._queue = self._workers.queue
        doctor = ClosureDoctor(self._workers)
        doctor.thread.start()
        self._joining = strategy.joining()
        if self._joining.has_announcements:
            thread = threading.Thread(
                target=add_new_workers,
                args=(self._workers, self._joining),
                name="jaxdist-new-workers",
                daemon=True,
            )
            thread.start()
            self._workers.others.append(thread)
        _OPEN.add(self._workers)
        weakref.finalize(self, doctor.messages.put, None)

    @called("ClusterCoordinator.schedule")
    def schedule(
        self,
        fn: Callable[..., Any],
        args: Sequence[Any] | None = None,
        kwargs: Mapping[str, Any] | None = None,
    ) -> RemoteValue:
        """Let a worker run a function, and return at once.

        The function is traced here, at its first call with such arguments. It waits only while
        262144 functions wait for a worker.

        Args:
            fn: A `jaxdist.function`, or a Python function.
            args: Its arguments. A per-worker iterator stands for that of the worker.
            kwargs: Its keyword arguments.

        Returns:
            The result, which may not exist yet.

        Raises:
            ArgumentTypeError: `fn` is not callable, or `args` is not a list or tuple.
            ArgumentError: An argument contains a `RemoteValue`, or a per-worker value of another
                coordinator.
            ContextError: The caller runs on a worker, or is traced.
            Exception: The first error of a function that was scheduled before, once. All functions
                that have not finished are then cancelled, this one too.

        Cost:
            Less than 10 us, without the time for tracing.

        Source:
            `tf.distribute.coordinator.ClusterCoordinator.schedule`.
        """
        self._check_place("schedule")
        check_callable(fn, remedy=_PASS_THE_FUNCTION)
        args = () if args is None else args
        check_call_arguments(args, kwargs)
        kwargs = {} if kwargs is None else kwargs
        inputs = _find_inputs(args, kwargs) if args or kwargs else ()
        for values in inputs:
            if values.owner is not self._workers:
                raise refuse(
                    f"{values!r}, which another coordinator has made.",
                    "The workers of a coordinator have the values that it has made.",
                    "Make it with create_per_worker_dataset of this coordinator.",
                )
        closure = self.strategy.prepare(fn, args, kwargs)
        name = getattr(fn, "__name__", None) or type(fn).__name__
        item = Scheduled(closure, name, self._workers.fence, inputs)
        self._queue.put(item)
        return item.result

    def join(self) -> None:
        """Wait until all functions that were scheduled before are finished.

        Raises:
            ContextError: The caller runs on a worker.
            Exception: The first error of a function that was scheduled before, once. All functions
                that have not finished are then cancelled.

        Source:
            `tf.distribute.coordinator.ClusterCoordinator.join`.
        """
        self._check_place("join")
        try:
            self._queue.wait()
        finally:
            self._workers.fence.advance()

    def done(self) -> bool:
        """Return whether all functions that were scheduled are finished.

        Raises:
            ContextError: The caller runs on a worker.
            Exception: The first error of a function that was scheduled before, once. All functions
                that have not finished are then cancelled.

        Source:
            `tf.distribute.coordinator.ClusterCoordinator.done`.
        """
        self._check_place("done")
        try:
            return self._queue.is_done()
        finally:
            self._workers.fence.advance()

    def fetch(self, val: Any) -> Any:
        """Wait for results, and return them as arrays of NumPy.

        Args:
            val: A `RemoteValue`, or a pytree with such leaves; other leaves are left as they are.

        Returns:
            The same structure, with the result of each `RemoteValue`.

        Raises:
            ArgumentError: A leaf is a `RemoteValue` of another coordinator, or a per-worker value.
            ContextError: The caller runs on a worker.
            CancelledError: A function was cancelled, because another one had failed.
            Exception: What a function itself raised.

        Source:
            `tf.distribute.coordinator.ClusterCoordinator.fetch`.
        """
        self._check_place("fetch")
        if isinstance(val, RemoteValue):
            return self._fetch(val)
        try:
            leaves, structure = jax.tree.flatten(val)
        except (TypeError, ValueError):
            check_keys("ClusterCoordinator.fetch was given", "val", val)
            raise
        return structure.unflatten(map(self._fetch, leaves))

    @called("ClusterCoordinator.fetch")
    def _fetch(self, leaf: Any) -> Any:
        if isinstance(leaf, PerWorkerValues):
            raise refuse(
                f"{show(leaf)}.",
                "Each worker has its own value, and it stays there.",
                "Pass it in args of ClusterCoordinator.schedule, and fetch what the function "
                "returns.",
            )
        if not isinstance(leaf, RemoteValue):
            return leaf
        if isinstance(leaf, ClosureResult) and leaf.fence is not self._workers.fence:
            raise refuse(
                "a RemoteValue of another coordinator.",
                "A coordinator fetches what its own schedule returned.",
                "Call fetch of the other coordinator, or value.fetch().",
            )
        return leaf.fetch()

    def create_per_worker_dataset(self, dataset_fn: Any) -> PerWorkerDataset:
        """Let each worker make a dataset.

        Args:
            dataset_fn: A function without arguments that returns a dataset, which each worker
                calls once; or a dataset.

        Returns:
            An object whose `iter` is an argument for `schedule`. A worker that was lost makes its
            dataset again, and starts from its beginning.

        Raises:
            ArgumentError: It is neither a function nor a dataset.
            ContextError: The caller runs on a worker.

        Source:
            `tf.distribute.coordinator.ClusterCoordinator.create_per_worker_dataset`.
        """
        self._check_place("create_per_worker_dataset")
        return PerWorkerDataset(self._workers, self.strategy.make_per_worker(dataset_fn))

    def statistics(self) -> Statistics:
        """Return how many functions were scheduled, and what became of them.

        It sends a few requests to each server.
        """
        counts, pending = self._queue.read_counts()
        servers = self.strategy.report_of_servers()
        return Statistics(
            **{**vars(counts), "applied": counts.applied - servers.lost},
            lost=servers.lost,
            lost_changes=servers.lost_changes,
            pending=pending,
            staleness=dict(servers.staleness),
        )

    def add_worker(self, address: str | None = None) -> int:
        """Let another worker take part while the training runs.

        It makes all per-worker datasets and iterators first, and then takes functions as the others
        do. A worker that was started with `jaxdist server --announce` needs no call: the
        coordinator finds it within a few seconds.

        Args:
            address: Where the worker listens, as `host:port`; it is waited for. None where all
                workers are in this process: one more is made there.

        Returns:
            The index of the worker. It is not an error if it already takes part.

        Raises:
            ArgumentError: `address` is not valid, is missing, or is not needed.
            ClusterError: Another task is at the address, or a worker with the index of another one.
            DeadlineExceededError: Nobody answers there within `JAXDIST_JOIN_SECONDS`.
            DeviceError: The replicas of a worker in this process need more devices.
            UnsupportedError: The worker computes on another platform than the others.
            ContextError: The caller runs on a worker, or is traced.

        Example:
            >>> from jaxdist.cluster_resolver import ClusterSpec, SimpleClusterResolver
            >>> cluster = ClusterSpec({"worker": ["w:1"], "ps": ["p:1"]})
            >>> strategy = jaxdist.ParameterServerStrategy(
            ...     SimpleClusterResolver(cluster, rpc_layer="local"))
            >>> jaxdist.coordinator.ClusterCoordinator(strategy).add_worker()
            1

        Source:
            TensorFlow has no such method: its clusters have the workers of their start.
        """
        self._check_place("add_worker")
        link, is_new = self._joining.add(address)
        if is_new:
            self._workers.add(link)
        return link.index

    def _check_place(self, method: str) -> None:
        if is_on_worker():
            raise ContextError(
                f"ClusterCoordinator.{method} was called in a function that runs on a worker.\n\n"
                "Only the program that made the coordinator gives work to workers; a function that "
                "waits for another one could wait forever.\n\n"
                f"Call {method} outside of the functions that are given to schedule and "
                "create_per_worker_dataset."
            )
        if _compat.is_inside_trace():
            raise ContextError(
                f"ClusterCoordinator.{method} was called while a function is traced.\n\n"
                "A traced function runs once in Python, and then as a program that gives no work "
                f"to workers.\n\nCall {method} outside of the function that jax.jit or another "
                "transformation traces."
            )


def _find_inputs(args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[PerWorkerValues, ...]:
    """Return the per-worker values among the arguments; raise if there is a `RemoteValue`."""
    try:
        # Values on servers are not fetched for this.
        leaves = jax.tree.leaves((args, kwargs), is_leaf=is_unit)
    except (TypeError, ValueError):
        check_keys("ClusterCoordinator.schedule was given", "args", list(args))
        check_keys("ClusterCoordinator.schedule was given", "kwargs", dict(kwargs))
        raise
    for leaf in leaves:
        if isinstance(leaf, RemoteValue):
            raise refuse(
                f"an argument that contains {leaf!r}.",
                "Functions run in no fixed order, so one cannot take the result of another.",
                "Pass coordinator.fetch(value), or do both in one function.",
            )
    return tuple(leaf for leaf in leaves if isinstance(leaf, PerWorkerValues))


_OPEN: weakref.WeakSet[Workers] = weakref.WeakSet()
_LAST_CALLS: list[Callable[[], None]] = []


def call_at_exit(call: Callable[[], None]) -> None:
    """Call a function when the process ends, after the threads of all coordinators."""
    _LAST_CALLS.append(call)


@atexit.register
def _stop_all() -> None:
    """Let the threads end before the interpreter does, which would end them inside of JAX."""
    found = list(_OPEN)
    for workers in found:
        workers.stop()
    for workers in found:
        workers.join(_EXIT_SECONDS)
    for call in _LAST_CALLS:
        call()
