"""`Network`: what this machine knows of names and ports. Tests have another one."""

import socket

from jaxdist import _processes


class Network:
    """Names and ports, as this machine sees them."""

    def get_host_name(self) -> str:
        """Return the name of this machine; gloo listens at its address."""
        return socket.gethostname()

    def find_addresses(self, host: str) -> tuple[str, ...]:
        """Return the addresses of a host; none if the name does not resolve."""
        try:
            found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
        except (OSError, UnicodeError):
            return ()
        return tuple(dict.fromkeys(str(entry[4][0]) for entry in found))

    def is_own(self, host: str) -> bool:
        """Whether a host has an address of this machine."""
        try:
            server = _processes.listen(host, 0)
        except OSError:
            return False
        if server is None:
            return False
        server.close()
        return True

    def is_used(self, host: str, port: int) -> bool:
        """Whether this process could not listen at an address of this machine."""
        try:
            server = _processes.listen(host, port)
        except OSError:
            return True
        if server is not None:
            server.close()
        return False

    def is_listening(self, host: str, port: int) -> bool:
        """Whether something accepts connections at an address. This connects."""
        return _processes.is_listening(host, port)

    def find_bind_address(self, addresses: list[str]) -> str:
        """Return where process 0, on this machine, would host JAX's coordination service."""
        return _processes.find_bind_address(addresses)
