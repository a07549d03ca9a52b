"""A replica that computes a batch alone, because its rows cannot be split evenly."""

from typing import Any


class Alone:
    """Stands for the context of a replica whose results are those of all rows.

    A function for workers has one trace, and so equal shapes on all replicas of a worker. A batch
    that cannot be split evenly, such as the last one, is computed by each replica as a whole: all
    have equal results, and random layers draw the numbers of replica 0.
    """

    num_replicas_in_sync = 1
    replica_id_in_sync_group = 0

    def all_reduce(self, op: str, value: Any) -> Any:
        """Return the value, which is the sum over one replica."""
        del op
        return value
