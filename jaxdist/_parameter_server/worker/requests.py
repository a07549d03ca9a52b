"""`Request` and `Finished`: one run of a closure, and what it returns."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from jaxdist._parameter_server.closures.traced import TracedClosure


@dataclasses.dataclass(frozen=True)
class Request:
    """One run of a closure.

    Args:
        closure: The closure.
        arguments: The arrays that it was scheduled with.
        batches: The leaves of its batches, by iterator, batch and leaf.
        number: Its number.
        fence: Values that were kept from before this fence must be read again.
        done_below: Closures with lower numbers are finished.
        client: Who has numbered it.
    """

    closure: TracedClosure
    arguments: Sequence[Any]
    batches: Mapping[tuple[int, ...], Any]
    number: int
    fence: int = 0
    done_below: int = 0
    client: str = ""


@dataclasses.dataclass(frozen=True)
class Finished:
    """What a run of a closure returns.

    Args:
        results: The results.
        counted: The servers that have counted the closure, by number, with their incarnation.
        read: The servers that it only reads, likewise.
    """

    results: Sequence[Any]
    counted: dict[int, str]
    read: dict[int, str] = dataclasses.field(default_factory=dict)
