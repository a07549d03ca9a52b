"""`MirroredStrategy` and `OneDeviceStrategy`."""

import dataclasses
from collections.abc import Sequence
from typing import Any, final

import jax
from jax.sharding import Mesh

from jaxdist import _gpus
from jaxdist import _mesh as meshes
from jaxdist._called import called, refuse
from jaxdist._collectives import read_communication
from jaxdist._devices import runtime
from jaxdist._strategies.base import Strategy
from jaxdist._strategies.deterministic import add_virtual_replicas, check_no_ops_with_deterministic
from jaxdist._strategies.over_processes import check_one_process
from jaxdist.errors import DeviceError


@final
class MirroredStrategy(Strategy):
    """A replica on each device; state is mirrored, and all-reduced updates keep it equal.

    In a job of several processes, name the devices of one process explicitly:
    `MirroredStrategy(jax.local_devices())`.

    Args:
        devices: Names or `jax.Device`s; None or `[]` means all accelerators of this process, or
            all CPU devices if there are no accelerators. `"described:h100:4x8"` means GPUs that
            this machine does not have: programs can be lowered and compiled for them.
        cross_device_ops: The implementation of reductions, inside `run` and in `reduce`; None is
            XLA (`experimental.CollectiveAllReduce`).
        mesh: Your own mesh instead of `devices`. Arguments and results are on it, with its axis
            types.
        replica_axes: With `mesh`: the axes over which replicas run. The other axes are the logical
            devices of each replica; GSPMD partitions over them.
        options: Default `experimental.CommunicationOptions` of calls that pass none.
        experimental_hints: The older name of `options`.
        deterministic: Whether training gives the same bits on any number of devices that divides
            the number of virtual replicas. True means 8 virtual replicas; an integer is their
            number, a power of two. A step sees the virtual replicas, and each device runs several
            of them one after the other. See `docs/ideas/deterministic.md`.

    Raises:
        SeveralProcessesError: In a job of several processes, devices of other processes, or
            default devices.
        DeviceError: Devices that do not exist, are listed twice, or are of different kinds.
        TopologyError: A description that is not valid, or names an unknown GPU.
        MissingExtraError: Described GPUs, without JAX's CUDA plugin or ptxas.
        ArgumentError: Both `devices` and `mesh`, axes that the mesh does not have, devices that
            do not divide the virtual replicas, or `cross_device_ops` with `deterministic`.
        ArgumentTypeError: `cross_device_ops` is not a `CrossDeviceOps`.

    Example:
        >>> MirroredStrategy().num_replicas_in_sync
        8
        >>> mesh = jax.make_mesh((4, 2), ("data", "model"))
        >>> MirroredStrategy(mesh=mesh, replica_axes=("data",)).num_replicas_in_sync
        4

    Source:
        `tf.distribute.MirroredStrategy`.
    """

    @called("MirroredStrategy")
    def __init__(
        self,
        devices: Sequence[str | jax.Device] | None = None,
        cross_device_ops: Any = None,
        *,
        mesh: Mesh | None = None,
        replica_axes: Sequence[str] | str | None = None,
        options: Any = None,
        experimental_hints: Any = None,
        deterministic: bool | int = False,
    ) -> None:
        communication = read_communication(cross_device_ops, options, experimental_hints)
        check_no_ops_with_deterministic(cross_device_ops, deterministic)
        # The user's mesh is kept, with its axis names: the step may name them in `jax.lax.psum`.
        if mesh is not None:
            if devices is not None:
                raise refuse(
                    "both devices and mesh.",
                    "A mesh has its devices already.",
                    "Leave devices out: MirroredStrategy(mesh=mesh).",
                )
            layout, were_chosen = meshes.adopt(mesh, replica_axes), True
            # The devices may be only described.
            described = _gpus.find_description(layout.devices)
            if described is not None:
                layout = dataclasses.replace(layout, described=described)
        elif replica_axes is not None:
            raise refuse(
                f"replica_axes={replica_axes!r} without a mesh.",
                "replica_axes are names of axes of mesh.",
                "Pass the mesh too, MirroredStrategy(mesh=mesh, "
                "replica_axes=mesh.axis_names[:1]), or leave replica_axes out.",
            )
        else:
            # A string is a sequence of letters, which would be read as names of devices.
            if isinstance(devices, (str, jax.Device)):
                devices = [devices]
            given: Sequence[str | jax.Device] = [] if devices is None else devices
            named = _read_description(given) or runtime.distinct_devices(given)
            described = _gpus.find_description(named)
            layout = meshes.build(named or runtime.default_devices(), described=described)
            were_chosen = bool(named)
        check_one_process(layout, were_chosen=were_chosen)
        layout = add_virtual_replicas(layout, deterministic)
        self._set_up(layout, communication)


def _read_description(given: Any) -> list[jax.Device] | None:
    """Return the described GPUs of `["described:h100:4x8"]`; None for all other devices.

    Raises:
        DeviceError: The name of a plan, `h100:4x8`, or a description beside other devices.
    """
    # Values that are not lists are rejected together with other invalid devices.
    names = given if isinstance(given, (list, tuple)) else ()
    of_plans = [
        d
        for d in names
        if isinstance(d, str) and (d.startswith(_gpus.DESCRIBED) or _gpus.is_gpu_of_table(d))
    ]
    if not of_plans:
        return None
    if len(names) == 1 and of_plans[0].startswith(_gpus.DESCRIBED):
        return _gpus.describe_gpus(_gpus.cluster_of(of_plans[0], "devices"))
    name = of_plans[0].removeprefix(_gpus.DESCRIBED)
    raise refuse(
        f"devices={list(names)!r}.",
        "GPUs that this machine does not have are one string that begins with 'described:', "
        "without other devices.",
        f"Pass MirroredStrategy('{_gpus.DESCRIBED}{name}').",
        kind=DeviceError,
    )


@final
class OneDeviceStrategy(Strategy):
    """One replica on one device: the reference for the same code on many devices.

    In a job of several processes, each process has its own strategy, which is logged.

    Args:
        device: `"cpu:0"`, `"GPU:1"`, a full documented name, or a `jax.Device`.
        options: Communication options. One replica communicates nothing, so they have no effect,
            which is logged.
        experimental_hints: The older name of `options`.
        deterministic: As for `MirroredStrategy`: this device runs the virtual replicas one after
            the other, and gives the bits of a `MirroredStrategy` with the same number of them.

    Raises:
        DeviceError: No such device.
        SeveralProcessesError: A device of another process.
        ArgumentError: The number of virtual replicas is not a power of two.

    Example:
        >>> strategy = OneDeviceStrategy("cpu:1")
        >>> strategy.run(lambda x: x + 1, (np.float32(1),)).devices() == {jax.devices()[1]}
        True

    Source:
        `tf.distribute.OneDeviceStrategy`.
    """

    @called("OneDeviceStrategy")
    def __init__(
        self,
        device: str | jax.Device,
        *,
        options: Any = None,
        experimental_hints: Any = None,
        deterministic: bool | int = False,
    ) -> None:
        layout = meshes.build([runtime.device_from_name(device, "OneDeviceStrategy(device=...)")])
        check_one_process(layout, were_chosen=True)
        layout = add_virtual_replicas(layout, deterministic)
        self._set_up(layout, read_communication(None, options, experimental_hints))

    # With virtual replicas the device has several replicas, so values stay `PerReplica`.
    @property
    def _unwraps(self) -> bool:
        return self.layout.num_virtual is None
