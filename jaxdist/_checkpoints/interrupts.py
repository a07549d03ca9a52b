"""Delays Ctrl-C until it does no harm, without losing it."""

import contextlib
import os
import signal
import threading
from collections.abc import Iterator
from types import FrameType
from typing import Any, Self


@contextlib.contextmanager
def delay_interrupts() -> Iterator[None]:
    """Delay Ctrl-C until the end of the body.

    Outside of the main thread it does nothing, since Python raises Ctrl-C in the main thread only.

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
    # Install a handler for SIGINT, because KeyboardInterrupt can be raised between any two
    # instructions, so a `try` around the body could not complete it.
    seen: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, _: seen.append(number))
    try:
        yield
    finally:
        # None means that a handler was installed outside of Python; it cannot be passed back.
        signal.signal(signal.SIGINT, signal.SIG_DFL if before is None else before)
        if seen:
            signal.raise_signal(signal.SIGINT)


# Note [Ctrl-C between steps]
# Python raises KeyboardInterrupt at any instruction. If that instruction is in a callback of the
# garbage collector, the exception is lost, and JAX has such a callback. Also, a process that exits
# while the devices run a step may crash. So the handler only records the first Ctrl-C, and `check`
# raises KeyboardInterrupt between steps.
_MESSAGE = b"\nCtrl-C: stopping after this step; press it again to stop at once\n"


class Interrupts:
    """A context manager that records one Ctrl-C for `check`; a second one interrupts immediately.

    Outside of the main thread it does nothing. See Note [Ctrl-C between steps].

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
        """Raise KeyboardInterrupt if Ctrl-C was recorded."""
        if self._is_seen:
            raise KeyboardInterrupt

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self._is_seen:
            raise KeyboardInterrupt
        self._is_seen = True
        with contextlib.suppress(OSError):
            # Not `print`: the signal may have interrupted a `print`, and it is not reentrant.
            os.write(2, _MESSAGE)

    def __enter__(self) -> Self:
        if self._is_main:
            self._before = signal.signal(signal.SIGINT, self._note)
        return self

    def __exit__(self, *_: object) -> None:
        if self._is_main:
            before = signal.SIG_DFL if self._before is None else self._before
            signal.signal(signal.SIGINT, before)
