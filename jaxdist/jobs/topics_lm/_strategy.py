"""The strategy of a configuration: replicas of one or of several logical devices."""

import math
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from jaxdist import tpu
from jaxdist._planning import assign_slices, find_logical_shape
from jaxdist._strategies import MirroredStrategy, Strategy, TPUStrategy
from jaxdist._validate import CallerRename
from jaxdist.cluster_resolver import TPUClusterResolver
from jaxdist.errors import ConfigError, TopologyError
from jaxdist.jobs.topics_lm._schema import TopicsConfig
from jaxdist.jobs.topics_lm._slices import (
    add_slices,
    count_device_slices,
    get_slice_index,
    is_in_slice,
)
from jaxdist.tpu.experimental import initialize_tpu_system


def topics_strategy(config: TopicsConfig) -> Strategy:
    """Return the configured strategy.

    On TPUs, and on CPU devices as a virtual slice, it is a `TPUStrategy`; its device assignment
    puts the logical devices of a replica next to each other. On listed devices and on GPUs it is a
    `MirroredStrategy`. Virtual CPU devices must be requested before JAX starts. If the partition
    shards state within slices, replicas have the axes `("slice", "replica")`.
    """
    listed, backend = config.strategy.devices, jax.default_backend()
    if listed != "auto":
        devices = MirroredStrategy(list(listed)).mesh.devices.ravel().tolist()
        return _make_mirrored(devices, config)
    # A GPU has no topology, so there is no device assignment to choose.
    if backend not in ("cpu", "tpu"):
        return _make_mirrored(jax.local_devices(), config)
    name = "" if backend == "tpu" else f"virtual:{config.strategy.virtual_slice}"
    resolver = TPUClusterResolver(name)
    topology = initialize_tpu_system(resolver)
    there = count_device_slices(jax.devices()) if backend == "tpu" else _count_named_slices(config)
    apart = there or 1
    asked = config.strategy.logical_devices
    try:
        with CallerRename("compile_for was given logical=", "strategy.logical_devices is "):
            box = find_logical_shape(topology, apart, asked)
    except TopologyError as error:
        text = str(error)
        named = text.startswith("strategy.logical_devices")
        raise ConfigError(
            text if named else f"strategy.logical_devices is {asked!r}. {text}"
        ) from None
    assignment = assign_slices(topology, box, apart)
    return add_slices(TPUStrategy(resolver, assignment), config, there)


def count_logical_devices(config: TopicsConfig) -> int:
    """Return the number of devices of a replica."""
    asked = config.strategy.logical_devices
    return asked if isinstance(asked, int) else math.prod(_parse_sizes(asked))


def num_cpu_devices(config: TopicsConfig) -> int:
    """Return the number of virtual CPU devices that the configuration needs without TPU or GPU."""
    return tpu.slice_of(config.strategy.virtual_slice).num_cores


def _count_named_slices(config: TopicsConfig) -> int | None:
    """Return the number of slices in a name such as `v5e:2x2*2`; None if it is 1.

    None leaves the number to `strategy.slices`.
    """
    number = tpu.slice_of(config.strategy.virtual_slice).num_slices
    return number if number > 1 else None


def _make_mirrored(devices: Sequence[Any], config: TopicsConfig) -> Strategy:
    count, there = count_logical_devices(config), None
    if is_in_slice(config):
        there = count_device_slices(devices)
        # Sorted by slice, so that each slice is one row of the mesh.
        devices = sorted(devices, key=get_slice_index) if there else devices
    if count == 1:
        return add_slices(MirroredStrategy(devices), config, there)
    if len(devices) % count:
        fitting = [n for n in range(1, len(devices) + 1) if len(devices) % n == 0]
        raise ConfigError(
            f"strategy.logical_devices is {count}, and there are {len(devices)} devices.\n\n"
            f"All replicas have the same number of devices.\n\nSet it to one of {fitting}."
        )
    grid = np.asarray(devices, dtype=object).reshape(-1, count)
    made = MirroredStrategy(mesh=Mesh(grid, ("replica", "logical")), replica_axes=("replica",))
    return add_slices(made, config, there)


def _parse_sizes(text: str) -> list[int]:
    return [int(size) for size in text.split("x")]
