"""`Stranger`: a client that makes requests which no client of jaxdist makes."""

import os
import random
import socket
import struct
import zlib
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import numpy as np

from jaxdist._called import called
from jaxdist._parameter_server.transport import Limits, Message
from jaxdist._parameter_server.transport.grpc_channel import (
    CALL_KEY,
    SECRET_KEY,
    SERVICE,
    WIRE,
    WIRE_KEY,
    load_grpc,
)
from jaxdist._parameter_server.transport.stream import REQUEST, Outgoing

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"


class Stranger:
    """Makes requests of all kinds. It knows the secret, where that makes it more dangerous."""

    def __init__(self, address: str, secret: str, seed: int) -> None:
        self._grpc = load_grpc()
        host, _, port = address.rpartition(":")
        self._where = (host, int(port))
        self._channel = self._grpc.insecure_channel(address)
        self._random = random.Random(seed)
        self._call = os.urandom(16)
        self._secret = secret.encode()

    def close(self) -> None:
        """End its connection."""
        self._channel.close()

    def ask(self) -> None:
        """Make one request; the server must not do anything for it."""
        kind: Callable[[], None] = self._random.choice(
            [
                self.any_socket,
                self.wrong_secret,
                self.metadata,
                self.any_bytes,
                self.header,
                self.mutated,
            ]
            + [self.unfinished, self.path]
        )
        kind()

    def any_socket(self) -> None:
        """Any bytes, also after the first ones of HTTP/2."""
        first = self._random.choice([b"", PREFACE, PREFACE[:10], b"GET / HTTP/1.1\r\n\r\n"])
        with socket.create_connection(self._where, timeout=10) as plain:
            plain.sendall(first + self._random.randbytes(self._random.choice([0, 9, 100, 70_000])))

    def wrong_secret(self) -> None:
        """A right message with no secret, or another one."""
        given = self._random.choice([(), ((SECRET_KEY, self._random.randbytes(28)),)])
        self._send([*self._right()], ((WIRE_KEY, WIRE), (CALL_KEY, self._call), *given))

    def metadata(self) -> None:
        """The secret, and metadata of no version, or without an id of the call."""
        keys = [(WIRE_KEY, WIRE), (CALL_KEY, self._call), (WIRE_KEY, "x" * 3000)]
        wrong = self._random.choice([[], keys[:1], keys[1:2], keys[1:], [(CALL_KEY, b"\xff" * 9)]])
        self._send([*self._right()], (*wrong, (SECRET_KEY, self._secret)))

    def any_bytes(self) -> None:
        """Chunks of any bytes."""
        sizes = self._random.choices([0, 1, 3, 4, 5, 8, 100, 5000, 600_000], k=3)
        self._send([self._random.randbytes(size) for size in sizes])

    def header(self) -> None:
        """A header with a right checksum that asks for any arrays."""
        names = ["float32", "bool", "object", "int4", "", "bfloat16", "M8[s]", "V1000000"]
        lengths = [-1, 0, 1, 3, 2**20, 2**28, 2**31, 2**40, 2**63, 1.5, None, "3"]
        arrays = [
            [self._random.choice(names), self._random.choices(lengths, k=self._random.randrange(4))]
            for _ in range(self._random.choice([0, 1, 3, 1000]))
        ]
        parts = ["no such method", {"x": self._nest()}, arrays, None]
        raw = msgspec.msgpack.encode(parts[: self._random.choice([1, 2, 3, 4, 4, 4])])
        length = self._random.choice([len(raw), len(raw), 2**31, 0])
        self._send([self._seal(struct.pack("<I", length) + raw)])

    def mutated(self) -> None:
        """A right message of which one byte is another."""
        chunks = list(self._right())
        number = self._random.randrange(len(chunks))
        damaged = bytearray(chunks[number])
        damaged[self._random.randrange(len(damaged))] ^= self._random.randrange(1, 256)
        chunks[number] = bytes(damaged)
        self._send(chunks)

    def unfinished(self) -> None:
        """The beginning of a large message, and then nothing."""
        header = ["add", {}, [["uint8", [2**28 - self._random.randrange(1000)]]], None]
        raw = msgspec.msgpack.encode(header)
        chunk = self._seal(struct.pack("<I", len(raw)) + raw + bytes(100_000))
        call = self._start(iter([chunk]), self._known(), 0.5)
        self._random.choice([call.cancel, lambda: self._read(call)])()

    def path(self) -> None:
        """Methods that nobody has."""
        name = self._random.choice([f"/{SERVICE}/Push", "/a/b", "/", "//", "x" * 5000])
        self._read(self._channel.stream_stream(name)(self._right(), timeout=5))

    def _nest(self) -> msgspec.Raw:
        # Lists of one element, in each other.
        return msgspec.Raw(b"\x91" * self._random.choice([1, 10, 100_000]) + b"\x01")

    @called("")
    def _right(self) -> Iterator[bytes]:
        size = self._random.choice([10, 700_000])
        message = Message("add", {}, (np.zeros(size, np.uint8),))
        return Outgoing(message, Limits()).make_chunks(self._call, REQUEST)

    def _seal(self, content: bytes) -> bytes:
        begun = zlib.crc32(struct.pack("<16sBQ", self._call, REQUEST, 0))
        return struct.pack("<I", zlib.crc32(content, begun)) + content

    def _known(self) -> tuple[tuple[str, Any], ...]:
        return ((WIRE_KEY, WIRE), (CALL_KEY, self._call), (SECRET_KEY, self._secret))

    def _start(self, chunks: Iterator[bytes], metadata: Any, seconds: float) -> Any:
        timeout = self._random.choice([seconds, seconds, seconds, None])
        stream = self._channel.stream_stream(f"/{SERVICE}/Stream")
        return stream(chunks, timeout=timeout, metadata=metadata)

    def _send(self, chunks: list[bytes], metadata: Any = None) -> None:
        known = self._known() if metadata is None else metadata
        if self._random.random() < 0.3:
            single = self._channel.unary_stream(f"/{SERVICE}/Call")
            self._read(single(chunks[0], timeout=5, metadata=known))
        else:
            self._read(self._start(iter(chunks), known, 5))

    def _read(self, call: Any) -> None:
        try:
            found = list(call)
        except self._grpc.RpcError:
            return
        # The only answer is that there is no such method.
        assert all(b"NotFoundError" in chunk for chunk in found)
