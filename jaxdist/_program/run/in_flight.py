"""A call path that limits how many steps on CPU devices run at once."""

from collections.abc import Callable
from typing import Any

from jaxdist._devices import CPU_STEPS
from jaxdist._program.compile.program import Program
from jaxdist._values import held_leaves


def must_count(program: Program) -> bool:
    """Whether steps of this program may wait for each other's threads; see `CPU_STEPS`."""
    layout = program.layout
    if layout.platform != "cpu" or len(layout.devices) < 2:
        return False
    return bool(program.traced_collectives) or layout.num_logical > 1


def count_steps(dispatch: Callable[..., Any]) -> Callable[..., Any]:
    """Return a call path that waits for a free place first, and counts the step it starts."""

    def call(*args: Any, **kwargs: Any) -> Any:
        CPU_STEPS.make_room()
        results = dispatch(*args, **kwargs)
        CPU_STEPS.dispatched(results, held_leaves)
        return results

    return call
