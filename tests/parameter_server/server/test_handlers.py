"""Messages of a server: fields and arrays of each method, and requests that are refused."""

import json
import pathlib
import threading
from typing import Any

import numpy as np
import optax
import pytest

from jaxdist._parameter_server.protocol import (
    Change,
    ChangeVariables,
    Create,
    Creation,
    GetStatistics,
    Hello,
    Read,
    ReadRows,
    RegisterUpdate,
    Release,
    Saved,
    ServerInfo,
    WriteSnapshot,
    as_array,
)
from jaxdist._parameter_server.server import VariableServer, make_handlers
from jaxdist._parameter_server.server.handlers import Announcements
from jaxdist._parameter_server.transport import Message
from jaxdist._parameter_server.transport.requests import (
    R,
    Request,
    get_reply_kind,
    make_message,
    read_reply,
)
from jaxdist.errors import ArgumentError, JaxdistError, ProgramMismatchError, ShapeError
from tests.parameter_server.server.exported import export_bytes, export_update


class _Client:
    """Sends requests to handlers as a transport does: the fields are JSON."""

    def __init__(self, **options: Any) -> None:
        self.server = VariableServer(**options)
        self._handlers = make_handlers(self.server)

    def send(self, method: str, *arrays: np.ndarray, **fields: Any) -> Message:
        """Send a message, whatever is in it."""
        sent = json.loads(json.dumps(fields))
        reply = self._handlers[method](Message(method, sent, arrays))
        assert reply.method == method
        json.dumps(reply.fields)
        assert all(isinstance(array, np.ndarray) for array in reply.arrays)
        return reply

    def call(self, request: Request[R]) -> R:
        """Send a request, and return the reply."""
        sent = make_message(request.method, request)
        reply = self.send(sent.method, *sent.arrays, **sent.fields)
        return read_reply(get_reply_kind(type(request)), reply)


def _client() -> _Client:
    client = _Client()
    client.call(Create([Creation("w", np.zeros(3)), Creation("t", np.zeros((4, 2)))], "c"))
    return client


def test_create_says_what_is_new() -> None:
    program = as_array(export_bytes(lambda: np.ones(2, np.float32)))
    request = Create([Creation("w", np.zeros(3)), Creation("made", program=program)])
    assert _client().call(request).made == {"w": (False, 0), "made": (True, 0)}


def test_read_sends_the_values_that_are_not_known() -> None:
    client = _client()
    first = client.call(Read(["w", "t"]))
    assert list(first.values) == ["w", "t"]
    request = Read(["w", "t"], known=first.versions, incarnation=first.incarnation)
    assert client.call(request).values == {}
    message = make_message("read", request)
    assert client.send("read", *message.arrays, **message.fields).arrays == ()


def test_read_rows_has_a_version() -> None:
    reply = _client().call(ReadRows("t", np.array([1, 1])))
    assert reply.version == 0
    assert reply.rows.shape == (2, 2)


def test_a_change_and_the_values_after_it_are_one_exchange() -> None:
    client = _client()
    changes = [
        Change("add", "w", [np.ones(3)], 0),
        Change("scatter_add", "t", [np.array([1]), np.ones((1, 2))]),
    ]
    request = ChangeVariables(changes, client="c", closure=1, read=["w"])
    reply = client.call(request)
    assert (reply.status, reply.staleness) == ("counted", [0, None])
    np.testing.assert_array_equal(reply.values["w"], np.ones(3))
    assert client.call(request).status == "already counted"


def test_an_update_program_is_registered_with_arrays_or_an_initialiser() -> None:
    client = _client()
    content, slots = export_update(optax.trace(0.9), np.zeros(3, np.float32))
    program = as_array(content)
    client.call(Create([Creation(name, np.zeros(3, np.float32)) for name in ("v", "u")]))
    assert client.call(RegisterUpdate("k", program, 1, {"v": slots})).made == {
        "v/slot_0": (True, 0)
    }
    init = as_array(export_bytes(lambda v: (v,), np.zeros(3, np.float32)))
    # One message has first values for some of its variables, and an initialiser for others.
    request = RegisterUpdate("k", program, 1, {"v": slots, "u": None}, init)
    assert client.call(request).made == {"v/slot_0": (False, 0), "u/slot_0": (True, 0)}
    change = Change("program:k", "v", [np.ones(3, np.float32)])
    reply = client.call(ChangeVariables([change], read=["v"]))
    np.testing.assert_array_equal(reply.values["v"], np.ones(3))


def test_the_other_methods(tmp_path: pathlib.Path) -> None:
    client = _client()
    assert client.call(Hello()).task == "ps:0"
    assert client.call(Release("c", 1)).was_registered is False
    assert client.call(GetStatistics()).applied == 0
    kept = _Client(snapshot_directory=tmp_path)
    assert kept.call(WriteSnapshot()) == Saved(0, 0)
    assert kept.call(Hello()).has_snapshots
    kept.server.close()


def test_numbers_that_are_keys_come_back_as_numbers() -> None:
    client = _client()
    client.call(ChangeVariables([Change("add", "w", [np.ones(3)], 0)], client="c", closure=1))
    assert client.call(GetStatistics()).staleness_of == {"c": {0: 1}}


