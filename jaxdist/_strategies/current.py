"""Which strategy, and which side of it, the caller is in."""

import contextlib
import functools
from collections.abc import Iterator
from typing import Any, NoReturn, final

import jax

from jaxdist import _mesh, _replica
from jaxdist._replica import ReplicaContext
from jaxdist._strategies.base import Strategy
from jaxdist._strategies.where_called import refuse_mixing
from jaxdist._validate import check_instance, shown
from jaxdist.errors import ContextError, MixedStrategyError


@final
class DefaultStrategy(Strategy):
    """One replica on JAX's default device; `get_strategy()` outside every scope."""

    @property
    def _unwraps(self) -> bool:
        return True

    def __init__(self) -> None:
        self._set_up(_mesh.build([jax.local_devices()[0]]))

    @contextlib.contextmanager
    def _in_scope(self) -> Iterator[Strategy]:
        """A block in which nothing changes; refused under another strategy's scope."""
        frame = _replica.current_frame()
        if frame is not None and frame.strategy is not self:
            refuse_mixing(self, "scope", frame)
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


@functools.cache
def _default() -> DefaultStrategy:
    return DefaultStrategy()


@functools.cache
def _default_replica() -> ReplicaContext:
    return ReplicaContext(_default(), traced=False)


def get_strategy() -> Strategy:
    """The current strategy; outside every scope a default one with one replica.

    Example:
        >>> get_strategy().num_replicas_in_sync
        1

    Source:
        `tf.distribute.get_strategy`.
    """
    frame = _replica.current_frame()
    strategy: Strategy = _default() if frame is None else frame.strategy
    return strategy


def has_strategy() -> bool:
    """Whether the caller is in the scope or in a step of a strategy other than the default one.

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


# The annotation says that there may be none, and does not make each step that is checked for types
# ask: what runs in a step has one. (The standard library writes `re.Match.group` so.)
def get_replica_context() -> ReplicaContext | Any:
    """The replica that the caller runs in, or None across replicas.

    Returns:
        Inside a step its `ReplicaContext`. None in a strategy's scope, in a merge function, and
        after `experimental_set_strategy`: the code there runs once, for all replicas, and
        `get_strategy()` has what it needs (`reduce`, `gather`). Outside every strategy the
        context of the default one, whose `replica_id_in_sync_group` is the Python integer 0.

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


def experimental_set_strategy(strategy: Strategy | None) -> None:
    """Make `strategy` the current one for the whole process, without a `with`; None ends that.

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
        raise ContextError(
            f"experimental_set_strategy was given strategy={shown(strategy)}.\n\n"
            "strategy is a strategy of jaxdist, or None, which clears it.\n\n"
            "Pass for instance jaxdist.MirroredStrategy()."
        )
    _replica.set_ambient(strategy)


def check_replicas(state: Any, every: int = 1) -> bool:
    """Compare the bits of mirrored state on all replicas of the current strategy.

    What `Strategy.run` proves to be equal is equal if the devices compute alike; this finds those
    that do not (a GPU that drifts, a promise of `assume_replicated` that was wrong).

    Cost:
        One small program: every device reads its copy once and gives 8 bytes per array.

    Args:
        state: Pytree of arrays, or NNX objects. Arrays that are not replicated over the
            strategy's devices are passed over.
        every: Compare only at every `every`-th call with state of this structure.

    Returns:
        Whether anything was compared in this call.

    Raises:
        ReplicaDriftError: Copies differ; the leaves and the replicas are named.
        ArgumentError: `every` is less than 1.

    Example:
        >>> strategy = MirroredStrategy()
        >>> with strategy.scope():
        ...     check_replicas({"w": jax.device_put(np.ones(3), strategy.replicated_sharding)})
        True
    """
    return get_strategy().check_replicas(state, every)


def check_strategy(caller: str, strategy: Any) -> None:
    """Refuse what is no strategy."""
    check_instance(
        caller,
        "strategy",
        strategy,
        Strategy,
        "a strategy of jaxdist",
        "Pass for instance jaxdist.MirroredStrategy().",
    )
