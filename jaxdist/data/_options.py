"""Options for prefetching, replicating, splitting and placing a distributed dataset."""

import enum
from typing import Any, NamedTuple

from jaxdist._called import called, refuse
from jaxdist._validate import as_flag, as_integer, check_instance, show
from jaxdist.data._reading.partial_batch import PartialBatch
from jaxdist.data._reading.shard_policy import AutoShardPolicy
from jaxdist.errors import UnsupportedError


class InputReplicationMode(enum.Enum):
    """Choice of how often `distribute_datasets_from_function` calls its function.

    Example:
        >>> InputReplicationMode("PER_REPLICA")
        <InputReplicationMode.PER_REPLICA: 'PER_REPLICA'>

    Source:
        `tf.distribute.InputReplicationMode`.
    """

    PER_WORKER = "PER_WORKER"  # once in each process; the replicas take its elements in turn
    PER_REPLICA = "PER_REPLICA"  # once for each replica; no other replica reads that dataset


class _Fields(NamedTuple):
    experimental_fetch_to_device: bool
    experimental_replication_mode: InputReplicationMode
    experimental_place_dataset_on_device: bool
    experimental_per_replica_buffer_size: int
    partial_batch: PartialBatch
    auto_shard_policy: AutoShardPolicy | None
    balance_rows: bool


class InputOptions(_Fields):
    """Options of `experimental_distribute_dataset` and `distribute_datasets_from_function`.

    A named tuple.

    Args:
        experimental_fetch_to_device: Whether to copy batches to the devices. `False` leaves
            them on the host, as a `PerReplica` of NumPy arrays. `None` becomes `True`.
        experimental_replication_mode: How often `distribute_datasets_from_function` calls its
            function.
        experimental_place_dataset_on_device: Whether to make and read each replica's dataset with
            that replica's device as JAX's default device. Needs `PER_REPLICA` and
            `experimental_fetch_to_device=False`, since its batches are on the device already.
        experimental_per_replica_buffer_size: Number of batches to prefetch for each replica. With
            0 or -1 jaxdist prefetches nothing and starts no thread.
        partial_batch: What to do with a batch that cannot be split evenly over the replicas, and
            with a last step that has fewer elements than replicas.
        auto_shard_policy: The part of the dataset of `experimental_distribute_dataset` that each
            process of a job reads: its files, its rows, or everything. None means the policy in
            the options of a tf.data dataset, and `AUTO` for other datasets.
        balance_rows: Whether `experimental_distribute_dataset` divides the rows of a batch as
            evenly as possible: 28 rows on 8 replicas are 4, 4, 4, 4, 3, 3, 3 and 3. The default
            is the division of TensorFlow, 4, 4, 4, 4, 4, 4, 4 and 0, which leaves replicas
            without rows more often. With the policies `FILE` and `OFF`, each process divides the
            rows that it has read.

    Raises:
        ArgumentError: `experimental_replication_mode` is not an `InputReplicationMode`,
            `partial_batch` not a `PartialBatch`, or `auto_shard_policy` not an `AutoShardPolicy`;
            or the buffer size is below -1 or above 65536.
        ArgumentTypeError: The buffer size is not an int, or a flag is not a bool.

    Example:
        >>> InputOptions(experimental_per_replica_buffer_size=2).experimental_fetch_to_device
        True

    Source:
        `tf.distribute.InputOptions`; `partial_batch`, `auto_shard_policy` and `balance_rows` are
        new.
    """

    __slots__ = ()

    @called("InputOptions")
    def __new__(
        cls,
        experimental_fetch_to_device: bool | None = None,
        experimental_replication_mode: InputReplicationMode = InputReplicationMode.PER_WORKER,
        experimental_place_dataset_on_device: bool = False,
        experimental_per_replica_buffer_size: int = 1,
        partial_batch: PartialBatch = PartialBatch.UNEVEN,
        auto_shard_policy: AutoShardPolicy | None = None,
        balance_rows: bool = False,
    ) -> "InputOptions":
        fetch = True if experimental_fetch_to_device is None else experimental_fetch_to_device
        options = super().__new__(
            cls,
            fetch,
            experimental_replication_mode,
            experimental_place_dataset_on_device,
            experimental_per_replica_buffer_size,
            partial_batch,
            auto_shard_policy,
            balance_rows,
        )
        for name in _FLAGS:
            as_flag(name, getattr(options, name))
        as_integer(
            "experimental_per_replica_buffer_size",
            experimental_per_replica_buffer_size,
            least=-1,
            most=MAX_BUFFER_SIZE,
            remedy="Pass 1, which reads one batch ahead, or 0, which reads none.",
        )
        mode = experimental_replication_mode
        _check_member("experimental_replication_mode", mode, InputReplicationMode)
        _check_member("partial_batch", partial_batch, PartialBatch)
        if auto_shard_policy is not None:
            _check_member("auto_shard_policy", auto_shard_policy, AutoShardPolicy)
        return options

    @property
    def is_per_replica(self) -> bool:
        """Whether each replica reads its own dataset."""
        return self.experimental_replication_mode is InputReplicationMode.PER_REPLICA


