"""Which files a block runs Python functions of, to see whether a call leaves C++."""

import contextlib
import sys
from collections.abc import Iterator
from typing import Any


@contextlib.contextmanager
def files_of_calls() -> Iterator[list[str]]:
    """The files of the Python functions that the block calls."""
    files: list[str] = []

    def note(frame: Any, event: str, _: Any) -> None:
        if event == "call":
            files.append(frame.f_code.co_filename)

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        yield files
    finally:
        sys.setprofile(before)
