"""A dataset whose batches are shared out over the replicas and put on the devices ahead of use."""

import contextlib
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import jax

from jaxdist import _validate
from jaxdist._typing import PyTree
from jaxdist.data._assemble import GROUP_CALLER, SPLIT_CALLER, Assembler, Grouper, Splitter
from jaxdist.data._cardinality import UNKNOWN_CARDINALITY
from jaxdist.data._context import InputContext
from jaxdist.data._iterator import DistributedIterator
from jaxdist.data._options import InputOptions, check_for_dataset, check_for_function
from jaxdist.data._place import Placer
from jaxdist.data._sources import GroupReader, ParallelReader, Reader, Source
from jaxdist.mesh import ReplicaMesh

S = TypeVar("S")
CheckContext = Callable[[], None]


class DistributedDataset(Iterable[PyTree]):
    """A dataset as a strategy gives it: each element is the batch of one step.

    Made by `Strategy.experimental_distribute_dataset` and
    `Strategy.distribute_datasets_from_function`. Every leaf of a batch is a `PerReplica`, or a
    plain array where the strategy has one replica. Each `for` over it begins anew.

    Example:
        >>> strategy = MirroredStrategy(["cpu:0", "cpu:1"])
        >>> dataset = strategy.experimental_distribute_dataset([np.arange(4), np.arange(4, 8)])
        >>> isinstance(dataset, DistributedDataset), [len(b.values) for b in dataset]
        (True, [2, 2])

    Source:
        `tf.distribute.DistributedDataset`.
    """

    def __init__(
        self,
        describe: str,
        open_reader: Callable[[], Reader],
        assembler: Callable[[], Assembler],
        *,
        depth: int,
        cardinality: int,
        check_context: CheckContext | None,
    ) -> None:
        self._describe = describe
        self._open_reader = open_reader
        self._assembler = assembler
        self._depth = depth
        self._cardinality = cardinality
        self._check_context = check_context
        self._spec: PyTree = None
        self._has_spec = False
        self._begun: DistributedIterator | None = None

    def __iter__(self) -> DistributedIterator:
        begun, self._begun = self._begun, None
        return self._begin() if begun is None else begun

    def _begin(self) -> DistributedIterator:
        return DistributedIterator(
            self._open_reader(),
            self._assembler,
            depth=self._depth,
            check_context=self._check_context,
        )

    @property
    def element_spec(self) -> PyTree:
        """Shapes and dtypes of what one replica gets of a batch, read from the first one.

        Nothing is lost by asking: the pass that is begun for it is the next one that `iter`
        gives. Later batches may have other shapes if the dataset has.

        Raises:
            OutOfRangeError: The dataset is empty.
        """
        if not self._has_spec:
            self._begun = self._begun or self._begin()
            self._spec, self._has_spec = self._begun.element_spec, True
        return self._spec

    @property
    def cardinality(self) -> int:
        """Batches in one pass, `INFINITE_CARDINALITY`, or `UNKNOWN_CARDINALITY`.

        Counted where the dataset has a `len`; there is no `len` of the distributed dataset, as
        in `tf.distribute`.
        """
        return self._cardinality

    def reduce(self, initial_state: S, reduce_func: Callable[[S, PyTree], S]) -> S:
        """Go through one pass, carrying a state from batch to batch.

        Args:
            initial_state: The state before the first batch.
            reduce_func: Takes the state and a batch, and returns the next state.

        Returns:
            The state after the last batch; `initial_state` if there is none.

        Example:
            >>> data = MirroredStrategy().experimental_distribute_dataset(
            ...     jaxdist.data.batches(np.arange(32), 8))
            >>> data.reduce(0, lambda count, batch: count + 1)
            4
        """
        _validate.is_callable("DistributedDataset.reduce", reduce_func)
        state = initial_state
        with iter(self) as iterator:
            for batch in iterator:
                state = reduce_func(state, batch)
        return state

    def __repr__(self) -> str:
        return f"DistributedDataset({self._describe})"


