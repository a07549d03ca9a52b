"""Free ports of this machine."""

import contextlib
import socket

_USED: set[int] = set()


def find_free_ports(count: int) -> list[int]:
    """Return ports of loopback that are free now, and that this process has not returned before.

    A port that was used before could still be in the mind of a process of an earlier job.
    """
    found: list[int] = []
    with contextlib.ExitStack() as stack:
        # The sockets stay open until all ports are found. Otherwise one port could be found twice.
        while len(found) < count:
            opened = stack.enter_context(socket.socket(socket.AF_INET, socket.SOCK_STREAM))
            opened.bind(("127.0.0.1", 0))
            port = int(opened.getsockname()[1])
            if port not in _USED:
                found.append(port)
    _USED.update(found)
    return found
