"""Functions that turn a user's dataset into the dataset of a strategy."""

import functools
from collections.abc import Callable
from typing import Any

import jax

from jaxdist import _validate
from jaxdist._called import called
from jaxdist._mesh import ReplicaMesh
from jaxdist._processes import Agreement
from jaxdist.data._assembler import Grouper, Splitter
from jaxdist.data._context import InputContext
from jaxdist.data._dataset import DistributedDataset
from jaxdist.data._iterator import DistributedIterator
from jaxdist.data._options import (
    InputOptions,
    check_is_not_sharded,
    check_is_shared,
    check_placement,
    checked_options,
)
from jaxdist.data._place import FixedRows, Placer
from jaxdist.data._reading.ahead import UNKNOWN_CARDINALITY, cardinality_of_steps
from jaxdist.data._reading.elements import ElementReader
from jaxdist.data._reading.partial_batch import GROUP_CALLER, SPLIT_CALLER, Drops, PartialBatch
from jaxdist.data._reading.readers import GroupReader, ParallelReader, Reader, use_default_device
from jaxdist.data._reading.sources import Source
from jaxdist.data._sharing.distribute import (
    Shared,
    check_policy,
    is_shared,
    number_pipelines,
    share_dataset,
    share_function,
)

CheckContext = Callable[[], None]


@called(SPLIT_CALLER)
def distribute_dataset(
    dataset: Any,
    layout: ReplicaMesh,
    options: InputOptions | None = None,
    *,
    check_context: CheckContext | None = None,
    agreement: Agreement | None = None,
) -> DistributedDataset:
    """Return a dataset that splits each element of `dataset`, a global batch, over the replicas.

    Shapes:
        In: every leaf `[B, ...]`.
        Out: `PerReplica` of local `[B / R, ...]`, where replica 0 has the first rows; with one
        replica the plain array `[B, ...]`. `PartialBatch` says what happens if `B` is not a
        multiple of the number of replicas `R`.

    Cost:
        One copy of each leaf from the host, which a thread makes in advance. No collective. With
        several processes, one exchange over their key-value store for each pass, or for each step
        if the dataset does not report the rows of its batches.

    Guarantees:
        A pass returns each example exactly once (with `PartialBatch.DROP`: at most once).
        At most `experimental_per_replica_buffer_size` elements are read beyond those taken.
        A batch does not change when the source overwrites the arrays that it returned.
        An error of the dataset is raised after the batches before it.

    Args:
        dataset: Iterable of pytrees of arrays: `batches(...)`, a Grain or tf.data dataset, a
            list, a loader, a generator (one pass only), or a function without arguments that
            makes one for each pass.
        layout: The mesh of the strategy.
        options: How many batches to prefetch, where to put them, what to do with uneven ones.
        check_context: A function to call before each batch; it raises if a batch cannot be
            returned in the current context.
        agreement: How the processes agree on rows; None means the agreement of the job.

    Raises:
        ArgumentTypeError: `dataset` is not an iterable of batches.
        NotImplementedError: `options` ask for one dataset for each replica.
        ArgumentError: `options` contradict each other.
        ShapeError: (when iterating) A leaf is a scalar, the structure of a batch differs from
            that of earlier batches, or `partial_batch` does not allow its size.

    Example:
        >>> layout = jaxdist._mesh.build(jax.devices())
        >>> for batch in distribute_dataset([{"x": np.arange(16)}], layout):
        ...     batch["x"].values[1].tolist()
        [2, 3]

    Source:
        `tf.distribute.Strategy.experimental_distribute_dataset`.
    """
    options = checked_options(options)
    check_is_shared(options)
    check_placement(options)
    source = Source(dataset, "dataset")
    policy = check_policy(options, source.dataset, layout)
    # One `Placer` and one `Drops` for all passes: a dropped batch is logged once, not once in
    # each epoch. The `Splitter` is new in each pass, since the first batch decides its shapes.
    placer = Placer(
        layout,
        fetches=options.experimental_fetch_to_device,
        has_exclusive_arrays=source.has_exclusive_arrays,
        balanced=options.balance_rows,
    )
    num_replicas = layout.num_replicas
    drops = Drops(num_replicas)

    @called(SPLIT_CALLER)
    def make_splitter(_: Any, rows: int) -> Splitter:
        read = ElementReader()
        fixed = FixedRows(num_replicas, source.batch_size or rows)
        return Splitter(read, placer, num_replicas, options.partial_batch, drops, fixed)

    shared = Shared(source.open, make_splitter, is_countable=True)
    if is_shared(layout):
        shared = share_dataset(source, policy, layout, options, placer, drops, agreement)
    cardinality = (
        source.cardinality_of_multiples(num_replicas)
        if options.partial_batch is PartialBatch.DROP
        else cardinality_of_steps([source.cardinality], 1, options.partial_batch)
    )
    described = f"{source!r} over {num_replicas} replicas"
    return _make_dataset(described, shared, cardinality, options, check_context)


