"""Reads and writes serialized topologies: TensorFlow's `TopologyProto`."""

from collections.abc import Iterable, Iterator
from typing import NamedTuple

from jaxdist._called import refuse
from jaxdist.errors import TopologyError

# Field numbers of the message.
_MESH_SHAPE, _NUM_TASKS, _DEVICES_PER_TASK, _COORDINATES = 1, 2, 3, 4
# Wire types of protobuf: a varint; 8 bytes; a length and that many bytes; 4 bytes.
_VARINT, _FIXED_64, _BYTES, _FIXED_32 = 0, 1, 2, 5


class TopologyFields(NamedTuple):
    """The fields of the message, not validated."""

    mesh_shape: list[int]
    num_tasks: int
    devices_per_task: int
    coordinates: list[int]


def write(fields: TopologyFields) -> bytes:
    """Return the message for `fields`, byte for byte as TensorFlow writes it."""
    # As in proto3, fields with the default value are omitted.
    return (
        _encode_packed(_MESH_SHAPE, fields.mesh_shape)
        + _encode_number(_NUM_TASKS, fields.num_tasks)
        + _encode_number(_DEVICES_PER_TASK, fields.devices_per_task)
        + _encode_packed(_COORDINATES, fields.coordinates)
    )


class _GarbageError(Exception):
    """Raised for bytes that are not a field of the message; its argument is the offset."""


def read(message: bytes) -> TopologyFields:
    """Return the fields of `message`; skip unknown fields, which a newer writer may add.

    Raises:
        TopologyError: The bytes are not a `TopologyProto`.
    """
    try:
        return _read(message)
    except _GarbageError as garbage:
        raise refuse(
            f"{len(message)} bytes, and the field at byte {garbage} cannot be read.",
            "A serialized topology is a TopologyProto.",
            "Pass what Topology.serialized() of jaxdist or of TensorFlow returned.",
            kind=TopologyError,
        ) from None


def _read(message: bytes) -> TopologyFields:
    shape: list[int] = []
    coordinates: list[int] = []
    numbers = {_NUM_TASKS: 0, _DEVICES_PER_TASK: 0}
    for field, value in _iterate_fields(message):
        if field in (_MESH_SHAPE, _COORDINATES):
            # A reader of protobuf must accept repeated numbers both packed and one by one.
            into = shape if field == _MESH_SHAPE else coordinates
            into += _unpack(value) if isinstance(value, bytes) else [value]
        elif field in numbers and isinstance(value, int):
            numbers[field] = value
    return TopologyFields(shape, numbers[_NUM_TASKS], numbers[_DEVICES_PER_TASK], coordinates)


def _encode_packed(field: int, numbers: Iterable[int]) -> bytes:
    packed = b"".join(map(_encode_varint, numbers))
    start = _encode_varint(field << 3 | _BYTES) + _encode_varint(len(packed))
    return start + packed if packed else b""


def _encode_number(field: int, value: int) -> bytes:
    return _encode_varint(field << 3 | _VARINT) + _encode_varint(value) if value else b""


def _encode_varint(value: int) -> bytes:
    # A negative int32 is written as the 64 bits of its two's complement.
    value &= 2**64 - 1
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def _unpack(packed: bytes) -> Iterator[int]:
    at = 0
    while at < len(packed):
        value, at = _read_varint(packed, at)
        yield value


def _iterate_fields(message: bytes) -> Iterator[tuple[int, int | bytes]]:
    at = 0
    while at < len(message):
        key, at = _read_varint(message, at)
        field, kind = key >> 3, key & 7
        if kind == _VARINT:
            value, at = _read_varint(message, at)
            yield field, value
            continue
        if kind == _BYTES:
            length, at = _read_varint(message, at)
        elif kind in (_FIXED_64, _FIXED_32):
            length = 8 if kind == _FIXED_64 else 4
        else:
            raise _GarbageError(at)
        # A varint may be read as a negative number.
        if not 0 <= length <= len(message) - at:
            raise _GarbageError(at)
        yield field, message[at : at + length]
        at += length


def _read_varint(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while at < len(data) and shift < 64:
        byte = data[at]
        value |= (byte & 0x7F) << shift
        at += 1
        if byte < 0x80:
            # Numbers of 2**63 and more are the two's complement of negative ones.
            return (value - 2**64 if value >= 2**63 else value), at
        shift += 7
    raise _GarbageError(at)
