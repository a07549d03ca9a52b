"""`Network`: looks up names and ports on this machine. Tests replace it."""

import socket

from jaxdist import _processes


class Network(_processes.Machine):
    """Looks up names and ports on this machine."""

    def get_host_name(self) -> str:
        """Return the name of this machine."""
        return socket.gethostname()

    def is_used(self, host: str, port: int) -> bool:
        """Whether this process could not listen at an address because the port is in use."""
        try:
            server = _processes.listen(host, port)
        except OSError:
            return True
        if server is not None:
            server.close()
        return False

    def is_listening(self, host: str, port: int) -> bool:
        """Whether something accepts connections at an address. This opens a connection."""
        return _processes.is_listening(host, port)

    def find_bind_address(self, addresses: list[str]) -> str:
        """Return where process 0, on this machine, would host JAX's coordination service."""
        return _processes.find_bind_address(addresses)
