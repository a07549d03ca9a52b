"""What a call ends with when it fails."""

import threading
import time
from typing import Any

import numpy as np
import pytest

import jaxdist
from jaxdist._parameter_server.rpc.served import get_code
from jaxdist._parameter_server.transport import Message, connect, serve
from jaxdist.errors import (
    ArgumentError,
    ArgumentTypeError,
    CancelledError,
    ContextError,
    DeadlineExceededError,
    InvalidArgumentError,
    JaxdistError,
    NonFiniteLossError,
    NotFoundError,
    OutOfRangeError,
    ProgramMismatchError,
    ShapeError,
    UnauthenticatedError,
    UnavailableError,
    UnknownError,
    UnsupportedError,
)
from jaxdist.experimental import rpc
from tests.parameter_server.rpc.serving import INT, LAYERS, serve_methods


def _raise(error: BaseException) -> Any:
    raise error


@pytest.mark.parametrize("layer", LAYERS)
@pytest.mark.parametrize(
    ("error", "code", "kind"),
    [
        (ValueError("a bad value"), 3, InvalidArgumentError),
        (TypeError("a bad type"), 3, InvalidArgumentError),
        (ZeroDivisionError("nothing"), 2, UnknownError),
        (NotImplementedError("not yet"), 12, UnsupportedError),
        (StopIteration("no more"), 11, OutOfRangeError),
        (SystemExit(3), 2, UnknownError),
        (ShapeError("rows"), 3, ShapeError),
        (ArgumentError("rows"), 3, ArgumentError),
        (ContextError("outside"), 9, ContextError),
        (NonFiniteLossError("nan"), 2, NonFiniteLossError),
    ],
    ids=repr,
)
def test_an_error_of_the_function_is_a_status_with_its_text_and_the_server_goes_on(
    layer: str, error: BaseException, code: int, kind: type[Exception]
) -> None:
    methods = {"fail": (lambda: _raise(error), None), "one": (lambda: 1, None)}
    with serve_methods(methods, layer) as (_, client):
        for result in (client.fail(), client.call("fail")):
            assert result.is_ok() is False
            found, text = result.get_error()
            assert (found, type(text)) == (code, str)
            assert str(error.args[0]) in text
            for _ in range(2):
                with pytest.raises(kind) as caught:
                    result.get_value()
                assert str(caught.value) == text
        assert repr(result).startswith("<StatusOrResult: ")
        with pytest.raises(kind, match=str(error.args[0])):
            client.fail_blocking()
        assert client.one_blocking() == 1


@pytest.mark.parametrize(
    ("kind", "code"),
    [
        (CancelledError, 1),
        (UnknownError, 2),
        (ArgumentTypeError, 3),
        (DeadlineExceededError, 4),
        (NotFoundError, 5),
        (ProgramMismatchError, 9),
        (UnavailableError, 14),
        (UnauthenticatedError, 16),
    ],
)
def test_codes_are_those_of_grpc(kind: type[JaxdistError], code: int) -> None:
    assert get_code(kind("text")) == code


@pytest.mark.parametrize("layer", LAYERS)
def test_an_unknown_method_is_an_invalid_argument(layer: str) -> None:
    with serve_methods({"one": (lambda: 1, None)}, layer) as (_, client):
        result = client.call("two", [1, 2])
        code, text = result.get_error()
        assert code == 3
        assert "method_name='two'" in text
        assert "['one']" in text
        with pytest.raises(InvalidArgumentError, match="'two'"):
            result.get_value()


@pytest.mark.parametrize(
    "result", ["text", object(), {1: 2}, [np.array(["a"])], jaxdist.PerReplica([1, 2]), 2**70]
)
def test_a_result_that_cannot_be_sent_is_named(result: Any) -> None:
    with serve_methods({"odd": (lambda: {"x": [result]}, None)}, "local") as (_, client):
        code, text = client.odd().get_error()
        assert code == 12
        assert "The function of 'odd' returned result['x'][0]" in text


@pytest.mark.parametrize("layer", LAYERS)
def test_a_deadline_of_a_call_and_of_a_client(layer: str) -> None:
    go_on = threading.Event()
    methods = {"wait": (lambda: go_on.wait(20), None)}
    with serve_methods(methods, layer, concurrent=True) as (server, client):
        quick: Any = rpc.Client.create(layer, server.address, "quick", 300)
        began = time.monotonic()
        for result in (
            client.wait(timeout_in_ms=300),
            client.call("wait", timeout_in_ms=300),
            quick.wait(),
        ):
            code, text = result.get_error()
            assert code == 4
            assert "'wait'" in text
            assert "did not reply within 0." in text
        assert "'quick'" in text
        assert time.monotonic() - began < 10
        with pytest.raises(DeadlineExceededError, match="pass timeout_in_ms="):
            quick.wait_blocking()
        longer = quick.wait(timeout_in_ms=20_000)
        go_on.set()
        assert longer.is_ok()
        quick.close()


