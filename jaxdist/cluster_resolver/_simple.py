"""A resolver that is told everything."""

from collections.abc import Mapping
from typing import Any, final

from jaxdist.cluster_resolver._cluster_spec import ClusterSpec
from jaxdist.cluster_resolver._resolver import ClusterResolver, master_url, tell_unused
from jaxdist.errors import ArgumentTypeError


@final
class SimpleClusterResolver(ClusterResolver):
    """A resolver for a cluster that is written down.

    Args:
        cluster_spec: The tasks.
        master: The address to connect to, where no task is asked for.
        task_type: The job of this process.
        task_id: The number of this process in its job.
        environment: Where the cluster runs.
        num_accelerators: Number of accelerators of a task, by kind.
        rpc_layer: The protocol before addresses, as `grpc`.

    Raises:
        ArgumentTypeError: `cluster_spec` is no `ClusterSpec`, or `master` no string.

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
            raise ArgumentTypeError(
                f"SimpleClusterResolver needs a ClusterSpec, and {type(cluster_spec).__name__} "
                "was given.\n\nWrap it: ClusterSpec({'worker': ['host0:2222']})."
            )
        if not isinstance(master, str):
            raise ArgumentTypeError(
                f"master is an address as a string, and {type(master).__name__} was given.\n\n"
                "Pass '' for this process."
            )
        self._cluster_spec = cluster_spec
        self._master = master
        self._task_type = task_type
        self._task_id = task_id
        self._environment = environment
        self._num_accelerators = dict(num_accelerators or {})
        self.rpc_layer = rpc_layer

    def cluster_spec(self) -> ClusterSpec:
        """The tasks of the cluster."""
        return self._cluster_spec

    def master(
        self,
        task_type: str | None = None,
        task_id: int | None = None,
        rpc_layer: str | None = None,
    ) -> str:
        """The address of a task where both its job and number are given, else the stored one."""
        address = self._master
        if task_type is not None and task_id is not None:
            address = self._cluster_spec.task_address(task_type, task_id)
        return master_url(address, rpc_layer or self.rpc_layer)

    def num_accelerators(
        self,
        task_type: str | None = None,
        task_id: int | None = None,
        config_proto: Any = None,
    ) -> dict[str, int]:
        """The numbers that it was told."""
        tell_unused(config_proto, task_type, task_id)
        return dict(self._num_accelerators)

    @property
    def environment(self) -> str:
        """Where the cluster runs."""
        return self._environment
