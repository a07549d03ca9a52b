"""The strategy of a configuration: replicas of one or of several logical devices."""

import itertools
import math
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from jaxdist import tpu
from jaxdist.cluster_resolver import TPUClusterResolver
from jaxdist.errors import ConfigError
from jaxdist.strategies import MirroredStrategy, Strategy, TPUStrategy
from jaxdist.tpu.experimental import DeviceAssignment, Topology, initialize_tpu_system
from jaxdist.training.topics_lm._schema import TopicsConfig


def topics_strategy(config: TopicsConfig) -> Strategy:
    """The configured strategy.

    On TPUs, and on CPU devices laid out as the virtual slice, it is a `TPUStrategy` whose device
    assignment has the logical devices of a replica side by side; on listed devices and on GPUs a
    `MirroredStrategy`. The virtual devices must have been asked for before.
    """
    listed, backend = config.strategy.devices, jax.default_backend()
    count = num_logical(config)
    if listed != "auto":
        return _mirrored(MirroredStrategy(list(listed)).mesh.devices.ravel().tolist(), count)
    if backend not in ("cpu", "tpu"):
        return _mirrored(jax.local_devices(), count)
    name = "" if backend == "tpu" else f"virtual:{config.strategy.virtual_slice}"
    resolver = TPUClusterResolver(name)
    topology = initialize_tpu_system(resolver)
    shape = computation_shape(topology, config.strategy.logical_devices)
    assignment = DeviceAssignment.build(
        topology,
        computation_shape=list(shape),
        num_replicas=math.prod(topology.mesh_shape.tolist()) // math.prod(shape),
    )
    return TPUStrategy(resolver, experimental_device_assignment=assignment)


def num_logical(config: TopicsConfig) -> int:
    """Devices of one replica."""
    asked = config.strategy.logical_devices
    return asked if isinstance(asked, int) else math.prod(_sizes(asked))


def num_cpu_devices(config: TopicsConfig) -> int:
    """Virtual CPU devices that the configuration needs where there is no accelerator."""
    return tpu.slice_of(config.strategy.virtual_slice).num_cores


def computation_shape(topology: Topology, asked: int | str) -> tuple[int, ...]:
    """The box of cores of one replica: both cores of a chip first, then what is most compact.

    Raises:
        ConfigError: No such box fills the topology; the numbers that do are listed.

    Example:
        >>> computation_shape(jaxdist.tpu.slice_of("v5e:2x4").topology, 2)
        (2, 1, 1, 1)
        >>> computation_shape(jaxdist.tpu.slice_of("v4:2x2x1").topology, 4)
        (2, 1, 1, 2)
        >>> computation_shape(jaxdist.tpu.slice_of("v5e:2x4").topology, "1x4")
        (1, 4, 1, 1)
    """
    mesh = tuple(topology.mesh_shape.tolist())
    boxes = list(itertools.product(*(_divisors(size) for size in mesh)))
    if isinstance(asked, str):
        sizes = _sizes(asked)
        padded = (*sizes, *(1,) * (3 - len(sizes)), 1)[:4] if len(sizes) < 4 else tuple(sizes)
        fitting = [box for box in boxes if box == padded]
    else:
        fitting = [box for box in boxes if math.prod(box) == asked]
    if not fitting:
        counts = sorted({math.prod(box) for box in boxes})
        raise ConfigError(
            f"strategy.logical_devices is {asked!r}, and replicas of that many devices do not "
            f"fill a mesh of {'x'.join(map(str, mesh))} cores.\n\n"
            f"Set it to one of {counts}, or to a shape whose sizes divide those of the mesh."
        )
    return min(fitting, key=lambda box: (-box[3], max(box[:3]), [-n for n in box[:3]]))


def _mirrored(devices: Sequence[Any], count: int) -> Strategy:
    if count == 1:
        return MirroredStrategy(devices)
    if len(devices) % count:
        fitting = _divisors(len(devices))
        raise ConfigError(
            f"strategy.logical_devices is {count}, and {len(devices)} devices do not divide by "
            f"it.\n\nSet it to one of {fitting}."
        )
    grid = np.asarray(devices, dtype=object).reshape(-1, count)
    return MirroredStrategy(mesh=Mesh(grid, ("replica", "logical")), replica_axes=("replica",))


def _sizes(text: str) -> list[int]:
    return [int(size) for size in text.split("x")]


def _divisors(size: int) -> list[int]:
    return [n for n in range(1, size + 1) if size % n == 0]
