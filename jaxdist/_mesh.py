"""The mesh of a strategy: its replica axes and its logical axes."""

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import (
    AbstractMesh,
    AxisType,
    Mesh,
    NamedSharding,
    PartitionSpec,
    SingleDeviceSharding,
)

from jaxdist._called import called, name_call, refuse
from jaxdist._compat import find_mapped_axis
from jaxdist._processes import Process, get_current_process
from jaxdist._validate import check_instance
from jaxdist.errors import ContextError, DeviceError

REPLICA_AXIS = "replica"
LOGICAL_AXIS = "logical"


@dataclasses.dataclass(frozen=True)
class ReplicaMesh:
    """A JAX mesh, and the axes of it over which copies of the step run.

    The replica axes are manual inside `run`. The other axes are the logical devices of each
    replica; they stay automatic, so GSPMD partitions the step over them.

    # Note [Explicit axes]
    A user's mesh may have Explicit axes, as `jax.make_mesh` makes them. Arguments and results are
    on this mesh, so they combine with the user's other arrays. Programs compute over `auto_mesh`.
    """

    mesh: Mesh
    replica_axes: tuple[str, ...]
    # Number of virtual replicas, several of which share a device (`deterministic=True`); or None.
    num_virtual: int | None = None
    # Name of a slice or of GPUs that are only described: programs compile for them, but cannot run;
    # or None.
    described: str | None = None
    # Whether a step must declare for every input how it is split over the logical devices.
    spmd: bool = False
    # The process whose replicas are the local ones. It is not part of the hash, which is computed
    # often and would rarely differ by it.
    process: Process = dataclasses.field(default_factory=get_current_process, hash=False)
    # The process of each device, in the order of `devices`; None means `Device.process_index`.
    owners: tuple[int, ...] | None = None
    # The one device that keeps the variables between their uses (`CentralStorageStrategy`); None
    # means that each device has a copy.
    variables_on: SingleDeviceSharding | None = None
    # The time limit of `CommunicationOptions` for one wait for other processes; None means no limit
    # of its own. Programs do not depend on it, so meshes with different limits are equal.
    timeout_seconds: float | None = dataclasses.field(default=None, compare=False)

    @called("ReplicaMesh")
    def __post_init__(self) -> None:
        if self.owners is None:
            return
        size, count = self.mesh.size, self.process.count
        if len(self.owners) != size or not {*self.owners} <= {*range(count)}:
            raise refuse(
                f"owners={self.owners} for {size} devices of {count} processes.",
                "owners has the number of a process for each device.",
                f"Pass {size} numbers from 0 to {count - 1}.",
            )

    # All properties below are cached: `run` reads them at every call, and a mesh never changes.

    @functools.cached_property
    def logical_axes(self) -> tuple[str, ...]:
        """Mesh axes that are not replica axes."""
        return tuple(a for a in self.mesh.axis_names if a not in self.replica_axes)

    @functools.cached_property
    def num_replicas(self) -> int:
        """Number of copies of the step that run together."""
        return self.num_virtual or self.num_places

    @functools.cached_property
    def num_places(self) -> int:
        """Number of positions on the replica axes: one per replica, unless replicas are virtual."""
        return math.prod(self.mesh.shape[a] for a in self.replica_axes)

    @functools.cached_property
    def replicas_per_place(self) -> int:
        """Number of replicas that share one device and run on it one after the other."""
        return self.num_replicas // self.num_places

    @functools.cached_property
    def auto_mesh(self) -> Mesh:
        """The same mesh with Auto axes only, or the mesh itself if its axes are Auto.

        Programs compute over it. Compiled programs treat arrays on both meshes alike, so none
        moves.
        """
        return make_auto(self.mesh)

    @functools.cached_property
    def has_explicit_axes(self) -> bool:
        """Whether arguments and results have types with shardings (`jax.make_mesh`)."""
        return self.auto_mesh is not self.mesh

    @functools.cached_property
    def has_explicit_logical_axes(self) -> bool:
        """Whether a logical axis is Explicit."""
        kinds = dict(zip(self.mesh.axis_names, self.mesh.axis_types, strict=True))
        return any(kinds[a] is AxisType.Explicit for a in self.logical_axes)

    @functools.cached_property
    def traced_mesh(self) -> Mesh | AbstractMesh:
        """The mesh over which a step is traced.

        With virtual replicas it is abstract, with one device for each virtual replica. So the
        trace, and the bits of the results, do not depend on the number of real devices.
        """
        if self.num_virtual is None:
            return self.auto_mesh
        names = self.mesh.axis_names
        sizes = tuple(
            self.num_virtual if a in self.replica_axes else self.mesh.shape[a] for a in names
        )
        return AbstractMesh(sizes, names, axis_types=(AxisType.Auto,) * len(names))

    @functools.cached_property
    def num_logical(self) -> int:
        """Number of devices that one replica spans."""
        return math.prod(self.mesh.shape[a] for a in self.logical_axes)

    @functools.cached_property
    def manual_axes(self) -> frozenset[str]:
        """Axes that `shard_map` makes manual: the replica axes, or all of them."""
        # Programs with automatic axes cannot reduce bfloat16 on CPU. So axes stay automatic only
        # if a replica spans several devices.
        return frozenset(self.mesh.axis_names if self.num_logical == 1 else self.replica_axes)

    def check_axes_are_free(self, what: str) -> None:
        """Check that no `jax.vmap` around the caller has an axis with the name of a replica axis.

        Raises:
            ContextError: A collective over the replicas would run over the mapped values instead.
        """
        name = find_mapped_axis(self.replica_axes)
        if name is None:
            return
        raise ContextError(
            f"{what} was called under jax.vmap(axis_name={name!r}), and {name!r} is an axis of "
            f"replicas: {list(self.replica_axes)}.\n\n"
            "Inside that vmap the name means the mapped values, so the replicas would not meet.\n\n"
            "Give the axis of vmap another name, such as axis_name='example'."
        )

    @functools.cached_property
    def replica_spec(self) -> PartitionSpec:
        """The `PartitionSpec` that splits dim 0 over the replicas."""
        axes = self.replica_axes
        return PartitionSpec(axes[0] if len(axes) == 1 else axes)

    @functools.cached_property
    def replicated(self) -> NamedSharding:
        """The layout of a mirrored value."""
        return NamedSharding(self.mesh, PartitionSpec())

    @functools.cached_property
    def per_replica(self) -> NamedSharding:
        """The layout of a per-replica value."""
        return NamedSharding(self.mesh, self.replica_spec)

    def tiles(self, parts: Sequence[int]) -> NamedSharding:
        """Return the layout of a mirrored array that is split over the logical devices.

        Args:
            parts: The number of parts of each dim. Part (i, j) of two dims in m and n parts is on
                logical device `i * n + j`.
        """
        # A `PartitionSpec` can name an axis but not a part of one. So if several dims are split,
        # the layout has a mesh of the same devices with one logical axis for each of these dims.
        cut = [n for n in parts if n > 1]
        if len(cut) < 2:
            whole = self.logical_axes[0] if len(self.logical_axes) == 1 else self.logical_axes
            return NamedSharding(
                self.mesh, PartitionSpec(*(whole if n > 1 else None for n in parts))
            )
        mesh = self._factorize(tuple(cut))
        names = iter(mesh.axis_names[len(self.replica_axes) :])
        return NamedSharding(mesh, PartitionSpec(*(next(names) if n > 1 else None for n in parts)))

    def _factorize(self, sizes: tuple[int, ...]) -> Mesh:
        """Return a mesh of the same devices whose logical axes have these sizes."""
        replicas = tuple(self.mesh.shape[a] for a in self.replica_axes)
        grid = self.device_grid.reshape(replicas + sizes)
        names = (*self.replica_axes, *(f"{LOGICAL_AXIS}_{i}" for i in range(len(sizes))))
        return Mesh(grid, names, axis_types=(AxisType.Auto,) * len(names))

    def is_factorized(self, mesh: Any) -> bool:
        """Whether `mesh` is this mesh with its logical axes factorized, as `tiles` makes it."""
        count = len(self.replica_axes)
        # The device order must agree too, or the parts would be on other logical devices.
        replicas = mesh.axis_names[:count] == self.replica_axes
        return (
            replicas
            and self.mesh.axis_names[:count] == self.replica_axes
            and all(mesh.shape[a] == self.mesh.shape[a] for a in self.replica_axes)
            and isinstance(mesh, Mesh)
            and tuple(mesh.devices.ravel()) == tuple(self.mesh.devices.ravel())
        )

    @functools.cached_property
    def device_grid(self) -> np.ndarray:
        """Devices as an array `[replica, logical device]`; virtual replicas share devices."""
        names = self.mesh.axis_names
        # A user's mesh may have its axes in any order.
        order = [names.index(a) for a in self.replica_axes + self.logical_axes]
        grid: np.ndarray = self.mesh.devices.transpose(order)
        grid = grid.reshape(self.num_places, self.num_logical)
        return np.repeat(grid, self.replicas_per_place, axis=0)

    @functools.cached_property
    def devices(self) -> tuple[jax.Device, ...]:
        """All devices, ordered by replica, without duplicates."""
        return tuple(dict.fromkeys(self.device_grid.ravel()))

    @functools.cached_property
    def has_shard_per_replica(self) -> bool:
        """Whether shard i of a per-replica array, in mesh order, is the value of replica i."""
        in_order = self.devices == tuple(self.mesh.devices.ravel())
        return self.num_logical == 1 and in_order and self.num_virtual is None

    @functools.cached_property
    def device_set(self) -> frozenset[jax.Device]:
        """All devices, as a set."""
        return frozenset(self.devices)

    @functools.cached_property
    def platform(self) -> str:
        """`'cpu'`, `'gpu'` or `'tpu'`."""
        return str(self.devices[0].platform)

    @functools.cached_property
    def is_described_gpu(self) -> bool:
        """Whether the devices are GPUs that are only described."""
        return self.described is not None and self.platform == "gpu"

    @functools.cached_property
    def device_owners(self) -> dict[jax.Device, int]:
        """The index of the process of each device."""
        owners = self.owners or tuple(d.process_index for d in self.devices)
        return dict(zip(self.devices, owners, strict=True))

    @functools.cached_property
    def replica_owners(self) -> tuple[int, ...]:
        """For each replica, the index of the process of its first device."""
        return tuple(self.device_owners[d] for d in self.device_grid[:, 0])

    @functools.cached_property
    def local_replicas(self) -> tuple[int, ...]:
        """Numbers of the replicas whose first device belongs to this process."""
        owned = enumerate(self.replica_owners)
        return tuple(replica for replica, owner in owned if owner == self.process.index)

    @functools.cached_property
    def is_local(self) -> bool:
        """Whether every device belongs to this process."""
        return {*self.device_owners.values()} == {self.process.index}

    @functools.cached_property
    def is_shared(self) -> bool:
        """Whether this process runs a part of the mesh, and other processes the rest."""
        if self.described is not None or self.process.count == 1:
            return False
        owners = {*self.device_owners.values()}
        return len(owners) > 1 and self.process.index in owners

    @functools.cached_property
    def first_device(self) -> jax.Device:
        """The first device of this process, or of all devices if this process has none."""
        own = (d for d, owner in self.device_owners.items() if owner == self.process.index)
        return next(own, self.devices[0])

    def check_can_run(self) -> None:
        """Raise an error if the devices are only described, so that nothing can run on them."""
        if self.described is not None:
            if self.is_described_gpu:
                instead = f"jaxdist.testing.virtual_devices({len(self.devices)}) for CPU devices"
            else:
                virtual = self.described.replace("described:", "virtual:")
                instead = f"{virtual!r}, which runs on CPU devices"
            raise DeviceError(
                f"{name_call()} needs devices, and {self.described!r} is a description of "
                f"{len(self.devices)} devices.\n\n"
                "Programs can be compiled for a description, and cannot run on it.\n\n"
                "Use strategy.lower(step, args).compile() to see the program that would run, with "
                f"jax.ShapeDtypeStruct for arrays; or {instead}."
            )

    def replica_mesh(self, replica: int) -> Mesh:
        """Return the mesh of one replica's logical devices."""
        shape = tuple(self.mesh.shape[a] for a in self.logical_axes)
        devices = self.device_grid[replica].reshape(shape)
        return Mesh(devices, self.logical_axes, axis_types=(AxisType.Auto,) * len(shape))

    def __repr__(self) -> str:
        what = f"{self.num_replicas} replicas x {self.num_logical} logical on {self.platform}"
        if self.num_virtual is not None:
            places = f"{self.num_places} device(s) of {self.platform}"
            what = f"{self.num_virtual} virtual replicas on {places}"
        axes = f"axes {dict(self.mesh.shape)}, replicas over {self.replica_axes}"
        return f"ReplicaMesh({what}, {axes})"


