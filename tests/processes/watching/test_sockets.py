"""Only gloo's connections are shut down."""

import os
import socket
import struct
from collections.abc import Iterator

import pytest

from jaxdist._processes import connections
from jaxdist._processes.watching.doctor import cut_collectives, cut_connections

pytestmark = pytest.mark.skipif(not os.path.exists("/proc/self/net/tcp"), reason="needs Linux")
Connected = tuple[socket.socket, socket.socket, socket.socket]


def _connect(family: socket.AddressFamily, host: str) -> Connected:
    server = socket.socket(family)
    server.bind((host, 0))
    server.listen()
    client = socket.create_connection(server.getsockname()[:2])
    accepted, _ = server.accept()
    for end in (client, accepted):
        end.settimeout(10)
    return server, client, accepted


def _publish(server: socket.socket) -> bytes:
    """The address of a server as gloo writes it: a `sockaddr` somewhere in a text of bytes."""
    host, port = server.getsockname()[:2]
    packed = socket.inet_pton(server.family, host)
    flow = bytes(4) if server.family == socket.AF_INET6 else b""
    return b"\x02head" + struct.pack("=H", server.family) + struct.pack("!H", port) + flow + packed


@pytest.fixture(params=["127.0.0.1", "::1"])
def connected(request: pytest.FixtureRequest) -> Iterator[list[Connected]]:
    """Two connections in this process: gloo's, and one of the user."""
    family = socket.AF_INET6 if ":" in request.param else socket.AF_INET
    try:
        both = [_connect(family, request.param) for _ in range(2)]
    except OSError:
        pytest.skip(f"this machine has no {request.param}")
    yield both
    for ends in both:
        for end in ends:
            end.close()


def test_connections_to_and_from_a_published_address_are_shut(connected: list[Connected]) -> None:
    (server, client, accepted), (_, other, other_accepted) = connected
    assert cut_connections([b"something else", _publish(server)]) == 2
    assert client.recv(1) == b""
    assert accepted.recv(1) == b""
    other.sendall(b"x")
    assert other_accepted.recv(1) == b"x"
    # The file numbers still belong to their owners.
    assert client.fileno() >= 0
    with pytest.raises(OSError):  # noqa: PT011
        client.sendall(b"x")


def test_without_published_addresses_nothing_is_shut(connected: list[Connected]) -> None:
    assert cut_connections([]) == 0
    # This process has joined no others.
    assert cut_collectives() == 0
    connected[0][1].sendall(b"x")
    assert connected[0][2].recv(1) == b"x"


def test_a_number_that_belongs_to_another_file_by_now_is_left(
    connected: list[Connected], monkeypatch: pytest.MonkeyPatch
) -> None:
    server, client, accepted = connected[0]
    real = connections.list_sockets

    def mix_up() -> dict[str, int]:
        other = connected[1][1].fileno()
        return dict.fromkeys(real(), other)

    monkeypatch.setattr(connections, "list_sockets", mix_up)
    assert cut_connections([_publish(server)]) == 0
    client.sendall(b"x")
    assert accepted.recv(1) == b"x"
