"""Strategies of version 1: those of version 2, with `axis=None` as a default of `reduce`."""

from collections.abc import Sequence
from typing import Any, final

import jax

from jaxdist import _strategies
from jaxdist._called import called
from jaxdist._collectives import CommunicationImplementation, CommunicationOptions, ReduceOp
from jaxdist._strategies import check_assignment, check_communication
from jaxdist._typing import PyTree
from jaxdist._validate import as_integer, log_without_effect
from jaxdist.cluster_resolver import ClusterResolver, TPUClusterResolver
from jaxdist.tpu.experimental import DeviceAssignment


class Strategy(_strategies.Strategy):
    """The base class of strategies with the interface of version 1 of `tf.distribute`.

    Example:
        >>> strategy = jaxdist.compat.v1.MirroredStrategy(["cpu:0", "cpu:1"])
        >>> isinstance(strategy, jaxdist.compat.v1.Strategy)
        True

    Source:
        `tf.compat.v1.distribute.Strategy`.
    """

    def reduce(
        self,
        reduce_op: ReduceOp | str,
        value: PyTree,
        axis: int | tuple[int, ...] | None = None,
        options: Any = None,
        *,
        experimental_hints: Any = None,
    ) -> PyTree:
        """Reduce like `jaxdist.Strategy.reduce`; `axis` may be omitted.

        Example:
            >>> strategy = jaxdist.compat.v1.MirroredStrategy(["cpu:0", "cpu:1"])
            >>> int(strategy.reduce("sum", PerReplica([1, 2])))
            3

        Source:
            `tf.compat.v1.distribute.Strategy.reduce`.
        """
        return super().reduce(
            reduce_op, value, axis, options, experimental_hints=experimental_hints
        )

    # `jaxdist.MirroredStrategy` and the others are final, so a strategy of version 1 cannot be
    # a subclass of them. It takes over the mesh of an instance instead.
    def _copy_setup(self, other: _strategies.Strategy) -> None:
        self._set_up(other.layout, other.communication)


@final
class MirroredStrategy(Strategy):
    """`jaxdist.MirroredStrategy` with the methods of version 1.

    Args:
        devices: As for `jaxdist.MirroredStrategy`.
        cross_device_ops: As for `jaxdist.MirroredStrategy`.

    Raises:
        Everything that `jaxdist.MirroredStrategy` raises.

    Example:
        >>> jaxdist.compat.v1.MirroredStrategy(["cpu:0", "cpu:1"]).num_replicas_in_sync
        2

    Source:
        `tf.compat.v1.distribute.MirroredStrategy`.
    """

    def __init__(
        self,
        devices: Sequence[str | jax.Device] | None = None,
        cross_device_ops: Any = None,
    ) -> None:
        self._copy_setup(_strategies.MirroredStrategy(devices, cross_device_ops))


@final
class OneDeviceStrategy(Strategy):
    """`jaxdist.OneDeviceStrategy` with the methods of version 1.

    Args:
        device: As for `jaxdist.OneDeviceStrategy`.

    Raises:
        DeviceError: The device does not exist.

    Example:
        >>> jaxdist.compat.v1.OneDeviceStrategy("cpu:1").extended.worker_devices
        ('/job:localhost/replica:0/task:0/device:CPU:1',)

    Source:
        `tf.compat.v1.distribute.OneDeviceStrategy`.
    """

    def __init__(self, device: str | jax.Device) -> None:
        self._copy_setup(_strategies.OneDeviceStrategy(device))

    @property
    def _unwraps(self) -> bool:
        return True


@final
class CentralStorageStrategy(Strategy):
    """`jaxdist.experimental.CentralStorageStrategy` with the methods of version 1.

    Args:
        compute_devices: As for `jaxdist.experimental.CentralStorageStrategy`.
        parameter_device: As for `jaxdist.experimental.CentralStorageStrategy`.

    Raises:
        Everything that `jaxdist.experimental.CentralStorageStrategy` raises.

    Example:
        >>> strategy = jaxdist.compat.v1.experimental.CentralStorageStrategy(["cpu:0", "cpu:1"])
        >>> strategy.extended.parameter_devices
        ('/job:localhost/replica:0/task:0/device:CPU:0',)

    Source:
        `tf.compat.v1.distribute.experimental.CentralStorageStrategy`.
    """

    def __init__(
        self,
        compute_devices: Sequence[str | jax.Device] | None = None,
        parameter_device: str | jax.Device | None = None,
    ) -> None:
        self._copy_setup(_strategies.CentralStorageStrategy(compute_devices, parameter_device))