def build(
    devices: Sequence[jax.Device],
    *,
    num_logical: int = 1,
    described: str | None = None,
    spmd: bool = False,
) -> ReplicaMesh:
    """Build the mesh of a strategy from devices listed replica by replica."""
    grid = np.asarray(devices, dtype=object).reshape(-1, num_logical)
    # Axis types are always passed: the default differs between `Mesh` and `jax.make_mesh`.
    # With Explicit axes `shard_map` rejects arrays that are not yet sharded over them.
    mesh = Mesh(grid, (REPLICA_AXIS, LOGICAL_AXIS), axis_types=(AxisType.Auto, AxisType.Auto))
    # A description is seen from its first process, since reading the current one would start JAX.
    last = max(d.process_index for d in devices)
    process = get_current_process() if described is None else Process(0, last + 1)
    return ReplicaMesh(mesh, (REPLICA_AXIS,), described=described, spmd=spmd, process=process)


@functools.lru_cache(maxsize=256)
def make_auto(mesh: Mesh) -> Mesh:
    """Return the mesh with all axes Auto; the mesh itself if all axes are Auto."""
    if all(kind is AxisType.Auto for kind in mesh.axis_types):
        return mesh
    return Mesh(mesh.devices, mesh.axis_names, axis_types=(AxisType.Auto,) * mesh.devices.ndim)


