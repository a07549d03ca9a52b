"""`Agreement`: decisions that the processes of a strategy make together."""

from typing import Any

import numpy as np

from jaxdist._parameter_server import WorkerStrategy
from jaxdist._replica import ReplicaContext
from jaxdist._strategies import Strategy, get_replica_context

# How often the processes exchange wishes: one exchange per step would cost more than the step.
_EVERY = 10


class Agreement:
    """Decisions that the processes of a strategy make together: to stop, or to save by the clock.

    Args:
        strategy: The strategy.
    """

    def __init__(self, strategy: Strategy) -> None:
        self._strategy = strategy
        # Workers of servers are not in step with each other.
        self.is_needed = not isinstance(strategy, WorkerStrategy) and count_processes(strategy) > 1

    def decide(self, step: int, wish: bool) -> bool:
        """Return whether any process wishes it; always False between exchanges.

        Args:
            step: How many steps this call of `train` has taken; the same in all processes.
            wish: Whether this process wishes it.
        """
        if not self.is_needed:
            return wish
        if step % _EVERY:
            return False
        given = self._strategy.experimental_distribute_values_from_function(
            lambda context: np.int32(wish)
        )
        return bool(np.asarray(self._strategy.run(_find_most, (given,))) > 0)


def _find_most(wish: Any) -> Any:
    context: ReplicaContext = get_replica_context()
    return context.all_reduce("sum", wish)


def count_processes(strategy: Strategy) -> int:
    """Return how many processes have devices of a strategy."""
    return len(set(strategy.layout.replica_owners))