def test_a_call_whose_turn_does_not_come_in_time_has_done_nothing() -> None:
    go_on, started = threading.Event(), threading.Event()
    calls: list[int] = []

    def wait() -> int:
        started.set()
        go_on.wait(20)
        return 0

    def note() -> int:
        calls.append(1)
        return len(calls)

    with serve_methods({"wait": (wait, None), "note": (note, None)}) as (_, client):
        first = client.wait()
        assert started.wait(20)
        assert client.note(timeout_in_ms=200).get_error()[0] == 4
        # The server stops waiting at the same time as the client.
        time.sleep(0.3)
        go_on.set()
        assert first.is_ok()
        assert client.note_blocking() == 1


@pytest.mark.parametrize("wrong", [-1, float("nan"), float("inf"), "1", None, True])
def test_a_timeout_that_is_none_is_refused(wrong: Any) -> None:
    with serve_methods({"one": (lambda: 1, None)}, "local") as (server, client):
        for call in (
            lambda: client.one(timeout_in_ms=wrong),
            lambda: client.one_blocking(timeout_in_ms=wrong),
            lambda: client.call("one", timeout_in_ms=wrong),
            lambda: rpc.Client.create("local", server.address, timeout_in_ms=wrong),
        ):
            with pytest.raises((ArgumentError, ArgumentTypeError), match="timeout_in_ms="):
                call()


@pytest.mark.parametrize("layer", LAYERS)
def test_a_client_waits_for_its_server_and_gives_up_at_its_deadline(layer: str) -> None:
    with pytest.raises(DeadlineExceededError, match=r"did not reply within 0\.2 s"):
        rpc.Client.create(layer, "localhost:9", timeout_in_ms=200)
    # A free port: nobody has it when the server is stopped.
    server = rpc.Server.create(layer, "localhost:0")
    server.start()
    address = server.address
    server.stop()
    later = rpc.Server.create(layer, address)
    later.register("one", lambda: 1)
    timer = threading.Timer(0.3, later.start)
    timer.start()
    client: Any = rpc.Client.create(layer, address, timeout_in_ms=20_000)
    assert client.one_blocking() == 1
    timer.join()
    client.close()
    later.stop()


_ONE_INT = {
    "name": "add",
    "structure": ["tuple", "*"],
    "leaves": [["array", 0]],
    "seconds": 5.0,
}


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"name": 3},
        {"name": "add"},
        {**_ONE_INT, "leaves": [["array", 0], ["array", 1]]},
        {**_ONE_INT, "leaves": "array"},
        {**_ONE_INT, "leaves": [[["array"], 0]]},
        {**_ONE_INT, "leaves": [["text", 0]]},
        {**_ONE_INT, "leaves": [["float", 0]]},
        {**_ONE_INT, "leaves": [["bool", 0]]},
        {**_ONE_INT, "structure": "*"},
        {**_ONE_INT, "structure": ["set", "*"]},
        {**_ONE_INT, "structure": ["tuple"]},
        {**_ONE_INT, "structure": ["tuple", "*", "*"]},
        {**_ONE_INT, "structure": ["dict", ["x"]]},
        {**_ONE_INT, "structure": ["dict"]},
        {**_ONE_INT, "structure": ["dict", [1], "*"]},
        {**_ONE_INT, "structure": []},
        {**_ONE_INT, "structure": 3},
        {**_ONE_INT, "seconds": -1.0},
        {**_ONE_INT, "seconds": "5"},
        {**_ONE_INT, "seconds": 1e300},
    ],
    ids=repr,
)
def test_a_message_that_no_client_sends_is_refused_and_calls_nothing(fields: Any) -> None:
    called: list[int] = []
    with serve_methods({"add": (lambda x: called.append(1), [INT])}) as (server, client):
        channel = connect(server.address, layer="grpc")
        with pytest.raises((ProgramMismatchError, InvalidArgumentError)):
            channel.call(Message("rpc/call", fields, (np.array(1, np.int32),)), 20)
        channel.close()
        assert called == []
        assert client.add(1).is_ok()


@pytest.mark.parametrize(
    "methods", [3, [3], [["a"]], [["a", 3]], [["a", ["*", [["int32"]]]]], [["a", ["x", []]]]]
)
def test_a_list_of_methods_that_is_none_is_refused(methods: Any) -> None:
    handlers = {"rpc/list": lambda request: Message("", {"methods": methods})}
    listener = serve("127.0.0.1:0", handlers, layer="local")
    with pytest.raises(ProgramMismatchError):
        rpc.Client.create("local", listener.address)
    listener.stop()


def test_a_reply_with_another_structure_is_refused() -> None:
    handlers = {
        "rpc/list": lambda request: Message("", {"methods": [["one", [["tuple"], []]]]}),
        "rpc/call": lambda request: Message("", {"structure": ["list", "*"], "arrays": []}, ()),
    }
    listener = serve("127.0.0.1:0", handlers, layer="local")
    client: Any = rpc.Client.create("local", listener.address)
    with pytest.raises(ProgramMismatchError, match="a structure that is not valid"):
        client.one_blocking()
    client.close()
    listener.stop()


def test_a_message_that_is_too_large_names_the_call() -> None:
    many = [1] * 10_001
    with serve_methods({"one": (lambda: 1, None)}) as (_, client):
        code, text = client.call("one", many).get_error()
        assert code == 3
        assert text.startswith("Client.call was given a message with")