def make_auto_sharding(sharding: Any) -> Any:
    """Return the same sharding on a mesh without Explicit axes; other values unchanged."""
    if not isinstance(sharding, NamedSharding) or not isinstance(sharding.mesh, Mesh):
        return sharding
    auto = make_auto(sharding.mesh)
    if auto is sharding.mesh:
        return sharding
    return NamedSharding(auto, sharding.spec, memory_kind=sharding.memory_kind)


@called("MirroredStrategy")
def adopt(mesh: Mesh, replica_axes: Sequence[str] | str | None) -> ReplicaMesh:
    """Build the `ReplicaMesh` of a strategy around a user's mesh."""
    remedy = "Build one with jax.sharding.Mesh(devices, axis_names), or leave mesh out."
    check_instance("mesh", mesh, Mesh, "a jax.sharding.Mesh", remedy)
    names = mesh.axis_names
    # Do not guess the axes: on a mesh ("data", "model"), copies over both axes would be wrong.
    if replica_axes is None:
        raise refuse(
            f"mesh with the axes {names}, and no replica_axes.",
            "replica_axes names the axes along which each device runs a copy of the step.",
            f"Pass for instance replica_axes=({names[0]!r},).",
        )
    axes = (replica_axes,) if isinstance(replica_axes, str) else tuple(replica_axes)
    unknown = [a for a in axes if a not in names]
    if unknown or not axes or len(set(axes)) != len(axes):
        what = f"{unknown} is not among them" if unknown else f"{axes} is empty or repeats a name"
        raise refuse(
            f"mesh with the axes {names}, and replica_axes={axes}: {what}.",
            "replica_axes are names of axes of the mesh.",
            f"Pass one or more of {names}, each once.",
        )
    kinds = dict(zip(names, mesh.axis_types, strict=True))
    manual = [a for a, kind in kinds.items() if kind is AxisType.Manual]
    if manual:
        raise refuse(
            f"mesh with the axes {names}; {manual} are Manual.",
            "Axes of a strategy's mesh are Explicit or Auto; a step makes its replica axes manual "
            "itself.",
            "Make the mesh with jax.make_mesh(shape, names), or with "
            "axis_types=(jax.sharding.AxisType.Auto, ...).",
        )
    return ReplicaMesh(mesh, axes)
