"""Steps that run on CPU devices and are not waited for: only so many may be at once."""

from collections.abc import Callable
from typing import Any

from jaxdist._devices import CPU_STEPS
from jaxdist._program.compile.program import Program
from jaxdist._values import held_leaves


def must_count(program: Program) -> bool:
    """Whether steps of this program can wait for each other's threads; see `CPU_STEPS`."""
    layout = program.layout
    if layout.platform != "cpu" or len(layout.devices) < 2:
        return False
    return bool(program.traced_collectives) or layout.num_logical > 1


def counted(dispatch: Callable[..., Any]) -> Callable[..., Any]:
    """A call path that waits for room first, and counts what it started."""

    def call(*args: Any, **kwargs: Any) -> Any:
        CPU_STEPS.make_room()
        results = dispatch(*args, **kwargs)
        CPU_STEPS.dispatched(results, held_leaves)
        return results

    return call
