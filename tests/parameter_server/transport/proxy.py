"""A TCP proxy between a real client and a real server, which does harm to what it passes on."""

import contextlib
import dataclasses
import socket
import threading
from collections.abc import Iterator

PIECE = 2**16


@dataclasses.dataclass
class Fault:
    """What happens to one piece of the bytes.

    Args:
        kind: `drop` (the piece is missing), `delay` (nothing goes on), `cut` (the connection ends
            in the middle of the piece), `duplicate` (it comes twice), `flip` (one bit changes), or
            `none`.
        number: The piece, from 1; of all connections together.
        to_server: Whether it is one from the client to the server.
    """

    kind: str
    number: int
    to_server: bool


class Proxy:
    """Passes bytes on between clients and a server. The fault happens once."""

    def __init__(self, target: str, fault: Fault) -> None:
        host, _, port = target.rpartition(":")
        self._target = (host, int(port))
        self.fault = fault
        self.has_happened = False
        self._pieces = 0
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self._sockets: list[socket.socket] = []
        self._server = socket.create_server(("127.0.0.1", 0))
        self._sockets.append(self._server)
        self.address = f"127.0.0.1:{self._server.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        """End all connections."""
        self._ended.set()
        with self._lock:
            sockets = list(self._sockets)
        for each in sockets:
            _end(each)

    def _accept(self) -> None:
        while not self._ended.is_set():
            try:
                client, _ = self._server.accept()
                server = socket.create_connection(self._target)
            except OSError:
                return
            with self._lock:
                self._sockets += [client, server]
            for source, target, to_server in ((client, server, True), (server, client, False)):
                arguments = (source, target, to_server)
                threading.Thread(target=self._pump, args=arguments, daemon=True).start()

    def _pump(self, source: socket.socket, target: socket.socket, to_server: bool) -> None:
        with contextlib.suppress(OSError):
            while piece := source.recv(PIECE):
                for part in self._harm(piece, to_server):
                    target.sendall(part)
        _end(source)
        _end(target)

    def _harm(self, piece: bytes, to_server: bool) -> Iterator[bytes]:
        kind = "none"
        with self._lock:
            if to_server == self.fault.to_server:
                self._pieces += 1
                if self._pieces == self.fault.number:
                    kind = self.fault.kind
                    self.has_happened = True
        half = len(piece) // 2
        match kind:
            case "drop":
                return
            case "delay":
                self._ended.wait(60)
            case "cut":
                yield piece[:half]
                raise ConnectionAbortedError
            case "duplicate":
                yield piece
            case "flip":
                piece = piece[:half] + bytes([piece[half] ^ 0x10]) + piece[half + 1 :]
        yield piece


@contextlib.contextmanager
def start_proxy(target: str, fault: Fault) -> Iterator[Proxy]:
    """Start a proxy; its connections end with the block."""
    proxy = Proxy(target, fault)
    try:
        yield proxy
    finally:
        proxy.close()


def _end(end: socket.socket) -> None:
    with contextlib.suppress(OSError):
        end.shutdown(socket.SHUT_RDWR)
    end.close()
