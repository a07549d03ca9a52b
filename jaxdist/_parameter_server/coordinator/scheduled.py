"""`Scheduled`: one closure until it is finished; and how many of them there were."""

import dataclasses
import time
from collections.abc import Callable, Mapping
from typing import Any

from jaxdist import _compat
from jaxdist._parameter_server.coordinator.per_worker import PerWorkerValues
from jaxdist._parameter_server.coordinator.remote_value import ClosureResult
from jaxdist._parameter_server.variables.servers import Fence


@dataclasses.dataclass
class Trouble:
    """What happened to a closure while a server did not answer."""

    since: float = dataclasses.field(default_factory=time.monotonic)
    began: str = dataclasses.field(default_factory=lambda: time.strftime("%H:%M:%S"))
    tries: int = 0
    workers: set[int] = dataclasses.field(default_factory=set)


@dataclasses.dataclass(slots=True, eq=False)
class Scheduled:
    """One closure from `schedule` until it is finished.

    Args:
        closure: What `CoordinatedStrategy.prepare` returned.
        name: What the user calls the function.
        fence: The fence of the coordinator.
        inputs: The per-worker values among its arguments.

    Attributes:
        settings: JAX's settings of the thread that scheduled it.
        number: 1, 2, 3 ... in the order of `schedule`; set by the queue.
        cancel: Asks the worker that runs the closure to stop it; None while no worker does.
        is_cancelled: Whether cancellation was requested.
        server_trouble: How often it was tried while a server did not answer.
        lost_on: The workers that were lost while they ran it.
    """

    closure: Any
    name: str
    fence: dataclasses.InitVar[Fence]
    inputs: tuple[PerWorkerValues, ...] = ()
    settings: _compat.ThreadSettings = dataclasses.field(default_factory=_compat.ThreadSettings)
    result: ClosureResult = dataclasses.field(init=False)
    number: int = 0
    cancel: Callable[[int], None] | None = None
    is_cancelled: bool = False
    server_trouble: Trouble | None = None
    lost_on: tuple[int, ...] = ()

    def __post_init__(self, fence: Fence) -> None:
        self.result = ClosureResult(fence)

    def describe(self) -> str:
        """Return how reports call the closure."""
        return f"function {self.number} ({self.name})"


class FinishedNumbers:
    """Finds the number below which all closures are finished.

    Servers forget the closures below it. Numbers may finish in any order.

    Example:
        >>> from jaxdist._parameter_server.coordinator.scheduled import FinishedNumbers
        >>> finished = FinishedNumbers()
        >>> finished.add(2)
        >>> finished.below
        1
        >>> finished.add(1)
        >>> finished.below
        3
    """

    __slots__ = ("_later", "below")

    def __init__(self) -> None:
        self.below = 1
        self._later: set[int] = set()

    def add(self, number: int) -> None:
        """Note that a closure is finished, or that it will never run."""
        if number != self.below:
            self._later.add(number)
            return
        number += 1
        while number in self._later:
            self._later.remove(number)
            number += 1
        self.below = number


@dataclasses.dataclass
class Counts:
    """What the queue has counted."""

    scheduled: int = 0
    applied: int = 0
    failed: int = 0
    cancelled: int = 0
    retried: int = 0


@dataclasses.dataclass(frozen=True)
class Statistics:
    """What became of the closures of a coordinator.

    `scheduled` is the sum of `applied`, `lost`, `failed`, `cancelled` and `pending`.

    Args:
        scheduled: Closures that were given to `schedule`.
        applied: Closures that have finished, and whose changes the servers have.
        lost: Closures that have finished, and whose changes were lost, because a server came back
            from a snapshot.
        failed: Closures that raised an error.
        cancelled: Closures that did not run because another one failed.
        pending: Closures that wait or run.
        lost_changes: Changes by the program that made the coordinator, outside of closures, that
            were lost in the same way: `variable.assign` (one for each shard) and `strategy.run`.
            They are in no other number.
        retried: How often a closure was run again, because a worker or a server was lost. The
            servers count it once.
        staleness: Staleness of a change -> number of changes, for the changes of this strategy:
            earlier runs on the same servers do not count.

    Example:
        >>> from jaxdist._parameter_server.coordinator import Statistics
        >>> Statistics(scheduled=3, applied=2, pending=1).lost
        0
    """

    scheduled: int = 0
    applied: int = 0
    lost: int = 0
    lost_changes: int = 0
    failed: int = 0
    cancelled: int = 0
    pending: int = 0
    retried: int = 0
    staleness: Mapping[int, int] = dataclasses.field(default_factory=dict)
