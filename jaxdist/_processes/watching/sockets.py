"""Closes gloo's connections, so that a stuck collective fails.

Note [Stuck collectives]
~~~~~~~~~~~~~~~~~~~~~~~~
A collective between CPU processes cannot be cancelled, and every later computation on the device,
and the end of the interpreter, wait for it. XLA has one time limit for all collectives of a
process, in whole seconds. So when the limit of one call has passed, this process shuts down its
gloo connections to the other processes: the collective fails at once, and the device is free.

The connections are found by address. Each process publishes where its gloo listens, so a connection
is gloo's if it ends at one of these addresses, here or there. No other socket of the process is
touched, and the coordination service stays connected.
"""

import os
import socket
import struct
from collections.abc import Iterable

from jaxdist._compat import get_gloo_addresses
from jaxdist._processes.connections import list_connections


def cut_collectives() -> int:
    """Shut down gloo's connections, and return how many there were.

    Returns 0 if the processes do not use gloo, or the system does not list sockets.
    """
    return cut_connections(get_gloo_addresses())


def cut_connections(published: Iterable[bytes]) -> int:
    """Shut down this process's connections that end at a published address; return how many."""
    addresses = tuple(published)
    count = 0
    for number, inode, here, there in list_connections():
        ends = (_pack(here), _pack(there))
        if not any(end in address for end in ends for address in addresses):
            continue
        count += _shut_down(number, inode)
    return count


def _shut_down(number: int, inode: int) -> bool:
    """Shut down a socket, unless its file descriptor belongs to another file by now."""
    try:
        with socket.socket(fileno=os.dup(number)) as connection:
            if os.fstat(connection.fileno()).st_ino != inode:
                return False
            connection.shutdown(socket.SHUT_RDWR)
            return True
    except OSError:
        # It was closed in the meantime.
        return False


def _pack(address: str) -> bytes:
    """Return an address of `/proc/net/tcp` as the beginning of a `sockaddr`."""
    host, _, port = address.partition(":")
    words = [int(host[i : i + 8], 16) for i in range(0, len(host), 8)]
    # The table shows each word of the address as a number in this machine's byte order.
    where = struct.pack(f"={len(words)}I", *words)
    number = struct.pack("!H", int(port, 16))
    if len(where) == 4:
        return struct.pack("=H", socket.AF_INET) + number + where
    flow = bytes(4)
    return struct.pack("=H", socket.AF_INET6) + number + flow + where
