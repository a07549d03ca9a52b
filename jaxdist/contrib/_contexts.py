"""Functions of `tf.contrib.distribute` that return or check the context of the caller."""

from jaxdist import _replica
from jaxdist._called import called, refuse
from jaxdist._replica import ReplicaContext
from jaxdist._strategies import Strategy, get_replica_context
from jaxdist.errors import ContextError


def get_cross_replica_context() -> Strategy | None:
    """Return the strategy of the caller's cross-replica context, or None in another context.

    Example:
        >>> strategy = MirroredStrategy()
        >>> with strategy.scope():
        ...     jaxdist.contrib.get_cross_replica_context() is strategy
        True
        >>> jaxdist.contrib.get_cross_replica_context() is None
        True

    Source:
        `tf.contrib.distribute.get_cross_replica_context`.
    """
    frame = _replica.current_frame()
    if frame is None or frame.replica is not None:
        return None
    strategy: Strategy = frame.strategy
    return strategy


@called("require_replica_context")
def require_replica_context(replica_ctx: ReplicaContext) -> None:
    """Raise an error if `replica_ctx` is not the context of the caller.

    Raises:
        ContextError: The caller is in another context.

    Example:
        >>> def step():
        ...     jaxdist.contrib.require_replica_context(get_replica_context())
        >>> MirroredStrategy().run(step)

    Source:
        `tf.contrib.distribute.require_replica_context`.
    """
    found = get_replica_context()
    if found is not replica_ctx:
        raise refuse(
            f"replica_ctx={replica_ctx!r}, and the context of the caller is {found!r}.",
            "A replica context belongs to the step that requested it, and ends with it.",
            "Call jaxdist.get_replica_context() inside the function that you pass to strategy.run.",
            kind=ContextError,
        )
