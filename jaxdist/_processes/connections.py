"""Lists the TCP connections of this process, on Linux."""

import math
import os
import socket
import struct
from collections.abc import Iterator
from typing import NamedTuple

_ESTABLISHED = "01"
# Offset of `tcpi_last_data_recv` in Linux' `struct tcp_info`: after 8 bytes and 11 words.
_LAST_DATA_RECEIVED = 52


class Connection(NamedTuple):
    """An established connection of this process.

    Attributes:
        number: File descriptor of the socket.
        inode: Inode of the socket.
        here: Address of this end, as `/proc/net/tcp` writes it: `0100007F:1F90`.
        there: Address of the other end.
    """

    number: int
    inode: int
    here: str
    there: str


def can_list_connections() -> bool:
    """Whether this system lists connections."""
    return os.path.exists("/proc/self/net/tcp") and os.path.exists("/proc/self/fd")


def list_connections() -> Iterator[Connection]:
    """Yield the established connections of this process; nothing if the system has no list."""
    numbers = list_sockets()
    for table in ("tcp", "tcp6"):
        try:
            with open(f"/proc/self/net/{table}") as file:
                rows = [line.split() for line in file][1:]
        except OSError:
            continue
        for row in rows:
            if row[3] == _ESTABLISHED and row[9] in numbers:
                yield Connection(numbers[row[9]], int(row[9]), row[1], row[2])


def list_sockets() -> dict[str, int]:
    """Return the file descriptor of each socket of this process, by inode."""
    found: dict[str, int] = {}
    try:
        names = os.listdir("/proc/self/fd")
    except OSError:
        return found
    for name in names:
        try:
            target = os.readlink(f"/proc/self/fd/{name}")
        except OSError:
            continue
        if target.startswith("socket:["):
            found[target[8:-1]] = int(name)
    return found


def count_clients(port: int, seconds: float) -> int:
    """Return how many connections from other processes a port of this process has.

    Connections that have received nothing for `seconds` do not count.
    """
    found = list(list_connections())
    ends = {_shorten(c.here) for c in found}
    clients = [c for c in found if _port_of(c.here) == port and _shorten(c.there) not in ends]
    return sum(_measure_silence(c) <= seconds for c in clients)


def _measure_silence(connection: Connection) -> float:
    """Return for how many seconds a connection has received nothing; infinity if it is closed."""
    try:
        with socket.socket(fileno=os.dup(connection.number)) as same:
            if os.fstat(same.fileno()).st_ino != connection.inode:
                return math.inf
            info = same.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _LAST_DATA_RECEIVED + 4)
    except OSError:
        return math.inf
    milliseconds: int = struct.unpack_from("=I", info, _LAST_DATA_RECEIVED)[0]
    return milliseconds / 1000


def _port_of(address: str) -> int:
    return int(address.rpartition(":")[2], 16)


def _shorten(address: str) -> str:
    # A connection of this process to itself can be in both tables. An IPv6 address that stands
    # for an IPv4 address ends in that address.
    host, _, port = address.partition(":")
    return f"{host[-8:]}:{port}"
