"""Every kind of strategy there is: the laws of a strategy are tested on each row."""

import dataclasses
import os
from collections.abc import Callable

import jax
import numpy as np
from jax.sharding import AxisType, Mesh

import jaxdist


@dataclasses.dataclass(frozen=True)
class Row:
    """How to make a strategy, and what it must then say of itself."""

    name: str
    make: Callable[[], jaxdist.Strategy]
    num_replicas: int
    num_logical: int = 1


CENTRAL = jaxdist.experimental.CentralStorageStrategy


def _cpus(count: int) -> list[str]:
    return [f"cpu:{i}" for i in range(count)]


def _mesh(shape: tuple[int, ...], names: tuple[str, ...]) -> Mesh:
    devices = np.asarray(jax.devices("cpu")[: int(np.prod(shape))], dtype=object).reshape(shape)
    return Mesh(devices, names, axis_types=(AxisType.Auto,) * len(names))


def _on_mesh(
    shape: tuple[int, ...], names: tuple[str, ...], replica_axes: tuple[str, ...]
) -> Callable[[], jaxdist.Strategy]:
    return lambda: jaxdist.MirroredStrategy(mesh=_mesh(shape, names), replica_axes=replica_axes)


def _on_tpu(
    name: str, computation_shape: list[int] | None = None, num_replicas: int = 1
) -> Callable[[], jaxdist.Strategy]:
    def make() -> jaxdist.Strategy:
        resolver = jaxdist.cluster_resolver.TPUClusterResolver(name)
        topology = jaxdist.tpu.experimental.initialize_tpu_system(resolver)
        assignment = jaxdist.tpu.experimental.DeviceAssignment.build(
            topology, computation_shape, num_replicas=num_replicas
        )
        return jaxdist.TPUStrategy(resolver, experimental_device_assignment=assignment)

    return make


STRATEGIES = [
    Row("default", jaxdist.get_strategy, 1),
    Row("one_device", lambda: jaxdist.OneDeviceStrategy("cpu:0"), 1),
    Row("one_device_not_the_first", lambda: jaxdist.OneDeviceStrategy("cpu:3"), 1),
    Row("mirrored_1", lambda: jaxdist.MirroredStrategy(_cpus(1)), 1),
    Row("mirrored_2", lambda: jaxdist.MirroredStrategy(_cpus(2)), 2),
    Row("mirrored_3", lambda: jaxdist.MirroredStrategy(_cpus(3)), 3),
    Row("mirrored_all", jaxdist.MirroredStrategy, 8),
    Row("mesh_of_one_axis", _on_mesh((8,), ("data",), ("data",)), 8),
    Row("mesh_with_logical_axis", _on_mesh((4, 2), ("data", "model"), ("data",)), 4, 2),
    Row("mesh_with_logical_axis_first", _on_mesh((2, 4), ("model", "data"), ("data",)), 4, 2),
    Row("mesh_with_two_replica_axes", _on_mesh((2, 4), ("a", "b"), ("a", "b")), 8),
    Row("virtual_4_on_2", lambda: jaxdist.MirroredStrategy(_cpus(2), deterministic=4), 4),
    Row("tpu_virtual_2_cores", _on_tpu("virtual:v4:2x2x1", [1, 1, 1, 2], 4), 4, 2),
    Row("multi_worker_alone", jaxdist.MultiWorkerMirroredStrategy, 8),
    Row("central_storage_default", CENTRAL, 1),
    Row("central_storage_2", lambda: CENTRAL(_cpus(2), "cpu:3"), 2),
    Row("central_storage_pinned_3", lambda: CENTRAL(_cpus(3), "pinned_host"), 3),
    Row("mesh_with_replica_axes_swapped", _on_mesh((2, 4), ("a", "b"), ("b", "a")), 8),
]

# In a process of a job the contract tests run with all of its processes; see
# `tests/strategies/multi_worker/contracts.py`.
REPLICAS_OF_JOB = int(os.environ.get("JAXDIST_TESTS_OF_JOB", "0"))
if REPLICAS_OF_JOB:
    STRATEGIES = [Row("processes", jaxdist.MultiWorkerMirroredStrategy, REPLICAS_OF_JOB)]

# `make accelerator` runs the contract tests with the first device of the machine.
if "JAXDIST_TESTS_ON_DEVICE" in os.environ:
    _FIRST = f"{jax.devices()[0].platform}:0"
    STRATEGIES = [
        Row("one_device", lambda: jaxdist.OneDeviceStrategy(_FIRST), 1),
        Row("mirrored_1", lambda: jaxdist.MirroredStrategy([_FIRST]), 1),
        Row("virtual_4_on_1", lambda: jaxdist.MirroredStrategy([_FIRST], deterministic=4), 4),
    ]
    if len(jax.devices()) > 1:
        STRATEGIES.append(Row("mirrored_all", jaxdist.MirroredStrategy, len(jax.devices())))
