"""`Channel.call_briefly`: one chunk there and one back; what is longer is told, and never cut."""

import contextlib
from collections.abc import Callable, Iterator

import numpy as np
import pytest

from jaxdist import errors
from jaxdist._parameter_server.transport import Channel, Message, connect, serve
from jaxdist._parameter_server.transport.stream import CHUNK
from tests.parameter_server.transport.task import poll

Handle = Callable[[Message], Message]


@contextlib.contextmanager
def _dial(handle: Handle, layer: str = "grpc") -> Iterator[Channel]:
    listener = serve("127.0.0.1:0", {"act": handle}, layer=layer)
    channel = connect(listener.address, layer=layer, name="ps 0")
    try:
        yield channel
    finally:
        channel.close()
        listener.stop()


@pytest.mark.parametrize("layer", ["local", "grpc"])
def test_a_brief_call_gives_what_a_call_gives(layer: str) -> None:
    arrays = (np.arange(6).reshape(2, 3), np.array(True))
    with _dial(lambda request: request, layer) as channel:
        reply = channel.call_briefly(Message("act", {"a": [1, None]}, arrays))
        assert reply is not None
        assert (reply.method, reply.fields) == ("act", {"a": [1, None]})
        assert all(np.array_equal(a, b) for a, b in zip(arrays, reply.arrays, strict=True))


def test_a_reply_of_more_than_a_chunk_is_told_and_the_work_is_done_once() -> None:
    seen: list[str] = []

    def handle(request: Message) -> Message:
        seen.append(request.method)
        return Message("act", {}, (np.zeros(CHUNK, np.uint8),))

    with _dial(handle) as channel:
        assert channel.call_briefly(Message("act")) is None
        assert seen == ["act"]
        assert channel.call(Message("act")).nbytes == CHUNK


def test_the_longest_reply_of_one_chunk_comes_whole() -> None:
    lengths = iter(range(CHUNK - 256, CHUNK + 256, 64))
    with _dial(lambda _: Message("act", {}, (np.ones(next(lengths), np.uint8),))) as channel:
        found = [channel.call_briefly(Message("act")) for _ in range(8)]
    whole = [reply.nbytes for reply in found if reply is not None]
    assert 0 < len(whole) < 8
    assert whole == list(range(CHUNK - 256, CHUNK + 256, 64))[: len(whole)]


def test_a_long_request_is_answered_too() -> None:
    sent = np.arange(CHUNK, dtype=np.int64)
    with _dial(lambda request: Message("act", {"sum": int(request.arrays[0].sum())})) as channel:
        reply = channel.call_briefly(Message("act", {}, (sent,)))
        assert reply is not None
        assert reply.fields["sum"] == sent.sum()


def test_errors_of_the_handler_and_of_the_connection_are_those_of_a_call() -> None:
    def fail(_: Message) -> Message:
        raise errors.OutOfRangeError("no batch is left")

    with _dial(fail) as channel:
        with pytest.raises(errors.OutOfRangeError, match="no batch is left"):
            channel.call_briefly(Message("act"))
        with pytest.raises(errors.NotFoundError, match="'other'"):
            channel.call_briefly(Message("other"))
        channel.close()
        with pytest.raises(errors.UnavailableError, match="this channel is closed"):
            channel.call_briefly(Message("act"))


def test_a_brief_call_has_a_deadline() -> None:
    done: list[bool] = []
    seen: list[bool] = []

    def hang(_: Message) -> Message:
        seen.append(True)
        poll(lambda: bool(done))
        return Message("act")

    with _dial(hang) as channel:
        with pytest.raises(errors.DeadlineExceededError, match=r"did not reply within 0\.2 s"):
            channel.call_briefly(Message("act"), 0.2)
        done.append(True)
        poll(lambda: bool(seen))


def test_a_brief_call_needs_the_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JAXDIST_SECRET", "a secret of this test, long enough")
    seen: list[bool] = []

    def handle(request: Message) -> Message:
        seen.append(True)
        return request

    with _dial(handle) as right:
        monkeypatch.setenv("JAXDIST_SECRET", "another secret, also long enough")
        wrong = connect(right.address, layer="grpc", name="ps 0")
        try:
            with pytest.raises(errors.UnauthenticatedError, match="another secret"):
                wrong.call_briefly(Message("act"))
        finally:
            wrong.close()
        assert not seen
        assert right.call_briefly(Message("act")) is not None
