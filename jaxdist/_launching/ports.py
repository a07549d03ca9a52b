"""Finds free ports of this machine."""

import contextlib
import socket

_USED: set[int] = set()


def find_free_ports(count: int, host: str = "127.0.0.1") -> list[int]:
    """Return ports that are free now, and that this process has not returned before.

    A process of an earlier job may still try to connect to a port that was used before.

    Args:
        count: How many ports.
        host: The address of this machine on which they are free.
    """
    found: list[int] = []
    with contextlib.ExitStack() as stack:
        # Keep the sockets open until all ports are found: otherwise one port could be found twice.
        while len(found) < count:
            family = socket.AF_INET6 if ":" in host else socket.AF_INET
            opened = stack.enter_context(socket.socket(family, socket.SOCK_STREAM))
            opened.bind((host, 0))
            port = int(opened.getsockname()[1])
            if port not in _USED:
                found.append(port)
    _USED.update(found)
    return found


def is_free(port: int, host: str) -> bool:
    """Whether no socket listens on a port of this machine."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as opened:
        # Connections that have just ended do not keep a port in use.
        opened.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            opened.bind((host, port))
        except OSError:
            return False
    return True
