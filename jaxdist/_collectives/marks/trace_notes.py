"""What there is to tell about the program that is being traced, beside its operations."""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any

from jaxdist import _compat
from jaxdist._collectives.marks.plan import AllReducePlan


@dataclasses.dataclass
class TraceNotes:
    """Hints without effect, as sentences; plans that left an all-reduce as it was, by line.

    Plans are made when somebody asks: what they say takes time to work out.
    """

    ignored: dict[Any, str] = dataclasses.field(default_factory=dict)
    plans: dict[str, Callable[[], AllReducePlan]] = dataclasses.field(default_factory=dict)


_RECORD: ContextVar[TraceNotes | None] = ContextVar("jaxdist_told", default=None)


@contextlib.contextmanager
def told() -> Iterator[TraceNotes]:
    """Collect what is told in the block."""
    record = TraceNotes()
    token = _RECORD.set(record)
    try:
        yield record
    finally:
        _RECORD.reset(token)


def note_ignored(sentence: str, what: Any = None) -> None:
    """Keep a sentence for the program that is being traced, if there is one.

    Of several sentences about the same thing, `what`, the first is kept.
    """
    record = _RECORD.get()
    if record is not None:
        record.ignored.setdefault(sentence if what is None else what, sentence)


def note_plan(plan: Callable[[], AllReducePlan]) -> None:
    """Keep the plan of an all-reduce that is plain operations of JAX, for the caller's line."""
    record = _RECORD.get()
    if record is not None:
        record.plans[_compat.callers_line()] = plan