@called(GROUP_CALLER)
def distribute_datasets_from_function(
    dataset_fn: Callable[[InputContext], Any],
    layout: ReplicaMesh,
    options: InputOptions | None = None,
    *,
    check_context: CheckContext | None = None,
    agreement: Agreement | None = None,
) -> DistributedDataset:
    """Return a dataset that gives each element of the dataset of `dataset_fn` to one replica.

    Shapes:
        In: every leaf `[b, ...]`, the batch of one replica, or a scalar.
        Out: `PerReplica` of local `[b, ...]`; with one replica the plain array. With
        `PartialBatch.UNEVEN` the shapes of one step may differ, and a replica whose data has ended
        gets `[0, ...]`, or 0 for a scalar. With `PAD`, `b` is that of the first step, and the
        mask of a scalar is a scalar.

    Cost:
        One copy of each leaf from the host, which a thread makes in advance. No collective.

    Args:
        dataset_fn: A function of an `InputContext` that returns a dataset (of the kinds that
            `distribute_dataset` takes) of per-replica batches. This function calls it once in each
            process, for the replicas of that process, and iterating does not call it again. With
            `InputReplicationMode.PER_REPLICA` it is called once for each replica.
        layout: The mesh of the strategy.
        options: How many batches to prefetch, where to put them, how often to call `dataset_fn`,
            what to do with steps that have too few elements or elements of different shapes.
        check_context: A function to call before each batch; it raises if a batch cannot be
            returned in the current context.
        agreement: How the processes agree on rows; None means the agreement of the job.

    Raises:
        ArgumentTypeError: `dataset_fn` is not a function, or does not return a dataset.
        ArgumentError: `options` contradict each other.
        ShapeError: (when iterating) The structure of an element differs from that of earlier
            elements, or `partial_batch` does not allow a step.

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
    options = checked_options(options)
    check_placement(options)
    check_is_not_sharded(options)
    _validate.check_callable(dataset_fn, "dataset_fn")
    num_replicas, is_per_replica = layout.num_replicas, options.is_per_replica
    is_divided = is_shared(layout)
    count = len(layout.local_replicas) if is_divided else num_replicas
    sources, devices = _make_sources(dataset_fn, layout, options)
    # Batches of a dataset made on the device are device arrays already. Without `fetches` the
    # placer would copy them back to the host.
    fetches = options.experimental_fetch_to_device or options.experimental_place_dataset_on_device
    placer = Placer(
        layout, fetches=fetches, has_exclusive_arrays=all(s.has_exclusive_arrays for s in sources)
    )

    drops = Drops(num_replicas)
    batch_size = max(s.batch_size for s in sources)

    def open_reader() -> Reader:
        if not is_per_replica:
            return GroupReader(sources[0].open(), count, placer.snapshot)
        readers = [s.open_on(d) for s, d in zip(sources, devices, strict=True)]
        return ParallelReader(readers, devices, placer.snapshot)

    @called(GROUP_CALLER)
    def make_grouper(_: Any, rows: int) -> Grouper:
        read = ElementReader()
        fixed = FixedRows(1, batch_size or rows)
        policy = options.partial_batch
        return Grouper(read, placer, num_replicas, policy, drops, fixed, is_per_replica)

    shared = Shared(open_reader, make_grouper, is_countable=True)
    if is_divided:
        given = (open_reader, batch_size, layout, options, placer, drops)
        shared = share_function(*given, agreement)
    cardinality = cardinality_of_steps(
        [s.cardinality for s in sources],
        1 if is_per_replica else num_replicas,
        options.partial_batch,
    )
    described = f"{sources[0]!r} from a function, over {num_replicas} replicas"
    return _make_dataset(described, shared, cardinality, options, check_context)


def _make_dataset(
    described: str,
    shared: Shared,
    cardinality: int,
    options: InputOptions,
    check_context: CheckContext | None,
) -> DistributedDataset:
    start_pass = functools.partial(
        DistributedIterator,
        shared.open_reader,
        shared.make_assembler,
        depth=max(options.experimental_per_replica_buffer_size, 0),
        check_context=check_context,
    )
    known = cardinality if shared.is_countable else UNKNOWN_CARDINALITY
    return DistributedDataset(described, start_pass, known)


@called(GROUP_CALLER)
def _make_sources(
    dataset_fn: Callable[[InputContext], Any], layout: ReplicaMesh, options: InputOptions
) -> tuple[list[Source], list[jax.Device | None]]:
    """Return the datasets that this process reads, and JAX's default device for each of them."""
    num_replicas = layout.num_replicas
    pipelines = [number_pipelines(layout)]
    if options.is_per_replica:
        own = layout.local_replicas if is_shared(layout) else range(num_replicas)
        pipelines = [(num_replicas, replica) for replica in own]
    places = options.experimental_place_dataset_on_device
    sources: list[Source] = []
    devices: list[jax.Device | None] = []
    for count, number in pipelines:
        devices.append(layout.device_grid[number, 0] if places else None)
        with use_default_device(devices[-1]):
            made = dataset_fn(InputContext(count, number, num_replicas))
            sources.append(Source(made, "dataset_fn()"))
    return sources, devices
