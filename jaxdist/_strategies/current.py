"""The current strategy and the current context: in a replica, or across replicas."""

import contextlib
import functools
from collections.abc import Iterator
from typing import Any, NoReturn, final

import jax

from jaxdist import _mesh, _replica
from jaxdist._called import called, refuse
from jaxdist._replica import ReplicaContext
from jaxdist._strategies.base import Strategy
from jaxdist._strategies.contexts import find_own_frame
from jaxdist._validate import check_instance, show
from jaxdist.errors import ContextError, MixedStrategyError


@final
class DefaultStrategy(Strategy):
    """One replica on JAX's default device; `get_strategy()` returns it outside every scope."""

    @property
    def _unwraps(self) -> bool:
        return True

    def __init__(self) -> None:
        self._set_up(_mesh.build([jax.local_devices()[0]]))

    @contextlib.contextmanager
    def _in_scope(self) -> Iterator[Strategy]:
        """Yield without any change; raise an error under another strategy's scope."""
        find_own_frame(self, "scope")
        yield self

    def __copy__(self) -> NoReturn:
        raise _make_copy_error("copy.copy")

    def __deepcopy__(self, memo: dict[int, Any]) -> NoReturn:
        raise _make_copy_error("copy.deepcopy")


def _make_copy_error(copy: str) -> ContextError:
    return ContextError(
        f"{copy} was called on the DefaultStrategy.\n\n"
        "The default strategy is one object for the whole process.\n\n"
        "Use jaxdist.get_strategy() wherever it is needed."
    )


# The strategy is made at its first use, not at import: it needs a device, and JAX's backends must
# not start before the user configures them (`jax.distributed`, virtual devices).
@functools.cache
def _default() -> DefaultStrategy:
    return DefaultStrategy()


@functools.cache
def _default_replica() -> ReplicaContext:
    return ReplicaContext(_default(), traced=False)


def get_strategy() -> Strategy:
    """Return the current strategy; outside every scope, a default one with one replica.

    Example:
        >>> get_strategy().num_replicas_in_sync
        1

    Source:
        `tf.distribute.get_strategy`.
    """
    frame = _replica.current_frame()
    return _default() if frame is None else frame.strategy


def has_strategy() -> bool:
    """Whether the caller is in a scope or a step of a strategy other than the default one.

    Example:
        >>> has_strategy()
        False
        >>> with MirroredStrategy().scope():
        ...     has_strategy()
        True

    Source:
        `tf.distribute.has_strategy`.
    """
    frame = _replica.current_frame()
    return frame is not None and frame.strategy is not _default()


# The annotation is `| Any`, not `| None`: inside a step the context is never None, and a type
# checker would make every step test for it. (`re.Match.group` is annotated in the same way.)
def get_replica_context() -> ReplicaContext | Any:
    """Return the context of the current replica, or None across replicas.

    Returns:
        Inside a step, its `ReplicaContext`. In a strategy's scope, in a merge function and after
        `experimental_set_strategy`, None: code there runs once for all replicas, and uses methods
        of `get_strategy()` (`reduce`, `gather`). Outside every strategy, the context of the default
        strategy, whose `replica_id_in_sync_group` is the Python integer 0.

    Example:
        >>> MirroredStrategy().run(lambda: get_replica_context().num_replicas_in_sync)
        8
        >>> with MirroredStrategy().scope():
        ...     print(get_replica_context())
        None

    Source:
        `tf.distribute.get_replica_context`.
    """
    frame = _replica.current_frame()
    return _default_replica() if frame is None else frame.replica


def in_cross_replica_context() -> bool:
    """Whether the caller is in a strategy's scope or in a merge function.

    Example:
        >>> in_cross_replica_context()
        False

    Source:
        `tf.distribute.in_cross_replica_context`.
    """
    frame = _replica.current_frame()
    return frame is not None and frame.replica is None


@called("experimental_set_strategy")
def experimental_set_strategy(strategy: Strategy | None) -> None:
    """Make `strategy` the current one for the whole process, without a `with`; None clears it.

    Raises:
        MixedStrategyError: Inside a scope or a step.
        ContextError: `strategy` is not a strategy.

    Example:
        >>> experimental_set_strategy(MirroredStrategy())
        >>> get_strategy().num_replicas_in_sync
        8
        >>> experimental_set_strategy(None)

    Source:
        `tf.distribute.experimental_set_strategy`.
    """
    frame = _replica.innermost_explicit_frame()
    if frame is not None:
        raise MixedStrategyError(
            f"experimental_set_strategy was called {frame.describe()}.\n\n"
            "It sets the strategy of the whole process, which a scope would hide.\n\n"
            "Call it outside every `with strategy.scope():`."
        )
    if strategy is not None and not isinstance(strategy, Strategy):
        raise refuse(
            f"strategy={show(strategy)}.",
            "strategy is a strategy of jaxdist, or None, which clears it.",
            "Pass for instance jaxdist.MirroredStrategy().",
            kind=ContextError,
        )
    _replica.set_ambient(strategy)


def check_replicas(state: Any, every: int = 1) -> bool:
    """Compare the bits of mirrored state on all replicas of the current strategy.

    The proof of `Strategy.run` that values are equal assumes that all devices compute the same.
    This check finds violations (a GPU that drifts, or a wrong promise of `assume_replicated`).

    Cost:
        One small program: every device reads its copy once and returns 8 bytes per array.

    Args:
        state: Pytree of arrays, or NNX objects. Arrays that are not replicated over the
            strategy's devices are ignored.
        every: Compare only at every `every`-th call with state of this structure.

    Returns:
        Whether anything was compared in this call.

    Raises:
        ReplicaDriftError: Copies differ; the message names the leaves and the replicas.
        ArgumentError: `every` is less than 1.

    Example:
        >>> strategy = MirroredStrategy()
        >>> with strategy.scope():
        ...     check_replicas({"w": jax.device_put(np.ones(3), strategy.replicated_sharding)})
        True
    """
    return get_strategy().check_replicas(state, every)


def check_strategy(strategy: Any) -> None:
    """Raise an error if `strategy` is not a strategy."""
    check_instance(
        "strategy",
        strategy,
        Strategy,
        "a strategy of jaxdist",
        "Pass for instance jaxdist.MirroredStrategy().",
    )
