"""What `Channel` and `Listener` promise, in one process and by gRPC."""

import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import ml_dtypes
import numpy as np
import pytest

from jaxdist import errors
from jaxdist._parameter_server.transport import (
    Channel,
    Handler,
    Limits,
    Listener,
    Message,
    connect,
    serve,
)
from tests.parameter_server.transport.task import poll

Serve = Callable[..., Listener]
Connect = Callable[..., Channel]


@pytest.fixture(params=["local", "grpc"])
def layer(request: pytest.FixtureRequest) -> str:
    """Each layer."""
    name: str = request.param
    return name


@pytest.fixture
def start(layer: str) -> Iterator[Serve]:
    """`serve`, whose listeners are stopped after the test."""
    listeners: list[Listener] = []

    def start(handlers: dict[str, Handler], address: str = "127.0.0.1:0", **more) -> Listener:
        listeners.append(serve(address, handlers, layer=layer, **more))
        return listeners[-1]

    yield start
    for listener in listeners:
        listener.stop()


@pytest.fixture
def dial(layer: str) -> Iterator[Connect]:
    """`connect`, whose channels are closed after the test."""
    channels: list[Channel] = []

    def dial(address: str, **more) -> Channel:
        channels.append(connect(address, layer=layer, name="ps 0", **more))
        return channels[-1]

    yield dial
    for channel in channels:
        channel.close()


def echo(request: Message) -> Message:
    """Return the request."""
    return request


def test_a_reply_is_what_the_handler_returned(start: Serve, dial: Connect) -> None:
    channel = dial(start({"echo": echo}).address)
    arrays = (np.arange(6).reshape(2, 3), np.ones(3, ml_dtypes.bfloat16), np.array(True))
    fields = {"step": 3, "name": None, "rest": [1.5, {"deep": ["x", False]}], "big": 2**63}
    reply = channel.call(Message("echo", fields, arrays))
    assert reply.method == "echo"
    assert reply.fields == fields
    assert [(a.dtype, a.shape) for a in reply.arrays] == [(a.dtype, a.shape) for a in arrays]
    assert all(np.array_equal(a, b) for a, b in zip(arrays, reply.arrays, strict=True))


def test_large_and_small_arrays_keep_their_order(start: Serve, dial: Connect) -> None:
    channel = dial(start({"echo": echo}).address)
    sizes = (1, 70_000, 0, 3, 600_000, 2, 1_000_003, 5)
    arrays = tuple(np.arange(size, dtype=np.uint16) for size in sizes)
    reply = channel.call(Message("echo", {}, arrays))
    assert [a.size for a in reply.arrays] == list(sizes)
    assert all(np.array_equal(a, b) for a, b in zip(arrays, reply.arrays, strict=True))


def test_a_nan_and_infinities_arrive(start: Serve, dial: Connect) -> None:
    channel = dial(start({"echo": echo}).address)
    fields = channel.call(Message("echo", {"x": [float("nan"), float("inf")]})).fields
    assert np.array_equal(fields["x"], [np.nan, np.inf], equal_nan=True)


def test_what_is_received_cannot_be_written(start: Serve, dial: Connect) -> None:
    writeable = []

    def look(request: Message) -> Message:
        writeable.extend(array.flags.writeable for array in request.arrays)
        return request

    own = np.ones(3)
    reply = dial(start({"look": look}).address).call(Message("look", {}, (own, np.ones(0))))
    assert not any(writeable + [array.flags.writeable for array in reply.arrays])
    assert len(writeable) == 2
    assert own.flags.writeable


def test_fields_of_the_receiver_are_its_own(start: Serve, dial: Connect) -> None:
    def change(request: Message) -> Message:
        request.fields["list"].append(2)
        return request

    fields = {"list": [1]}
    channel = dial(start({"change": change}).address)
    assert channel.call(Message("change", fields)).fields == {"list": [1, 2]}
    assert fields == {"list": [1]}


def test_an_array_that_is_not_contiguous_or_of_the_other_byte_order_arrives(
    start: Serve, dial: Connect
) -> None:
    channel = dial(start({"echo": echo}).address)
    sent = (np.arange(20).reshape(4, 5).T, np.arange(9)[::-2], np.arange(5, dtype=">f4"))
    got = channel.call(Message("echo", {}, sent)).arrays
    assert all(np.array_equal(a, b) for a, b in zip(sent, got, strict=True))
    assert all(array.dtype.isnative and array.flags.c_contiguous for array in got)


