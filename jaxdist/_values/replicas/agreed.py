"""Shapes of the values of all replicas, where a process holds only its own values."""

from typing import TypeAlias

from jaxdist._values.replicas.per_replica import PerReplica

# Note [Agreed shapes]
# In a job of several processes a `PerReplica` whose values are stored one by one has those of the
# local replicas. Before a dataset gives such a value, the processes have agreed on the shapes of
# all replicas, and the value carries them. So every process can compile the program of the whole
# step without another exchange.

AgreedShapes: TypeAlias = tuple[tuple[int, ...], ...]


def mark_with_shapes(value: PerReplica, shapes: AgreedShapes) -> None:
    """Attach the shape of the value of every replica, in replica order."""
    value._agreed = shapes


def agreed_shapes(value: PerReplica) -> AgreedShapes | None:
    """Return the shape of the value of every replica, or None if it is not known.

    Example:
        >>> from jaxdist._values import agreed_shapes
        >>> agreed_shapes(PerReplica([1, 2])) is None
        True
    """
    # The slot is empty for values that no dataset gave.
    return getattr(value, "_agreed", None)
