"""Arguments for functions that make data: which pipeline or replica they make it for."""

import dataclasses

from jaxdist._validate import as_integer
from jaxdist.errors import ArgumentError


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

    __slots__ = ("_input_pipeline_id", "_num_input_pipelines", "_num_replicas_in_sync")

    def __init__(
        self,
        num_input_pipelines: int = 1,
        input_pipeline_id: int = 0,
        num_replicas_in_sync: int = 1,
    ) -> None:
        caller = "InputContext"
        as_integer(caller, "num_input_pipelines", num_input_pipelines, least=1)
        as_integer(caller, "input_pipeline_id", input_pipeline_id, least=0)
        as_integer(caller, "num_replicas_in_sync", num_replicas_in_sync, least=1)
        self._num_input_pipelines = num_input_pipelines
        self._input_pipeline_id = input_pipeline_id
        self._num_replicas_in_sync = num_replicas_in_sync

    @property
    def num_input_pipelines(self) -> int:
        """Number of input pipelines of the job."""
        return self._num_input_pipelines

    @property
    def input_pipeline_id(self) -> int:
        """Number of this pipeline, from 0."""
        return self._input_pipeline_id

    @property
    def num_replicas_in_sync(self) -> int:
        """Number of replicas in one step, over all pipelines."""
        return self._num_replicas_in_sync

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
        caller = "InputContext.get_per_replica_batch_size"
        remedy = "Pass the rows of one step, over all replicas."
        as_integer(caller, "global_batch_size", global_batch_size, least=0, remedy=remedy)
        rows, rest = divmod(global_batch_size, self._num_replicas_in_sync)
        if rest:
            # Suggest no batch size of 0.
            down = rows * self._num_replicas_in_sync
            lower = f"{down} or " if down else ""
            raise ArgumentError(
                "InputContext.get_per_replica_batch_size cannot share out global_batch_size="
                f"{global_batch_size} over num_replicas_in_sync={self._num_replicas_in_sync}.\n\n"
                f"{global_batch_size} is not a multiple of {self._num_replicas_in_sync}: "
                f"{rest} row(s) would be left over.\n\n"
                f"Use {lower}{down + self._num_replicas_in_sync}."
            )
        return rows

    def __repr__(self) -> str:
        return (
            f"jaxdist.InputContext(input pipeline id {self._input_pipeline_id}, "
            f"total: {self._num_input_pipelines})"
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

    def __post_init__(self) -> None:
        caller = "ValueContext"
        as_integer(caller, "replica_id_in_sync_group", self.replica_id_in_sync_group, least=0)
        as_integer(caller, "num_replicas_in_sync", self.num_replicas_in_sync, least=1)

    def __repr__(self) -> str:
        return (
            f"jaxdist.ValueContext(replica id {self.replica_id_in_sync_group}, "
            f"total replicas in sync: {self.num_replicas_in_sync})"
        )
