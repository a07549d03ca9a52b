"""A message as a stream of chunks, and back.

A chunk is at most `CHUNK` bytes. It begins with a checksum of its content, which continues the
checksum of the call, the direction and the number of the chunk. So a chunk that is damaged,
missing, repeated, or of another call is found. The first chunk has the length of the header, the
header, and the first bytes of the arrays.

The checksum is CRC-32: it finds every error of up to 32 bits in a row. An array is read four times
for it in an exchange, so zlib-ng computes it: 29 GB/s here, where zlib reads 4.5 and gRPC moves 1.
"""

import struct
from collections.abc import Iterator
from typing import Any

import msgspec
import numpy as np

from jaxdist._parameter_server.transport.calls import Failure
from jaxdist._parameter_server.transport.layout import (
    Arrays,
    Layout,
    LayoutError,
    Spec,
    make_layout,
    pad,
)
from jaxdist._parameter_server.transport.limits import Limits, compare
from jaxdist._parameter_server.transport.message import (
    LONGEST_METHOD,
    Message,
    get_names,
    get_plain,
)

try:
    from zlib_ng.zlib_ng import crc32
except ImportError:  # The same checksum, but slower.
    from zlib import crc32

CHUNK = 2**19
REQUEST, REPLY = 0, 1
_CHECKSUM = struct.Struct("<I")
_LENGTH = struct.Struct("<I")
_PLACE = struct.Struct("<16sBQ")
_ZEROS = memoryview(bytes(64))


class DamagedError(ValueError):
    """Raised for chunks that are not those that were sent."""


class RefusedError(ValueError):
    """Raised for a message that arrived as it was sent, and that a receiver does not accept."""


class Header(msgspec.Struct, array_like=True):
    """A message without the values of its arrays."""

    method: str
    fields: dict[str, Any]
    arrays: list[Spec]
    failure: Failure | None = None


_DECODER = msgspec.msgpack.Decoder(Header)


class Outgoing:
    """A message that is sent.

    Args:
        message: The message. Its arrays must not change until it is sent.
        limits: The largest message that the other side accepts.
        failure: The error that a reply reports.

    Raises:
        ArgumentError: The message is larger than the limits.
        ArgumentTypeError: The dtype of an array is not one that messages have.
    """

    def __init__(self, message: Message, limits: Limits, failure: Failure | None = None) -> None:
        self._arrays = [get_plain(array) for array in message.arrays]
        limits.check(self._arrays)
        names = get_names()
        specs = [(names[array.dtype], [*array.shape]) for array in self._arrays]
        header = Header(message.method, dict(message.fields), specs, failure)
        self._header = msgspec.msgpack.encode(header)
        compare("bytes of fields, names and shapes", len(self._header), limits.header_bytes)

    @property
    def is_one_chunk(self) -> bool:
        """Whether it is so small."""
        size = sum(pad(array.nbytes) for array in self._arrays)
        return _LENGTH.size + len(self._header) + size <= CHUNK

    def make_chunks(self, call: bytes, direction: int) -> Iterator[bytes]:
        """Yield the chunks."""
        number, free = 0, CHUNK
        held: list[memoryview] = []
        for piece in self._list_pieces():
            at = 0
            while at < len(piece):
                if not free:
                    yield _seal(held, call, direction, number)
                    number, free = number + 1, CHUNK
                    held = []
                part = piece[at : at + free]
                held.append(part)
                at += len(part)
                free -= len(part)
        yield _seal(held, call, direction, number)

    def _list_pieces(self) -> Iterator[memoryview]:
        yield memoryview(_LENGTH.pack(len(self._header)))
        yield memoryview(self._header)
        for array in self._arrays:
            # Dtypes of ml_dtypes have no buffer of their own.
            yield array.reshape(-1).view(np.uint8).data
            yield _ZEROS[: pad(array.nbytes) - array.nbytes]


