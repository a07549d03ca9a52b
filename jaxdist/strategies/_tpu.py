"""Replicas on the cores of a slice of TPUs."""

from typing import Any, final

from jaxdist import mesh as meshes
from jaxdist.cluster_resolver import TPUClusterResolver
from jaxdist.collectives import communication_of
from jaxdist.errors import ArgumentTypeError, TopologyError
from jaxdist.strategies._base import Strategy
from jaxdist.tpu import TPUSystem
from jaxdist.tpu.experimental import DeviceAssignment


@final
class TPUStrategy(Strategy):
    """Replicas on TPU cores: one on each, or as a device assignment says.

    The mesh follows the assignment: device `[r, l]` of `strategy.mesh.devices` is the core of
    logical device l of replica r.

    Args:
        tpu_cluster_resolver: Which TPUs; None is those of this machine.
        experimental_device_assignment: Which core each logical device of each replica is; None is
            a replica on every core, in the order of JAX's devices, host by host.
        experimental_spmd_xla_partitioning: A rule for the functions that place values on logical
            devices, which are not here yet; within a replica XLA partitions either way.
        options: `experimental.CommunicationOptions` that hold where a call does not say otherwise.
        experimental_hints: The older name of `options`.

    Raises:
        NotFoundError: There is no TPU; the message says where it was looked for.
        TopologyError: An assignment without replicas, or for cores that the TPUs do not have.
        ArgumentTypeError: No TPU resolver, or no assignment.

    Example:
        >>> resolver = jaxdist.cluster_resolver.TPUClusterResolver("virtual:v4:2x2x1")
        >>> topology = jaxdist.tpu.experimental.initialize_tpu_system(resolver)
        >>> assignment = jaxdist.tpu.experimental.DeviceAssignment.build(
        ...     topology, computation_shape=[1, 1, 1, 2], num_replicas=4)
        >>> strategy = TPUStrategy(resolver, experimental_device_assignment=assignment)
        >>> dict(strategy.mesh.shape)
        {'replica': 4, 'logical': 2}

    Source:
        `tf.distribute.TPUStrategy`.
    """

    def __init__(
        self,
        tpu_cluster_resolver: TPUClusterResolver | None = None,
        experimental_device_assignment: DeviceAssignment | None = None,
        experimental_spmd_xla_partitioning: bool = False,
        *,
        options: Any = None,
        experimental_hints: Any = None,
    ) -> None:
        resolver = TPUClusterResolver("") if tpu_cluster_resolver is None else tpu_cluster_resolver
        if not isinstance(resolver, TPUClusterResolver):
            raise ArgumentTypeError(
                f"TPUStrategy needs a TPUClusterResolver, and {type(resolver).__name__} was "
                "given.\n\nPass jaxdist.cluster_resolver.TPUClusterResolver(''), or nothing for "
                "the TPUs of this machine."
            )
        system = resolver.tpu_system
        assignment = _checked(resolver, system, experimental_device_assignment)
        self._resolver, self._assignment = resolver, assignment
        self._spmd = bool(experimental_spmd_xla_partitioning)
        grid = system.device_grid(assignment.core_assignment)
        described = resolver.tpu_name if system.is_described else None
        layout = meshes.build(grid.ravel().tolist(), num_logical=grid.shape[1], described=described)
        self._set_up(layout, communication_of("TPUStrategy", None, options, experimental_hints))

    @property
    def cluster_resolver(self) -> TPUClusterResolver:
        """The resolver of these TPUs.

        Example:
            >>> resolver = jaxdist.cluster_resolver.TPUClusterResolver("virtual:v5e:2x4")
            >>> TPUStrategy(resolver).cluster_resolver is resolver
            True
        """
        return self._resolver

    @property
    def device_assignment(self) -> DeviceAssignment:
        """Which core each logical device of each replica is.

        Example:
            >>> resolver = jaxdist.cluster_resolver.TPUClusterResolver("virtual:v5e:2x2")
            >>> TPUStrategy(resolver).device_assignment
            DeviceAssignment(4 replicas x 1 core: 0000|1000|0100|1100)
        """
        return self._assignment

    @property
    def experimental_spmd_xla_partitioning(self) -> bool:
        """Whether every input of a step has to be split over, or replicated to, logical devices.

        Example:
            >>> resolver = jaxdist.cluster_resolver.TPUClusterResolver("virtual:v5e:2x2")
            >>> TPUStrategy(resolver).experimental_spmd_xla_partitioning
            False
        """
        return self._spmd

    def __deepcopy__(self, memo: dict[int, Any]) -> "TPUStrategy":
        other: Any = super().__deepcopy__(memo)
        other._resolver, other._assignment = self._resolver, self._assignment
        other._spmd = self._spmd
        return other


def _checked(
    resolver: TPUClusterResolver, system: TPUSystem, assignment: DeviceAssignment | None
) -> DeviceAssignment:
    if assignment is None:
        every_core = system.topology.device_coordinates.reshape(-1, 1, 4)
        return DeviceAssignment(system.topology, every_core)
    if not isinstance(assignment, DeviceAssignment):
        raise ArgumentTypeError(
            f"experimental_device_assignment is of type {type(assignment).__name__}.\n\n"
            "Pass what jaxdist.tpu.experimental.DeviceAssignment.build returns."
        )
    if assignment.num_replicas == 0 or assignment.num_cores_per_replica == 0:
        raise TopologyError(
            f"The device assignment has {assignment.num_replicas} replicas of "
            f"{assignment.num_cores_per_replica} cores, and a strategy needs one of each.\n\n"
            "Build it with num_replicas=1 or more."
        )
    if assignment.topology != system.topology:
        raise TopologyError(
            f"The device assignment is for {assignment.topology}, and {resolver!r} is "
            f"{system.topology}.\n\n"
            "Build the assignment on the topology that initialize_tpu_system(resolver) returns."
        )
    return assignment
