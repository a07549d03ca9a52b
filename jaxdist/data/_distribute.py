"""From a user's dataset to the dataset of a strategy."""

import contextlib
from collections.abc import Callable
from typing import Any

import jax

from jaxdist import _validate
from jaxdist._mesh import ReplicaMesh
from jaxdist.data._context import InputContext
from jaxdist.data._dataset import CheckContext, DistributedDataset
from jaxdist.data._group import Grouper
from jaxdist.data._options import (
    InputOptions,
    check_for_dataset,
    check_for_function,
    checked_options,
)
from jaxdist.data._place import Placer
from jaxdist.data._reading.assemble import GROUP_CALLER, SPLIT_CALLER, Drops
from jaxdist.data._reading.cardinality import cardinality_of_steps
from jaxdist.data._reading.partial_batch import PartialBatch
from jaxdist.data._reading.readers import GroupReader, ParallelReader, Reader
from jaxdist.data._reading.sources import Source
from jaxdist.data._split import Splitter


def distribute_dataset(
    dataset: Any,
    layout: ReplicaMesh,
    options: InputOptions | None = None,
    *,
    check_context: CheckContext | None = None,
) -> DistributedDataset:
    """Share out each element of `dataset`, a global batch, over the replicas.

    Shapes:
        In: every leaf `[B, ...]`.
        Out: `PerReplica` of local `[B / R, ...]`, replica 0 with the first rows; with one
        replica the plain array `[B, ...]`. Where `B` is not a multiple of the number of replicas
        `R`: as `PartialBatch` says.

    Cost:
        One copy of each leaf from the host, made by a thread ahead of use. No collective.

    Guarantees:
        Each example is given exactly once per pass (with `PartialBatch.DROP`: at most once).
        At most `experimental_per_replica_buffer_size` elements are read beyond those taken.
        A batch does not change when the source overwrites the arrays that it gave.
        An error of the dataset arrives after the batches before it.

    Args:
        dataset: Iterable of pytrees of arrays: `batches(...)`, a Grain or tf.data dataset, a
            list, a loader, a generator (one pass only), or a function without arguments that
            makes one for each pass.
        layout: The mesh of the strategy.
        options: How to read ahead, where to put batches, what to do with uneven ones.
        check_context: Called before each batch is given; raises where it cannot be.

    Raises:
        ArgumentTypeError: `dataset` is not an iterable of batches.
        NotImplementedError: `options` asks for one dataset for each replica.
        ArgumentError: `options` do not go together.
        ShapeError: (when iterating) A scalar among the leaves, a batch that is built otherwise
            than those before it, or one that `partial_batch` does not allow.

    Example:
        >>> layout = jaxdist._mesh.build(jax.devices())
        >>> for batch in distribute_dataset([{"x": np.arange(16)}], layout):
        ...     batch["x"].values[1].tolist()
        [2, 3]

    Source:
        `tf.distribute.Strategy.experimental_distribute_dataset`.
    """
    options = checked_options(SPLIT_CALLER, options)
    check_for_dataset(options)
    source = Source(SPLIT_CALLER, dataset)
    placer = Placer(
        layout,
        fetches=options.experimental_fetch_to_device,
        has_exclusive_arrays=source.has_exclusive_arrays,
    )
    drops = Drops(SPLIT_CALLER, layout.num_replicas)
    return DistributedDataset(
        f"{source!r} over {layout.num_replicas} replicas",
        source.open,
        lambda rows: Splitter(
            placer, layout.num_replicas, options.partial_batch, drops, source.batch_size or rows
        ),
        depth=max(options.experimental_per_replica_buffer_size, 0),
        cardinality=source.cardinality_of_multiples(layout.num_replicas)
        if options.partial_batch is PartialBatch.DROP
        else cardinality_of_steps([source.cardinality], 1, options.partial_batch),
        check_context=check_context,
    )