# Each prefetched batch takes memory; a number above this is a mistake.
MAX_BUFFER_SIZE = 1 << 16

_FLAGS = ("experimental_fetch_to_device", "experimental_place_dataset_on_device", "balance_rows")


def _check_member(name: str, value: Any, kind: type[enum.Enum]) -> None:
    if not isinstance(value, kind):
        room = "jaxdist.experimental" if kind is AutoShardPolicy else "jaxdist"
        raise refuse(
            f"{name}={show(value)}.",
            f"{name} is one of {', '.join(map(str, kind))}.",
            f"Pass for instance {name}={room}.{next(iter(kind))}.",
        )


def checked_options(options: Any) -> InputOptions:
    """Return `options`, or the default options for None."""
    if options is None:
        return InputOptions()
    check_instance(
        "options",
        options,
        InputOptions,
        "a jaxdist.InputOptions",
        "Pass options=jaxdist.InputOptions(experimental_fetch_to_device=True), or leave it out.",
    )
    return options


@called("experimental_distribute_dataset")
def check_is_shared(options: InputOptions) -> None:
    """Check that `options` select one dataset, whose batches the replicas share."""
    if options.is_per_replica:
        raise refuse(
            "options with experimental_replication_mode=PER_REPLICA.",
            "It distributes one dataset, whose batches the replicas share.",
            "Use distribute_datasets_from_function, which calls its function once for each "
            "replica.",
            kind=UnsupportedError,
        )


@called("distribute_datasets_from_function")
def check_is_not_sharded(options: InputOptions) -> None:
    """Check that `options` leave the sharding of the data to the user's function."""
    if options.balance_rows:
        raise refuse(
            "options with balance_rows=True.",
            "Each replica takes a whole element of the dataset of its function, and no element is "
            "divided.",
            "Leave balance_rows out; or use experimental_distribute_dataset, which divides global "
            "batches.",
        )
    policy = options.auto_shard_policy
    if policy not in (None, AutoShardPolicy.OFF):
        raise refuse(
            f"options with auto_shard_policy={policy.name}.",
            "Its function makes the dataset of each process, and nothing shards that further.",
            "Leave auto_shard_policy out, and shard the dataset in the function by "
            "context.num_input_pipelines and context.input_pipeline_id; or use "
            "experimental_distribute_dataset.",
        )


def check_placement(options: InputOptions) -> None:
    """Check that datasets can be made on the devices, if `options` request it."""
    if not options.experimental_place_dataset_on_device:
        return
    if not options.is_per_replica:
        raise refuse(
            "InputOptions(experimental_place_dataset_on_device=True, "
            f"experimental_replication_mode={options.experimental_replication_mode}).",
            "A dataset is placed on the device of a replica only if that replica has its own "
            "dataset: InputReplicationMode.PER_REPLICA.",
            "Leave experimental_place_dataset_on_device out, or call "
            "distribute_datasets_from_function with "
            "experimental_replication_mode=InputReplicationMode.PER_REPLICA and "
            "experimental_fetch_to_device=False.",
        )
    if options.experimental_fetch_to_device:
        raise refuse(
            "InputOptions(experimental_place_dataset_on_device=True, experimental_fetch_to_device="
            f"{options.experimental_fetch_to_device}).",
            "A dataset that is on the device has its batches there already, so they cannot be "
            "fetched to it. None means True.",
            "Pass experimental_fetch_to_device=False.",
        )
