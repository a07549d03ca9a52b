"""Runs the steps of a Keras model: on the workers of a coordinator, or in this process."""

import contextlib
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

from jaxdist._parameter_server import ClusterCoordinator, ParameterServerStrategy

# How many steps of each worker may be queued, as for `fit.Model`: enough that it never waits, and
# so few that Ctrl-C takes effect soon.
_QUEUED = 4


class CoordinatorRunner:
    """Workers take steps from the queue of a coordinator."""

    def __init__(self, strategy: ParameterServerStrategy) -> None:
        self._strategy = strategy
        self._coordinator = ClusterCoordinator(strategy)
        self._queued: deque[tuple[Any, Any]] = deque()
        self._functions: dict[Any, Callable[..., Any]] = {}

    def start(self, step: Callable[..., Any], args: tuple[Any, ...], note: Any) -> None:
        """Schedule a step; its result is returned with `note`."""
        function = self._functions.get(step)
        if function is None:
            strategy = self._strategy

            def function(*args: Any) -> Any:
                return strategy.run(step, args)

            function.__name__ = step.__name__
            self._functions[step] = function
        self._queued.append((self._coordinator.schedule(function, args), note))

    def collect(self, *, least: int = 0) -> Iterator[tuple[Any, Any]]:
        """Return results with their notes: at least `least`, and all that are available."""
        # Workers may join while the training runs.
        most = _QUEUED * len(self._strategy.links())
        least = max(least, len(self._queued) - most)
        while self._queued and (least > 0 or self._queued[0][0].is_ready()):
            least -= 1
            value, note = self._queued.popleft()
            yield value.fetch(), note

    def collect_all(self) -> Iterator[tuple[Any, Any]]:
        """Return all results, and wait until the servers have all changes."""
        yield from self.collect(least=len(self._queued))
        self._coordinator.join()

    def drop(self) -> None:
        """Drop all results. Steps that have not run are cancelled."""
        self._queued.clear()
        # The caller raises the error of the first function that failed.
        with contextlib.suppress(Exception):
            self._coordinator.join()


class OwnRunner:
    """This worker runs its steps itself, one after another."""

    def __init__(self, strategy: Any) -> None:
        self._strategy = strategy
        self._done: deque[tuple[Any, Any]] = deque()

    def start(self, step: Callable[..., Any], args: tuple[Any, ...], note: Any) -> None:
        """Run a step."""
        self._done.append((self._strategy.run(step, args), note))

    def collect(self, *, least: int = 0) -> Iterator[tuple[Any, Any]]:
        """Return results with their notes."""
        while self._done:
            yield self._done.popleft()

    def collect_all(self) -> Iterator[tuple[Any, Any]]:
        """Return all results."""
        return self.collect()

    def drop(self) -> None:
        """Drop all results."""
        self._done.clear()


def make_runner(strategy: Any) -> CoordinatorRunner | OwnRunner:
    """Return the runner for a strategy."""
    if isinstance(strategy, ParameterServerStrategy):
        return CoordinatorRunner(strategy)
    return OwnRunner(strategy)