def distribute_datasets_from_function(
    dataset_fn: Callable[[InputContext], Any],
    layout: ReplicaMesh,
    options: InputOptions | None = None,
    *,
    check_context: CheckContext | None = None,
) -> DistributedDataset:
    """Give each element of the dataset that `dataset_fn` makes to one replica.

    Shapes:
        In: every leaf `[b, ...]`, the batch of one replica, or a scalar.
        Out: `PerReplica` of local `[b, ...]`; with one replica the plain array. With
        `PartialBatch.UNEVEN` the shapes of one step may differ, and a replica whose data has ended
        gets `[0, ...]`, or 0 for a scalar. With `PAD`, `b` is that of the first step, and a
        scalar has a scalar for its mask.

    Cost:
        One copy of each leaf from the host, made by a thread ahead of use. No collective.

    Args:
        dataset_fn: Takes an `InputContext` and returns a dataset (as `distribute_dataset` takes
            them) of per-replica batches. It is called now, once, and not again when iterating;
            with `InputReplicationMode.PER_REPLICA` once for each replica.
        layout: The mesh of the strategy.
        options: How to read ahead, where to put batches, how often to call `dataset_fn`, what
            to do with steps whose elements are too few or of different shapes.
        check_context: Called before each batch is given; raises where it cannot be.

    Raises:
        ArgumentTypeError: `dataset_fn` is not a function, or does not return a dataset.
        ArgumentError: `options` do not go together.
        ShapeError: (when iterating) An element that is built otherwise than those before it, or
            a step that `partial_batch` does not allow.

    Example:
        >>> def dataset_fn(context):
        ...     size = context.get_per_replica_batch_size(16)
        ...     return jaxdist.data.batches(np.arange(32), size)
        >>> layout = jaxdist._mesh.build(jax.devices())
        >>> first = next(iter(distribute_datasets_from_function(dataset_fn, layout)))
        >>> first.values[1].tolist()
        [2, 3]

    Source:
        `tf.distribute.Strategy.distribute_datasets_from_function`.
    """
    options = checked_options(GROUP_CALLER, options)
    check_for_function(options)
    _validate.is_callable(GROUP_CALLER, dataset_fn, "dataset_fn")
    num_replicas, is_per_replica = layout.num_replicas, options.is_per_replica
    devices = _default_devices(layout, options)
    sources = _make_sources(dataset_fn, num_replicas, devices)
    fetches = options.experimental_fetch_to_device or options.experimental_place_dataset_on_device
    placer = Placer(
        layout, fetches=fetches, has_exclusive_arrays=all(s.has_exclusive_arrays for s in sources)
    )

    drops = Drops(GROUP_CALLER, num_replicas)
    batch_size = max(s.batch_size for s in sources)

    def open_reader() -> Reader:
        if not is_per_replica:
            return GroupReader(sources[0].open(), num_replicas, placer.snapshot)
        readers = [_open_on(s, d) for s, d in zip(sources, devices, strict=True)]
        return ParallelReader(readers, devices, placer.snapshot)

    return DistributedDataset(
        f"{sources[0]!r} from a function, over {num_replicas} replicas",
        open_reader,
        lambda rows: Grouper(
            placer,
            num_replicas,
            options.partial_batch,
            drops,
            batch_size or rows,
            is_per_replica=is_per_replica,
        ),
        depth=max(options.experimental_per_replica_buffer_size, 0),
        cardinality=cardinality_of_steps(
            [s.cardinality for s in sources],
            1 if is_per_replica else num_replicas,
            options.partial_batch,
        ),
        check_context=check_context,
    )


def _default_devices(layout: ReplicaMesh, options: InputOptions) -> list[jax.Device | None]:
    """For each call of the function, JAX's default device while it makes and reads its data."""
    if not options.is_per_replica:
        return [None]
    if not options.experimental_place_dataset_on_device:
        return [None] * layout.num_replicas
    return list(layout.device_grid[:, 0])


def _make_sources(
    dataset_fn: Callable[[InputContext], Any],
    num_replicas: int,
    devices: list[jax.Device | None],
) -> list[Source]:
    sources = []
    for pipeline, device in enumerate(devices):
        context = InputContext(len(devices), pipeline, num_replicas)
        with _use_default_device(device):
            sources.append(Source(GROUP_CALLER, dataset_fn(context)))
    return sources


def _open_on(source: Source, device: jax.Device | None) -> Any:
    with _use_default_device(device):
        return source.open()


def _use_default_device(device: jax.Device | None) -> contextlib.AbstractContextManager[Any]:
    return contextlib.nullcontext() if device is None else jax.default_device(device)