class Incoming:
    """A message that is received, chunk by chunk.

    Args:
        call: The id of the call.
        direction: `REQUEST` or `REPLY`.
        limits: The most that is taken in.
    """

    def __init__(self, call: bytes, direction: int, limits: Limits) -> None:
        self._call, self._direction, self._limits = call, direction, limits
        self._number = 0
        self._header: Header | None = None
        self._layout: Layout | None = None
        self._arrays: Arrays | None = None
        self._pending = memoryview(b"")
        self._block, self._at, self._left = 0, 0, 0

    @property
    def is_complete(self) -> bool:
        """Whether the whole message has arrived."""
        return self._header is not None and not self._left

    @property
    def nbytes(self) -> int:
        """Bytes that the arrays will have; known after the first chunk."""
        return 0 if self._layout is None else self._layout.nbytes

    def add(self, chunk: bytes) -> None:
        """Take the next chunk. After the first one call `allocate`.

        Raises:
            DamagedError: It is not the chunk that was sent as the next one.
            RefusedError: It is not a message, or is larger than the limits.
        """
        view = memoryview(chunk)
        content = view[_CHECKSUM.size :]
        if len(view) <= _CHECKSUM.size and (len(view) < _CHECKSUM.size or self._number == 0):
            raise DamagedError(f"chunk {self._number + 1} is cut off")
        begun = _begin(self._call, self._direction, self._number)
        if crc32(content, begun) != _CHECKSUM.unpack_from(view)[0]:
            raise DamagedError(f"chunk {self._number + 1} is not what was sent")
        self._number += 1
        if self._header is None:
            content = self._read_header(content)
        elif not len(content):
            raise RefusedError("a chunk is empty")
        if len(content) > self._left:
            raise RefusedError("the stream continues after the end of its arrays")
        self._pending = content
        if self._arrays is not None:
            self._copy()

    def allocate(self) -> None:
        """Take memory for the arrays, once their sizes are known and allowed."""
        if self._layout is not None and self._arrays is None:
            self._arrays = self._layout.allocate()
            self._copy()

    def finish(self) -> tuple[Message, Failure | None]:
        """Return the message, and the error that it reports.

        Raises:
            DamagedError: It is not complete.
            RefusedError: The bytes of an array are not values of its dtype.
        """
        if self._header is None or self._arrays is None or self._left:
            raise DamagedError(f"the stream ended after chunk {self._number}, in its middle")
        try:
            arrays = self._arrays.view()
        except LayoutError as error:
            raise RefusedError(str(error)) from None
        return Message(self._header.method, self._header.fields, arrays), self._header.failure

    def _read_header(self, content: memoryview) -> memoryview:
        if len(content) < _LENGTH.size:
            raise DamagedError("chunk 1 is cut off")
        (length,) = _LENGTH.unpack_from(content)
        if length > self._limits.header_bytes:
            raise RefusedError(
                f"its header has {length:,} bytes, and {self._limits.header_bytes:,} is the most"
            )
        if length > len(content) - _LENGTH.size:
            raise RefusedError("its header is longer than the first chunk")
        header = content[_LENGTH.size : _LENGTH.size + length]
        try:
            found: Header = _DECODER.decode(header)
            if len(found.method) > LONGEST_METHOD:
                raise RefusedError(f"the name of its method has {len(found.method):,} characters")
            count, most = len(found.arrays), self._limits.arrays
            if count > most:
                raise RefusedError(f"it has {count:,} arrays, and {most:,} is the most")
            layout = make_layout(found.arrays)
        except (msgspec.MsgspecError, LayoutError, RecursionError, OverflowError) as error:
            raise RefusedError(f"its header cannot be read: {error}") from None
        if sum(layout.sizes) > self._limits.message_bytes:
            raise RefusedError(
                f"its arrays have {sum(layout.sizes):,} bytes, and "
                f"{self._limits.message_bytes:,} is the most"
            )
        self._header, self._layout, self._left = found, layout, layout.nbytes
        return content[_LENGTH.size + length :]

    def _copy(self) -> None:
        if self._arrays is None:
            return
        content, done = self._pending, 0
        while done < len(content):
            block = self._arrays.blocks[self._block]
            count = min(len(content) - done, block.size - self._at)
            block.data[self._at : self._at + count] = content[done : done + count]
            done += count
            self._at += count
            if self._at == block.size:
                self._block, self._at = self._block + 1, 0
        self._left -= len(content)
        self._pending = memoryview(b"")


def _begin(call: bytes, direction: int, number: int) -> int:
    return crc32(_PLACE.pack(call, direction, number))


def _seal(pieces: list[memoryview], call: bytes, direction: int, number: int) -> bytes:
    checksum = _begin(call, direction, number)
    for piece in pieces:
        checksum = crc32(piece, checksum)
    return b"".join([_CHECKSUM.pack(checksum), *pieces])
