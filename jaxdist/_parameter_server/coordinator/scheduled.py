"""`Scheduled`: one closure from `schedule` until it is finished."""

import dataclasses
import time
from collections.abc import Callable
from typing import Any

from jaxdist._parameter_server.coordinator.per_worker import PerWorkerValues
from jaxdist._parameter_server.coordinator.remote_value import ClosureResult
from jaxdist._parameter_server.variables.servers import Fence


class Scheduled:
    """One closure from `schedule` until it is finished.

    Args:
        closure: What `CoordinatedStrategy.prepare` returned.
        name: What the user calls the function.
        fence: The fence of the coordinator.
        inputs: The per-worker values among its arguments.

    Attributes:
        number: 1, 2, 3 ... in the order of `schedule`; set by the queue.
        cancel: Asks the worker that runs the closure to stop it; None while no worker does.
        is_cancelled: Whether cancellation was requested.
        server_trouble: How often it was tried while a server did not answer.
        lost_on: The workers that were lost while they ran it.
    """

    __slots__ = (
        "cancel",
        "closure",
        "inputs",
        "is_cancelled",
        "lost_on",
        "name",
        "number",
        "result",
        "server_trouble",
    )

    def __init__(
        self, closure: Any, name: str, fence: Fence, inputs: tuple[PerWorkerValues, ...] = ()
    ) -> None:
        self.closure = closure
        self.name = name
        self.inputs = inputs
        self.result = ClosureResult(fence)
        self.number = 0
        self.cancel: Callable[[int], None] | None = None
        self.is_cancelled = False
        self.server_trouble: Trouble | None = None
        self.lost_on: tuple[int, ...] = ()

    def describe(self) -> str:
        """Return how reports call the closure."""
        return f"function {self.number} ({self.name})"


@dataclasses.dataclass
class Trouble:
    """What happened to a closure while a server did not answer."""

    since: float = dataclasses.field(default_factory=time.monotonic)
    began: str = dataclasses.field(default_factory=lambda: time.strftime("%H:%M:%S"))
    tries: int = 0
    workers: set[int] = dataclasses.field(default_factory=set)
