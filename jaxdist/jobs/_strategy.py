"""Makes the strategy of a configuration: replicas of one or several logical devices, in slices."""

import contextlib
import logging
import math
import os
from collections import Counter
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh

from jaxdist import tpu
from jaxdist._called import called
from jaxdist._cluster import find_task
from jaxdist._mesh import ReplicaMesh
from jaxdist._parameter_server import MinSizePartitioner, ParameterServerStrategy
from jaxdist._planning import assign_slices, find_logical_shape, make_axes, put_on_axes
from jaxdist._strategies import MirroredStrategy, MultiWorkerMirroredStrategy, Strategy, TPUStrategy
from jaxdist.cluster_resolver import (
    ClusterSpec,
    SimpleClusterResolver,
    TPUClusterResolver,
    choose_resolver,
    find_source,
    list_training_tasks,
)
from jaxdist.cost import worker_of
from jaxdist.errors import ArgumentTypeError, ClusterError, ConfigError, TopologyError
from jaxdist.jobs._config.schema import (
    JobConfig,
    StrategyConfig,
    check_config,
    count_devices_of_replica,
    count_logical_devices,
    list_inner_axes,
    name_devices,
)
from jaxdist.jobs._partitions import PARTITIONS
from jaxdist.tpu.experimental import initialize_tpu_system

_LOG = logging.getLogger("jaxdist")


def get_slice_index(device: Any) -> int:
    """Return the slice index of a TPU, or the NVLink domain of a GPU; 0 if it has none."""
    if device.platform == "gpu":
        return worker_of(device)
    index: int | None = getattr(device, "slice_index", None)
    return index or 0


def count_device_slices(devices: Sequence[Any]) -> int | None:
    """Return the number of TPU slices or NVLink domains; None if the devices do not show it.

    GPUs of a single domain do not: the configuration may divide them.

    Raises:
        ConfigError: Slices have different numbers of devices.
    """
    is_tpu = all(
        d.platform == "tpu" and getattr(d, "slice_index", None) is not None for d in devices
    )
    is_gpu = all(d.platform == "gpu" for d in devices)
    if not is_tpu and not is_gpu:
        return None
    counts = Counter(map(get_slice_index, devices))
    if is_gpu and len(counts) == 1:
        return None
    if len(set(counts.values())) > 1:
        raise ConfigError(
            f"strategy.devices has different numbers of devices in its slices, or NVLink domains: "
            f"{dict(sorted(counts.items()))}.\n\nAll slices have the same number of devices.\n\n"
            f"List {min(counts.values())} of each."
        )
    return len(counts)


def add_axes(strategy: Strategy, asked: StrategyConfig, there: int | None) -> Strategy:
    """Return the strategy; with axes for slices and within replicas if the configuration has any.

    Args:
        strategy: The strategy. Its replicas are in the order of their slices.
        asked: The configured strategy. It gives the number of slices if the devices do not.
        there: The number of slices of the devices; None if unknown.

    Raises:
        ConfigError: The devices and the configuration have different numbers of slices, or the
            number of replicas is not a multiple of the number of slices.
    """
    in_slices = PARTITIONS[asked.partition].is_in_slice
    inner, logical = list_inner_axes(asked), count_logical_devices(asked)
    axes = make_axes(in_slices=in_slices, inner=inner, logical=logical)
    if not in_slices:
        return put_on_axes(strategy, axes, 1)
    # 1 is the default, so it does not contradict the devices.
    if there is not None and asked.slices not in (1, there):
        raise ConfigError(
            f"strategy.slices is {asked.slices}, and the devices are in {there} slice(s).\n\n"
            "It is the number of slices that the devices are in.\n\n"
            f"Leave it out, or set it to {there}."
        )
    slices = there or asked.slices
    replicas = strategy.num_replicas_in_sync
    if replicas % slices:
        fitting = [n for n in range(1, replicas + 1) if replicas % n == 0]
        below = max(n for n in fitting if n < slices)
        near = [below, *[n for n in fitting if n > slices][:1]]
        raise ConfigError(
            f"strategy.slices is {slices}, and there are {replicas} replicas.\n\n"
            "All slices have the same number of replicas.\n\nSet strategy.slices to "
            f"{' or '.join(map(str, near))}."
        )
    return put_on_axes(strategy, axes, slices)


# The least bytes of a shard of a variable.
_LEAST_SHARD = 2**20