def distribute_dataset(
    dataset: Any,
    layout: ReplicaMesh,
    options: InputOptions | None = None,
    *,
    check_context: CheckContext | None = None,
) -> DistributedDataset:
    """Share out each element of `dataset`, a global batch, over the replicas.

    Shapes:
        In: every leaf `[B, ...]`, with `B` a multiple of the number of replicas `R`.
        Out: `PerReplica` of local `[B / R, ...]`, replica 0 with the first rows; with one
        replica the plain array `[B, ...]`.

    Cost:
        One copy of each leaf from the host, made by a thread ahead of use. No collective.

    Guarantees:
        At most `experimental_per_replica_buffer_size` elements are read beyond those taken.
        A batch does not change when the source overwrites the arrays that it gave.
        An error of the dataset arrives after the batches before it.

    Args:
        dataset: Iterable of pytrees of arrays: a list, a loader, `batches(...)`, a generator
            (one pass only), or a function without arguments that makes one for each pass.
        layout: The mesh of the strategy.
        options: How to read ahead and where to put batches.
        check_context: Called before each batch is given; raises where it cannot be.

    Raises:
        ArgumentTypeError: `dataset` is not an iterable of batches.
        NotImplementedError: `options` asks for one dataset for each replica.
        ArgumentError: `options` do not go together.
        ShapeError: (when iterating) A batch that cannot be split, or is built otherwise than
            those before it.

    Example:
        >>> layout = jaxdist.mesh.build(jax.devices())
        >>> for batch in distribute_dataset([{"x": np.arange(16)}], layout):
        ...     batch["x"].values[1].tolist()
        [2, 3]

    Source:
        `tf.distribute.Strategy.experimental_distribute_dataset`.
    """
    options = options or InputOptions()
    check_for_dataset(options)
    source = Source(SPLIT_CALLER, dataset)
    placer = Placer(
        layout,
        fetches=options.experimental_fetch_to_device,
        gives_up_memory=source.gives_up_memory,
    )
    return DistributedDataset(
        f"{source!r} over {layout.num_replicas} replicas",
        source.open,
        lambda: Splitter(placer, layout.num_replicas),
        depth=max(options.experimental_per_replica_buffer_size, 0),
        cardinality=source.cardinality,
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
        In: every leaf `[b, ...]`, the batch of one replica, or a scalar; the same shape for all
        replicas of one step.
        Out: `PerReplica` of local `[b, ...]`; with one replica the plain array.

    Cost:
        One copy of each leaf from the host, made by a thread ahead of use. No collective.

    Args:
        dataset_fn: Takes an `InputContext` and returns a dataset (as `distribute_dataset` takes
            them) of per-replica batches. It is called now, once, and not again when iterating;
            with `InputReplicationMode.PER_REPLICA` once for each replica.
        layout: The mesh of the strategy.
        options: How to read ahead, where to put batches, how often to call `dataset_fn`.
        check_context: Called before each batch is given; raises where it cannot be.

    Raises:
        ArgumentTypeError: `dataset_fn` is not a function, or does not return a dataset.
        ArgumentError: `options` do not go together.
        ShapeError: (when iterating) The last step has too few elements for all replicas, or
            shapes differ between the replicas of one step.

    Example:
        >>> def dataset_fn(context):
        ...     size = context.get_per_replica_batch_size(16)
        ...     return jaxdist.data.batches(np.arange(32), size)
        >>> layout = jaxdist.mesh.build(jax.devices())
        >>> first = next(iter(distribute_datasets_from_function(dataset_fn, layout)))
        >>> first.values[1].tolist()
        [2, 3]

    Source:
        `tf.distribute.Strategy.distribute_datasets_from_function`.
    """
    options = options or InputOptions()
    check_for_function(options)
    _validate.is_callable(GROUP_CALLER, dataset_fn)
    num_replicas, is_per_replica = layout.num_replicas, options.is_per_replica
    devices = _default_devices(layout, options)
    sources = _call(dataset_fn, num_replicas, devices)
    fetches = options.experimental_fetch_to_device or options.experimental_place_dataset_on_device
    placer = Placer(
        layout, fetches=fetches, gives_up_memory=all(s.gives_up_memory for s in sources)
    )

    def open_reader() -> Reader:
        if not is_per_replica:
            return GroupReader(sources[0].open(), num_replicas, placer.keep)
        readers = [_open(s, d) for s, d in zip(sources, devices, strict=True)]
        return ParallelReader(readers, devices, placer.keep)

    return DistributedDataset(
        f"{sources[0]!r} from a function, over {num_replicas} replicas",
        open_reader,
        lambda: Grouper(placer, num_replicas, is_per_replica=is_per_replica),
        depth=max(options.experimental_per_replica_buffer_size, 0),
        cardinality=_cardinality(sources[0].cardinality, 1 if is_per_replica else num_replicas),
        check_context=check_context,
    )


def _default_devices(layout: ReplicaMesh, options: InputOptions) -> list[jax.Device | None]:
    """For each call of the function, JAX's default device while it makes and reads its data."""
    if not options.is_per_replica:
        return [None]
    if not options.experimental_place_dataset_on_device:
        return [None] * layout.num_replicas
    return list(layout.device_grid[:, 0])


def _call(
    dataset_fn: Callable[[InputContext], Any],
    num_replicas: int,
    devices: list[jax.Device | None],
) -> list[Source]:
    sources = []
    for pipeline, device in enumerate(devices):
        context = InputContext(len(devices), pipeline, num_replicas)
        with _on(device):
            sources.append(Source(GROUP_CALLER, dataset_fn(context)))
    return sources


def _open(source: Source, device: jax.Device | None) -> Any:
    with _on(device):
        return source.open()


def _on(device: jax.Device | None) -> contextlib.AbstractContextManager[Any]:
    return contextlib.nullcontext() if device is None else jax.default_device(device)


def _cardinality(elements: int, per_step: int) -> int:
    return elements // per_step if elements > UNKNOWN_CARDINALITY + 1 else elements