@pytest.mark.parametrize("fields", [{}, {"task": 3}, {"task": "ps:0", "another": 1}])
def test_a_reply_of_another_version_is_a_named_error(fields: dict[str, Any]) -> None:
    with pytest.raises(ProgramMismatchError, match="The reply to 'hello' is not valid"):
        read_reply(ServerInfo, Message("hello", fields))


_WRONG: dict[str, tuple[str, dict[str, Any]]] = {
    "no field": ("read", {}),
    "another field": ("read", {"names": ["w"], "nmaes": []}),
    "a text for a list": ("read", {"names": "w"}),
    "a number for a name": ("read", {"names": [3]}),
    "a long name": ("read", {"names": ["x" * 513]}),
    "a negative closure": ("read", {"names": ["w"], "closure": -1}),
    "a huge closure": ("read", {"names": ["w"], "closure": 1 << 64}),
    "a negative time": ("read", {"names": ["w"], "seconds": -1}),
    "no time": ("read", {"names": ["w"], "seconds": float("nan")}),
    "a negative number of an array": ("change", {"changes": [["add", "w", [-1]]]}),
    "a flag for an array": ("read_rows", {"name": "t", "ids": True}),
    "an array twice": ("change", {"changes": [["scatter_add", "t", [0, 0]]]}),
    "what is gone": ("change", {"changes": [], "read_closure": 1}),
    "a flag as a number": ("change", {"changes": [], "closure": True}),
    "fields where there are none": ("hello", {"x": 1}),
}


@pytest.mark.parametrize("case", _WRONG)
def test_fields_that_are_not_those_of_the_method_are_an_error(case: str) -> None:
    method, fields = _WRONG[case]
    with pytest.raises(ArgumentError, match=f"^{method} was given fields that are not valid"):
        _client().send(method, **fields)


@pytest.mark.parametrize(
    ("method", "fields", "count"),
    [
        ("create", {"variables": [["a", 0], ["b", 1]]}, 1),
        ("read", {"names": ["w"]}, 1),
        ("read_rows", {"name": "t", "ids": 0}, 2),
        ("change", {"changes": [["add", "w", [0]]]}, 0),
        ("change", {"changes": [["add", "w", [1 << 60]]]}, 1),
        ("register_update", {"key": "k", "program": 1, "num_slots": 1, "variables": {}}, 1),
        ("register_update", {"key": "k", "program": 0, "num_slots": 0, "variables": {}}, 0),
    ],
)
def test_another_number_of_arrays_is_an_error_before_anything_is_made(
    method: str, fields: dict[str, Any], count: int
) -> None:
    with pytest.raises(ShapeError, match=f"^{method} was given {count} arrays"):
        _client().send(method, *[np.zeros(3)] * count, **fields)


def test_random_requests_change_nothing_and_are_named_errors() -> None:
    client = _client()
    rng = np.random.default_rng(5)
    values = ["w", "t", "x", "", -1, 1 << 70, None, 1.5, True, [], {}, ["w"], [["w"]], [{}]]
    methods = ["create", "read", "read_rows", "change", "register_update", "release"]
    names = "names name variables client closure changes key num_slots known ids program".split()
    for _ in range(3000):
        fields = {
            str(rng.choice(names)): values[rng.integers(len(values))]
            for _ in range(rng.integers(0, 4))
        }
        if fields.get("names") == ["w"] or fields.get("changes") == []:
            continue
        arrays = [np.zeros(rng.integers(0, 3, rng.integers(0, 3))) for _ in range(rng.integers(3))]
        try:
            client.send(str(rng.choice(methods)), *arrays, **fields)
        except JaxdistError:
            pass
    reply = client.call(Read(["w", "t"]))
    assert reply.versions == {"w": 0, "t": 0}


def test_readers_never_see_a_part_of_a_change() -> None:
    client = _client()
    is_done, errors = threading.Event(), list[BaseException]()
    ids = np.arange(4)

    def read() -> None:
        try:
            while not is_done.is_set():
                reply = client.call(Read(["w", "t"]))
                w, t = reply.values.values()
                assert set(w) | set(t.ravel()) == set(reply.versions.values())
                found = client.call(ReadRows("t", ids))
                assert set(found.rows.ravel()) == {found.version}
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=read) for _ in range(3)]
    for thread in threads:
        thread.start()
    changes = [
        Change("add", "w", [np.ones(3)]),
        Change("scatter_add", "t", [ids, np.ones((4, 2))]),
    ]
    try:
        for _ in range(400):
            client.call(ChangeVariables(changes))
    finally:
        is_done.set()
        for thread in threads:
            thread.join()
    assert errors == []


def test_a_server_forgets_workers_that_are_silent() -> None:
    now = [0.0]
    announced = Announcements(lambda: now[0])
    announced.note(1, "a:1")
    now[0] = 6.0
    announced.note(2, "b:1")
    assert announced.list_present() == {1: "a:1", 2: "b:1"}
    now[0] = 11.0
    assert announced.list_present() == {2: "b:1"}
    announced.note(1, "c:1")
    assert announced.list_present() == {2: "b:1", 1: "c:1"}


def test_announcements_have_a_bound() -> None:
    announced = Announcements(lambda: 0.0)
    for index in range(5000):
        announced.note(index, "a:1")
    found = announced.list_present()
    assert len(found) == 1024
    assert max(found) == 4999