@called("jobs.make_strategy")
def make_strategy(config: JobConfig) -> Strategy:
    """Return the strategy of a configuration.

    On TPUs, and on CPU devices arranged as a slice, it is a `TPUStrategy`. Its device
    assignment puts the logical devices of a replica next to each other. On all other devices, and
    with `deterministic`, it is a `MirroredStrategy`. Virtual CPU devices must be requested before
    JAX starts. If the partition shards state within slices, replicas have the axes
    `("slice", "replica")`. With `stages`, `positions` or `experts` the axes `"stage"`,
    `"positions"` and `"experts"` come after those of replicas, in this order, and an axis
    `"logical"` only for several logical devices. With the kind `"multi_worker_mirrored"` it is
    a `MultiWorkerMirroredStrategy` over the processes of `TF_CONFIG`. With the kind
    `"parameter_server"` it is a `ParameterServerStrategy` on the tasks of `TF_CONFIG`, or on
    servers and workers in this process if `TF_CONFIG` names no servers.

    Example:
        >>> from jaxdist.jobs import DigitsConfig
        >>> make_strategy(DigitsConfig()).num_replicas_in_sync
        8
    """
    check_config(config)
    asked = config.strategy
    if asked.kind == "multi_worker_mirrored":
        # Do this first: the processes must join before JAX starts.
        every = MultiWorkerMirroredStrategy(deterministic=asked.deterministic)
        return _put_inner_axes(every, asked)
    if asked.kind == "parameter_server":
        return _make_with_servers(asked)
    _warn_of_other_processes()
    backend = jax.default_backend()
    if asked.devices != "auto":
        listed = MirroredStrategy(list(asked.devices)).mesh.devices.ravel().tolist()
        return _make_mirrored(listed, asked)
    devices = jax.local_devices()
    if backend == "cpu":
        # The process may have more devices, from XLA_FLAGS or from an earlier request.
        devices = devices[: count_cpu_devices(config)]
    is_slice = backend == "tpu" or (backend == "cpu" and isinstance(asked.virtual_devices, str))
    if is_slice and asked.deterministic is False:
        return _make_tpu("" if backend == "tpu" else str(asked.virtual_devices), asked)
    # GPUs have no topology, so there is no device assignment to choose.
    return _make_mirrored(devices, asked)


def _warn_of_other_processes() -> None:
    """Log that this process trains alone, if it is one of several."""
    # A cluster that cannot be read stops no training that does not need one.
    with contextlib.suppress(ClusterError, ArgumentTypeError):
        source = find_source(os.environ)
        if source.name == "none":
            return
        # Other environments have signs only for several processes.
        if source.name == "tf_config" and len(list_training_tasks(choose_resolver())) < 2:
            return
        _LOG.warning(
            "strategy.kind is 'auto', so this process trains alone, and %s describes a job of "
            "several processes. With strategy.kind='multi_worker_mirrored' they train together.",
            source.because,
        )


def count_cpu_devices(config: JobConfig) -> int:
    """Return the number of virtual CPU devices that the configuration needs without TPU or GPU.

    Example:
        >>> from jaxdist.jobs import DigitsConfig
        >>> count_cpu_devices(DigitsConfig())
        8
    """
    asked = config.strategy.virtual_devices
    return asked if isinstance(asked, int) else tpu.slice_of(asked).num_cores


@called("jobs.train")
def is_chief(config: JobConfig) -> bool:
    """Return whether this process shows the progress and writes metrics and pictures.

    This does not start JAX.

    Example:
        >>> from jaxdist.jobs import DigitsConfig
        >>> is_chief(DigitsConfig())
        True
    """
    if config.strategy.kind != "multi_worker_mirrored":
        return True
    # An evaluator, or a process without a cluster, works alone.
    return find_task(choose_resolver()).number in (None, 0)


@called("jobs.train")
def is_server_task(config: JobConfig) -> bool:
    """Return whether this process is a parameter server or a worker of a cluster.

    Example:
        >>> from jaxdist.jobs import DigitsConfig
        >>> is_server_task(DigitsConfig())
        False
    """
    has_servers = config.strategy.kind == "parameter_server"
    return has_servers and find_task(choose_resolver()).job in ("ps", "worker")


def has_cluster(config: JobConfig) -> bool:
    """Return whether this is one of several processes, whose launcher chooses the devices."""
    several = config.strategy.kind == "multi_worker_mirrored"
    return several and len(list_training_tasks(choose_resolver())) > 1


