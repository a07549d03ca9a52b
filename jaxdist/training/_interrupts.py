"""Ctrl-C that waits for what must not be cut in two."""

import contextlib
import signal
import threading
from collections.abc import Iterator


@contextlib.contextmanager
def interrupts_wait() -> Iterator[None]:
    """Let Ctrl-C take effect after the body; outside the main thread there is none to wait for.

    Example:
        >>> done = []
        >>> try:
        ...     with interrupts_wait():
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
