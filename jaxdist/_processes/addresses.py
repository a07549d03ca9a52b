"""Parses, formats and checks addresses of processes (`host:port`), and listens at them."""

import errno
import ipaddress
import re
import socket
from collections.abc import Sequence

from jaxdist._called import called, refuse
from jaxdist._validate import show
from jaxdist.errors import ClusterError

_NAME = re.compile(r"[^\s:/\[\].]+(\.[^\s:/\[\].]+)*\.?")


def parse_address(address: str, lowest: int = 1) -> tuple[str, int] | None:
    """Return the host and the port of `host:port` or `[ipv6]:port`; None for anything else.

    An IPv6 address without brackets gives None: its last part could be the port or not.

    Args:
        address: The address.
        lowest: The lowest port.
    """
    host, _, port = address.rpartition(":")
    if not (port.isascii() and port.isdigit() and lowest <= int(port) < 65536):
        return None
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
        try:
            ipaddress.IPv6Address(host)
        except ValueError:
            return None
        return host, int(port)
    return (host, int(port)) if _NAME.fullmatch(host) else None


def describe_addresses(lowest: int = 1) -> str:
    """Return the rule for addresses, for error messages."""
    return (
        f"An address is host:port, without spaces, with a port from {lowest} to 65535. An address "
        "of IPv6 is in brackets."
    )


def split_address(address: str) -> tuple[str, int]:
    """Return the host and the port of `host:port` or `[ipv6]:port`.

    Raises:
        ClusterError: The address has neither form.
    """
    found = parse_address(str(address))
    if found is None:
        raise refuse(
            f"the address {show(address)}.",
            describe_addresses(),
            "Write for instance 'worker0.example.com:12345' or '[::1]:12345'.",
            kind=ClusterError,
        )
    return found


def format_address(host: str, port: int) -> str:
    """Return `host:port`, with an IPv6 address in brackets.

    Example:
        >>> from jaxdist._processes import format_address
        >>> format_address("::1", 2222)
        '[::1]:2222'
    """
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def is_loopback(host: str) -> bool:
    """Whether a host name or address is loopback, which no other machine can reach."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def is_listening(host: str, port: int, seconds: float = 1.0) -> bool:
    """Whether something accepts connections at an address."""
    try:
        socket.create_connection((host, port), timeout=seconds).close()
    except OSError:
        return False
    return True


def listen(host: str, port: int) -> socket.socket | None:
    """Return a socket that listens at an address; None if it is not an address of this machine.

    A name that resolves to loopback here (Debian maps the host's own name so) has another address
    for other machines: the socket then listens at all addresses.

    Raises:
        OSError: The port is in use, or this user may not bind it.
    """
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except OSError:
        return None
    family, kind, protocol, _, where = found[0]
    if is_loopback(str(where[0])) and not is_loopback(host):
        if socket.has_dualstack_ipv6():
            return socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True)
        return socket.create_server(("", port))
    server = socket.socket(family, kind, protocol)
    # A port that an ended process of this job used a moment ago can be used again at once. A port
    # on which another socket listens cannot.
    server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        server.bind(where)
        server.listen(128)
    except OSError as error:
        server.close()
        # Behind a proxy or in a container, the job's address may belong to another machine.
        if error.errno == errno.EADDRNOTAVAIL:
            return None
        raise
    return server


@called("join")
def find_bind_address(addresses: Sequence[str]) -> str:
    """Return where process 0 hosts the service, on no more interfaces than the job needs."""
    host, port = split_address(addresses[0])
    hosts = [split_address(address)[0] for address in addresses]
    if all(is_loopback(h) for h in hosts):
        host = "127.0.0.1" if host == "localhost" else host
        return format_address(host, port)
    try:
        server = listen(host, 0)
    except OSError:
        server = None
    if server is None:
        return f"[::]:{port}"
    with server:
        own = server.getsockname()[0]
    # All addresses, as `listen` chose.
    return format_address("::" if own == "0.0.0.0" else own, port)
