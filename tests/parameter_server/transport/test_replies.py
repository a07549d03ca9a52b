"""Replies that no listener of jaxdist sends, to a real caller."""

import contextlib
import struct
import zlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import msgspec
import numpy as np
import pytest

from jaxdist._called import called
from jaxdist._parameter_server.transport import Limits, Message, Security, connect, serve
from jaxdist._parameter_server.transport.grpc_channel import (
    CALL_KEY,
    SERVICE,
    GrpcChannel,
    load_grpc,
)
from jaxdist._parameter_server.transport.limits import DEFAULT
from jaxdist._parameter_server.transport.stream import REPLY, REQUEST, Outgoing
from jaxdist.errors import UnavailableError, UnknownError

Reply = Callable[[bytes], Iterator[bytes]]


@contextlib.contextmanager
def _start(reply: Reply) -> Iterator[str]:
    """A bare server of gRPC; `reply` gets the id of the call."""
    grpc = load_grpc()

    def answer(_: bytes, context: Any) -> Iterator[bytes]:
        yield from reply(dict(context.invocation_metadata())[CALL_KEY])

    server = grpc.server(ThreadPoolExecutor(2))
    methods = {"Call": grpc.unary_stream_rpc_method_handler(answer)}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, methods),))
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        server.stop(None).wait(10)


def _call(reply: Reply, limits: Limits = DEFAULT) -> Message:
    with _start(reply) as address:
        channel = connect(address, layer="grpc", name="ps 0", security=Security(), limits=limits)
        try:
            return channel.call(Message("pull"), 20)
        finally:
            channel.close()


@called("")
def _right(call: bytes, direction: int = REPLY) -> Iterator[bytes]:
    arrays = (np.arange(200_000), np.ones(3))
    return Outgoing(Message("pull", {}, arrays), Limits()).make_chunks(call, direction)


def _seal(call: bytes, header: Any) -> bytes:
    raw = msgspec.msgpack.encode(header)
    content = struct.pack("<I", len(raw)) + raw
    begun = zlib.crc32(struct.pack("<16sBQ", call, REPLY, 0))
    return struct.pack("<I", zlib.crc32(content, begun)) + content


def test_the_server_of_these_tests_answers() -> None:
    assert np.array_equal(_call(_right).arrays[0], np.arange(200_000))


WRONG: dict[str, Reply] = {
    "nothing": lambda call: iter(()),
    "half": lambda call: iter([next(_right(call))]),
    "the first chunk twice": lambda call: iter([next(_right(call))] * 2),
    "the reply to another call": lambda call: _right(bytes(16)),
    "the request": lambda call: _right(call, REQUEST),
    "a byte that is another": lambda call: (c[:-1] + bytes([c[-1] ^ 1]) for c in _right(call)),
    "a dtype that is none": lambda call: iter([_seal(call, ["m", {}, [["object", [3]]], None])]),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_reply_that_is_not_what_was_sent_is_no_reply(name: str) -> None:
    with pytest.raises(UnavailableError, match=r"ps 0 at (.|\n)*its reply was damaged on its way"):
        _call(WRONG[name])


def test_what_comes_after_a_complete_reply_changes_nothing() -> None:
    reply = _call(lambda call: iter([*_right(call), bytes(9)]))
    assert np.array_equal(reply.arrays[1], np.ones(3))


def test_a_reply_above_the_limits_of_the_caller_is_refused() -> None:
    with pytest.raises(UnavailableError, match="1,600,024 bytes, and 1,000 is the most"):
        _call(_right, Limits(message_bytes=1000))


def test_an_error_of_a_later_version_keeps_its_name() -> None:
    failure = ["TimeTravelError", "not yet", []]
    with pytest.raises(UnknownError, match="TimeTravelError: not yet"):
        _call(lambda call: iter([_seal(call, ["pull", {}, [], failure])]))


@pytest.mark.parametrize("name", ["Security", "get_names", "collections", "JaxdistError "])
def test_a_name_that_is_no_error_makes_no_object(name: str) -> None:
    with pytest.raises(UnknownError, match=name):
        _call(lambda call: iter([_seal(call, ["pull", {}, [], [name, "text", [1]]])]))


def test_a_channel_of_grpc_that_was_closed_meanwhile_is_unavailable() -> None:
    listener = serve("127.0.0.1:0", {}, layer="grpc", security=Security())
    channel = connect(listener.address, layer="grpc", name="ps 0", security=Security())
    assert isinstance(channel, GrpcChannel)
    channel._channel.close()
    with pytest.raises(UnavailableError, match=r"ps 0 at (.|\n)*closed"):
        channel.call(Message("pull"), 20)
    listener.stop()
