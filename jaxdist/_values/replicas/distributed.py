"""The marker that all distributed values share."""


class DistributedValues:
    """A value that lives on the replicas of a strategy.

    Not made directly: `PerReplica` is what `Strategy.run` and datasets give.

    Example:
        >>> isinstance(PerReplica([1, 2]), DistributedValues)
        True

    Source:
        `tf.distribute.DistributedValues`.
    """

    __slots__ = ()