@final
class TPUStrategy(Strategy):
    """`jaxdist.TPUStrategy` with the methods of version 1, without those for logical devices.

    Args:
        tpu_cluster_resolver: The TPUs; None for those of this machine.
        steps_per_run: Steps that Estimator and `fit` run on the TPUs before they return to the
            host; None for 1. It has no effect on `run`, which is one step (`jaxdist.multi_step`
            joins several), and a number other than 1 is logged.
        device_assignment: The core of each logical device of each replica.

    Raises:
        NotFoundError: No TPU was found.
        ArgumentError: `steps_per_run` is below 1.

    Example:
        >>> resolver = jaxdist.cluster_resolver.TPUClusterResolver("virtual:v5e:2x2")
        >>> strategy = jaxdist.compat.v1.experimental.TPUStrategy(resolver)
        >>> strategy.num_replicas_in_sync, strategy.steps_per_run
        (4, 1)

    Source:
        `tf.compat.v1.distribute.experimental.TPUStrategy`.
    """

    _requires_static_shapes = True

    def __init__(
        self,
        tpu_cluster_resolver: TPUClusterResolver | None = None,
        steps_per_run: int | None = None,
        device_assignment: DeviceAssignment | None = None,
    ) -> None:
        self._steps_per_run = _validate_steps(steps_per_run)
        check_assignment("device_assignment", device_assignment)
        self._newer = _strategies.TPUStrategy(tpu_cluster_resolver, device_assignment)
        self._copy_setup(self._newer)

    @property
    def steps_per_run(self) -> int:
        """Steps that Estimator and `fit` run before they return to the host.

        Example:
            >>> resolver = jaxdist.cluster_resolver.TPUClusterResolver("virtual:v5e:2x2")
            >>> jaxdist.compat.v1.experimental.TPUStrategy(resolver, 8).steps_per_run
            8
        """
        return self._steps_per_run

    @property
    def cluster_resolver(self) -> TPUClusterResolver:
        """The resolver of these TPUs."""
        return self._newer.cluster_resolver

    def _hosts_of_replicas(self) -> list[Any]:
        return self._newer._hosts_of_replicas()

    def __deepcopy__(self, memo: dict[int, Any]) -> "TPUStrategy":
        # The base class copies only the mesh; this one also needs `_newer` and its resolver.
        resolver, assignment = self._newer.cluster_resolver, self._newer.device_assignment
        other = TPUStrategy(resolver, self._steps_per_run, assignment)
        memo[id(self)] = other
        return other


@called("TPUStrategy")
def _validate_steps(steps: Any) -> int:
    if steps is None:
        return 1
    steps = as_integer("steps_per_run", steps, least=1, remedy="Pass 1, or None.")
    if steps > 1:
        why = "strategy.run is still one step, and jaxdist.multi_step joins several"
        log_without_effect("steps_per_run", why)
    return steps


@final
class MultiWorkerMirroredStrategy(Strategy):
    """`jaxdist.MultiWorkerMirroredStrategy` with the methods of version 1.

    Args:
        communication: A `CommunicationImplementation`, like `implementation` of
            `CommunicationOptions`.
        cluster_resolver: The cluster; None reads `TF_CONFIG`.

    Raises:
        Everything that `jaxdist.MultiWorkerMirroredStrategy` raises.

    Example:
        >>> jaxdist.compat.v1.experimental.MultiWorkerMirroredStrategy().num_replicas_in_sync
        8

    Source:
        `tf.compat.v1.distribute.experimental.MultiWorkerMirroredStrategy`.
    """

    @called("v1.experimental.MultiWorkerMirroredStrategy")
    def __init__(
        self,
        communication: CommunicationImplementation = CommunicationImplementation.AUTO,
        cluster_resolver: ClusterResolver | None = None,
    ) -> None:
        check_communication(communication)
        options = CommunicationOptions(implementation=communication)
        new = _strategies.MultiWorkerMirroredStrategy(cluster_resolver, options)
        self._resolver = new.cluster_resolver
        self._copy_setup(new)

    @property
    def cluster_resolver(self) -> ClusterResolver:
        """The resolver of the cluster.

        Example:
            >>> strategy = jaxdist.compat.v1.experimental.MultiWorkerMirroredStrategy()
            >>> strategy.cluster_resolver.task_type is None
            True
        """
        return self._resolver
