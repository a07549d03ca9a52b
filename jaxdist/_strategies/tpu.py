"""`TPUStrategy`: replicas on the cores of a TPU slice."""

from collections.abc import Callable, Sequence
from typing import Any, final

from jaxdist import _mesh as meshes
from jaxdist._called import called, refuse
from jaxdist._collectives import read_communication
from jaxdist._strategies import logical_devices
from jaxdist._strategies.base import Strategy
from jaxdist._strategies.over_processes import warn_if_alone
from jaxdist._typing import PyTree
from jaxdist._validate import as_flag, check_instance
from jaxdist.cluster_resolver import TPUClusterResolver
from jaxdist.errors import TopologyError
from jaxdist.tpu import TPUSystem, order_cores, system_of
from jaxdist.tpu.experimental import DeviceAssignment


@final
class TPUStrategy(Strategy):
    """Replicas on TPU cores: one per core, or according to a device assignment.

    The mesh follows the assignment: device `[r, l]` of `strategy.mesh.devices` is the core of
    logical device l of replica r.

    Args:
        tpu_cluster_resolver: The TPUs; None means those of this machine.
        experimental_device_assignment: The core of each logical device of each replica; None means
            a replica on every core, in the order of JAX's devices, host by host. On slices of v4,
            v5p and tpu7x of 4x4x4 chips and more the order is row by row of chips, since the
            compiler for TPUs keeps all-gathers in this order only.
        experimental_spmd_xla_partitioning: Whether every input of a step must be split over the
            logical devices, or replicated to them, before its use; then no value can be assigned
            to one logical device. XLA partitions a replica in either case.
        options: Default `experimental.CommunicationOptions` of calls that pass none.
        experimental_hints: The older name of `options`.

    Raises:
        NotFoundError: No TPU was found; the message says where jaxdist searched.
        TopologyError: An assignment without replicas, or for cores that the TPUs do not have.
        ArgumentTypeError: The resolver or the assignment has the wrong type.

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

    @called("TPUStrategy")
    def __init__(
        self,
        tpu_cluster_resolver: TPUClusterResolver | None = None,
        experimental_device_assignment: DeviceAssignment | None = None,
        experimental_spmd_xla_partitioning: bool = False,
        *,
        options: Any = None,
        experimental_hints: Any = None,
    ) -> None:
        # As in TensorFlow, the strategy does not need `initialize_tpu_system` before: `system_of`
        # finds the devices at their first use.
        resolver = TPUClusterResolver("") if tpu_cluster_resolver is None else tpu_cluster_resolver
        check_instance(
            "tpu_cluster_resolver",
            resolver,
            TPUClusterResolver,
            "a jaxdist.cluster_resolver.TPUClusterResolver",
            "Pass jaxdist.cluster_resolver.TPUClusterResolver(''), or nothing for the TPUs of this "
            "machine.",
        )
        spmd = as_flag("experimental_spmd_xla_partitioning", experimental_spmd_xla_partitioning)
        system = system_of(
            resolver.tpu_name, f"TPUStrategy(tpu_cluster_resolver={tpu_cluster_resolver!r})"
        )
        assignment = _validate_assignment(resolver, system, experimental_device_assignment)
        self._resolver, self._assignment = resolver, assignment
        grid = system.device_grid(assignment.core_assignment)
        described = resolver.tpu_name if system.is_described else None
        layout = meshes.build(
            grid.ravel().tolist(),
            num_logical=grid.shape[1],
            described=described,
            spmd=spmd,
        )
        # A strategy over several processes communicates, and a described one does not run.
        if described is None and layout.is_local:
            warn_if_alone(layout)
        self._set_up(layout, read_communication(None, options, experimental_hints))

    _requires_static_shapes = True

    def _hosts_of_replicas(self) -> list[Any]:
        count = self._assignment.num_replicas
        return [self._assignment.host_device(replica) for replica in range(count)]

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
        """The core of each logical device of each replica.

        Example:
            >>> resolver = jaxdist.cluster_resolver.TPUClusterResolver("virtual:v5e:2x2")
            >>> TPUStrategy(resolver).device_assignment
            DeviceAssignment(4 replicas x 1 core: 0000|1000|0100|1100)
        """
        return self._assignment

    @property
    def experimental_spmd_xla_partitioning(self) -> bool:
        """Whether every input of a step must be split over, or replicated to, logical devices.

        Example:
            >>> resolver = jaxdist.cluster_resolver.TPUClusterResolver("virtual:v5e:2x2")
            >>> TPUStrategy(resolver).experimental_spmd_xla_partitioning
            False
        """
        return self.layout.spmd

    @called("TPUStrategy.experimental_split_to_logical_devices")
    def experimental_split_to_logical_devices(
        self, tensor: PyTree, partition_dimensions: Sequence[int]
    ) -> PyTree:
        """Split a tensor over the logical devices of each replica; its values do not change.

        Inside of a step it constrains the sharding of the value, and XLA partitions the operations
        that compute and use it. The gradient has the same sharding. Outside of a step it places an
        array.

        Shapes:
            Unchanged. Logical device `i * n + j` has part (i, j) of dims split into m and n.
            Inside of a step a dim may be uneven: XLA pads the last part.

        Cost:
            The transfer of the value; none if each device has the whole value.

        Args:
            tensor: An array, or a pytree of arrays that are all split in the same way.
            partition_dimensions: For each dim the number of parts; their product is the number of
                logical devices.

        Returns:
            The same values. A split value that the step returns is a split array (uneven dims, and
            dim 0 of a per-replica value, are not split in results).

        Raises:
            ShapeError: The wrong number of dims, a dim with fewer elements than parts, or, outside
                of a step, a dim that the number of parts does not divide.
            ArgumentError: The product is not the number of logical devices.
            ContextError: In a merge function, or in a step of another strategy.

        Example:
            >>> resolver = jaxdist.cluster_resolver.TPUClusterResolver("virtual:v4:2x2x1")
            >>> topology = jaxdist.tpu.experimental.initialize_tpu_system(resolver)
            >>> assignment = jaxdist.tpu.experimental.DeviceAssignment.build(
            ...     topology, computation_shape=[1, 1, 1, 2], num_replicas=4)
            >>> strategy = TPUStrategy(resolver, assignment)
            >>> w = strategy.experimental_split_to_logical_devices(np.ones((2, 6)), [1, 2])
            >>> w.addressable_shards[0].data.shape
            (2, 3)

        Source:
            `tf.distribute.TPUStrategy.experimental_split_to_logical_devices`.
        """
        return logical_devices.split(self, tensor, partition_dimensions)

    @called("TPUStrategy.experimental_replicate_to_logical_devices")
    def experimental_replicate_to_logical_devices(self, tensor: PyTree) -> PyTree:
        """Replicate a tensor to all logical devices of each replica; its values do not change.

        Inside of a step it constrains the sharding of the value. Outside of a step it places an
        array.

        Shapes:
            Unchanged.

        Cost:
            An all-gather over the logical devices, if the tensor is split.

        Args:
            tensor: An array, or a pytree of arrays.

        Returns:
            The same values.

        Raises:
            ContextError: In a merge function, or in a step of another strategy.

        Example:
            >>> resolver = jaxdist.cluster_resolver.TPUClusterResolver("virtual:v4:2x2x1")
            >>> topology = jaxdist.tpu.experimental.initialize_tpu_system(resolver)
            >>> assignment = jaxdist.tpu.experimental.DeviceAssignment.build(
            ...     topology, computation_shape=[1, 1, 1, 2], num_replicas=4)
            >>> strategy = TPUStrategy(resolver, assignment)
            >>> def step(x):
            ...     return strategy.experimental_replicate_to_logical_devices(x) + 1
            >>> strategy.run(step, (np.ones(2),)).tolist()
            [2.0, 2.0]

        Source:
            `tf.distribute.TPUStrategy.experimental_replicate_to_logical_devices`.
        """
        return logical_devices.replicate(self, tensor)

    @called("TPUStrategy.experimental_assign_to_logical_device")
    def experimental_assign_to_logical_device(
        self, tensor: PyTree, logical_device_id: int
    ) -> PyTree:
        """Compute a tensor on one logical device of each replica; its values do not change.

        jaxdist places the operation that produces the value on that device, together with all
        operations whose results only it uses, and their gradients. Collectives and other marked
        values end the region. The other devices skip these operations. `Program.placed` of
        `strategy.lower` lists the placed operations.

        Shapes:
            Unchanged.

        Cost:
            A conditional, and an all-reduce over the logical devices of the results that other
            devices use.

        Args:
            tensor: A value inside of a step, or a pytree of them.
            logical_device_id: From 0.

        Returns:
            The same values.

        Raises:
            ArgumentError: No such logical device, or the strategy partitions by SPMD.
            ContextError: Outside of a step, in a merge function or a step of another strategy.

        Example:
            >>> resolver = jaxdist.cluster_resolver.TPUClusterResolver("virtual:v4:2x2x1")
            >>> topology = jaxdist.tpu.experimental.initialize_tpu_system(resolver)
            >>> assignment = jaxdist.tpu.experimental.DeviceAssignment.build(
            ...     topology, computation_shape=[1, 1, 1, 2], num_replicas=1)
            >>> strategy = TPUStrategy(resolver, assignment)
            >>> def step(x):
            ...     return strategy.experimental_assign_to_logical_device(x + x, 0)
            >>> strategy.run(step, (np.ones(2),)).tolist()
            [2.0, 2.0]

        Source:
            `tf.distribute.TPUStrategy.experimental_assign_to_logical_device`.
        """
        return logical_devices.assign(self, tensor, logical_device_id)

    @called("TPUStrategy.on_logical_device")
    def on_logical_device(
        self, logical_device_id: int
    ) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        """Compute calls of a function, and their gradients, on one logical device of each replica.

        `experimental_assign_to_logical_device` infers which operations to place. This decorator
        places exactly the operations of the function.

        Shapes:
            Unchanged.

        Cost:
            As for `experimental_assign_to_logical_device`.

        Args:
            logical_device_id: From 0.

        Returns:
            A decorator. The decorated function is called inside of a step, takes and returns
            pytrees of arrays, and contains no collective. NNX objects among its arguments are
            updated in place.

        Raises:
            ArgumentError: No such logical device, or the strategy partitions by SPMD.
            ArgumentTypeError: The function returns a leaf that is not an array.
            ContextError: The function is called outside of a step, or writes an NNX object that it
                closes over; or, raised by `run`, an operation in it needs the other devices.

        Example:
            >>> resolver = jaxdist.cluster_resolver.TPUClusterResolver("virtual:v4:2x2x1")
            >>> topology = jaxdist.tpu.experimental.initialize_tpu_system(resolver)
            >>> assignment = jaxdist.tpu.experimental.DeviceAssignment.build(
            ...     topology, computation_shape=[1, 1, 1, 2], num_replicas=1)
            >>> strategy = TPUStrategy(resolver, assignment)
            >>> @strategy.on_logical_device(1)
            ... def layer(w, x):
            ...     return jnp.tanh(x @ w)
            >>> program = strategy.lower(layer, (np.eye(2), np.zeros((1, 2))))
            >>> [(work.device, work.operations) for work in program.placed]
            [(1, 2)]
        """
        return logical_devices.on_logical_device(self, logical_device_id)


@called("TPUStrategy")
def check_assignment(name: str, assignment: Any) -> None:
    """Raise an error if `assignment` is neither None nor a `DeviceAssignment`.

    `name` is the name of the parameter.
    """
    if assignment is not None:
        what = "a jaxdist.tpu.experimental.DeviceAssignment"
        remedy = "Pass what jaxdist.tpu.experimental.DeviceAssignment.build returns."
        check_instance(name, assignment, DeviceAssignment, what, remedy)


def _validate_assignment(
    resolver: TPUClusterResolver, system: TPUSystem, assignment: DeviceAssignment | None
) -> DeviceAssignment:
    if assignment is None:
        every_core = order_cores(system.topology, system.num_slices)
        return DeviceAssignment(system.topology, every_core[:, None])
    check_assignment("experimental_device_assignment", assignment)
    # `DeviceAssignment.build(num_replicas=0)` is valid, as in TensorFlow; an empty mesh is not.
    if assignment.num_replicas == 0 or assignment.num_cores_per_replica == 0:
        raise refuse(
            f"a device assignment that has {assignment.num_replicas} replicas of "
            f"{assignment.num_cores_per_replica} cores.",
            "A strategy has at least one replica, of one core.",
            "Build it with num_replicas=1 or more.",
            kind=TopologyError,
        )
    if assignment.topology != system.topology:
        raise refuse(
            f"a device assignment for {assignment.topology}, and {resolver!r} is {system.topology}"
            ".",
            "A device assignment is for the topology of the resolver.",
            "Build the assignment on the topology that initialize_tpu_system(resolver) returns.",
            kind=TopologyError,
        )
    return assignment
