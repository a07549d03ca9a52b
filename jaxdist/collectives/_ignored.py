"""Hints that were given and have no effect, kept for the program that is being traced."""

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar

_RECORD: ContextVar[dict[str, None] | None] = ContextVar("jaxdist_ignored_hints", default=None)


@contextlib.contextmanager
def ignored_hints() -> Iterator[dict[str, None]]:
    """Collect sentences on hints without effect, each once, in order."""
    record: dict[str, None] = {}
    token = _RECORD.set(record)
    try:
        yield record
    finally:
        _RECORD.reset(token)


def note_ignored(sentence: str) -> None:
    """Keep a sentence for the program that is being traced, if there is one."""
    record = _RECORD.get()
    if record is not None:
        record[sentence] = None
