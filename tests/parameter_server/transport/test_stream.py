"""Messages as chunks, and what a receiver makes of chunks that nobody has sent so."""

import itertools
import math
import struct
import tracemalloc
import zlib
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from jaxdist._called import called
from jaxdist._parameter_server.transport.limits import Limits
from jaxdist._parameter_server.transport.message import Message, get_dtypes
from jaxdist._parameter_server.transport.stream import (
    CHUNK,
    REPLY,
    REQUEST,
    DamagedError,
    Incoming,
    Outgoing,
    RefusedError,
)
from jaxdist.errors import ArgumentError
from tests.tables import examples

CALL = bytes(range(16))
LIMITS = Limits()


@called("send")
def send(message: Message, call: bytes = CALL) -> list[bytes]:
    """Return the chunks of a request."""
    return list(Outgoing(message, LIMITS).make_chunks(call, REQUEST))


def receive(chunks: list[bytes], limits: Limits = LIMITS) -> Message:
    """Return the request that these chunks are."""
    incoming = Incoming(CALL, REQUEST, limits)
    for chunk in chunks:
        incoming.add(chunk)
        incoming.allocate()
    return incoming.finish()[0]


def equal_bits(one: np.ndarray, other: np.ndarray) -> bool:
    """Whether arrays are the same, not-a-numbers included."""
    native = one.astype(one.dtype.newbyteorder("="))
    return (native.dtype, one.shape, native.tobytes()) == (
        other.dtype,
        other.shape,
        other.tobytes(),
    )


def _arrays() -> st.SearchStrategy[np.ndarray]:
    shapes = hnp.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=7)
    plain = st.sampled_from(sorted(get_dtypes())).flatmap(
        lambda name: shapes.flatmap(lambda shape: _fill(np.dtype(get_dtypes()[name]), shape))
    )
    return st.one_of(plain, plain.map(_spread), plain.map(_swap))


def _fill(dtype: np.dtype, shape: tuple[int, ...]) -> st.SearchStrategy[np.ndarray]:
    size = math.prod(shape) * dtype.itemsize
    if dtype == np.bool_:
        return st.lists(st.booleans(), min_size=size, max_size=size).map(
            lambda values: np.array(values, bool).reshape(shape)
        )
    return st.binary(min_size=size, max_size=size).map(
        lambda raw: np.frombuffer(bytearray(raw), np.uint8).view(dtype).reshape(shape)
    )


def _spread(array: np.ndarray) -> np.ndarray:
    """The same values, each with a gap after it."""
    wide = np.repeat(array, 2, axis=-1) if array.ndim else array
    return wide[..., ::2] if array.ndim else wide


def _swap(array: np.ndarray) -> np.ndarray:
    kinds = "iufc"
    is_numpy = array.dtype.kind in kinds and array.dtype.isbuiltin == 1
    return array.astype(array.dtype.newbyteorder(">")) if is_numpy else array


_FIELDS = st.dictionaries(
    st.text(max_size=5),
    st.recursive(
        st.none()
        | st.booleans()
        | st.integers(-(2**63), 2**64 - 1)
        | st.floats(allow_nan=False)
        | st.text(max_size=20),
        lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner),
        max_leaves=12,
    ),
    max_size=4,
)


