"""Counting what a loop compiles and traces."""

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Any

import jax


@dataclasses.dataclass
class Count:
    """A number that goes up."""

    number: int = 0


_COUNTS: list[Count] = []


def _listen(event: str, *_: Any, **__: Any) -> None:
    if "backend_compile" in event:
        for count in _COUNTS:
            count.number += 1


# JAX has no public way to take one listener out again, so there is one for all tests.
jax.monitoring.register_event_duration_secs_listener(_listen)


@contextlib.contextmanager
def compilations() -> Iterator[Count]:
    """Count what the backend compiles in the block."""
    count = Count()
    _COUNTS.append(count)
    try:
        yield count
    finally:
        _COUNTS.remove(count)
