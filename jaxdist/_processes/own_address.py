"""Finds the address at which the other processes of a job reach this one.

Note [Address of gloo]
~~~~~~~~~~~~~~~~~~~~~~
Collectives between CPU processes (gloo) connect at any free port of one address of each process.
JAX takes the address of the host's own name, which may not be the one of the cluster: Debian maps
the name to 127.0.1.1, a host with two networks has two addresses, and the name of a container may
have none. So jaxdist uses the address that this process has in the cluster. If this machine does
not have that address (behind a proxy), or if it is loopback in a job of several hosts, jaxdist uses
the address from which this machine reaches the other processes.
"""

import dataclasses
import glob
import socket
from collections.abc import Sequence
from typing import Any

from jaxdist._called import called
from jaxdist._processes.addresses import is_loopback, listen, split_address

# Which network interfaces NCCL uses.
INTERFACE = "NCCL_SOCKET_IFNAME"
# The port of a datagram that is never sent.
_DISCARD = 9


class Machine:
    """Looks up names and addresses on this machine. Tests replace it."""

    def find_addresses(self, host: str) -> tuple[str, ...]:
        """Return the addresses of a host; an empty tuple if the name does not resolve."""
        try:
            found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
        except (OSError, UnicodeError):
            return ()
        return tuple(dict.fromkeys(_show(entry[4]) for entry in found))

    def is_own(self, host: str) -> bool:
        """Whether a host has an address of this machine."""
        try:
            server = listen(host, 0)
        except OSError:
            return False
        if server is None:
            return False
        server.close()
        return True

    def find_source(self, host: str) -> str | None:
        """Return the address from which this machine reaches a host. Nothing is sent."""
        for address in self.find_addresses(host):
            family = socket.AF_INET6 if ":" in address else socket.AF_INET
            with socket.socket(family, socket.SOCK_DGRAM) as probe:
                try:
                    probe.connect((address, _DISCARD))
                except OSError:
                    continue
                return _show(probe.getsockname())
        return None

    def has_gpus(self) -> bool:
        """Whether this machine has NVIDIA GPUs, whose collectives (NCCL) choose an interface."""
        return bool(glob.glob("/dev/nvidia[0-9]*"))

    def find_interface(self, address: str) -> str | None:
        """Return the network interface that has an address of this machine."""
        # Only jobs of several hosts with GPUs need it.
        import psutil

        host = address.partition("%")[0]
        for name, entries in psutil.net_if_addrs().items():
            if any(entry.address.partition("%")[0] == host for entry in entries):
                return str(name)
        return None


@dataclasses.dataclass(frozen=True)
class OwnAddress:
    """An address of this machine.

    Attributes:
        address: The numeric address.
        reason: Why it was chosen.
    """

    address: str
    reason: str


@called("join")
def find_own_address(
    addresses: Sequence[str], index: int, service: str = "", machine: Machine | None = None
) -> OwnAddress | None:
    """Return the address of this process for collectives; see Note [Address of gloo].

    Args:
        addresses: `host:port` of each process.
        index: Which of them this process is.
        service: `host:port` of the coordination service, if a launcher hosts it.
        machine: Where to look up names and addresses; this machine by default.

    Returns:
        The address; None if none is found. JAX then uses the address of the host's name.

    Raises:
        ClusterError: An address is not `host:port`.
    """
    machine = machine or Machine()
    hosts = [split_address(address)[0] for address in addresses]
    # Processes that all run on one machine may use loopback.
    is_local = all(is_loopback(host) for host in hosts)
    # Both ends of a connection have the same kind of address.
    has_ipv6 = any(":" in host for host in hosts)
    found = machine.find_addresses(hosts[index])
    for address in sorted(found, key=lambda a: (":" in a) != has_ipv6):
        if (is_local or not is_loopback(address)) and machine.is_own(address):
            return OwnAddress(address, f"the address of {hosts[index]} in the cluster")
    others = [host for i, host in enumerate(hosts) if i != index]
    if service:
        others.insert(0, split_address(service)[0])
    for host in others:
        source = machine.find_source(host)
        if source is not None and not is_loopback(source):
            return OwnAddress(source, f"from which {host} is reached")
    return None


def is_chosen(interface: str, choice: str) -> bool:
    """Whether `NCCL_SOCKET_IFNAME=choice` lets NCCL use an interface.

    The choice is a list of prefixes of names. After `=` the names are exact; after `^` NCCL leaves
    them out.

    Example:
        >>> from jaxdist._processes import is_chosen
        >>> is_chosen("eth0", "eth,ib"), is_chosen("eth0", "=eth"), is_chosen("eth0", "^docker,lo")
        (True, False, True)
    """
    negated = choice.startswith("^")
    rest = choice.removeprefix("^")
    exact = rest.startswith("=")
    names = [name.partition(":")[0] for name in rest.removeprefix("=").split(",") if name]
    found = interface in names if exact else any(interface.startswith(name) for name in names)
    return found != negated


def _show(where: Any) -> str:
    """Return the address of a `sockaddr`; a link-local one with its interface."""
    address = str(where[0])
    scope = where[3] if len(where) == 4 else 0
    if not scope or "%" in address:
        return address
    try:
        return f"{address}%{socket.if_indextoname(scope)}"
    except OSError:
        return address
