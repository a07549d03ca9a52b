"""Small values of the data API: the pipeline or replica that data is for, and an optional batch."""

import dataclasses

from jaxdist._called import called
from jaxdist._typing import PyTree
from jaxdist._validate import as_integer
from jaxdist.errors import ArgumentError


@dataclasses.dataclass(frozen=True, repr=False, eq=False)
class InputContext:
    """The part of the input that a dataset function makes, and the number of replicas.

    `Strategy.distribute_datasets_from_function` passes one to its function, once for each input
    pipeline.

    Args:
        num_input_pipelines: Number of input pipelines of the job.
        input_pipeline_id: Number of this pipeline, from 0.
        num_replicas_in_sync: Number of replicas in one step, over all pipelines.

    Example:
        >>> context = InputContext(num_replicas_in_sync=4)
        >>> context.get_per_replica_batch_size(32)
        8
        >>> print(context)
        jaxdist.InputContext(input pipeline id 0, total: 1)

    Source:
        `tf.distribute.InputContext`.
    """

    num_input_pipelines: int = 1
    input_pipeline_id: int = 0
    num_replicas_in_sync: int = 1

    @called("InputContext")
    def __post_init__(self) -> None:
        as_integer("num_input_pipelines", self.num_input_pipelines, least=1)
        as_integer("input_pipeline_id", self.input_pipeline_id, least=0)
        as_integer("num_replicas_in_sync", self.num_replicas_in_sync, least=1)

    @called("InputContext.get_per_replica_batch_size")
    def get_per_replica_batch_size(self, global_batch_size: int) -> int:
        """Return the number of rows that one replica takes of a global batch.

        Args:
            global_batch_size: Number of rows of one step, over all replicas.

        Raises:
            ArgumentError: `global_batch_size` is not a multiple of the number of replicas.

        Example:
            >>> InputContext(num_replicas_in_sync=6).get_per_replica_batch_size(12)
            2
        """
        remedy = "Pass the rows of one step, over all replicas."
        as_integer("global_batch_size", global_batch_size, least=0, remedy=remedy)
        rows, rest = divmod(global_batch_size, self.num_replicas_in_sync)
        if rest:
            # Never suggest a batch size of 0.
            down = rows * self.num_replicas_in_sync
            lower = f"{down} or " if down else ""
            raise ArgumentError(
                "InputContext.get_per_replica_batch_size cannot share out global_batch_size="
                f"{global_batch_size} over num_replicas_in_sync={self.num_replicas_in_sync}.\n\n"
                f"{global_batch_size} is not a multiple of {self.num_replicas_in_sync}: "
                f"{rest} row(s) would be left over.\n\n"
                f"Use {lower}{down + self.num_replicas_in_sync}."
            )
        return rows

    def __repr__(self) -> str:
        return (
            f"jaxdist.InputContext(input pipeline id {self.input_pipeline_id}, "
            f"total: {self.num_input_pipelines})"
        )


@dataclasses.dataclass(frozen=True, repr=False)
class ValueContext:
    """The replica for which a function makes a value.

    `Strategy.experimental_distribute_values_from_function` passes one to its function, once for
    each replica.

    Args:
        replica_id_in_sync_group: Number of the replica, from 0.
        num_replicas_in_sync: Number of replicas in one step.

    Example:
        >>> print(ValueContext(0, 2))
        jaxdist.ValueContext(replica id 0, total replicas in sync: 2)

    Source:
        `tf.distribute.experimental.ValueContext`.
    """

    replica_id_in_sync_group: int = 0
    num_replicas_in_sync: int = 1

    @called("ValueContext")
    def __post_init__(self) -> None:
        as_integer("replica_id_in_sync_group", self.replica_id_in_sync_group, least=0)
        as_integer("num_replicas_in_sync", self.num_replicas_in_sync, least=1)

    def __repr__(self) -> str:
        return (
            f"jaxdist.ValueContext(replica id {self.replica_id_in_sync_group}, "
            f"total replicas in sync: {self.num_replicas_in_sync})"
        )


class OptionalBatch:
    """A batch, or the end of the data.

    Source:
        `tf.experimental.Optional`, as `get_next_as_optional` returns it.
    """

    __slots__ = ("_held",)

    def __init__(self, held: tuple[PyTree, ...]) -> None:
        # A tuple of at most one batch: a batch may be any pytree, so no value can mark the end.
        self._held = held

    def has_value(self) -> bool:
        """Whether there is a batch."""
        return bool(self._held)

    def get_value(self) -> PyTree:
        """Return the batch.

        Raises:
            ArgumentError: The `OptionalBatch` is empty.
        """
        if not self._held:
            raise ArgumentError(
                "get_value() was called on an empty OptionalBatch.\n\n"
                "An OptionalBatch is empty when the dataset has ended.\n\n"
                "Check has_value() first."
            )
        return self._held[0]

    def __repr__(self) -> str:
        return f"OptionalBatch({self._held[0]!r})" if self._held else "OptionalBatch(empty)"
