"""The base class of all distributed values."""


class DistributedValues:
    """A value on the replicas of a strategy.

    Users do not create one directly: `Strategy.run` and datasets return `PerReplica`.

    Example:
        >>> isinstance(PerReplica([1, 2]), DistributedValues)
        True

    Source:
        `tf.distribute.DistributedValues`.
    """

    __slots__ = ()