def test_memory_that_came_by_grpc_is_aligned(start: Serve, dial: Connect, layer: str) -> None:
    aligned: list[int] = []

    def look(request: Message) -> Message:
        aligned.extend(array.ctypes.data % 64 for array in request.arrays)
        return request

    sent = tuple(np.zeros(64, np.uint8)[: n + 1] for n in range(5))
    dial(start({"look": look}).address).call(
        Message("look", {}, (*sent, np.zeros(2**19 + 3, np.uint8)))
    )
    assert len(aligned) == 6
    assert layer == "local" or not any(aligned)


@pytest.mark.parametrize(
    ("raised", "kind", "text"),
    [
        (errors.ShapeError("a shape\n\nof 2"), errors.ShapeError, "a shape\n\nof 2"),
        (errors.OutOfRangeError("no more"), errors.OutOfRangeError, "no more"),
        (errors.DuplicateTaskError("twice"), errors.DuplicateTaskError, "twice"),
        (errors.ConfigError("ä\ud800"), errors.ConfigError, "ä?"),
        (KeyError("w"), errors.UnknownError, "fail raised KeyError: 'w'"),
        (StopIteration("w"), errors.UnknownError, "fail raised StopIteration: w"),
        (SystemExit(3), errors.UnknownError, "fail raised SystemExit: 3"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_an_error_of_a_handler_is_the_caller_s(
    start: Serve, dial: Connect, raised: BaseException, kind: type[Exception], text: str
) -> None:
    def fail(_: Message) -> Message:
        raise raised

    with pytest.raises(kind) as caught:
        dial(start({"fail": fail}).address).call(Message("fail"))
    assert type(caught.value) is kind
    assert str(caught.value).startswith(text)
    assert __file__ not in str(caught.value)


def test_an_error_keeps_the_processes_that_are_its_cause(start: Serve, dial: Connect) -> None:
    def fail(_: Message) -> Message:
        raise errors.UnavailableError("process 3 has ended", [3])

    with pytest.raises(errors.UnavailableError, match="process 3 has ended") as caught:
        dial(start({"fail": fail}).address).call(Message("fail"))
    assert caught.value.processes == (3,)


class OwnError(errors.CheckpointError):
    """A class of a room, which callers do not know."""


def test_a_class_that_is_not_public_arrives_as_the_class_above(start: Serve, dial: Connect) -> None:
    def fail(_: Message) -> Message:
        raise OwnError("damaged")

    with pytest.raises(errors.CheckpointError, match="damaged") as caught:
        dial(start({"fail": fail}).address).call(Message("fail"))
    assert type(caught.value) is errors.CheckpointError


def test_an_error_whose_text_cannot_be_made_arrives(start: Serve, dial: Connect) -> None:
    class Mute(Exception):  # noqa: N818
        def __str__(self) -> str:
            raise RuntimeError

    def fail(_: Message) -> Message:
        raise Mute

    with pytest.raises(errors.UnknownError, match="fail raised Mute"):
        dial(start({"fail": fail}).address).call(Message("fail"))


def test_a_method_that_is_not_there_is_named(start: Serve, dial: Connect) -> None:
    with pytest.raises(errors.NotFoundError, match=r"'push'(.|\n)*\['echo'\]"):
        dial(start({"echo": echo}).address).call(Message("push"))


BAD: dict[str, np.ndarray] = {
    "objects in an array": np.array([object()]),
    "texts in an array": np.array(["a"]),
    "dates": np.array(["2020-01-01"], "M8[D]"),
    "records": np.zeros(2, [("a", "i4")]),
    "long doubles": np.zeros(2, np.longdouble),
}


@pytest.mark.parametrize("name", BAD)
def test_what_cannot_be_sent_is_refused_on_both_ways(
    start: Serve, dial: Connect, name: str
) -> None:
    wrong = Message("reply", {}, (BAD[name],))
    channel = dial(start({"reply": lambda _: wrong, "echo": echo}).address)
    refused = (errors.ArgumentTypeError, errors.ArgumentError)
    with pytest.raises(refused, match=r"Channel\.call"):
        channel.call(wrong)
    with pytest.raises(refused, match="The reply of reply"):
        channel.call(Message("reply"))
    channel.call(Message("echo"))


def test_a_message_above_the_limits_is_refused(start: Serve, dial: Connect) -> None:
    small = Limits(message_bytes=1000, arrays=3)
    channel = dial(start({"echo": echo}, limits=small).address)
    with pytest.raises(errors.ArgumentError, match="1,600"):
        channel.call(Message("echo", {}, (np.zeros(200),)))
    with pytest.raises(errors.ArgumentError, match="4 arrays"):
        channel.call(Message("echo", {}, (np.zeros(1),) * 4))
    channel.call(Message("echo", {}, (np.zeros(125),)))


def test_a_reply_above_the_limits_is_refused(start: Serve, dial: Connect) -> None:
    big = Message("pull", {}, (np.zeros(200),))
    channel = dial(start({"pull": lambda _: big}, limits=Limits(message_bytes=1000)).address)
    with pytest.raises(errors.ArgumentError, match=r"The reply of pull(.|\n)*1,600"):
        channel.call(Message("pull"))


@pytest.mark.parametrize("seconds", [0.2, 0.0, -1.0])
def test_a_call_without_a_reply_ends_at_its_deadline(
    start: Serve, dial: Connect, seconds: float
) -> None:
    release = threading.Event()

    def wait(request: Message) -> Message:
        release.wait(30)
        return request

    channel = dial(start({"wait": wait}).address)
    began = time.monotonic()
    with pytest.raises(errors.DeadlineExceededError, match=r"ps 0 at 127\.0\.0\.1:\d+ did not"):
        channel.call(Message("wait"), seconds)
    assert time.monotonic() - began < 5
    release.set()


def test_the_deadline_of_a_call_is_a_setting(
    start: Serve, dial: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    release = threading.Event()
    monkeypatch.setenv("JAXDIST_RPC_SECONDS", "0.2")
    channel = dial(start({"wait": lambda request: release.wait(30) and request}).address)
    with pytest.raises(errors.DeadlineExceededError, match=r"within 0\.2 s(.|\n)*RPC_SECONDS"):
        channel.call(Message("wait"))
    release.set()


def test_the_longest_time_is_infinite(start: Serve, dial: Connect) -> None:
    channel = dial(start({"echo": echo}).address)
    assert channel.call(Message("echo"), float("inf")).method == "echo"
    assert channel.call(Message("echo"), 60).method == "echo"


def test_nobody_there_is_an_error_at_once(start: Serve, dial: Connect) -> None:
    listener = start({"echo": echo})
    listener.stop()
    began = time.monotonic()
    with pytest.raises(errors.UnavailableError, match=r"ps 0 at (.|\n)*'echo'(.|\n)*not answered"):
        dial(listener.address).call(Message("echo"), 30)
    assert time.monotonic() - began < 10


def _call_later(channel: Channel, message: Message, seconds: float = 30) -> "Future[Message]":
    pool = ThreadPoolExecutor(1)
    future = pool.submit(channel.call, message, seconds)
    pool.shutdown(wait=False)
    return future


@pytest.mark.parametrize("size", [0, 10**6])
@pytest.mark.parametrize("end", ["stop", "close"])
def test_calls_that_wait_end_with_the_other_side_and_with_the_channel(
    start: Serve, dial: Connect, end: str, size: int
) -> None:
    entered, release = threading.Event(), threading.Event()

    def wait(request: Message) -> Message:
        entered.set()
        release.wait(30)
        return request

    listener = start({"wait": wait})
    channel = dial(listener.address)
    call = _call_later(channel, Message("wait", {}, (np.zeros(size, np.int8),)))
    assert entered.wait(20)
    began = time.monotonic()
    (listener.stop if end == "stop" else channel.close)()
    with pytest.raises(errors.UnavailableError, match="ps 0 at"):
        call.result(20)
    assert time.monotonic() - began < 5
    release.set()


def test_a_task_that_starts_again_is_found_by_the_same_channel(start: Serve, dial: Connect) -> None:
    listener = start({"echo": echo})
    channel = dial(listener.address)
    channel.call(Message("echo"))
    listener.stop()
    with pytest.raises(errors.UnavailableError, match="last answered"):
        channel.call(Message("echo"))
    start({"echo": echo}, listener.address)
    channel.wait_until_ready(10)
    assert channel.call(Message("echo")).method == "echo"


def test_a_channel_waits_for_a_task_that_is_being_started(start: Serve, dial: Connect) -> None:
    first = start({"echo": echo})
    first.stop()
    channel = dial(first.address)
    with pytest.raises(errors.DeadlineExceededError, match="ps 0 at"):
        channel.wait_until_ready(0.2)
    with ThreadPoolExecutor(1) as pool:
        ready = pool.submit(channel.wait_until_ready, 20)
        start({"echo": echo}, first.address)
        ready.result(20)
    assert channel.call(Message("echo")).method == "echo"


def test_a_closed_channel_says_so(start: Serve, dial: Connect) -> None:
    channel = dial(start({"echo": echo}).address)
    channel.close()
    channel.close()
    for call in (lambda: channel.call(Message("echo")), lambda: channel.wait_until_ready(5)):
        with pytest.raises(errors.UnavailableError, match="this channel is closed"):
            call()


def test_an_address_belongs_to_one_task(start: Serve) -> None:
    listener = start({"echo": echo})
    with pytest.raises(errors.ClusterError, match=listener.address):
        start({"echo": echo}, listener.address)
    listener.stop()
    listener.stop()
    assert start({"echo": echo}, listener.address).address == listener.address


def test_a_task_that_has_stopped_and_its_closed_channel_leave_no_thread(
    start: Serve, dial: Connect
) -> None:
    before = set(threading.enumerate())
    listener = start({"echo": echo})
    channel = dial(listener.address)
    # Both ways are so large that a thread looks after slow calls.
    channel.call(Message("echo", {}, (np.zeros(2**22, np.uint8),)))
    channel.close()
    listener.stop()
    poll(lambda: not set(threading.enumerate()) - before, 8)


def test_several_threads_call_at_a_time(start: Serve, dial: Connect) -> None:
    everyone = threading.Barrier(8)

    def meet(request: Message) -> Message:
        everyone.wait(30)
        return request

    channel = dial(start({"meet": meet}).address)

    def call(number: int) -> bool:
        array = np.full(number * 100_000, number, np.int16)
        reply = channel.call(Message("meet", {"number": number}, (array,)), 30)
        return reply.fields == {"number": number} and np.array_equal(reply.arrays[0], array)

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(call, range(8)))


def test_more_calls_than_a_task_takes_wait_or_are_refused(start: Serve, dial: Connect) -> None:
    release, entered = threading.Event(), threading.Semaphore(0)

    def wait(request: Message) -> Message:
        entered.release()
        release.wait(30)
        return request

    channel = dial(start({"wait": wait}, limits=Limits(calls=2)).address)
    calls = [_call_later(channel, Message("wait")) for _ in range(2)]
    assert all(entered.acquire(timeout=20) for _ in calls)
    with pytest.raises((errors.UnavailableError, errors.DeadlineExceededError)):
        channel.call(Message("wait"), 0.5)
    release.set()
    assert [call.result(20).method for call in calls] == ["wait", "wait"]
    poll(lambda: _answers(channel))


def _answers(channel: Channel) -> bool:
    try:
        return channel.call(Message("wait"), 5).method == "wait"
    except errors.UnavailableError:
        return False


_WRONG = ["", "2222", "127.0.0.1:x", "127.0.0.1:70000", 2222, "localhost:12:13", "::1:2222"]


@pytest.mark.parametrize("address", [*_WRONG, "grpc://host:1", "a b:1", "a..b:1", "[::x]:1"])
def test_an_address_that_is_none_is_refused(layer: str, address) -> None:
    wrong = (errors.ArgumentError, errors.ArgumentTypeError)
    with pytest.raises(wrong, match="serve was given address="):
        serve(address, {}, layer=layer)
    with pytest.raises(wrong, match="connect was given address="):
        connect(address, layer=layer)


def test_nobody_connects_to_port_0(layer: str) -> None:
    with pytest.raises(errors.ArgumentError, match="a port from 1"):
        connect("127.0.0.1:0", layer=layer)


def test_without_a_host_an_address_is_loopback(start: Serve) -> None:
    assert start({"echo": echo}, ":0").address.startswith("127.0.0.1:")


def test_an_address_of_version_6_is_in_brackets(start: Serve, dial: Connect) -> None:
    if not _has_version_6():
        pytest.skip("this machine has no IPv6")
    listener = start({"echo": echo}, "[::1]:0")
    assert listener.address.startswith("[::1]:")
    assert dial(listener.address).call(Message("echo")).method == "echo"


def _has_version_6() -> bool:
    try:
        with socket.socket(socket.AF_INET6) as opened:
            opened.bind(("::1", 0))
    except OSError:
        return False
    return True
