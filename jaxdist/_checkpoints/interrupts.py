"""Ctrl-C that waits for what must not be cut in two, and is not lost."""

import contextlib
import os
import signal
import threading
from collections.abc import Iterator
from types import FrameType
from typing import Any, Self


@contextlib.contextmanager
def delay_interrupts() -> Iterator[None]:
    """Let Ctrl-C take effect after the body; outside the main thread there is none to wait for.

    Example:
        >>> done = []
        >>> try:
        ...     with delay_interrupts():
        ...         signal.raise_signal(signal.SIGINT)
        ...         done.append("the body")
        ... except KeyboardInterrupt:
        ...     done.append("then Ctrl-C")
        >>> done
        ['the body', 'then Ctrl-C']
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    seen: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, _: seen.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.SIG_DFL if before is None else before)
        if seen:
            signal.raise_signal(signal.SIGINT)


# [Note: Ctrl-C between steps]
# A KeyboardInterrupt that Python raises wherever it happens to be is lost in callbacks of the
# garbage collector, of which JAX has one; and a process that ends while the devices work on a step
# may end with a crash. So the first Ctrl-C is noted, and `check` raises it between steps.
_MESSAGE = b"\nCtrl-C: stopping after this step; once more stops at once\n"


class Interrupts:
    """Notes the first Ctrl-C for `check`; the second interrupts at once. A context manager.

    Outside the main thread there is no Ctrl-C to note.

    Example:
        >>> with Interrupts() as interrupts:
        ...     signal.raise_signal(signal.SIGINT)
        ...     try:
        ...         interrupts.check()
        ...     except KeyboardInterrupt:
        ...         print("now")
        now
    """

    def __init__(self) -> None:
        self._is_seen = False
        self._before: Any = None
        self._is_main = threading.current_thread() is threading.main_thread()

    def check(self) -> None:
        """Raise the Ctrl-C that was noted."""
        if self._is_seen:
            raise KeyboardInterrupt

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self._is_seen:
            raise KeyboardInterrupt
        self._is_seen = True
        with contextlib.suppress(OSError):
            os.write(2, _MESSAGE)  # print may be what was interrupted

    def __enter__(self) -> Self:
        if self._is_main:
            self._before = signal.signal(signal.SIGINT, self._note)
        return self

    def __exit__(self, *_: object) -> None:
        if self._is_main:
            before = signal.SIG_DFL if self._before is None else self._before
            signal.signal(signal.SIGINT, before)
