"""What an arm is inside its process."""

import dataclasses
from collections.abc import Callable
from typing import Any


def _nothing(_: int) -> None:
    return None


def _no_facts() -> dict[str, Any]:
    return {}


@dataclasses.dataclass(frozen=True)
class Loop:
    """A loop to be timed.

    Args:
        run: Takes that many steps, and returns when their results are there.
        prepare: Makes what the next `run` uses up; not timed.
        facts: What became of it, as JSON values: the loss, say, to see that all arms did one job.
    """

    run: Callable[[int], object]
    prepare: Callable[[int], object] = _nothing
    facts: Callable[[], dict[str, Any]] = _no_facts
