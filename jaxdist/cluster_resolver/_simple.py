"""`SimpleClusterResolver`: a resolver with explicit values."""

from collections.abc import Mapping
from typing import Any, final

from jaxdist._called import called, refuse_type
from jaxdist._validate import as_integer, check_instance, show
from jaxdist.cluster_resolver._cluster_spec import ClusterSpec
from jaxdist.cluster_resolver._resolver import (
    ClusterResolver,
    check_task,
    find_master,
    log_unused_arguments,
    master_url,
)

_CALLER = "SimpleClusterResolver"
_NUMBERS = (
    "a dict from kinds of accelerators to their numbers, or None",
    "Pass for instance num_accelerators={'GPU': 8}.",
)


@final
class SimpleClusterResolver(ClusterResolver):
    """A resolver for a cluster that its arguments describe.

    Args:
        cluster_spec: The tasks.
        master: The address that `master()` returns without a task.
        task_type: The job of this process.
        task_id: The number of this process in its job.
        environment: The environment of the cluster.
        num_accelerators: Number of accelerators of a task, by kind.
        rpc_layer: The protocol prefix of addresses, for instance `grpc`.

    Raises:
        ArgumentTypeError: `cluster_spec` is not a `ClusterSpec`, or `master` is not a string.

    Example:
        >>> from jaxdist.cluster_resolver import ClusterSpec, SimpleClusterResolver
        >>> cluster = ClusterSpec({"worker": ["host0:2222", "host1:2222"]})
        >>> resolver = SimpleClusterResolver(
        ...     cluster, task_type="worker", task_id=1, rpc_layer="grpc")
        >>> resolver.master("worker", 0)
        'grpc://host0:2222'

    Source:
        `tf.distribute.cluster_resolver.SimpleClusterResolver`.
    """

    @called(_CALLER)
    def __init__(
        self,
        cluster_spec: ClusterSpec,
        master: str = "",
        task_type: str | None = None,
        task_id: int | None = None,
        environment: str = "",
        num_accelerators: Mapping[str, int] | None = None,
        rpc_layer: str | None = None,
    ) -> None:
        if not isinstance(cluster_spec, ClusterSpec):
            raise refuse_type(
                f"cluster_spec={show(cluster_spec)}.",
                "cluster_spec is a ClusterSpec.",
                "Wrap it: ClusterSpec({'worker': ['host0:2222']}).",
            )
        remedy = "Pass '' for this process."
        check_instance("master", master, str, "an address as a string", remedy)
        check_instance("environment", environment, str, "a string", "Pass ''.")
        check_task(task_type, task_id, rpc_layer)
        if num_accelerators is not None:
            check_instance("num_accelerators", num_accelerators, Mapping, *_NUMBERS)
            for kind, number in num_accelerators.items():
                check_instance("num_accelerators", kind, str, *_NUMBERS)
                as_integer(f"num_accelerators[{kind!r}]", number, least=0)
        self._cluster_spec = cluster_spec
        self._master = master
        self._task_type = task_type
        self._task_id = task_id
        self._environment = environment
        self._num_accelerators = dict(num_accelerators or {})
        self.rpc_layer = rpc_layer

    def cluster_spec(self) -> ClusterSpec:
        """Return the tasks of the cluster."""
        return self._cluster_spec

    @called(f"{_CALLER}.master")
    def master(
        self,
        task_type: str | None = None,
        task_id: int | None = None,
        rpc_layer: str | None = None,
    ) -> str:
        """Return the address of the given task; without a task, the stored address."""
        address = self._master
        check_task(task_type, task_id, rpc_layer)
        if task_type is not None and task_id is not None:
            task = (task_type, task_id)
            return find_master(self._cluster_spec, task, rpc_layer or self.rpc_layer)
        return master_url(address, rpc_layer or self.rpc_layer)

    @called(f"{_CALLER}.num_accelerators")
    def num_accelerators(
        self,
        task_type: str | None = None,
        task_id: int | None = None,
        config_proto: Any = None,
    ) -> dict[str, int]:
        """Return the numbers given to the constructor."""
        check_task(task_type, task_id)
        log_unused_arguments(config_proto, task_type, task_id)
        return dict(self._num_accelerators)

    @property
    def environment(self) -> str:
        """The environment of the cluster."""
        return self._environment
