"""Finds free ports of this machine for the tasks of a test."""

import contextlib
import socket

_USED: set[int] = set()


def find_free_ports(count: int) -> list[int]:
    """Return distinct free ports of 127.0.0.1 that this process has not returned before.

    A task of an earlier test may still try to connect to a port that was used before.
    """
    found: list[int] = []
    with contextlib.ExitStack() as stack:
        # All sockets stay open until the end: a port that is closed could be found again.
        while len(found) < count:
            opened = stack.enter_context(socket.socket())
            opened.bind(("127.0.0.1", 0))
            port = int(opened.getsockname()[1])
            if port not in _USED:
                found.append(port)
    _USED.update(found)
    return found