@settings(
    max_examples=examples(200, long=3000),
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
@given(fields=_FIELDS, arrays=st.lists(_arrays(), max_size=5))
def test_every_message_arrives_as_it_was_sent(
    fields: dict[str, Any], arrays: list[np.ndarray]
) -> None:
    got = receive(send(Message("m", fields, tuple(arrays))))
    assert got.fields == fields
    assert len(got.arrays) == len(arrays)
    assert all(equal_bits(a, b) for a, b in zip(arrays, got.arrays, strict=True))


@pytest.mark.parametrize("name", get_dtypes())
def test_every_dtype_arrives_in_several_chunks(name: str) -> None:
    dtype = get_dtypes()[name]
    raw = np.random.default_rng(0).integers(0, 2, CHUNK + 64, np.uint8)
    array = raw.view(dtype)
    assert equal_bits(array, receive(send(Message("m", {}, (array,)))).arrays[0])


def test_the_dtypes_of_jax_are_there() -> None:
    wanted = {"bfloat16", "float8_e4m3fn", "float8_e5m2", "int4", "uint4", "bool", "complex64"}
    assert wanted <= set(get_dtypes())


@pytest.mark.parametrize("over", [-1, 0, 1])
@pytest.mark.parametrize("count", [1, 2, 3])
def test_messages_that_end_at_the_end_of_a_chunk_arrive(count: int, over: int) -> None:
    for before in (0, 5):
        size = count * CHUNK - 64 + over
        arrays = (np.ones(before, np.uint8), np.arange(size // 8), np.array(3, np.int8))
        got = receive(send(Message("m", {}, arrays)))
        assert all(equal_bits(a, b) for a, b in zip(arrays, got.arrays, strict=True))


def test_no_chunk_is_longer_than_gRPC_takes() -> None:
    chunks = send(Message("m", {"text": "x" * 200_000}, (np.zeros(3_000_000, np.uint8),)))
    assert max(map(len, chunks)) == CHUNK + 4
    assert len(chunks) == 7


def test_a_header_that_is_too_long_is_refused_by_the_sender() -> None:
    with pytest.raises(ArgumentError, match="bytes of fields, names and shapes"):
        send(Message("m", {"text": "x" * LIMITS.header_bytes}))


def _chunks() -> list[bytes]:
    values = np.random.default_rng(1).integers(0, 256, 3 * CHUNK, np.uint8)
    return send(Message("m", {"x": 1}, (values, np.arange(3))))


HARM: dict[str, Callable[[list[bytes], int], Iterator[bytes]]] = {
    "dropped": lambda chunks, k: itertools.chain(chunks[:k], chunks[k + 1 :]),
    "repeated": lambda chunks, k: itertools.chain(chunks[: k + 1], chunks[k:]),
    "swapped": lambda c, k: itertools.chain(c[:k], c[k + 1 : k + 2], c[k : k + 1], c[k + 2 :]),
    "shorter": lambda chunks, k: itertools.chain(chunks[:k], [chunks[k][:-1]], chunks[k + 1 :]),
    "longer": lambda chunks, k: itertools.chain(chunks[:k], [chunks[k] + b"\0"], chunks[k + 1 :]),
    "empty": lambda chunks, k: itertools.chain(chunks[:k], [b""], chunks[k + 1 :]),
    "three bytes": lambda chunks, k: itertools.chain(chunks[:k], [b"abc"], chunks[k + 1 :]),
    "last": lambda chunks, k: iter(chunks[:k]),
}


@pytest.mark.parametrize("number", range(4))
@pytest.mark.parametrize("harm", HARM)
def test_chunks_that_are_not_those_that_were_sent_are_refused(harm: str, number: int) -> None:
    chunks = _chunks()
    assert len(chunks) == 4
    if harm == "swapped" and number == 3:
        number = 2
    with pytest.raises((DamagedError, RefusedError)):
        receive(list(HARM[harm](chunks, number)))


@settings(max_examples=examples(100, long=2000), deadline=None)
@given(data=st.data())
def test_any_other_byte_is_found(data: st.DataObject) -> None:
    chunks = send(Message("m", {"x": [1, "text"]}, (np.arange(100), np.ones(70_000))))
    number = data.draw(st.integers(0, len(chunks) - 1))
    place = data.draw(st.integers(0, len(chunks[number]) - 1))
    other = data.draw(st.integers(1, 255))
    damaged = bytearray(chunks[number])
    damaged[place] ^= other
    with pytest.raises(DamagedError):
        receive([*chunks[:number], bytes(damaged), *chunks[number + 1 :]])


@called("send")
def test_a_chunk_of_another_call_or_direction_is_refused() -> None:
    message = Message("m", {}, (np.arange(3),))
    with pytest.raises(DamagedError):
        receive(send(message, bytes(16)))
    with pytest.raises(DamagedError):
        receive(list(Outgoing(message, LIMITS).make_chunks(CALL, REPLY)))


def forge(header: Any, *, length: int | None = None, payload: bytes = b"") -> bytes:
    """Return a first chunk with a right checksum and a header of any content."""
    raw = header if isinstance(header, bytes) else msgspec.msgpack.encode(header)
    content = struct.pack("<I", len(raw) if length is None else length) + raw + payload
    begun = zlib.crc32(struct.pack("<16sBQ", CALL, REQUEST, 0))
    return struct.pack("<I", zlib.crc32(content, begun)) + content


def _with(*arrays: Any) -> list[Any]:
    return ["m", {}, list(arrays), None]


FORGED = {
    "no header": b"",
    "no list": 3,
    "too short": ["m"],
    "a method with a long name": ["m" * 501, {}, [], None],
    "a method that is no text": [3, {}, [], None],
    "fields that are no dict": ["m", [], [], None],
    "a key that is no text": ["m", {3: 4}, [], None],
    "no array": _with(3),
    "no shape": _with(["float32", 3]),
    "objects": _with(["object", [3]]),
    "texts": _with(["<U3", [3]]),
    "records": _with(["i4,f4", [3]]),
    "a dtype in the words of C": _with(["f4", [3]]),
    "a dtype as a number": _with([3, [3]]),
    "a negative length": _with(["float32", [-1]]),
    "two negative lengths": _with(["float32", [-2, -2]]),
    "a length that is no integer": _with(["float32", [1.5]]),
    "a length of True": _with(["float32", [True]]),
    "a product above 64 bits": _with(["float32", [2**32, 2**32]]),
    "a product above 64 bits with a zero": _with(["float32", [2**62, 2**62, 0]]),
    "a length above 64 bits": _with(["float32", [2**64 - 1]]),
    "more dimensions than NumPy has": _with(["float32", [1] * 65]),
    "more bytes than a message has": _with(["float32", [2**33]]),
    "more bytes together": _with(*[["float32", [2**31]]] * 3),
    "more arrays than a message has": _with(*[["float32", [1]]] * 10_001),
    "an error that is none": ["m", {}, [], 3],
    "many lists in lists": b"\x94\xa1m\x81\xa1a" + b"\x91" * 100_000 + b"\x90\x90\xc0",
    "half of a header": msgspec.msgpack.encode(_with())[:-2],
}


@pytest.mark.parametrize("name", FORGED)
def test_a_header_that_is_none_is_refused_before_memory_is_taken(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    incoming = Incoming(CALL, REQUEST, LIMITS)
    monkeypatch.setattr(np, "empty", lambda *_: pytest.fail("memory was taken"))
    with pytest.raises((RefusedError, DamagedError)):
        incoming.add(forge(FORGED[name]))
    assert not incoming.is_complete


def test_a_length_of_the_header_that_is_none_is_refused() -> None:
    for length in (1000, LIMITS.header_bytes + 1, 2**32 - 1):
        with pytest.raises(RefusedError, match="header"):
            receive([forge(_with(), length=length)])
    short = b"ab"
    begun = zlib.crc32(struct.pack("<16sBQ", CALL, REQUEST, 0))
    with pytest.raises(DamagedError, match="cut off"):
        receive([struct.pack("<I", zlib.crc32(short, begun)) + short])


def test_bytes_after_the_end_are_refused() -> None:
    with pytest.raises(RefusedError, match="continues"):
        receive([forge(_with(), payload=b"more")])


def test_a_chunk_without_bytes_is_refused() -> None:
    empty = struct.pack("<I", zlib.crc32(struct.pack("<16sBQ", CALL, REQUEST, 1)))
    with pytest.raises(RefusedError, match="empty"):
        receive([forge(_with(["float32", [3]])), empty])


def test_a_bool_that_is_neither_true_nor_false_is_refused() -> None:
    with pytest.raises(RefusedError, match="bool"):
        receive([forge(_with(["bool", [3]]), payload=b"\0\1\2" + bytes(61))])


def test_small_arrays_share_memory_and_large_ones_do_not() -> None:
    sizes = (100, 100, 2**20, 100)
    got = receive(send(Message("m", {}, tuple(np.ones(n, np.int8) for n in sizes)))).arrays
    bases = [array.base for array in got]
    assert np.shares_memory(_base(got[0]), got[1])
    assert not np.shares_memory(_base(got[2]), got[1])
    assert not np.shares_memory(_base(got[2]), got[3])
    assert all(base is not None for base in bases)


def _base(array: np.ndarray) -> np.ndarray:
    while isinstance(array.base, np.ndarray):
        array = array.base
    return array


@called("send")
def test_neither_side_holds_a_large_message_twice() -> None:
    size = 32 * 2**20
    message = Message("m", {}, (np.ones(size, np.uint8),))
    tracemalloc.start()
    try:
        incoming = Incoming(CALL, REQUEST, LIMITS)
        for chunk in Outgoing(message, LIMITS).make_chunks(CALL, REQUEST):
            incoming.add(chunk)
            incoming.allocate()
        assert incoming.finish()[0].nbytes == size
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert size <= most < size + 4 * CHUNK