def count_replicas(config: JobConfig) -> int:
    """Return the number of replicas on the listed devices, or on virtual CPU devices."""
    asked = config.strategy
    listed = asked.devices
    devices = count_cpu_devices(config) if listed == "auto" else len(listed)
    return max(1, devices // count_devices_of_replica(asked))


def _make_with_servers(asked: StrategyConfig) -> Strategy:
    """Return the strategy on the tasks of a cluster, or with all tasks in this process."""
    bound = None if asked.max_staleness == "any" else asked.max_staleness
    resolver = choose_resolver()
    cluster = resolver.cluster_spec()
    if cluster and "ps" not in cluster.jobs:
        raise ConfigError(
            "strategy.kind is 'parameter_server', and the cluster of this process has the jobs "
            f"{cluster.jobs} and no parameter servers (ps).\n\n"
            "Variables are on parameter servers.\n\n"
            "Start the tasks with jaxdist launch --ps 1 --workers 2 train CONFIG, or unset "
            "TF_CONFIG to have them all in this process."
        )
    if not cluster:
        jobs = {"chief": 1, "ps": asked.servers, "worker": asked.workers}
        spec = {job: [f"{job}{n}:0" for n in range(count)] for job, count in jobs.items()}
        cluster = ClusterSpec(spec)
        resolver = SimpleClusterResolver(cluster, task_type="chief", task_id=0, rpc_layer="local")
    servers = cluster.num_tasks("ps")
    # Small variables stay whole; a table with many rows has a part on each server.
    partitioner = MinSizePartitioner(_LEAST_SHARD, servers) if servers > 1 else None
    return ParameterServerStrategy(resolver, partitioner, max_staleness=bound)


def _make_tpu(virtual_slice: str, asked: StrategyConfig) -> Strategy:
    """Return the strategy on a virtual slice, or on the TPUs of this job if its name is empty."""
    resolver = TPUClusterResolver(f"virtual:{virtual_slice}" if virtual_slice else "")
    topology = initialize_tpu_system(resolver)
    if virtual_slice:
        # The name of a single slice leaves the number of slices to `strategy.slices`.
        number = tpu.slice_of(virtual_slice).num_slices
        there = number if number > 1 else None
    else:
        there = count_device_slices(jax.devices())
    apart = there or 1
    # The stages of a replica are neighbours, as its logical devices are.
    shape = count_devices_of_replica(asked) if list_inner_axes(asked) else asked.logical_devices
    name = name_devices(asked)
    try:
        box = find_logical_shape(topology, apart, shape)
    except TopologyError as error:
        text = str(error).replace("compile_for was given logical=", f"{name} is ", 1)
        named = text.startswith(name)
        raise ConfigError(text if named else f"{name} is {shape!r}. {text}") from None
    assignment = assign_slices(topology, box, apart)
    return add_axes(TPUStrategy(resolver, assignment), asked, there)


def _put_inner_axes(strategy: Strategy, asked: StrategyConfig) -> Strategy:
    """Return a strategy whose replicas have the axes of the configuration, on neighbours.

    Raises:
        ConfigError: The devices of a replica do not divide those of the processes.
    """
    inner = list_inner_axes(asked)
    if not inner:
        return strategy
    devices, size = strategy.mesh.devices.ravel(), math.prod(inner.values())
    if len(devices) % size:
        fitting = [n for n in range(1, len(devices) + 1) if len(devices) % n == 0]
        name = name_devices(asked).removeprefix("strategy.logical_devices times ")
        raise ConfigError(
            f"{name} is {size}, and the processes have {len(devices)} devices."
            "\n\nAll replicas have the same number of devices.\n\n"
            f"Set it to one of {fitting}."
        )
    axes = ("replica", *inner)
    mesh = Mesh(devices.reshape(-1, *inner.values()), axes, axis_types=(AxisType.Auto,) * len(axes))
    layout = ReplicaMesh(mesh, ("replica",), process=strategy.layout.process)
    return strategy._on(layout)


def _make_mirrored(devices: Sequence[Any], asked: StrategyConfig) -> Strategy:
    count, there = count_devices_of_replica(asked), None
    if PARTITIONS[asked.partition].is_in_slice:
        there = count_device_slices(devices)
        # Sort by slice, so that each slice is one row of the mesh.
        devices = sorted(devices, key=get_slice_index) if there else devices
    if len(devices) % count:
        fitting = [n for n in range(1, len(devices) + 1) if len(devices) % n == 0]
        raise ConfigError(
            f"{name_devices(asked)} is {count}, and there are {len(devices)} devices.\n\n"
            f"All replicas have the same number of devices.\n\nSet it to one of {fitting}."
        )
    made = MirroredStrategy(
        mesh=Mesh(np.asarray(devices, object).reshape(-1, count), ("replica", "logical")),
        replica_axes=("replica",),
        deterministic=asked.deterministic,
    )
    return add_axes(made, asked, there)
