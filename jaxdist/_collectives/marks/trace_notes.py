"""Notes of the current trace: ignored hints and all-reduce plans."""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any

from jaxdist import _compat
from jaxdist._collectives.marks.plan import AllReducePlan


@dataclasses.dataclass
class TraceNotes:
    """Notes of one trace: `ignored` has hints without effect, `plans` has plans by source line.

    A plan here describes an all-reduce that is a plain `psum`. It is a function, because it takes
    time to compute, and only `explain` needs it.
    """

    ignored: dict[Any, str] = dataclasses.field(default_factory=dict)
    plans: dict[str, Callable[[], AllReducePlan]] = dataclasses.field(default_factory=dict)
    # The smallest `timeout_seconds` of a collective of the step, between processes.
    timeout_seconds: float | None = None


_RECORD: ContextVar[TraceNotes | None] = ContextVar("jaxdist_told", default=None)


@contextlib.contextmanager
def collect_notes() -> Iterator[TraceNotes]:
    """Collect the notes of the block."""
    record = TraceNotes()
    with _compat.set_in_block(_RECORD, record):
        yield record


def note_ignored(sentence: str, what: Any = None) -> None:
    """Add a sentence about an option without effect to the notes of the current trace.

    Of several sentences with the same `what`, the first one is kept.
    """
    record = _RECORD.get()
    if record is not None:
        record.ignored.setdefault(sentence if what is None else what, sentence)


def note_limit(seconds: float) -> None:
    """Note that a collective of the current trace has a time limit."""
    record = _RECORD.get()
    if record is not None:
        before = record.timeout_seconds
        record.timeout_seconds = seconds if before is None else min(before, seconds)


def note_plan(plan: Callable[[], AllReducePlan]) -> None:
    """Add the plan of a `psum` to the notes, under the line of the user's code."""
    record = _RECORD.get()
    if record is not None:
        record.plans[_compat.find_callers_line()] = plan
